//! Login with an API key, and logout.

use std::time::Instant;

use askama::Template;
use axum::{
    Extension, Form,
    extract::{Query, State, rejection::FormRejection},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Redirect, Response},
};
use serde::Deserialize;

use super::{Content, PageResult, Visit, session, view};
use crate::{ApiError, App, Peer, Secret};

#[derive(Template)]
#[template(path = "login.html")]
struct LoginView<'a> {
    next: &'a str,
    problem: Option<&'a str>,
    /// Whether visitors may also log in at a provider.
    has_sign_on: bool,
}

fn form(app: &App, status: StatusCode, next: &str, problem: Option<&str>) -> Response {
    let has_sign_on = app.sign_on.is_some();
    view::plain(status, &Content::new("Log in", &LoginView { next, problem, has_sign_on }))
}

/// Redirects from `/` to the dashboard.
pub(crate) async fn root() -> Redirect {
    Redirect::to(session::HOME)
}

/// The page to open after login.
#[derive(Deserialize)]
pub(crate) struct Next {
    #[serde(default)]
    pub next: String,
}

/// Shows the login page.
pub(crate) async fn show(State(app): State<App>, Query(Next { next }): Query<Next>) -> Response {
    form(&app, StatusCode::OK, session::destination(&next), None)
}

/// Most bytes of the login form, which strangers may send.
pub(crate) const FORM_BYTES_MAX: usize = 16 << 10;

/// The login form.
#[derive(Deserialize)]
pub(crate) struct Credentials {
    #[serde(default)]
    key: String,
    #[serde(default)]
    next: String,
}

/// Logs a visitor in.
pub(crate) async fn log_in(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    credentials: Result<Form<Credentials>, FormRejection>,
) -> Response {
    if !session::is_same_site(&app.site, &headers) {
        return view::error(None, &ApiError::other_site());
    }
    let Credentials { key, next } = match credentials {
        Ok(Form(credentials)) => credentials,
        Err(error) => match ApiError::of_body(&error) {
            Some(error) => return view::error(None, &error),
            None => {
                let problem = "The form cannot be read.";
                return form(&app, StatusCode::BAD_REQUEST, session::HOME, Some(problem));
            }
        },
    };
    let next = session::destination(&next);
    if let Err(wait) = app.logins.admit(peer.network(), Instant::now()) {
        let seconds = wait.as_secs() + 1;
        let problem = format!("Too many attempts. Try again in {seconds} s.");
        return form(&app, StatusCode::TOO_MANY_REQUESTS, next, Some(&problem));
    }
    match open_session(&app, &key).await {
        Ok(Some(secret)) => (session::opened(&secret, peer), Redirect::to(next)).into_response(),
        Ok(None) => {
            let problem = "This API key is not valid. It may be mistyped or revoked.";
            form(&app, StatusCode::UNAUTHORIZED, next, Some(problem))
        }
        Err(error) => view::error(None, &error),
    }
}

/// Opens a session for an API key; `None` if the key is not valid.
async fn open_session(app: &App, key: &str) -> Result<Option<Secret>, ApiError> {
    let Some(secret) = Secret::parse(key.trim()) else { return Ok(None) };
    let Some(key) = app.store.key(&secret.hash()).await? else { return Ok(None) };
    let session = Secret::generate();
    app.store.add_session(&session.hash(), key.id, session::LIFETIME).await?;
    tracing::info!(key = %key.id, "logged in");
    Ok(Some(session))
}

/// Ends the session.
pub(crate) async fn log_out(visit: Visit) -> PageResult {
    visit.app.store.end_session(&visit.visitor.session).await?;
    Ok((session::closed(visit.peer), Redirect::to(session::LOGIN)).into_response())
}
