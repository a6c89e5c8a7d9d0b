//! [`ApiError`]: the status and the OpenAI-style body of a failed request.

use std::time::Duration;

use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tritmill_client::{ClientError, FieldError, answer};
use tritmill_http::BodyError;
use tritmill_queue::{JobError, StoreError, dispatch::Cause};
use utoipa::ToSchema;

use crate::{line_template::TemplateError, refusals::Limit, shown_errors, store::KeyRole};

/// `Retry-After` when the store is unavailable.
const STORE_RETRY: Duration = Duration::from_secs(2);
/// `Retry-After` when the memory for bodies is used up.
const MEMORY_RETRY: Duration = Duration::from_secs(1);
const INVALID: &str = "invalid_request_error";
/// Tells OpenAI's clients whether to send the request again. Without it they repeat all of 408, 409, 429 and 5xx.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The body of every failed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct ErrorResponse {
    error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    /// Explanation for people.
    message: String,
    /// Class of the error.
    #[schema(examples("invalid_request_error"))]
    r#type: &'static str,
    /// Name of the invalid field.
    param: Option<String>,
    /// Error code for programs.
    code: String,
}

/// What handlers of the API return.
pub(crate) type JsonResult<T> = Result<Json<T>, ApiError>;

/// Time to wait before another batch is created.
const BATCHES_RETRY: Duration = Duration::from_secs(10);

/// Returns the error code of a queue that takes no more jobs.
const fn code_of(cause: Cause) -> &'static str {
    match cause {
        Cause::Cpu => "cpu_busy",
        Cause::Gpu => "gpu_busy",
        Cause::Memory => "memory_full",
        Cause::NoWorker => "no_worker",
        _ => "queue_full",
    }
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {}", .detail.message)]
pub(crate) struct ApiError {
    status: StatusCode,
    /// Boxed: most results have no error.
    detail: Box<ErrorDetail>,
    retry_after: Option<Duration>,
    /// The limit that refused the request.
    limit: Option<Limit>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        let detail = Box::new(ErrorDetail { message, r#type: kind, param: None, code });
        Self { status, detail, retry_after: None, limit: None }
    }

    /// An invalid request.
    pub fn invalid(code: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, code, message)
    }

