//! Random models with one scale per matrix, as Hugging Face folders.

use std::{io::Write, path::Path};

use rayon::prelude::*;

use super::{
    random::{SplitMix, four_trits, mix},
    vocabulary::{CHAT_TEMPLATE, SPECIAL, byte_tokenizer},
};
use crate::{
    config::{Linear, ModelConfig, Norm},
    files::{
        error::ModelError,
        hugging_face::{
            config::WeightStorage,
            names::{linear_name, norm_name},
            safetensors::Dtype,
            write::{self, FolderTexts, TensorPlan},
        },
        roles::{norm_len, norms},
    },
};

/// The random contents of a tensor.
#[derive(Clone, Copy)]
enum Fill {
    /// Packed trits, about a third of each value.
    Trits,
    /// bf16 with mean 0 and about this standard deviation.
    Bell(f32),
    /// bf16 around 1.
    NearOne,
    /// The same bf16 everywhere.
    Constant(f32),
}

/// Writes a random model.
pub(super) fn write(config: &ModelConfig, out: &Path, seed: u64) -> Result<(), ModelError> {
    let (plan, fills): (Vec<_>, Vec<_>) = plan(config).into_iter().unzip();
    let tokenizer = byte_tokenizer(false).to_string();
    let texts = FolderTexts {
        tokenizer: tokenizer.as_bytes(),
        special_tokens: [("bos_token", SPECIAL[0]), ("eos_token", SPECIAL[3])]
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .into(),
        chat_template: Some(CHAT_TEMPLATE),
    };
    let storage = WeightStorage::PackedMultiply;
    write::write_folder(out, config, storage, &texts, &plan, |index, writer| {
        let size = plan[index].size_bytes();
        fill(fills[index], size, mix(seed ^ mix(index as u64 + 1)), writer)
            .map_err(|error| ModelError::io(out, error))
    })
}

fn plan(config: &ModelConfig) -> Vec<(TensorPlan, Fill)> {
    let mut plan = Vec::new();
    let mut add = |name: String, dtype, shape: &[usize], fill| {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        plan.push((TensorPlan { name, dtype, shape }, fill));
    };
    let table = [config.vocab_size, config.hidden_size];
    let embedding = Fill::Bell(1.0);
    add("model.embed_tokens.weight".to_owned(), Dtype::Bf16, &table, embedding);
    if !config.tied_head {
        add("lm_head.weight".to_owned(), Dtype::Bf16, &table, Fill::Bell(0.02));
    }
    for norm in norms(config) {
        // With a plain final norm, a random tied model only repeats its last token.
        let fill = if norm == Norm::Final { Fill::Bell(0.1) } else { Fill::NearOne };
        add(norm_name(norm), Dtype::Bf16, &[norm_len(config, norm)], fill);
    }
    for layer in 0..config.layer_count {
        for linear in Linear::OF_ATTENTION {
            let (rows, cols) = config.linear_shape(linear);
            let name = linear_name(layer, linear);
            let scale = format!("{name}_scale");
            add(name, Dtype::U8, &[rows / 4, cols], Fill::Trits);
            // Trits have variance 2/3: this scale preserves the variance of the activations.
            let factor = (1.5 / cols as f32).sqrt();
            add(scale, Dtype::Bf16, &[1], Fill::Constant(factor));
        }
    }
    plan
}

/// Bytes generated and written at a time.
const WINDOW: usize = 16 << 20;
/// Bytes generated from one counter value.
const PIECE: usize = 64 << 10;

fn fill(fill: Fill, size: u64, seed: u64, writer: &mut dyn Write) -> std::io::Result<()> {
    let mut window = vec![0; WINDOW.min(size as usize)];
    let trits = four_trits();
    let mut written = 0u64;
    while written < size {
        let len = (size - written).min(WINDOW as u64) as usize;
        let first_piece = written / PIECE as u64;
        window[..len].par_chunks_mut(PIECE).enumerate().for_each(|(piece, bytes)| {
            let mut random = SplitMix(mix(seed ^ mix(first_piece + piece as u64)));
            match fill {
                Fill::Trits => random.bytes(bytes, |byte| trits[usize::from(byte)]),
                Fill::Bell(deviation) => random.bf16s(bytes, |bell| bell * deviation),
                Fill::NearOne => random.bf16s(bytes, |bell| 1.0 + 0.05 * bell),
                Fill::Constant(value) => random.bf16s(bytes, |_| value),
            }
        });
        writer.write_all(&window[..len])?;
        written += len as u64;
    }
    Ok(())
}
