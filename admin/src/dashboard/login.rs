//! Logging in with an API key, and out.

use std::time::Instant;

use askama::Template;
use axum::{
    Extension, Form,
    extract::{Query, State, rejection::FormRejection},
    http::{HeaderMap, StatusCode, header::SET_COOKIE},
    response::{IntoResponse as _, Redirect, Response},
};
use serde::Deserialize;

use super::{
    page::{self, PageError, Visit, rendered},
    session,
};
use crate::{app::App, error::ApiError, secret::Secret, serve::Peer};

#[derive(Template)]
#[template(path = "login.html")]
struct Login<'a> {
    next: &'a str,
    problem: Option<&'a str>,
}

fn form(status: StatusCode, next: &str, problem: Option<&str>) -> Response {
    page::plain(status, "Log in", &rendered(&Login { next, problem }))
}

/// Shows the way in.
pub(crate) async fn door() -> Redirect {
    Redirect::to(session::HOME)
}

/// Where to go afterwards.
#[derive(Deserialize)]
pub(crate) struct Next {
    #[serde(default)]
    next: String,
}

/// Asks for a key.
pub(crate) async fn ask(Query(Next { next }): Query<Next>) -> Response {
    form(StatusCode::OK, session::destination(&next), None)
}

/// What was filled in.
#[derive(Deserialize)]
pub(crate) struct Credentials {
    #[serde(default)]
    key: String,
    #[serde(default)]
    next: String,
}

/// Opens a session of the key.
pub(crate) async fn open(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    credentials: Result<Form<Credentials>, FormRejection>,
) -> Response {
    if !session::is_of_this_site(&headers) {
        return page::plain_error(&ApiError::other_site());
    }
    let Ok(Form(Credentials { key, next })) = credentials else {
        return form(StatusCode::BAD_REQUEST, session::HOME, Some("The form cannot be read."));
    };
    let next = session::destination(&next);
    if let Err(wait) = app.dashboard().logins.admit(peer.address, Instant::now()) {
        let seconds = wait.as_secs() + 1;
        let problem = format!("Too many attempts: try again in {seconds} s.");
        return form(StatusCode::TOO_MANY_REQUESTS, next, Some(&problem));
    }
    match begin(&app, &key).await {
        Ok(Some(secret)) => {
            ([(SET_COOKIE, session::opened(&secret, peer))], Redirect::to(next)).into_response()
        }
        Ok(None) => {
            let problem = "This key opens nothing: it is mistyped, unknown or revoked.";
            form(StatusCode::UNAUTHORIZED, next, Some(problem))
        }
        Err(error) => page::plain_error(&error),
    }
}

/// A session of the key with this secret.
async fn begin(app: &App, key: &str) -> Result<Option<Secret>, ApiError> {
    let Some(secret) = Secret::parse(key.trim()) else { return Ok(None) };
    let Some(key) = app.store().key(&secret.hash()).await? else { return Ok(None) };
    let session = Secret::generate();
    app.store().add_session(&session.hash(), key.id, session::LIFETIME).await?;
    tracing::info!(key = %key.id, "logged in");
    Ok(Some(session))
}

/// Ends the session.
pub(crate) async fn close(visit: Visit) -> Result<Response, PageError> {
    visit.app.store().end_session(&visit.visitor.session).await?;
    let cookie = session::closed(visit.peer);
    Ok(([(SET_COOKIE, cookie)], Redirect::to(session::LOGIN)).into_response())
}
