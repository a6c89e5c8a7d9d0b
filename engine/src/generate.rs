//! One request on an engine that has no other: the simplest way to an answer.

use std::time::Instant;

use crate::{Engine, Event, Output, Request, RequestError, SubmitError};

/// Why there is no answer.
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

/// Runs `request` to its end; `on_text` hears the text of every choice as it becomes certain.
///
/// # Errors
/// [`GenerateError`]; text that was already heard is then all there is.
///
/// # Panics
/// If the engine goes idle without reporting the request's end, which is a bug in it.
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
