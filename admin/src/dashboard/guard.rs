//! Middleware that checks the session of a dashboard request.

use axum::{
    extract::{Request, State},
    http::{Extensions, HeaderMap, Method},
    middleware::Next,
    response::{IntoResponse as _, Redirect, Response},
};

use super::{
    live,
    session::{self, Visitor},
    view,
};
use crate::{ApiError, App, Exchange, Peer, store::KeyRole};

/// Passes a request on if its session's key has the role, with the [`Visitor`](session::Visitor) in its
/// extensions; redirects visitors who are not logged in. Renders errors of the page.
pub(crate) async fn require_session(
    State((app, role)): State<(App, KeyRole)>,
    mut request: Request,
    next: Next,
) -> Response {
    let visitor = match visitor(&app, request.headers(), request.extensions()).await {
        Ok(Some(visitor)) => visitor,
        Ok(None) => return to_login(&request),
        Err(error) => return view::error(None, &error),
    };
    let caller = visitor.caller.clone();
    if !caller.role.includes(role) {
        return view::error(Some(&caller), &ApiError::forbidden(role));
    }
    if request.method() != Method::GET && !session::is_same_site(&app.site, request.headers()) {
        return view::error(Some(&caller), &ApiError::other_site());
    }
    request.extensions_mut().insert(visitor);
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) => {
            app.metrics.refusals.count_error(&error, &caller.tenant);
            view::error(Some(&caller), &error)
        }
        None => response,
    }
}

/// Returns the visitor of a request, if its session is valid and its key within its limits.
async fn visitor(
    app: &App,
    headers: &HeaderMap,
    extensions: &Extensions,
) -> Result<Option<Visitor>, ApiError> {
    let of_server = ApiError::unauthorized;
    let peer = *extensions.get::<Peer>().ok_or_else(of_server)?;
    let exchange = extensions.get::<Exchange>().ok_or_else(of_server)?;
    let Some(session) = session::of_cookie(headers, peer) else {
        app.rate_limiter.admit_stranger(peer)?;
        return Ok(None);
    };
    app.rate_limiter.admit_secret(&session, peer)?;
    let Some(mut visitor) = session::of_session(app, session).await? else {
        app.rate_limiter.forget(&session);
        return Ok(None);
    };
    let (key, tenant) = (visitor.caller.key, &visitor.caller.tenant);
    let admitted = app.rate_limiter.admit(session, key, exchange);
    admitted.inspect_err(|error| app.metrics.refusals.count_error(error, tenant))?;
    app.key_uses.note(app, key);
    visitor.caller.address = Some(peer.ip);
    Ok(Some(visitor))
}

fn to_login(request: &Request) -> Response {
    if live::is_requested(request.headers()) {
        // An event source would follow a redirect to a page that is not a stream.
        return view::error(None, &ApiError::unauthorized());
    }
    let back = match *request.method() {
        Method::GET => request.uri().path_and_query().map_or(session::HOME, |path| path.as_str()),
        _ => session::HOME,
    };
    let next = session::percent_encoded(back);
    Redirect::to(&format!("{}?next={next}", session::LOGIN)).into_response()
}
