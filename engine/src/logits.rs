//! The logits of one token sequence at every position, for comparing models.

use crate::{
    backend::{Backend, Chunk, Logits, LogitsFor, StepError},
    kv::{BlockId, blocks_for},
    sampling::TokenLogit,
};

/// Positions per step, few enough that their logits do not take much memory.
const CHUNK_TOKENS: usize = 64;

/// Runs `tokens` from position 0 in KV blocks 0, 1, … of `backend`, and passes the logits to `each`, some
/// positions at a time, in order. // (positions, vocab)
///
/// # Errors
/// If a token is not in the vocabulary, the backend has too few blocks, or `each` returns an error.
pub fn each_position<E: From<StepError>>(
    backend: &mut dyn Backend,
    tokens: &[u32],
    mut each: impl FnMut(&[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let blocks: Vec<BlockId> = (0..blocks_for(tokens.len()) as u32).map(BlockId).collect();
    let mut logits = Logits::default();
    for (index, part) in tokens.chunks(CHUNK_TOKENS).enumerate() {
        let chunk = Chunk {
            state: 0.into(),
            tokens: part,
            position: index * CHUNK_TOKENS,
            blocks: &blocks,
            logits: LogitsFor::All,
        };
        backend.step(&[chunk], &mut logits)?;
        each(logits.all())?;
    }
    Ok(())
}

/// Returns the `count` largest logits of one position, largest first, the lower id first among equals.
pub fn top(logits: &[f32], count: usize) -> Vec<TokenLogit> {
    let mut all: Vec<TokenLogit> =
        logits.iter().zip(0u32..).map(|(&logit, id)| TokenLogit { id, logit }).collect();
    all.sort_by(|a, b| b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id)));
    all.truncate(count);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_sorts_by_logit_then_by_token() {
        let ids = |count| -> Vec<u32> {
            top(&[0.5, 2.0, -1.0, 2.0], count).iter().map(|token| token.id).collect()
        };
        assert_eq!(ids(0), Vec::<u32>::new());
        assert_eq!(ids(1), [1]);
        assert_eq!(ids(3), [1, 3, 0]);
        assert_eq!(ids(9), [1, 3, 0, 2]);
    }
}
