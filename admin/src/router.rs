//! [`router`] serves every [route](crate::routes::ROUTES) behind the checks of its access.

use axum::{
    Extension, Router,
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
};
use percent_encoding::percent_decode_str;

use crate::{
    Access, ApiError, App, Peer, access, anthropic::shape, cors, dashboard::guard, extract::drain,
    health, rate_limits, routes::ROUTES,
};

/// Browsers use HTTPS alone for a year.
const HTTPS_ONLY: HeaderValue = HeaderValue::from_static("max-age=31536000");

/// Returns the service: the API and the dashboard.
pub fn router(app: App) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let mut handler = (route.handler)();
        handler = match route.access {
            Access::Public if route.is_health_check() => handler,
            Access::Public => {
                let state = (app.clone(), route.is_page());
                handler.route_layer(middleware::from_fn_with_state(
                    state,
                    rate_limits::limit_strangers,
                ))
            }
            Access::Key(role) => {
                let state = (app.clone(), role);
                handler.route_layer(middleware::from_fn_with_state(state, access::require_key))
            }
            Access::Page(role) => {
                let state = (app.clone(), role);
                handler.route_layer(middleware::from_fn_with_state(state, guard::require_session))
            }
        };
        router = router.route(route.path, handler);
    }
    router
        .fallback(unknown_url)
        .method_not_allowed_fallback(other_method)
        .layer(middleware::from_fn(check_head))
        .layer(middleware::from_fn(shape::give_shape))
        .layer(middleware::from_fn_with_state(app.clone(), cors::allow_sites))
        .layer(middleware::from_fn_with_state(app.clone(), add_security_headers))
        .layer(middleware::from_fn_with_state(app.clone(), health::count_request))
        .with_state(app)
}

/// Answers a method that a path does not have; the response gets the header `Allow`.
async fn other_method(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    method: Method,
) -> Result<StatusCode, ApiError> {
    app.rate_limiter.admit_stranger(peer)?;
    match method {
        Method::OPTIONS => Ok(StatusCode::NO_CONTENT),
        _ => Err(ApiError::method_not_allowed()),
    }
}

/// Refuses paths that are no text, and bodies in an encoding that the service does not read.
async fn check_head(request: Request, next: Next) -> Response {
    if percent_decode_str(request.uri().path()).decode_utf8().is_err() {
        return ApiError::invalid("invalid_path", "the path is not UTF-8").into_response();
    }
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    let encoding =
        encoding.map(|encoding| String::from_utf8_lossy(encoding.as_bytes()).into_owned());
    match encoding.filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("identity")) {
        None => next.run(request).await,
        Some(name) => {
            drain(request.into_body().into_data_stream()).await;
            let mut response = ApiError::encoded_body(&name).into_response();
            let identity = HeaderValue::from_static("identity");
            response.headers_mut().insert(header::ACCEPT_ENCODING, identity);
            response
        }
    }
}

/// Refuses a request for an unknown path.
async fn unknown_url(State(app): State<App>, Extension(peer): Extension<Peer>) -> ApiError {
    app.rate_limiter.admit_stranger(peer).err().unwrap_or_else(ApiError::unknown_url)
}

/// Adds headers that keep browsers from sniffing, framing, caching or running a response.
async fn add_security_headers(State(app): State<App>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    let defaults = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    ];
    for (name, value) in defaults {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    if app.site.is_https() {
        headers.insert(header::STRICT_TRANSPORT_SECURITY, HTTPS_ONLY);
    }
    response
}
