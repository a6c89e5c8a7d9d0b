//! Divisors of the RoPE frequencies in GGUF files: `rope_freqs.weight`, or of `minicpm` the two tensors of LongRoPE.

use super::{
    architecture::Architecture,
    container::Gguf,
    keys::Keys,
    names::{LONGROPE_DIVISORS, ROPE_DIVISORS},
    tensors::Finder,
};
use crate::{
    config::{LongFactors, ModelConfig, RopeScaling},
    files::{
        encodings::dense::widen,
        error::{ModelError, Problem},
    },
};

/// Reads the divisors, if the file has them. They are refused with another scaling, because llama.cpp would apply both.
pub(super) fn read_divisors(
    gguf: &Gguf<'_>,
    finder: &mut Finder<'_>,
    config: &mut ModelConfig,
    architecture: Architecture,
) -> Result<(), ModelError> {
    let [short, long] = LONGROPE_DIVISORS;
    let is_longrope = architecture == Architecture::MiniCpm && finder.entries.contains_key(short);
    let name = if is_longrope { short } else { ROPE_DIVISORS };
    if !finder.entries.contains_key(name) {
        return Ok(());
    }
    if !config.rope_scaling.is_none() {
        let (tensor, needs) = (name.to_owned(), "two changes of RoPE at once");
        return Err(ModelError::UnexpectedTensor { tensor, others: 0, needs });
    }
    let mut long_factors = None;
    if is_longrope && finder.entries.contains_key(long) {
        let keys = Keys { gguf, prefix: "minicpm.rope.scaling." };
        let original = keys.size("original_context_length", u64::from(u32::MAX))?;
        long_factors = Some(LongFactors {
            original_context: original.unwrap_or(config.context_length),
            divisors: divisors(finder, long, config.head_dim / 2)?,
        });
    }
    let divisors = divisors(finder, name, config.head_dim / 2)?;
    config.rope_scaling = RopeScaling::of_divisors(divisors, long_factors);
    Ok(())
}

fn divisors(
    finder: &mut Finder<'_>,
    name: &str,
    frequencies: usize,
) -> Result<Vec<f32>, ModelError> {
    let tensor = finder.dense(name, &[frequencies])?;
    let mut divisors = vec![0f32; tensor.cols];
    widen(tensor.dtype, &finder.bytes[tensor.span.range.clone()], &mut divisors);
    if let Some(wrong) = divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
        let problem = Problem::BadScale(*wrong);
        return Err(ModelError::bad_tensor(name, tensor.span.range.start as u64, problem));
    }
    Ok(divisors)
}
