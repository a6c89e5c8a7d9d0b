//! Login by a single sign-on: the way to the provider's page, and back.
//!
//! What the login must be finished with is in a cookie of ten minutes, which browsers send when the provider sends the
//! visitor back. The session cookie is not sent then, because another site began the navigation: so the last answer is a
//! page of this service that goes on to the dashboard by itself.

use std::time::Instant;

use askama::Template;
use axum::{
    Extension,
    extract::{Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Redirect, Response},
};
use serde::Deserialize;
use tritmill_queue::Timestamp;

use super::{Content, login::Next, session, view};
use crate::{
    ApiError, App, Peer, Secret,
    sign_on::{Attempt, Identity, SignOnError, SingleSignOn},
    store::ApiKey,
};

#[derive(Template)]
#[template(path = "signed_on.html")]
struct SignedOnView<'a> {
    next: &'a str,
}

#[derive(Template)]
#[template(path = "sign_on_failed.html")]
struct FailedView<'a> {
    message: &'a str,
}

fn failed(status: StatusCode, message: &str) -> Response {
    view::plain(status, &Content::new("Log in", &FailedView { message }))
}

fn of_error(error: &SignOnError) -> Response {
    tracing::warn!(%error, "a single sign-on failed");
    match error {
        SignOnError::Provider(_) => failed(
            StatusCode::BAD_GATEWAY,
            "The login provider cannot be reached, or does not answer as it should.",
        ),
        SignOnError::Token(_) => {
            failed(StatusCode::UNAUTHORIZED, "The login provider's answer is not valid.")
        }
    }
}

/// Returns the single sign-on, if there is one and the address may try.
fn admitted(app: &App, peer: Peer) -> Result<&SingleSignOn, Box<Response>> {
    let Some(sign_on) = app.sign_on.as_ref() else {
        return Err(Box::new(view::error(None, &ApiError::unknown_url())));
    };
    app.logins.admit(peer.network(), Instant::now()).map_err(|wait| {
        let message = format!("Too many attempts. Try again in {} s.", wait.as_secs() + 1);
        Box::new(failed(StatusCode::TOO_MANY_REQUESTS, &message))
    })?;
    Ok(sign_on)
}

/// Sends the visitor to the provider's page.
pub(crate) async fn begin(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    Query(Next { next }): Query<Next>,
) -> Response {
    let sign_on = match admitted(&app, peer) {
        Ok(sign_on) => sign_on,
        Err(refused) => return *refused,
    };
    match sign_on.begin().await {
        Ok((url, attempt)) => {
            let Attempt { state, nonce, verifier } = attempt;
            let next = session::percent_encoded(session::destination(&next));
            let kept = [state, nonce, verifier, next].join(".");
            (session::attempt_begun(kept, peer), Redirect::to(&url)).into_response()
        }
        Err(error) => of_error(&error),
    }
}

/// What the provider adds to the address of this service.
#[derive(Deserialize)]
pub(crate) struct Answer {
    #[serde(default)]
    code: String,
    #[serde(default)]
    state: String,
    #[serde(default)]
    error: String,
}

/// Logs in the visitor that the provider sent back.
pub(crate) async fn finish(
    State(app): State<App>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    Query(answer): Query<Answer>,
) -> Response {
    let sign_on = match admitted(&app, peer) {
        Ok(sign_on) => sign_on,
        Err(refused) => return *refused,
    };
    let Some((attempt, next)) = begun(&headers).filter(|(begun, _)| begun.state == answer.state)
    else {
        let message = "This login was not begun in this browser, or it took too long.";
        return failed(StatusCode::BAD_REQUEST, message);
    };
    if !answer.error.is_empty() || answer.code.is_empty() {
        tracing::info!(error = answer.error, "the provider refused a login");
        return failed(StatusCode::FORBIDDEN, "The login provider refused the login.");
    }
    let identity = match sign_on.finish(answer.code, attempt).await {
        Ok(identity) => identity,
        Err(error) => return of_error(&error),
    };
    match open_session(&app, sign_on, &identity).await {
        Ok(Some(secret)) => {
            let next = session::destination(&next);
            let page = Content::new("Log in", &SignedOnView { next });
            let cookies = session::attempt_finished(session::opened(&secret, peer), peer);
            (cookies, view::plain(StatusCode::OK, &page)).into_response()
        }
        Ok(None) => failed(StatusCode::FORBIDDEN, "Your account may not use this dashboard."),
        Err(error) => view::error(None, &error),
    }
}

/// Returns the login that this browser began, and the page to open after it.
fn begun(headers: &HeaderMap) -> Option<(Attempt, String)> {
    let kept = session::attempt_of(headers)?;
    let mut parts = kept.splitn(4, '.').map(str::to_owned);
    let (state, nonce, verifier) = (parts.next()?, parts.next()?, parts.next()?);
    let next =
        percent_encoding::percent_decode_str(&parts.next()?).decode_utf8().ok()?.into_owned();
    let is_whole = [&state, &nonce, &verifier].into_iter().all(|part| !part.is_empty());
    is_whole.then_some((Attempt { state, nonce, verifier }, next))
}

/// Opens a session of the visitor's key; `None` if no rule lets the visitor in, or the key is revoked.
async fn open_session(
    app: &App,
    sign_on: &SingleSignOn,
    identity: &Identity,
) -> Result<Option<Secret>, ApiError> {
    let Some(role) = sign_on.role(identity) else {
        tracing::info!(subject = identity.subject, "no rule lets a visitor in");
        return Ok(None);
    };
    let key = ApiKey {
        id: sign_on.key_id(identity),
        tenant: sign_on.tenant().clone(),
        role,
        name: identity.email.clone().unwrap_or_else(|| identity.subject.clone()),
        created_at: Timestamp::default(),
        revoked_at: None,
        expires_at: None,
        last_used_at: None,
    };
    // No caller ever has this secret: the key is for sessions alone.
    let Some(key) = app.store.admit_login(&key, &Secret::generate().hash()).await? else {
        return Ok(None);
    };
    let session = Secret::generate();
    app.store.add_session(&session.hash(), key.id, session::LIFETIME).await?;
    tracing::info!(key = %key.id, "logged in by single sign-on");
    Ok(Some(session))
}
