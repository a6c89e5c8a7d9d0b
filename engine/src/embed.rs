//! Embeds texts: turns each into a vector of length 1, which is close to those of texts that mean the like.

use std::{collections::HashMap, time::Instant};

use crate::{
    Engine,
    files::Model,
    request::{Event, Request, RequestError, RequestId, SubmitError},
    tokenizer::TokenizerError,
};

/// A text cannot be embedded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// The engine does not accept a text.
    #[error("text {index}")]
    Refused {
        /// The text.
        index: usize,
        /// The reason.
        source: SubmitError,
    },
    /// The engine failed at a text.
    #[error("text {index}")]
    Failed {
        /// The text.
        index: usize,
        /// The reason.
        source: RequestError,
    },
}

/// Returns the vectors of texts, given as tokens. // (texts, hidden)
///
/// # Errors
/// The first text that cannot be embedded.
pub fn vectors(engine: &mut Engine, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, EmbedError> {
    let mut vectors = vec![Vec::new(); texts.len()];
    let mut running: HashMap<RequestId, usize> = HashMap::new();
    let mut waiting = texts.iter().enumerate().peekable();
    let mut result = Ok(());
    loop {
        while let Some((index, text)) = waiting.peek() {
            let request = Request { prompt: text.to_vec(), embeds: true, ..Request::default() };
            match engine.submit(request) {
                Ok(id) => running.insert(id, *index),
                Err(SubmitError::Full { .. }) if !running.is_empty() => break,
                Err(source) => {
                    result = result.and(Err(EmbedError::Refused { index: *index, source }));
                    None
                }
            };
            waiting.next();
        }
        if result.is_err() {
            running.drain().for_each(|(id, _)| engine.cancel(id));
            waiting.by_ref().for_each(drop);
        }
        if engine.is_idle() {
            return result.map(|()| vectors);
        }
        for event in engine.step(Instant::now()).events {
            match event {
                Event::Finished { id, output } => {
                    let vector = output.choices.into_iter().find_map(|choice| choice.vector);
                    if let (Some(index), Some(vector)) = (running.remove(&id), vector) {
                        vectors[index] = vector;
                    }
                }
                Event::Failed { id, error, .. } => {
                    if let Some(index) = running.remove(&id) {
                        result = result.and(Err(EmbedError::Failed { index, source: error }));
                    }
                }
                Event::Delta { .. } => {}
            }
        }
    }
}

/// Returns the tokens of a text, with the end token of the model, of which it pools the hidden row.
///
/// # Errors
/// As [`Tokenizer::encode`](crate::tokenizer::Tokenizer::encode).
pub fn tokens(model: &Model, text: &str) -> Result<Vec<u32>, TokenizerError> {
    let mut tokens = model.tokenizer().encode(text, true)?;
    let ends = &model.config().eos_tokens;
    if tokens.last().is_none_or(|last| !ends.contains(last)) {
        tokens.extend(ends.first());
    }
    Ok(tokens)
}
