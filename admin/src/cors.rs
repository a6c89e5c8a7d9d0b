//! Cross-origin calls: lets scripts of chosen sites call the API (the protocol is CORS, of the Fetch standard).
//!
//! Off by default. A browser sends a preflight request without the key, so it is answered before the key is
//! checked. No response allows cookies: the pages of the dashboard stay out of reach.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};

use crate::{
    App,
    site::{CrossOrigin, Site},
};

/// Methods of the API.
const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, DELETE");
/// Seconds for which a browser may keep the answer to a preflight request; browsers keep it for two hours at most.
const MAX_AGE_S: HeaderValue = HeaderValue::from_static("7200");
/// Headers of responses that scripts may read, beside those that they always may.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, request-id, x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
     x-ratelimit-reset-requests, x-incomplete, x-next-after, x-has-more, retry-after, \
     etag, accept-ranges, content-range, content-disposition",
);

/// Answers preflight requests, and adds to other responses that the caller's site may read them.
pub(crate) async fn allow_sites(State(app): State<App>, request: Request, next: Next) -> Response {
    if app.site.cross_origins.is_empty() {
        return next.run(request).await;
    }
    let allowed = allowed(&app.site, request.headers());
    let mut response = match is_preflight(&request) {
        true => preflight(request.headers()),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}

/// Returns whether a browser asks what a request may have before it sends it.
fn is_preflight(request: &Request) -> bool {
    let has = |name: HeaderName| request.headers().contains_key(name);
    request.method() == Method::OPTIONS
        && has(header::ORIGIN)
        && has(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Returns the value of `Access-Control-Allow-Origin`, if the site that sent the request may read the response.
fn allowed(site: &Site, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    site.cross_origins.iter().find_map(|allowed| match allowed {
        CrossOrigin::Any => Some(HeaderValue::from_static("*")),
        CrossOrigin::Of(site) => (site.as_str() == origin).then(|| origin.clone()),
    })
}

/// Returns the answer to a preflight request: which methods and headers the request that follows may have.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE_S);
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    response
}