    /// A field with a value that is not allowed.
    pub fn invalid_value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("invalid_value", message).at(param)
    }

    /// A required field that is missing.
    pub fn missing_field(param: &str) -> Self {
        Self::invalid("missing_field", format!("{param} is missing")).at(param)
    }

    /// Names the field that caused the error.
    #[must_use]
    pub fn at(mut self, param: impl Into<String>) -> Self {
        self.detail.param = Some(param.into());
        self
    }

    /// Says that the same request may succeed in a moment.
    #[must_use]
    pub fn soon(self) -> Self {
        Self { retry_after: Some(Duration::from_secs(1)), ..self }
    }

    /// Names the limit that refused the request.
    #[must_use]
    pub fn by(self, limit: Limit) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// An item that does not exist, or that belongs to another tenant.
    pub fn not_found(what: &str, id: &str) -> Self {
        let id: String = id.chars().filter(|c| !c.is_control()).take(80).collect();
        let message = format!("no such {what}: '{id}'");
        Self::new(StatusCode::NOT_FOUND, INVALID, "not_found", message)
    }

    /// A model that no worker serves.
    pub fn model_not_found(name: &str) -> Self {
        let mut error = Self::not_found("model", name).at("model");
        error.detail.code = "model_not_found".to_owned();
        error
    }

    /// An unknown path.
    pub fn unknown_url() -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, "unknown_url", "no such path")
    }

    /// A method that the path does not have.
    pub fn method_not_allowed() -> Self {
        let message = "the path has no such method: the header Allow names those that it has";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", message)
    }

    /// A body in an encoding that is not read.
    pub fn encoded_body(encoding: &str) -> Self {
        let encoding: String = encoding.chars().filter(|c| !c.is_control()).take(40).collect();
        let message = format!("bodies encoded as '{encoding}' are not read: send it as it is");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_encoding", message)
    }

    /// A missing, unknown or revoked API key.
    pub fn unauthorized() -> Self {
        let message = "no valid API key: send one as 'Authorization: Bearer tm-…'";
        let (status, kind) = (StatusCode::UNAUTHORIZED, "authentication_error");
        Self::new(status, kind, "invalid_api_key", message)
    }

    /// An API key with too low a role.
    pub fn forbidden(needed: KeyRole) -> Self {
        let message = format!("this needs an API key with role '{}'", needed.as_str());
        Self::new(StatusCode::FORBIDDEN, "permission_error", "insufficient_role", message)
    }

    /// A form that was sent from another site.
    pub fn other_site() -> Self {
        let message = "this form was sent from another site: send it from the dashboard";
        Self::new(StatusCode::FORBIDDEN, "permission_error", "other_site", message)
    }

    /// A body that is too large.
    pub fn too_large(what: &str, limit_bytes: u64) -> Self {
        let message = format!("the {what} is larger than {limit_bytes} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "too_large", message)
    }

    /// A range that a file does not have.
    pub fn invalid_range(message: String) -> Self {
        let status = StatusCode::RANGE_NOT_SATISFIABLE;
        Self::new(status, INVALID, "invalid_range", message).at("Range")
    }

    /// A body that did not arrive in time.
    pub fn request_timeout() -> Self {
        let message = "the request did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, "timeout", message)
    }

    /// A body for which there was no memory in time.
    pub fn no_request_memory() -> Self {
        let message = "too many large requests are being read: try again";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let full = Self::new(status, "server_error", "request_memory_full", message);
        Self { retry_after: Some(MEMORY_RETRY), ..full }
    }

    /// Returns what became of a body that was not read to its end, if the server ended it.
    pub fn of_body(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        match BodyError::find(error)? {
            BodyError::Timeout => Some(Self::request_timeout()),
            BodyError::NoMemory => Some(Self::no_request_memory()),
            BodyError::Broken(_) => None,
        }
    }

    /// A job that was not answered in time.
    pub fn answer_timeout() -> Self {
        let message = "no answer in time: the job was cancelled";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "timeout", message)
    }

    /// Too many requests of this kind at once.
    pub fn busy(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "busy", message);
        Self { retry_after: Some(Duration::from_secs(1)), ..error }
    }

    /// Too many requests in a time.
    pub fn rate_limited(message: &str, wait: Duration) -> Self {
        let (status, kind) = (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error");
        let error = Self::new(status, kind, "rate_limit_exceeded", message);
        Self { retry_after: Some(wait), ..error }
    }

    /// Too many unfinished batches of the tenant.
    pub fn too_many_batches(max: u32) -> Self {
        let message =
            format!("the tenant has {max} unfinished batches, the maximum: wait for one to finish");
        let mut full = Self::busy(message).by(Limit::OpenBatches);
        full.detail.code = "too_many_batches".to_owned();
        Self { retry_after: Some(BATCHES_RETRY), ..full }
    }

    /// A tenant that has as much as an operator allows it. Repeating the request does not help.
    pub fn over_limit(limit: Limit, what: &str, most: u64, used: u64) -> Self {
        let message = format!(
            "the tenant may have {most} {what} and has {used}: delete some, or ask the operator for more"
        );
        let (status, kind) = (StatusCode::FORBIDDEN, "permission_error");
        Self::new(status, kind, "tenant_limit_reached", message).by(limit)
    }

    /// A budget that is spent. Repeating the request does not help before its period ends.
    pub fn budget_spent(message: &str) -> Self {
        let (status, kind) = (StatusCode::FORBIDDEN, "permission_error");
        Self::new(status, kind, "budget_spent", message).by(Limit::Budget)
    }

    /// A job that failed.
    pub fn job_failed(error: &JobError) -> Self {
        let error = &shown_errors::for_tenant(error);
        let (status, kind) = answer::status(error);
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut failed = Self::new(status, kind, &error.code, &error.message);
        failed.detail.param.clone_from(&error.param);
        failed
    }

    /// A request that contradicts an earlier one.
    pub fn conflict(code: &str, message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, INVALID, code, message)
    }

    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The explanation for people.
    pub fn message(&self) -> &str {
        &self.detail.message
    }

    /// The limit that refused the request, if one did.
    pub fn limit(&self) -> Option<Limit> {
        self.limit
    }

    /// The value of `Retry-After`.
    pub fn retry_after(&self) -> Option<HeaderValue> {
        let wait = self.retry_after?;
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        Some(HeaderValue::from(seconds.max(1)))
    }

    /// The value of [`SHOULD_RETRY`]: `true` where the same request may succeed later, `false` where it would repeat
    /// finished or pointless work; `None` where no client repeats it anyway.
    fn should_retry(&self) -> Option<HeaderValue> {
        let is_repeated = matches!(self.status.as_u16(), 408 | 409 | 429 | 500..);
        let may_succeed = self.retry_after.is_some() || self.status == StatusCode::REQUEST_TIMEOUT;
        is_repeated.then(|| HeaderValue::from_static(if may_succeed { "true" } else { "false" }))
    }

    /// The body, which is also sent within streams.
    pub fn body(self) -> ErrorResponse {
        ErrorResponse { error: *self.detail }
    }

    /// Name of the invalid field.
    pub fn param(&self) -> Option<&str> {
        self.detail.param.as_deref()
    }
}

