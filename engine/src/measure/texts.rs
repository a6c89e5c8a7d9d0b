//! Measures how fast an engine embeds texts: whole requests, of which the rows share steps.

use std::time::Instant;

use super::{Phase, Speed, Workload, rate, speed};
use crate::{
    Engine,
    embed::{self, EmbedError},
};

/// Embeds the prompts of the workload; a batch of them is submitted at once. Calls `progress` with the number of each repetition
/// before it starts. Decode steps and logits of the workload do not count.
///
/// # Errors
/// As [`embed::vectors`].
pub fn texts(
    engine: &mut Engine,
    workload: &Workload,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Speed>, EmbedError> {
    let (length, vocab_size) = (workload.prompt_tokens, engine.backend().vocab_size());
    // No text begins as another one does, or its keys and values would be reused.
    let mut texts = (0..).map(|number| text(number, length, vocab_size));
    // Warm-up: the first access to weights and KV blocks must not count.
    embed::vectors(engine, &texts.by_ref().take(1).collect::<Vec<_>>())?;
    let mut samples = vec![Vec::with_capacity(workload.repetitions); workload.batches.len()];
    for repetition in 0..workload.repetitions {
        progress(repetition);
        for (samples, &batch) in samples.iter_mut().zip(&workload.batches) {
            let texts: Vec<Vec<u32>> = texts.by_ref().take(batch).collect();
            let start = Instant::now();
            embed::vectors(engine, &texts)?;
            samples.push(rate(batch * length, start));
        }
    }
    let cases = workload.batches.iter().zip(samples);
    Ok(cases.filter_map(|(&batch, rates)| speed(Phase::Embed, batch, rates)).collect())
}

/// Returns a text of arbitrary tokens.
fn text(number: u64, length: usize, vocab_size: usize) -> Vec<u32> {
    let token = |position: u64| {
        // SplitMix64.
        let mut bits = (number << 32 | position).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % vocab_size as u64) as u32
    };
    (0..length as u64).map(token).collect()
}
