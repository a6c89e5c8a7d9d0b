//! Embeds texts: turns each into a vector of length 1, which is close to those of texts that mean the like.
//!
//! The vector is the hidden row of the text's last token, after the final norm, divided by its length
//! ([`Pooling`](crate::config::Pooling)). Rows of many texts share steps, and each text's vector is the same to the bit, whatever
//! else is in the steps.

use std::{collections::VecDeque, sync::Arc};

use crate::{
    backend::{Backend, Chunk, LogitsFor, StepError},
    files::Model,
    kv::{BLOCK_TOKENS, BlockId, blocks_for},
    load::{self, EngineOptions, LoadError},
    tokenizer::TokenizerError,
};

/// Rows of a step: with more, texts are hardly faster.
const STEP_ROWS: usize = 512;

/// A text cannot be embedded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// A text has no tokens.
    #[error("text {index} has no tokens")]
    Empty {
        /// The text.
        index: usize,
    },
    /// A text does not fit the context.
    #[error("text {index} has {tokens} tokens, more than the model's context of {limit}")]
    TooLong {
        /// The text.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// The context.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("text {index}: token {token} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The text.
        index: usize,
        /// The id.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The model computed a vector without a direction.
    #[error("text {index} has no vector: its length is {length}")]
    NoDirection {
        /// The text.
        index: usize,
        /// Zero, infinite or not a number.
        length: f64,
    },
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// An embedding model, loaded.
pub struct Embedder {
    model: Arc<Model>,
    backend: Box<dyn Backend>,
    free: Vec<BlockId>,
}

/// A text of which some tokens are computed.
struct Started {
    index: usize,
    done: usize,
    blocks: Vec<BlockId>,
}

impl Embedder {
    /// Loads an embedding model on the processor.
    ///
    /// # Errors
    /// The model generates text, or cannot be loaded.
    pub fn load(model: &Arc<Model>, options: &EngineOptions) -> Result<Self, LoadError> {
        // The longest text, and a step of short ones.
        let block_count = blocks_for(model.config().context_length) + STEP_ROWS / BLOCK_TOKENS;
        let backend = load::embedding_backend(model, options, block_count)?;
        let free = (0..block_count as u32).rev().map(BlockId).collect();
        Ok(Self { model: Arc::clone(model), backend, free })
    }

    /// Returns the length of a vector.
    pub fn dimensions(&self) -> usize {
        self.model.config().hidden_size
    }

    /// Returns the vectors of texts, given as tokens. // (texts, dimensions)
    ///
    /// # Errors
    /// The first text that cannot be embedded; nothing is computed then unless a step fails.
    pub fn embed(&mut self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, EmbedError> {
        for (index, text) in texts.iter().enumerate() {
            self.check(index, text)?;
        }
        let mut vectors = vec![Vec::new(); texts.len()];
        let mut waiting: VecDeque<Started> =
            (0..texts.len()).map(|index| Started { index, done: 0, blocks: Vec::new() }).collect();
        let mut hidden = Vec::new();
        while !waiting.is_empty() {
            let result = self.step(texts, &mut waiting, &mut hidden, &mut vectors);
            if result.is_err() {
                waiting.drain(..).for_each(|text| self.free.extend(text.blocks));
            }
            result?;
        }
        Ok(vectors)
    }

    fn check(&self, index: usize, text: &[u32]) -> Result<(), EmbedError> {
        let config = self.model.config();
        let (limit, vocab_size) = (config.context_length, config.vocab_size);
        if text.is_empty() {
            return Err(EmbedError::Empty { index });
        }
        if text.len() > limit {
            return Err(EmbedError::TooLong { index, tokens: text.len(), limit });
        }
        match text.iter().find(|token| **token as usize >= vocab_size) {
            Some(&token) => Err(EmbedError::TokenOutOfRange { index, token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Computes the next rows of the first texts that wait, and the vectors of those that end.
    fn step(
        &mut self,
        texts: &[Vec<u32>],
        waiting: &mut VecDeque<Started>,
        hidden: &mut Vec<f32>,
        vectors: &mut [Vec<f32>],
    ) -> Result<(), EmbedError> {
        let mut rows = STEP_ROWS;
        let mut ends = Vec::new(); // in their texts
        for text in waiting.iter_mut() {
            let left = texts[text.index].len() - text.done;
            let needed = blocks_for(texts[text.index].len()) - text.blocks.len();
            if rows == 0 || needed > self.free.len() {
                break;
            }
            text.blocks.extend(self.free.drain(self.free.len() - needed..));
            ends.push(text.done + left.min(rows));
            rows -= left.min(rows);
        }
        let mut chunks = Vec::with_capacity(ends.len());
        for (text, end) in waiting.iter().zip(&ends) {
            let tokens = &texts[text.index];
            let logits = if *end == tokens.len() { LogitsFor::Last } else { LogitsFor::Nothing };
            let (tokens, position) = (&tokens[text.done..*end], text.done);
            chunks.push(Chunk { tokens, position, blocks: &text.blocks, logits });
        }
        self.backend.step_hidden(&chunks, hidden)?;
        let mut pooled = hidden.chunks_exact(self.model.config().hidden_size);
        for end in ends {
            let Some(mut text) = waiting.pop_front() else { break };
            if end < texts[text.index].len() {
                // The last one of the step.
                text.done = end;
                waiting.push_front(text);
                break;
            }
            self.free.append(&mut text.blocks);
            vectors[text.index] = normalised(text.index, pooled.next().unwrap_or_default())?;
        }
        Ok(())
    }
}

/// Returns the tokens of a text, with the end token of the model, of which it pools the hidden row.
///
/// # Errors
/// As [`Tokenizer::encode`](crate::tokenizer::Tokenizer::encode).
pub fn tokens(model: &Model, text: &str) -> Result<Vec<u32>, TokenizerError> {
    let mut tokens = model.tokenizer().encode(text, true)?;
    let end = model.config().eos_tokens.first().copied();
    tokens.extend(end.filter(|end| tokens.last() != Some(end)));
    Ok(tokens)
}

/// Divides a row by its length.
fn normalised(index: usize, row: &[f32]) -> Result<Vec<f32>, EmbedError> {
    let length = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if !(length.is_finite() && length > 0.0) {
        return Err(EmbedError::NoDirection { index, length });
    }
    Ok(row.iter().map(|x| (f64::from(*x) / length) as f32).collect())
}
