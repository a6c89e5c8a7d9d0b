//! Runs one request on an otherwise idle engine: the simplest way to generate text.

use std::time::Instant;

use crate::{Engine, Event, Output, Request, RequestError, SubmitError};

/// A request was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The request was not accepted.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The request failed.
    #[error(transparent)]
    Request(#[from] RequestError),
}

/// Runs `request` to its end; calls `on_text` with the index of a choice and its next piece of text.
///
/// # Errors
/// If the request is refused or fails; `on_text` has already received the text up to the failure.
///
/// # Panics
/// If the engine becomes idle without an end of the request, which is a bug of the engine.
pub fn run(
    engine: &mut Engine,
    request: Request,
    mut on_text: impl FnMut(u32, &str),
) -> Result<Output, GenerateError> {
    let submitted = engine.submit(request, Instant::now())?;
    while !engine.is_idle() {
        for event in engine.step(Instant::now()).events {
            match event {
                Event::Delta { id, choice, text, .. } if id == submitted => on_text(choice, &text),
                Event::Finished { id, output } if id == submitted => return Ok(output),
                Event::Failed { id, error, .. } if id == submitted => return Err(error.into()),
                Event::Delta { .. } | Event::Finished { .. } | Event::Failed { .. } => {}
            }
        }
    }
    unreachable!("every accepted request ends with one Finished or Failed")
}
