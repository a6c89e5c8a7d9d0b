//! Dashboard sessions: a cookie with a secret, of which the store keeps a hash.
//!
//! The cookie is sent to the dashboard only, never to the API; scripts cannot read it, and browsers do not
//! send it with links or forms of other sites. In addition, a form is rejected unless the browser says
//! that the dashboard itself sent it.

use std::time::Duration;

use axum::http::{
    HeaderMap, Uri,
    header::{HOST, ORIGIN},
};
use axum_extra::extract::{
    CookieJar,
    cookie::{Cookie, SameSite},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::{ApiError, App, Caller, Peer, Secret, Site, WebOrigin, store::keys::KeyHash};

/// Lifetime of a session.
pub(super) const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Path of the dashboard, and of its cookies.
pub(crate) const HOME: &str = "/dashboard";
/// Path of the login page.
pub(super) const LOGIN: &str = "/dashboard/login";
const SESSION: &str = "tritmill_session";
const SECURE_SESSION: &str = "__Secure-tritmill_session";
const NOTICE: &str = "tritmill_notice";
const ATTEMPT: &str = "tritmill_login";
/// How long a login at a provider may take.
const ATTEMPT_LIFETIME: Duration = Duration::from_secs(600);
/// Longest notice of an action, in characters, and how long it waits to be shown.
const NOTICE_CHARS_MAX: usize = 300;
const NOTICE_LIFETIME: Duration = Duration::from_secs(60);

/// A logged-in visitor.
#[derive(Clone)]
pub(super) struct Visitor {
    /// Hash of the session's secret.
    pub session: KeyHash,
    pub caller: Caller,
}

/// Returns the name of the session cookie. With the prefix, browsers take the cookie by HTTPS alone, so that a
/// network cannot plant one.
fn session_name(peer: Peer) -> &'static str {
    if peer.is_secure { SECURE_SESSION } else { SESSION }
}

/// Returns the hash of the session cookie's secret, if there is one.
pub(super) fn of_cookie(headers: &HeaderMap, peer: Peer) -> Option<KeyHash> {
    let cookies = CookieJar::from_headers(headers);
    let secret =
        cookies.get(session_name(peer)).and_then(|cookie| Secret::parse(cookie.value()))?;
    Some(secret.hash())
}

/// Returns the visitor of a session, if it is valid.
pub(super) async fn of_session(app: &App, session: KeyHash) -> Result<Option<Visitor>, ApiError> {
    let key = app.store.session(&session).await?;
    Ok(key.map(|key| Visitor { session, caller: key.into() }))
}

/// Encodes text for URLs.
pub(super) fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Returns the page to open after login: `next` if it is a page of the dashboard.
pub(super) fn destination(next: &str) -> &str {
    let is_page = next.parse::<Uri>().is_ok_and(|uri| {
        let path = uri.path();
        uri.authority().is_none() && (path == HOME || path.starts_with("/dashboard/"))
    });
    // Browsers treat a backslash as a slash.
    if is_page && !next.contains('\\') && next != LOGIN { next } else { HOME }
}

/// Whether the browser says that a page of this site sent the form: by `Sec-Fetch-Site`, which scripts
/// cannot set, or by the origin, because browsers omit that header without TLS. A proxy may have changed the host.
pub(super) fn is_same_site(site: &Site, headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(site) = text("sec-fetch-site") {
        return site == "same-origin";
    }
    let origin = text(ORIGIN.as_str());
    if origin.is_some() && origin == site.public_url.as_ref().map(WebOrigin::as_str) {
        return true;
    }
    let origin = origin.and_then(|origin| origin.split_once("://"));
    matches!((origin, text(HOST.as_str())), (Some((_, origin)), Some(host)) if origin == host)
}

/// The cookie of a new session.
pub(super) fn opened(secret: &Secret, peer: Peer) -> CookieJar {
    CookieJar::new().add(cookie(session_name(peer), secret.reveal().to_owned(), LIFETIME, peer))
}

/// The cookie that ends a session.
pub(super) fn closed(peer: Peer) -> CookieJar {
    CookieJar::new().add(cookie(session_name(peer), String::new(), Duration::ZERO, peer))
}

/// The cookie of a login that was begun at a provider. Browsers send it also when the provider's site sends the visitor
/// back.
pub(super) fn attempt_begun(kept: String, peer: Peer) -> CookieJar {
    CookieJar::new().add(attempt(kept, ATTEMPT_LIFETIME, peer))
}

/// Removes the cookie of a login that is finished.
pub(super) fn attempt_finished(cookies: CookieJar, peer: Peer) -> CookieJar {
    cookies.add(attempt(String::new(), Duration::ZERO, peer))
}

fn attempt(kept: String, lifetime: Duration, peer: Peer) -> Cookie<'static> {
    let mut cookie = cookie(ATTEMPT, kept, lifetime, peer);
    cookie.set_same_site(SameSite::Lax);
    cookie
}

