//! [`Webhooks`]: calls webhooks of finished batches.
//!
//! Due webhooks are claimed from the store with a lease, round the tenants, for one call each; the result of the
//! call is written under the claim's epoch, with the time of the next call. A host or a tenant has a few calls
//! at once, so that one that does not answer delays no others. If a process dies in between, the webhook is called
//! again, by this process or another: a receiver is called at least once, each time with the same `webhook-id`.

pub(crate) mod signature;

use std::{collections::HashMap, time::Duration};

use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::json;
use tokio::{
    sync::watch,
    task::{Id, JoinError, JoinSet},
    time::sleep,
};
use tritmill_client::http::{BadCertificates, HttpClient, HttpError};
use tritmill_queue::{StoreError, Tenant, Timestamp, store::Claimant};
use uuid::Uuid;

use crate::{
    App,
    openai::batches::BatchView,
    store::{
        Batch,
        batch_steps::{BatchClaim, BatchWrites, WebhookBounds},
        webhooks::Webhook,
    },
};

/// Lease of a claimed webhook.
const LEASE: Duration = Duration::from_secs(15);
/// Time limit of a call, including the connection.
const CALL_WITHIN: Duration = Duration::from_secs(5);
const _: () = assert!(CALL_WITHIN.as_secs() * 2 < LEASE.as_secs());
/// Most calls at once.
const CALLS_MAX: usize = 32;
/// Most webhooks of a host that are claimed while none of its calls runs.
const HOST_MAX: u32 = 2;
/// Most webhooks of a tenant that are claimed at once, while fewer calls of it run.
const TENANT_MAX: u32 = 4;
const _: () = assert!(CALLS_MAX > 2 * TENANT_MAX as usize);
/// Pause between two claims.
const POLL: Duration = Duration::from_secs(1);
/// Delays before the second call and the following ones, in seconds: a day and a half in all.
const RETRY_DELAYS_S: [u64; 9] = [1, 5, 30, 120, 600, 3600, 10_800, 36_000, 86_400];

/// A failed call.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("answered {0}")]
    Status(u16),
    #[error("malformed secret")]
    Secret,
}

/// Calls the webhooks of finished batches.
pub struct Webhooks {
    app: App,
    owner: String,
    client: HttpClient,
    calls: JoinSet<()>,
    /// Host and tenant of each running call.
    running: HashMap<Id, (String, Tenant)>,
}

impl Webhooks {
    /// A sender of a service's webhooks; `owner` names its process, for people.
    ///
    /// # Errors
    /// If the system's root certificates cannot be loaded.
    pub fn new(app: App, owner: String) -> Result<Self, BadCertificates> {
        let client = HttpClient::new(app.limits.webhook_addresses, None)?;
        let (calls, running) = (JoinSet::new(), HashMap::new());
        Ok(Self { app, owner, client, calls, running })
    }

    /// Runs until `stop` is true or its sender is dropped.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let app = self.app.clone();
        loop {
            while let Some(ended) = self.calls.try_join_next_with_id() {
                self.call_ended(ended);
            }
            let claimed = self.begin_calls().await;
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                // The host and the tenant of an ended call may have more.
                Some(ended) = self.calls.join_next_with_id() => self.call_ended(ended),
                () = app.webhook_due.notified() => {}
                () = sleep(POLL), if claimed == 0 => {}
                // Excluding what runs now, there may be others.
                () = std::future::ready(()), if claimed > 0 => {}
            }
        }
        // Calls are bounded in time; a call without a written result is repeated.
        while self.calls.join_next().await.is_some() {}
    }

    fn call_ended(&mut self, ended: Result<(Id, ()), JoinError>) {
        let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
        self.running.remove(&id);
    }

    /// Claims due webhooks and begins their calls; returns how many.
    async fn begin_calls(&mut self) -> usize {
        let room = CALLS_MAX.saturating_sub(self.calls.len());
        if room == 0 {
            return 0;
        }
        let busy_hosts: Vec<String> = self.running.values().map(|(host, _)| host.clone()).collect();
        let of = |tenant: &Tenant| self.running.values().filter(|(_, one)| one == tenant).count();
        let mut busy_tenants: Vec<Tenant> =
            self.running.values().map(|(_, one)| one.clone()).collect();
        busy_tenants.retain(|tenant| of(tenant) >= TENANT_MAX as usize);
        let bounds = WebhookBounds {
            max: room as u32,
            per_host: HOST_MAX,
            per_tenant: TENANT_MAX,
            busy_hosts: &busy_hosts,
            busy_tenants: &busy_tenants,
        };
        let by = Claimant::new(&self.owner, LEASE);
        let claimed = self.app.store.claim_webhooks(by, bounds).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot claim webhooks, trying again");
            Vec::new()
        });
        let count = claimed.len();
        for claim in claimed {
            let host = claim.batch.webhook.as_ref().map(Webhook::host).unwrap_or_default();
            let tenant = claim.batch.tenant.clone();
            let call = self.calls.spawn(deliver(self.app.clone(), self.client.clone(), claim));
            self.running.insert(call.id(), (host, tenant));
        }
        count
    }
}

