//! What responses to Anthropic's clients have in common: the shape of errors, and the header with the id of the request. They are those
//! below `/v1/messages`, and the models for requests that name a version of its API.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use serde_json::Value;
use tritmill_client::{anthropic::answer, json_line};

use super::PATH;
use crate::{ApiError, error::ShownError, request_trace::RequestId};

/// Name of the header with the version of the API that a client speaks, and the first version that there was.
const VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const FIRST_VERSION: &str = "2023-01-01";
/// Path of the models, which other clients ask for, too.
const MODELS: &str = "/v1/models";
/// Anthropic's name of the header with the id of a request.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Returns whether a request names a version of Anthropic's API.
pub(crate) fn is_asked(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}

/// Returns the body of an error.
pub(super) fn body(status: u16, message: &str, request_id: Option<&str>) -> Value {
    answer::error(answer::error_kind(status), message, request_id)
}

/// Returns whether the response to a request has the shape.
fn has_shape(request: &Request) -> bool {
    let is_below = |path: &str| {
        let rest = request.uri().path().strip_prefix(path);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    is_below(PATH) || (is_below(MODELS) && is_asked(request.headers()))
}

/// Gives responses the shape that Anthropic's clients expect.
pub(crate) async fn give_shape(request: Request, next: Next) -> Response {
    if !has_shape(&request) {
        return next.run(request).await;
    }
    let id = request.extensions().get().map(|RequestId(id)| id.clone());
    let mut response = match check_version(request.headers().get(VERSION)) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    if let Some(ShownError { message }) = response.extensions_mut().remove() {
        let id = id.as_ref().and_then(|id| id.to_str().ok());
        let text = json_line(&body(response.status().as_u16(), &message, id));
        *response.body_mut() = Body::from(text);
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Refuses what is no version. A client that names none speaks the latest; later ones have added to what there was.
fn check_version(version: Option<&HeaderValue>) -> Result<(), ApiError> {
    match version {
        Some(version) if !version.to_str().is_ok_and(is_version) => {
            let message = format!("anthropic-version must be a date, from {FIRST_VERSION} on");
            Err(ApiError::invalid_value(VERSION.as_str(), message))
        }
        _ => Ok(()),
    }
}

/// Whether a text is a date on which there was a version.
fn is_version(text: &str) -> bool {
    let is_date = text.len() == FIRST_VERSION.len()
        && text.bytes().zip(FIRST_VERSION.bytes()).all(|(byte, like)| match like {
            b'-' => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    is_date && text >= FIRST_VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_dates() {
        for version in ["2023-01-01", "2023-06-01", "2031-12-09"] {
            assert!(is_version(version), "{version}");
        }
        for wrong in ["", "1999-01-01", "2023-6-01", "2023/06/01", "latest", "2023-06-01x"] {
            assert!(!is_version(wrong), "{wrong}");
        }
    }
}
