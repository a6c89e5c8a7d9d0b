//! The trace of a request: its span is a child of the caller's, which the header `traceparent` names, and the
//! parent of the spans of its jobs. Every response has the id of its request, and so has every log line of it.

use std::convert::Infallible;

use axum::{
    extract::{FromRequestParts, Request},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, request::Parts},
};
use tracing::{Span, field::Empty};
use tritmill_queue::{TraceParent, trace::mark_failed};
use uuid::Uuid;

use crate::{Peer, access::is_health_check};

/// Name of the header with the id of a request.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Most characters of an id that a caller chose.
const ID_CHARS_MAX: usize = 128;

/// The id of a request, among its extensions.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub HeaderValue);

/// Returns the id of a request: the caller's, if it is visible ASCII of at most [`ID_CHARS_MAX`] characters, or a
/// new one.
pub(crate) fn id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|value| {
        let text = value.as_bytes();
        (1..=ID_CHARS_MAX).contains(&text.len()) && text.iter().all(u8::is_ascii_graphic)
    });
    given.cloned().unwrap_or_else(|| {
        let id = format!("req_{}", Uuid::now_v7().as_simple());
        HeaderValue::try_from(id).expect("hexadecimal digits are visible ASCII")
    })
}

/// Returns the span of a request; disabled for health checks and scrapes, of which there are many. A span
/// has the pattern of the path, never its values. Its level lets every log line of the request have its id.
pub(crate) fn span(request: &Request, route: &str, id: &HeaderValue) -> Span {
    if is_health_check(route) || route == "/metrics" {
        return Span::none();
    }
    let span = tracing::error_span!(
        parent: None,
        "request",
        request.id = id.to_str().unwrap_or_default(),
        client.address = request.extensions().get().map(|peer: &Peer| display(peer.ip)),
        otel.kind = "server",
        http.request.method = %request.method(),
        http.route = route,
        http.response.status_code = Empty,
    );
    if !span.is_disabled()
        && let Some(caller) = of_headers(request.headers())
    {
        caller.adopt(&span);
    }
    span
}

/// Records how a request ended. The body of a stream may follow.
pub(crate) fn end(span: &Span, status: StatusCode) {
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        mark_failed(span, "the request failed");
    }
}

/// The parent of the jobs of a request: its span, or without one that of its caller.
pub(crate) struct JobParent(pub Option<TraceParent>);

impl<S: Sync> FromRequestParts<S> for JobParent {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let parent = TraceParent::of_span(&Span::current());
        Ok(Self(parent.or_else(|| of_headers(&parts.headers))))
    }
}

fn of_headers(headers: &HeaderMap) -> Option<TraceParent> {
    headers.get("traceparent")?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sane_id_of_the_caller_is_kept() {
        let of = |given: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(given) = given {
                headers.insert(REQUEST_ID, HeaderValue::from_str(given).expect("a header"));
            }
            id(&headers).to_str().expect("ASCII").to_owned()
        };
        let longest = "x".repeat(ID_CHARS_MAX);
        for sane in ["7", "trace/1:{a}", &longest] {
            assert_eq!(of(Some(sane)), sane);
        }
        for odd in ["", "a b", "ü", &format!("{longest}x")] {
            assert!(of(Some(odd)).starts_with("req_"), "{odd}");
        }
        assert_ne!(of(None), of(None));
    }

    #[tokio::test]
    async fn job_continues_the_trace_of_its_caller() {
        let parent = async |header: Option<&str>| {
            let mut request = Request::builder().uri("/v1/completions");
            if let Some(value) = header {
                request = request.header("Traceparent", value);
            }
            let (mut parts, _) = request.body(()).expect("a request").into_parts();
            let Ok(JobParent(parent)) = JobParent::from_request_parts(&mut parts, &()).await;
            parent.map(|parent| parent.to_string())
        };
        let valid = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(parent(Some(valid)).await.as_deref(), Some(valid));
        assert_eq!(parent(Some("00-nonsense")).await, None);
        assert_eq!(parent(None).await, None);
    }
}
