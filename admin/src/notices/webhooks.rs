//! A call of a webhook, as Standard Webhooks says it.

use std::time::Duration;

use reqwest::{Method, header::CONTENT_TYPE};
use tritmill_client::http::{HttpClient, HttpError};
use tritmill_queue::StoreError;

use super::{payload, signature};
use crate::{
    App,
    store::notices::{Notice, Outcome, Receiver},
};

/// 410 Gone: the receiver wants no more calls.
const GONE: u16 = 410;

/// A failed call.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("answered {0}")]
    Status(u16),
    #[error("has a malformed secret")]
    Secret,
    #[error("was not called: {0}")]
    Store(#[from] StoreError),
}

/// Calls the webhook of a notice once.
pub(super) async fn call(
    app: &App,
    client: &HttpClient,
    notice: &Notice,
    within: Duration,
) -> Outcome {
    match try_call(app, client, notice, within).await {
        Ok(()) => Outcome::Delivered,
        Err(error @ CallError::Status(GONE)) => Outcome::Gone(error.to_string()),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

async fn try_call(
    app: &App,
    client: &HttpClient,
    notice: &Notice,
    within: Duration,
) -> Result<(), CallError> {
    let Receiver::Webhook { url, secret } = &notice.to else { return Err(CallError::Secret) };
    let key = signature::key(secret).ok_or(CallError::Secret)?;
    // Receivers refuse a time that is not now.
    let now = app.store.now().await?.seconds();
    let body = payload::json(notice).to_string();
    let signature = signature::sign(&key, &notice.event, now, &body);
    let request = client
        .request(Method::POST, url)?
        .header(CONTENT_TYPE, "application/json")
        .header("webhook-id", &notice.event)
        .header("webhook-timestamp", now)
        .header("webhook-signature", signature)
        .body(body);
    match client.send(request, within).await?.status() {
        status if status.is_success() => Ok(()),
        status => Err(CallError::Status(status.as_u16())),
    }
}
