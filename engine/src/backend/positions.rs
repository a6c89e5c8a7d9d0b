//! What every backend agrees on before a step computes anything: which chunks fit, which positions are
//! wanted, and the angles that positions are rotated by.

use std::ops::Range;

use super::{Chunk, LogitsFor, StepError};
use crate::{config::ModelConfig, kv::BLOCK_TOKENS, math};

/// Checks a step's chunks against a model and a pool of so many KV blocks.
pub(super) fn check(
    chunks: &[Chunk<'_>],
    config: &ModelConfig,
    block_count: usize,
) -> Result<(), StepError> {
    for chunk in chunks {
        let end = chunk.position.checked_add(chunk.tokens.len());
        let fits = end.is_some_and(|end| {
            !chunk.tokens.is_empty()
                && end <= config.context_length
                && end <= chunk.blocks.len() * BLOCK_TOKENS
        });
        if !fits || chunk.blocks.iter().any(|b| b.0 as usize >= block_count) {
            return Err(StepError::BadChunk {
                position: chunk.position,
                tokens: chunk.tokens.len(),
                blocks: chunk.blocks.len(),
            });
        }
        let vocab_size = config.vocab_size;
        if let Some(&token) = chunk.tokens.iter().find(|token| **token as usize >= vocab_size) {
            return Err(StepError::TokenOutOfRange { token, vocab_size });
        }
    }
    Ok(())
}

impl LogitsFor {
    /// The wanted rows among a chunk's, and how many of the largest logits of each, if not all.
    pub(super) fn rows(self, rows: Range<usize>) -> (Range<usize>, Option<usize>) {
        let (first, last) = (rows.start, rows.end);
        match self {
            Self::Nothing => (last..last, None),
            Self::Last => (last - 1..last, None),
            Self::All => (first..last, None),
            Self::Largest(count) => (last - 1..last, Some(count)),
        }
    }
}

/// RoPE frequencies `theta^(−2j / head_dim)` as the reference computes them: the power rounded to f32,
/// then inverted. // (head_dim / 2)
pub(super) fn rope_frequencies(theta: f32, head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|j| {
            let exponent = (2 * j) as f32 / head_dim as f32;
            1.0 / math::pow(f64::from(theta), f64::from(exponent)) as f32
        })
        .collect()
}

/// Cosines, then sines, of a position's angles. // (2, head_dim / 2)
pub(super) fn rotation(position: usize, frequencies: &[f32], out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(frequencies.len());
    for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
        let angle = position as f32 * frequency;
        let (s, c) = math::sin_cos(f64::from(angle));
        (*cos, *sin) = (c as f32, s as f32);
    }
}
