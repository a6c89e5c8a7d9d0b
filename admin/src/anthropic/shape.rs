//! What responses below `/v1/messages` have in common: the shape of errors, and the header with the id of the request.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use serde_json::Value;
use tritmill_client::{anthropic::answer, json_line};

use super::PATH;
use crate::{ApiError, error::ShownError, request_trace::RequestId};

/// Name of the header with the version of the API that a client speaks, and the versions that there are.
const VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const VERSIONS: [&str; 2] = ["2023-06-01", "2023-01-01"];
/// Anthropic's name of the header with the id of a request.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Returns the body of an error.
pub(super) fn body(status: u16, message: &str, request_id: Option<&str>) -> Value {
    answer::error(answer::error_kind(status), message, request_id)
}

/// Gives responses below `/v1/messages` the shape that Anthropic's clients expect.
pub(crate) async fn give_shape(request: Request, next: Next) -> Response {
    let rest = request.uri().path().strip_prefix(PATH);
    if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
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

/// Refuses a version that is not known. A client that names none speaks the latest.
fn check_version(version: Option<&HeaderValue>) -> Result<(), ApiError> {
    match version {
        Some(version) if !VERSIONS.iter().any(|known| *known == version) => {
            let message = format!("anthropic-version must be one of {}", VERSIONS.join(", "));
            Err(ApiError::invalid_value(VERSION.as_str(), message))
        }
        _ => Ok(()),
    }
}