/// Returns what the cookie of a begun login has.
pub(super) fn attempt_of(headers: &HeaderMap) -> Option<String> {
    let cookies = CookieJar::from_headers(headers);
    cookies.get(ATTEMPT).map(|cookie| cookie.value().to_owned())
}

/// Adds a notice that the next page shows once.
pub(super) fn with_notice(cookies: CookieJar, notice: &str, peer: Peer) -> CookieJar {
    let notice = notice.chars().take(NOTICE_CHARS_MAX).collect();
    cookies.add(cookie(NOTICE, notice, NOTICE_LIFETIME, peer))
}

/// Removes the notice.
pub(super) fn without_notice(cookies: CookieJar, peer: Peer) -> CookieJar {
    cookies.add(cookie(NOTICE, String::new(), Duration::ZERO, peer))
}

/// Returns the notice of the previous action.
pub(super) fn notice(cookies: &CookieJar) -> Option<String> {
    cookies.get(NOTICE).map(|cookie| cookie.value().to_owned()).filter(|text| !text.is_empty())
}

fn cookie(name: &'static str, value: String, lifetime: Duration, peer: Peer) -> Cookie<'static> {
    let lifetime = lifetime.try_into().expect("a lifetime of hours");
    let cookie = Cookie::build((name, value)).path(HOME).max_age(lifetime).http_only(true);
    cookie.same_site(SameSite::Strict).secure(peer.is_secure).build()
}

#[cfg(test)]
mod tests {
    use axum::{
        http::{
            HeaderValue,
            header::{COOKIE, SET_COOKIE},
        },
        response::IntoResponse as _,
    };

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn only_forms_of_this_site_are_accepted() {
        let public_url = Some("https://public.example".parse().expect("an origin"));
        let site = Site { public_url, ..Site::default() };
        let check = |pairs: &[(&'static str, &'static str)], expect: bool| {
            assert_eq!(is_same_site(&site, &headers(pairs)), expect, "{pairs:?}");
        };
        check(&[("origin", "https://public.example"), ("host", "10.0.0.7:8080")], true);
        check(&[("origin", "http://public.example"), ("host", "10.0.0.7:8080")], false);
        check(&[], false);
        check(&[("sec-fetch-site", "same-origin")], true);
        check(&[("sec-fetch-site", "same-site")], false);
        check(&[("sec-fetch-site", "cross-site"), ("origin", "http://a"), ("host", "a")], false);
        check(&[("origin", "http://a:8080"), ("host", "a:8080")], true);
        check(&[("origin", "http://b:8080"), ("host", "a:8080")], false);
        check(&[("origin", "null"), ("host", "a:8080")], false);
    }

    #[test]
    fn session_by_https_has_a_name_that_http_cannot_set() {
        let secret = Secret::generate();
        for (is_secure, name) in [(true, "__Secure-tritmill_session"), (false, "tritmill_session")]
        {
            let peer = Peer { ip: [127, 0, 0, 1].into(), is_secure };
            let response = (opened(&secret, peer), ()).into_response();
            let cookie = response.headers()[SET_COOKIE].to_str().expect("ASCII");
            assert!(cookie.starts_with(&format!("{name}=tm-")), "{cookie}");
            assert_eq!(cookie.contains("; Secure"), is_secure);
            let mut sent = HeaderMap::new();
            let pair = cookie.split("; ").next().expect("a pair");
            sent.insert(COOKIE, pair.parse().expect("a header"));
            assert_eq!(of_cookie(&sent, peer), Some(secret.hash()));
            assert_eq!(of_cookie(&sent, Peer { is_secure: !is_secure, ..peer }), None);
        }
    }

    #[test]
    fn login_redirects_only_to_dashboard_pages() {
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
    fn notice_survives_its_cookie_until_it_is_removed() {
        let peer = Peer { ip: [127, 0, 0, 1].into(), is_secure: true };
        // What a browser that received these cookies sends back.
        let sent_back = |cookies: CookieJar| {
            let response = (cookies, ()).into_response();
            let cookie = response.headers()[SET_COOKIE].to_str().expect("ASCII");
            assert!(
                cookie
                    .ends_with("; HttpOnly; SameSite=Strict; Secure; Path=/dashboard; Max-Age=60")
                    || cookie.contains("Max-Age=0"),
                "{cookie}"
            );
            let mut headers = HeaderMap::new();
            let pair = cookie.split("; ").next().expect("a pair");
            headers.insert(COOKIE, pair.parse().expect("a header"));
            CookieJar::from_headers(&headers)
        };
        for text in ["3 jobs replayed", "50 % – \"done\"; really", "ü=ß\n"] {
            let cookies = sent_back(with_notice(CookieJar::new(), text, peer));
            assert_eq!(notice(&cookies).as_deref(), Some(text));
            assert_eq!(notice(&sent_back(without_notice(cookies, peer))), None);
        }
    }
}
