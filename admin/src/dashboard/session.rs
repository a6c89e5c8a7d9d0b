//! Who is logged in: a cookie with a secret, of which the store keeps a hash.
//!
//! The cookie goes to the dashboard alone, never to the API, cannot be read by a script, and is not
//! sent with what another site links to or posts. A form is refused beside that unless the browser
//! says that the dashboard itself sent it.

use std::time::Duration;

use axum::{
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Method, Uri,
        header::{COOKIE, HOST, ORIGIN, SET_COOKIE},
    },
    middleware::Next,
    response::{IntoResponse as _, Redirect, Response},
};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use tritmill_queue::store::{KeyRole, keys::KeyHash};

use super::page;
use crate::{access::Caller, app::App, error::ApiError, secret::Secret, serve::Peer};

/// How long a session lasts.
pub(super) const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Where the dashboard is, and its cookies go.
pub(crate) const HOME: &str = "/dashboard";
/// Where to log in.
pub(super) const LOGIN: &str = "/dashboard/login";
const SESSION: &str = "tritmill_session";
const NOTICE: &str = "tritmill_notice";
/// Of a text that tells a visitor once what was done, and how long it waits to be read.
const NOTICE_BYTES_MAX: usize = 300;
const NOTICE_S: u64 = 60;

/// Whoever is logged in, by the hash of its session's secret.
#[derive(Clone)]
pub(super) struct Visitor {
    pub session: KeyHash,
    pub caller: Caller,
}

/// Lets a request pass whose session's key has the role, with its [`Visitor`] among the extensions;
/// sends others to log in.
pub(crate) async fn require(
    State((app, role)): State<(App, KeyRole)>,
    mut request: Request,
    next: Next,
) -> Response {
    let visitor = match visitor(&app, request.headers()).await {
        Ok(Some(visitor)) => visitor,
        Ok(None) => return to_login(&request),
        Err(error) => return page::plain_error(&error),
    };
    if visitor.caller.role < role {
        return page::error(&visitor.caller, &ApiError::forbidden(role.as_str()));
    }
    if request.method() != Method::GET && !is_of_this_site(request.headers()) {
        return page::error(&visitor.caller, &ApiError::other_site());
    }
    request.extensions_mut().insert(visitor.clone());
    let mut response = next.run(request).await;
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) => page::error(&visitor.caller, &error),
        None => response,
    }
}

/// Whoever has the session of the request's cookie, if it lasts.
pub(super) async fn visitor(app: &App, headers: &HeaderMap) -> Result<Option<Visitor>, ApiError> {
    let Some(secret) = cookie(headers, SESSION).and_then(Secret::parse) else { return Ok(None) };
    of_session(app, secret.hash()).await
}

/// Whoever has this session, if it lasts.
pub(super) async fn of_session(app: &App, session: KeyHash) -> Result<Option<Visitor>, ApiError> {
    let key = app.store().session(&session).await?;
    Ok(key.map(|key| Visitor {
        session,
        caller: Caller { key: key.id, tenant: key.tenant, role: key.role },
    }))
}

fn to_login(request: &Request) -> Response {
    if super::live::is_asked_for(request.headers()) {
        // A redirect would be followed, and its page is no stream.
        return page::plain_error(&ApiError::no_key());
    }
    let back = match *request.method() {
        Method::GET => request.uri().path_and_query().map_or(HOME, |path| path.as_str()),
        _ => HOME,
    };
    Redirect::to(&format!("{LOGIN}?next={}", percent_encoded(back))).into_response()
}

/// Text in the characters that addresses and cookies take as they are.
pub(super) fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Where a visitor wants to go after it logged in, if that is a page of the dashboard.
pub(super) fn destination(next: &str) -> &str {
    let is_page = next.parse::<Uri>().is_ok_and(|uri| {
        let path = uri.path();
        uri.authority().is_none() && (path == HOME || path.starts_with("/dashboard/"))
    });
    // A browser takes a backslash for a slash.
    if is_page && !next.contains('\\') && next != LOGIN { next } else { HOME }
}

