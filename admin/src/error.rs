//! What a caller hears when it gets no answer: a status, and a body of OpenAI's shape.

use std::time::Duration;

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tritmill_client::{ClientError, FieldError, answer};
use tritmill_queue::{JobError, StoreError};

/// When to come back to a store that is away.
const STORE_AWAY: Duration = Duration::from_secs(2);

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: String,
    message: String,
    param: Option<String>,
    retry_after: Option<Duration>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        Self { status, kind, code, message, param: None, retry_after: None }
    }

    /// The request cannot be served as it is.
    pub fn invalid(code: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
    }

    /// The field at fault.
    #[must_use]
    pub fn at(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// There is none, or none of the caller's.
    pub fn not_found(what: &str, id: &str) -> Self {
        let id: String = id.chars().filter(|c| !c.is_control()).take(80).collect();
        let message = format!("no such {what}: '{id}'");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "not_found", message)
    }

    /// No worker serves this model.
    pub fn no_model(name: &str) -> Self {
        let error = Self::not_found("model", name);
        Self { code: "model_not_found".to_owned(), ..error }.at("model")
    }

    /// No path or method of this name.
    pub fn no_route() -> Self {
        let message = "no such path or method";
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "unknown_url", message)
    }

    /// The key is missing, unknown or revoked.
    pub fn no_key() -> Self {
        let message = "no valid API key: send one as 'Authorization: Bearer tm-…'";
        let (status, kind) = (StatusCode::UNAUTHORIZED, "authentication_error");
        Self::new(status, kind, "invalid_api_key", message)
    }

    /// The key does not allow it.
    pub fn forbidden(needed: &str) -> Self {
        let message = format!("this API key does not allow it: a key with role '{needed}' does");
        Self::new(StatusCode::FORBIDDEN, "permission_error", "insufficient_role", message)
    }

    /// A form that no page of ours sent.
    pub fn other_site() -> Self {
        let message = "another site sent this form: go back to the page and send it from there";
        Self::new(StatusCode::FORBIDDEN, "permission_error", "other_site", message)
    }

    /// Too many bytes.
    pub fn too_large(what: &str, limit_bytes: u64) -> Self {
        let message = format!("the {what} is larger than {limit_bytes} bytes");
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        Self::new(status, "invalid_request_error", "too_large", message)
    }

    /// The caller stopped sending.
    pub fn slow() -> Self {
        let message = "the request did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "timeout", message)
    }

    /// No answer in time.
    pub fn late() -> Self {
        let message = "no answer in time: the job was cancelled";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "timeout", message)
    }

    /// No more of this at once.
    pub fn crowded(message: &str) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "busy", message);
        Self { retry_after: Some(Duration::from_secs(1)), ..error }
    }

    /// How a job ended that was not answered.
    pub fn job(error: &JobError) -> Self {
        let (status, kind) = answer::status(error);
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let known = Self::new(status, kind, &error.code, &error.message);
        Self { param: error.param.clone(), ..known }
    }

    /// It contradicts what was done before.
    pub fn conflict(code: &str, message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, "invalid_request_error", code, message)
    }

    /// Somebody withdrew the job.
    pub fn cancelled() -> Self {
        Self::conflict("cancelled", "the job was cancelled")
    }

    /// The status of its response.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// A sentence for people.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The body, as it is also sent within a stream.
    pub fn body(&self) -> Value {
        json!({
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            },
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        let message = format!("{} {}", error.path, error.problem);
        Self::invalid(error.code, message).at(error.path)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        if let StoreError::InvalidValue { what, problem } = &error {
            return Self::invalid("invalid_value", format!("{what} {problem}")).at(*what);
        }
        // The caller is told that, not what: the store's words are the operator's.
        tracing::error!(%error, "the store failed a request");
        let message = "the store does not answer: try again";
        let away =
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "unavailable", message);
        Self { retry_after: Some(STORE_AWAY), ..away }
    }
}

impl From<ClientError> for ApiError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Busy { retry_after, .. } => {
                let busy = Self::crowded(&format!("the {error}"));
                Self { retry_after: Some(retry_after), code: "queue_full".to_owned(), ..busy }
            }
            ClientError::Store(error) => error.into(),
            ClientError::Unknown(id) => Self::not_found("job", &id.to_string()),
            other => Self::invalid("conflict", other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::dispatch::Limit;

    use super::*;

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        let limit = Limit::Tokens(7);
        let wait = Duration::from_millis(1200);
        let busy = ClientError::Busy { limit, accepted: 0, retry_after: wait };
        let response = ApiError::from(busy).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "2");
    }

    #[test]
    fn a_store_that_is_away_keeps_its_words_to_itself() {
        let said = StoreError::Unavailable("password 'hunter2' refused".into());
        let error = ApiError::from(said);
        assert!(!error.body().to_string().contains("hunter2"));
        assert_eq!(error.into_response().status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}