/// Calls a webhook once and records the result.
async fn deliver(app: App, client: HttpClient, mut claim: BatchClaim) {
    let id = claim.batch.id;
    if let Err(error) = try_deliver(&app, &client, &mut claim).await {
        tracing::warn!(batch = %id, %error, "cannot record a webhook call, calling again later");
        return;
    }
    if let Err(error) = app.store.release_batch(id, claim.epoch, Duration::ZERO).await {
        tracing::debug!(batch = %id, %error, "cannot release a batch, its lease will expire");
    }
}

async fn try_deliver(
    app: &App,
    client: &HttpClient,
    claim: &mut BatchClaim,
) -> Result<(), StoreError> {
    let Some(webhook) = claim.batch.webhook.clone() else { return Ok(()) };
    let called_at = app.store.now().await?;
    let result = call(client, &claim.batch, &webhook, called_at).await;
    let now = app.store.now().await?;
    claim.batch.webhook = Some(after_call(webhook, &result, now));
    let batch = claim.batch.id;
    match result {
        Ok(()) => tracing::info!(%batch, "webhook delivered"),
        // Without the error: it may quote the URL, which may contain a password.
        Err(_) => tracing::info!(%batch, "webhook call failed"),
    }
    app.store.save_batch(claim, BatchWrites::default()).await?;
    Ok(())
}

/// Returns the state of a webhook after a call.
fn after_call(webhook: Webhook, result: &Result<(), CallError>, now: Timestamp) -> Webhook {
    let attempts = webhook.attempts.saturating_add(1);
    let delay = RETRY_DELAYS_S.get(webhook.attempts as usize).copied().map(Duration::from_secs);
    let (next_at, ended_at, error) = match (result, delay) {
        (Ok(()), _) => (None, Some(now), None),
        // 410 Gone: the receiver wants no more calls.
        (Err(error @ CallError::Status(410)), _) | (Err(error), None) => {
            (None, Some(now), Some(error))
        }
        (Err(error), Some(delay)) => (Some(now.after(delay)), None, Some(error)),
    };
    let error = error.map(ToString::to_string);
    Webhook { attempts, next_at, ended_at, error, ..webhook }
}

async fn call(
    client: &HttpClient,
    batch: &Batch,
    webhook: &Webhook,
    now: Timestamp,
) -> Result<(), CallError> {
    let key = signature::key(&webhook.secret).ok_or(CallError::Secret)?;
    let mut id = format!("evt_{}", Uuid::from(batch.id).as_simple());
    if batch.reopened > 0 {
        // Another end of the batch is another event.
        id.push_str(&format!("_{}", batch.reopened));
    }
    let body = json!({
        "id": id,
        "object": "event",
        "type": format!("batch.{}", batch.state.as_str()),
        "created_at": now.seconds(),
        "data": BatchView::from(batch.clone()),
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
    let response = client.send(request, CALL_WITHIN).await?;
    match response.status() {
        status if status.is_success() => Ok(()),
        status => Err(CallError::Status(status.as_u16())),
    }
}

#[cfg(test)]
mod tests {
    use crate::store::webhooks::WebhookSecret;

    use super::*;

    #[test]
    fn failed_calls_are_retried_with_growing_delays_and_not_forever() {
        let mut webhook =
            Webhook::new("https://a.example/".to_owned(), WebhookSecret(String::new()));
        let now = Timestamp(1000);
        let delivered = after_call(webhook.clone(), &Ok(()), now);
        assert_eq!((delivered.ended_at, delivered.error, delivered.attempts), (Some(now), None, 1));
        let gone = after_call(webhook.clone(), &Err(CallError::Status(410)), now);
        assert!(gone.ended_at.is_some() && gone.error.is_some());
        for delay in RETRY_DELAYS_S {
            webhook = after_call(webhook, &Err(HttpError::Timeout(CALL_WITHIN).into()), now);
            assert_eq!(webhook.next_at, Some(now.after(Duration::from_secs(delay))));
            assert_eq!(webhook.ended_at, None);
        }
        webhook = after_call(webhook, &Err(CallError::Status(500)), now);
        assert_eq!((webhook.ended_at, webhook.attempts), (Some(now), 10));
        assert_eq!(webhook.error.as_deref(), Some("answered 500"));
    }
}
