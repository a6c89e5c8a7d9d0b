//! [`Webhooks`]: tells creators of batches that they are over.
//!
//! What is due lies in the store, where a claim makes it one process's for a while; what comes of a
//! call is written under the claim's epoch. One that is killed in between calls again, or another
//! does: a receiver hears at least once, each time under the same `webhook-id`.

pub(crate) mod signature;

use std::time::Duration;

use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::json;
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tritmill_client::http::{BadCertificates, HttpClient, HttpError};
use tritmill_queue::{
    StoreError, Timestamp,
    store::{
        Batch,
        batches::{BatchClaim, BatchWrites},
        webhooks::Webhook,
    },
};
use uuid::Uuid;

use crate::{app::App, openai::batches::shown};

/// How long a call stays a process's.
const LEASE: Duration = Duration::from_secs(25);
/// How long a call may take, its connection included.
const CALL_WITHIN: Duration = Duration::from_secs(10);
const _: () = assert!(CALL_WITHIN.as_secs() * 2 < LEASE.as_secs());
/// Calls at once.
const TOGETHER: usize = 16;
/// Between two looks for what is due.
const LOOK: Duration = Duration::from_secs(1);
/// Waits before the second call and those after it, in seconds: a day and a half in all.
const WAITS_S: [u64; 9] = [1, 5, 30, 120, 600, 3600, 10_800, 36_000, 86_400];

/// Why a call does not count.
#[derive(Debug, thiserror::Error)]
enum Missed {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("answered {0}")]
    Status(u16),
    #[error("has a secret that is none")]
    Secret,
}

/// Calls webhooks.
pub struct Webhooks {
    app: App,
    owner: String,
    client: HttpClient,
}

impl Webhooks {
    /// Calls those of a service; `owner` names its process, for people.
    ///
    /// # Errors
    /// [`BadCertificates`].
    pub fn new(app: App, owner: String) -> Result<Self, BadCertificates> {
        let client = HttpClient::new(app.limits().webhook_addresses, None)?;
        Ok(Self { app, owner, client })
    }

    /// Calls until `stop` says so, or nobody can say so any more.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut calls = JoinSet::new();
        loop {
            while calls.try_join_next().is_some() {}
            let room = u32::try_from(TOGETHER.saturating_sub(calls.len())).unwrap_or(u32::MAX);
            let claimed = match room {
                0 => Ok(Vec::new()),
                room => self.app.store().claim_webhooks(&self.owner, LEASE, room).await,
            };
            let claimed = claimed.unwrap_or_else(|error| {
                tracing::warn!(%error, "webhooks not claimed, trying again");
                Vec::new()
            });
            for held in claimed {
                calls.spawn(tell(self.app.clone(), self.client.clone(), held));
            }
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                () = self.app.webhooks().notified() => {}
                () = sleep(LOOK) => {}
            }
        }
        // Each is bounded; what is not written in time is told again.
        while calls.join_next().await.is_some() {}
    }
}

/// Tells of one batch, once, and writes what came of it.
async fn tell(app: App, client: HttpClient, mut held: BatchClaim) {
    let id = held.batch.id;
    if let Err(error) = tell_once(&app, &client, &mut held).await {
        tracing::warn!(batch = %id, %error, "what came of a webhook is not written: it is called again");
        return;
    }
    if let Err(error) = app.store().release_batch(id, held.epoch).await {
        tracing::debug!(batch = %id, %error, "a claim is left to run out");
    }
}

async fn tell_once(
    app: &App,
    client: &HttpClient,
    held: &mut BatchClaim,
) -> Result<(), StoreError> {
    let Some(webhook) = held.batch.webhook.clone() else { return Ok(()) };
    let called_at = app.store().now().await?;
    let called = call(client, &held.batch, &webhook, called_at).await;
    let now = app.store().now().await?;
    held.batch.webhook = Some(noted(webhook, &called, now));
    let batch = held.batch.id;
    match called {
        Ok(()) => tracing::info!(%batch, "webhook told"),
        // The address is its creator's, and may hold a password of theirs.
        Err(_) => tracing::info!(%batch, "webhook missed"),
    }
    app.store().save_batch(held, BatchWrites::default()).await?;
    Ok(())
}

/// A webhook after a call.
fn noted(webhook: Webhook, called: &Result<(), Missed>, now: Timestamp) -> Webhook {
    let attempts = webhook.attempts.saturating_add(1);
    let wait = WAITS_S.get(webhook.attempts as usize).copied().map(Duration::from_secs);
    let (next_at, ended_at, error) = match (called, wait) {
        (Ok(()), _) => (None, Some(now), None),
        // Gone, as HTTP has it: it wants no more calls.
        (Err(Missed::Status(410)), _) | (Err(_), None) => (None, Some(now), called.as_ref().err()),
        (Err(error), Some(wait)) => (Some(now.after(wait)), None, Some(error)),
    };
    let error = error.map(ToString::to_string);
    Webhook { attempts, next_at, ended_at, error, ..webhook }
}

async fn call(
    client: &HttpClient,
    batch: &Batch,
    webhook: &Webhook,
    now: Timestamp,
) -> Result<(), Missed> {
    let key = signature::key(&webhook.secret).ok_or(Missed::Secret)?;
    let id = format!("evt_{}", Uuid::from(batch.id).as_simple());
    let body = json!({
        "id": id,
        "object": "event",
        "type": format!("batch.{}", batch.state.as_str()),
        "created_at": now.seconds(),
        "data": shown(batch),
    });
    let body = body.to_string();
    let signature = signature::sign(&key, &id, now.seconds(), &body);
    let request = client
        .request(Method::POST, &webhook.url)?
        .header(CONTENT_TYPE, "application/json")
        .header("webhook-id", id)
        .header("webhook-timestamp", now.seconds())
        .header("webhook-signature", signature)
        .body(body);
    let answer = client.send(request, CALL_WITHIN).await?;
    match answer.status() {
        status if status.is_success() => Ok(()),
        status => Err(Missed::Status(status.as_u16())),
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::store::webhooks::WebhookSecret;

    use super::*;

    #[test]
    fn a_call_that_is_missed_is_made_again_later_and_not_for_ever() {
        let mut webhook = Webhook {
            url: "https://a.example/".to_owned(),
            secret: WebhookSecret(String::new()),
            attempts: 0,
            next_at: None,
            ended_at: None,
            error: None,
        };
        let now = Timestamp(1000);
        let told = noted(webhook.clone(), &Ok(()), now);
        assert_eq!((told.ended_at, told.error, told.attempts), (Some(now), None, 1));
        let gone = noted(webhook.clone(), &Err(Missed::Status(410)), now);
        assert!(gone.ended_at.is_some() && gone.error.is_some());
        for wait in WAITS_S {
            webhook = noted(webhook, &Err(HttpError::Timeout(CALL_WITHIN).into()), now);
            assert_eq!(webhook.next_at, Some(now.after(Duration::from_secs(wait))));
            assert_eq!(webhook.ended_at, None);
        }
        webhook = noted(webhook, &Err(Missed::Status(500)), now);
        assert_eq!((webhook.ended_at, webhook.attempts), (Some(now), 10));
        assert_eq!(webhook.error.as_deref(), Some("answered 500"));
    }
}
