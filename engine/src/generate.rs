//! A single request on an engine without other requests.

use std::time::Instant;

use crate::{Engine, Event, Output, Request, RequestError, SubmitError};

/// A request was not accepted or failed.
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

/// Runs `request` until it finishes. `on_text` gets the index and the new text of a choice, as soon as
/// the text cannot change any more.
///
/// # Errors
/// If the request is not accepted, or fails; `on_text` may have received text by then.
///
/// # Panics
/// If the engine becomes idle without an event that ends the request, which is a bug.
pub fn run(
    engine: &mut Engine,
    request: Request,
    mut on_text: impl FnMut(u32, &str),
) -> Result<Output, GenerateError> {
    let submitted = engine.submit(request)?;
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
