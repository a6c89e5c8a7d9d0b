//! The logits of one token sequence at every position, for comparing models.

use crate::{
    backend::{Backend, Chunk, Logits, LogitsFor, StepError},
    kv::blocks_for,
    sampling::TokenLogit,
};

/// Positions per step, few enough that their logits do not take much memory.
const CHUNK_TOKENS: usize = 64;

/// A logit is infinite or not a number: weights of the model are too large for f32, or too small.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("the logits of position {position} are of no use: that of token {token} is {logit}")]
pub struct NotFinite {
    /// Position of the first such logit.
    pub position: usize,
    /// Its token.
    pub token: usize,
    /// Its value.
    pub logit: f32,
}

/// Runs `tokens` from position 0 in KV blocks 0, 1, … of `backend`, and passes the logits to `each`, some
/// positions at a time, in order. // (positions, vocab)
///
/// # Errors
/// If a token is not in the vocabulary, the backend has too few blocks, a logit is not finite, or `each` returns an error.
pub fn each_position<E: From<StepError> + From<NotFinite>>(
    backend: &mut dyn Backend,
    tokens: &[u32],
    mut each: impl FnMut(&[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let (blocks, windows) = backend.layer_groups().tables(0, blocks_for(tokens.len()));
    let mut logits = Logits::default();
    for (index, part) in tokens.chunks(CHUNK_TOKENS).enumerate() {
        let chunk = Chunk {
            state: 0.into(),
            tokens: part,
            position: index * CHUNK_TOKENS,
            blocks: &blocks,
            windows: &windows,
            logits: LogitsFor::All,
        };
        backend.step(&[chunk], &mut logits)?;
        check(logits.all(), backend.vocab_size(), index * CHUNK_TOKENS)?;
        each(logits.all())?;
    }
    Ok(())
}

/// Checks logits of positions from `first` on.
fn check(logits: &[f32], vocab: usize, first: usize) -> Result<(), NotFinite> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        None => Ok(()),
        Some(at) => {
            Err(NotFinite { position: first + at / vocab, token: at % vocab, logit: logits[at] })
        }
    }
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
    fn logits_that_are_not_finite_are_named_by_position_and_token() {
        let mut logits = vec![0.5; 3 * 10];
        assert_eq!(check(&logits, 10, 64), Ok(()));
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            logits[17] = wrong;
            let error = check(&logits, 10, 64).expect_err("it is not finite");
            assert_eq!((error.position, error.token), (65, 7));
            assert!(error.to_string().contains("position 65"), "{error}");
        }
    }

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