/// The message of a failed request, in the extensions of its response: some paths have errors of another shape.
#[derive(Debug, Clone)]
pub(crate) struct ShownError {
    pub message: String,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, retry_after, limit) = (self.status, self.retry_after(), self.limit);
        let should_retry = self.should_retry();
        let shown = ShownError { message: self.message().to_owned() };
        let mut response = (status, Json(self.body())).into_response();
        response.extensions_mut().insert(shown);
        if let Some(wait) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, wait);
        }
        if let Some(should_retry) = should_retry {
            response.headers_mut().insert(SHOULD_RETRY, should_retry);
        }
        if let Some(limit) = limit {
            response.extensions_mut().insert(limit);
        }
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        Self::invalid(&error.code, error.message).at(error.param)
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::invalid(error.code, error.message()).at(error.path)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        if let StoreError::InvalidValue { what, problem } = &error {
            return Self::invalid_value(*what, format!("{what} {problem}"));
        }
        // Details of the store are for operators, not for callers.
        tracing::error!(%error, "the store failed a request");
        if let StoreError::Damaged { .. } = error {
            let message = "stored data of this request is damaged: see the server's log";
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            return Self::new(status, "server_error", "damaged_data", message);
        }
        if let StoreError::Refused(_) = error {
            let message = "the store refuses this service: see the server's log";
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            return Self::new(status, "server_error", "store_refused", message);
        }
        let message = "the store is not available: try again";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let unavailable = Self::new(status, "server_error", "unavailable", message);
        Self { retry_after: Some(STORE_RETRY), ..unavailable }
    }
}

impl From<ClientError> for ApiError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Busy { retry_after, limit, cause, .. } => {
                let mut full = Self::busy(format!("the {error}")).by(Limit::Queue(limit, cause));
                full.detail.code = code_of(cause).to_owned();
                Self { retry_after: Some(retry_after), ..full }
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
    fn full_queue_has_a_retry_after_header() {
        for (cause, code) in [
            (Cause::Backlog, "queue_full"),
            (Cause::Cpu, "cpu_busy"),
            (Cause::Gpu, "gpu_busy"),
            (Cause::Memory, "memory_full"),
            (Cause::NoWorker, "no_worker"),
        ] {
            let (limit, wait) = (Limit::Tokens(7), Duration::from_millis(1200));
            let busy = ClientError::Busy { limit, cause, accepted: 0, retry_after: wait };
            let error = ApiError::from(busy);
            assert_eq!(error.limit(), Some(super::Limit::Queue(limit, cause)));
            assert_eq!(error.detail.code, code);
            assert!(error.message().contains("try again in 1.2 s"), "{}", error.message());
            let response = error.into_response();
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()[header::RETRY_AFTER], "2");
        }
    }

    #[test]
    fn only_what_may_succeed_later_is_to_be_repeated() {
        let check = |error: ApiError, expect: Option<&str>| {
            let what = error.to_string();
            let response = error.into_response();
            let told = response.headers().get(SHOULD_RETRY);
            assert_eq!(told.map(|value| value.to_str().expect("ASCII")), expect, "{what}");
        };
        check(ApiError::busy("full"), Some("true"));
        check(ApiError::request_timeout(), Some("true"));
        check(ApiError::no_request_memory(), Some("true"));
        check(ApiError::from(StoreError::Unavailable("away".into())), Some("true"));
        check(ApiError::conflict("idempotency_conflict", "another request"), Some("false"));
        check(ApiError::answer_timeout(), Some("false"));
        let failed = JobError::new(tritmill_queue::ErrorKind::Engine, "engine_broken", "it broke");
        check(ApiError::job_failed(&failed), Some("false"));
        check(ApiError::missing_field("model"), None);
        check(ApiError::unauthorized(), None);
    }

    #[test]
    fn store_errors_hide_their_details() {
        let unavailable = StoreError::Unavailable("password 'hunter2' refused".into());
        let damaged = StoreError::Damaged { what: "outcome", detail: "hunter2".to_owned() };
        for (error, status, may_retry) in [
            (unavailable, StatusCode::SERVICE_UNAVAILABLE, true),
            (damaged, StatusCode::INTERNAL_SERVER_ERROR, false),
        ] {
            let error = ApiError::from(error);
            assert!(!error.message().contains("hunter2"));
            let response = error.into_response();
            assert_eq!(response.status(), status);
            assert_eq!(response.headers().contains_key(header::RETRY_AFTER), may_retry);
        }
    }
}