/// Whether a browser says that a page of ours sent the form: by the header that scripts cannot set,
/// or, without TLS between machines, where there is none, by the origin's name.
pub(super) fn is_of_this_site(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(site) = text("sec-fetch-site") {
        return site == "same-origin";
    }
    let origin = text(ORIGIN.as_str()).and_then(|origin| origin.split_once("://"));
    matches!((origin, text(HOST.as_str())), (Some((_, origin)), Some(host)) if origin == host)
}

/// The cookie of a new session.
pub(super) fn opened(secret: &Secret, peer: Peer) -> HeaderValue {
    set(SESSION, secret.reveal(), LIFETIME.as_secs(), peer)
}

/// The cookie that ends one.
pub(super) fn closed(peer: Peer) -> HeaderValue {
    set(SESSION, "", 0, peer)
}

/// Sends a visitor on, who reads there what was done.
pub(super) fn done(to: &str, what: &str, peer: Peer) -> Response {
    let mut end = what.len().min(NOTICE_BYTES_MAX);
    while !what.is_char_boundary(end) {
        end -= 1;
    }
    let notice = set(NOTICE, &percent_encoded(&what[..end]), NOTICE_S, peer);
    ([(SET_COOKIE, notice)], Redirect::to(to)).into_response()
}

/// What was done before the visitor came here, and the cookie that forgets it.
pub(super) fn notice(headers: &HeaderMap, peer: Peer) -> Option<(String, HeaderValue)> {
    let encoded = cookie(headers, NOTICE).filter(|text| !text.is_empty())?;
    Some((percent_decoded(encoded)?, set(NOTICE, "", 0, peer)))
}

fn percent_decoded(text: &str) -> Option<String> {
    Some(percent_decode_str(text).decode_utf8().ok()?.into_owned())
}

fn set(name: &str, value: &str, seconds: u64, peer: Peer) -> HeaderValue {
    let secure = if peer.is_secure { "; Secure" } else { "" };
    let cookie = format!(
        "{name}={value}; Path={HOME}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    );
    HeaderValue::try_from(cookie).expect("names, digits and percent-encoded text are visible ASCII")
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let sent = headers.get_all(COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let mut pairs = sent.flat_map(|cookies| cookies.split("; "));
    pairs
        .find_map(|pair| pair.split_once('=').filter(|(is, _)| *is == name).map(|(_, value)| value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn a_form_is_taken_from_this_site_alone() {
        let check = |pairs: &[(&'static str, &'static str)], expect: bool| {
            assert_eq!(is_of_this_site(&headers(pairs)), expect, "{pairs:?}");
        };
        check(&[], false);
        check(&[("sec-fetch-site", "same-origin")], true);
        check(&[("sec-fetch-site", "same-site")], false);
        check(&[("sec-fetch-site", "cross-site"), ("origin", "http://a"), ("host", "a")], false);
        check(&[("origin", "http://a:8080"), ("host", "a:8080")], true);
        check(&[("origin", "http://b:8080"), ("host", "a:8080")], false);
        check(&[("origin", "null"), ("host", "a:8080")], false);
    }

    #[test]
    fn a_visitor_is_sent_to_pages_of_the_dashboard_alone() {
        for page in ["/dashboard", "/dashboard/batches?after=x", "/dashboard/jobs/1"] {
            assert_eq!(destination(page), page);
        }
        for other in [
            "",
            "/",
            "//evil.example/dashboard",
            "https://evil.example/dashboard/",
            "/dashboard/\\evil.example",
            "/dashboardx",
            "javascript:alert(1)",
            LOGIN,
        ] {
            assert_eq!(destination(other), HOME, "{other}");
        }
    }

    #[test]
    fn a_notice_is_read_as_it_was_written() {
        for text in ["3 jobs replayed", "50 % – \"done\"; really", "ü=ß\n"] {
            assert_eq!(percent_decoded(&percent_encoded(text)).as_deref(), Some(text));
        }
        assert_eq!(percent_decoded("%ff"), None, "no text");
    }
}
