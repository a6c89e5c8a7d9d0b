//! What every request needs.

use std::{sync::Arc, time::Duration};

use tokio::sync::{Notify, Semaphore, watch};
use tritmill_client::{Client, http::AddressPolicy};
use tritmill_queue::{
    StoreError,
    store::{ApiKey, FrontStore, KeyRole},
};

use crate::{
    dashboard::Dashboard,
    ends::Ends,
    health::Metrics,
    models::Models,
    secret::{Secret, new_key},
    watch::Changes,
};

/// What a caller may ask for at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of an uploaded file.
    pub file_bytes_max: u64,
    /// Lines of a batch; at most `u32::MAX`.
    pub batch_lines_max: u64,
    /// How long a request that somebody waits for may take.
    pub answer_within: Duration,
    /// Answers that stream at once.
    pub streams_max: usize,
    /// Whom webhooks may call.
    pub webhook_addresses: AddressPolicy,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes_max: 200_000_000,
            batch_lines_max: 50_000,
            answer_within: Duration::from_secs(600),
            streams_max: 8192,
            webhook_addresses: AddressPolicy::PublicOnly,
        }
    }
}

/// The service, shared by all requests.
#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    client: Client,
    store: Arc<dyn FrontStore>,
    models: Models,
    ends: Ends,
    limits: Limits,
    streams: Arc<Semaphore>,
    /// There is a batch to drive.
    batches: Notify,
    /// There is a batch whose end is to be told.
    webhooks: Notify,
    metrics: Metrics,
    changes: Changes,
    dashboard: Dashboard,
    /// Whether what has no end of its own is to end.
    stopping: watch::Sender<bool>,
}

impl App {
    /// The service over a store that `client` submits to. Within a runtime.
    pub fn new(client: Client, store: Arc<dyn FrontStore>, models: Models, limits: Limits) -> Self {
        let ends = Ends::of(client.clone());
        let streams = Arc::new(Semaphore::new(limits.streams_max));
        Self(Arc::new(Inner {
            client,
            store,
            models,
            ends,
            limits,
            streams,
            batches: Notify::new(),
            webhooks: Notify::new(),
            metrics: Metrics::default(),
            changes: Changes::default(),
            dashboard: Dashboard::default(),
            stopping: watch::Sender::new(false),
        }))
    }

    /// Ends what would go on until its reader leaves, so that the service can stop.
    pub fn stop(&self) {
        self.0.stopping.send_replace(true);
    }

    /// Resolves when the service stops.
    pub(crate) async fn stopped(&self) {
        // The sender is here.
        let _ = self.0.stopping.subscribe().wait_for(|stop| *stop).await;
    }

    /// Makes the first key of all, an operator's, and returns its secret; none if there is a key.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn first_key(&self) -> Result<Option<Secret>, StoreError> {
        let (key, secret): (ApiKey, Secret) =
            new_key(tritmill_queue::Tenant::default(), KeyRole::Operate, "first");
        let is_first = self.store().add_first_key(&key, &secret.hash()).await?;
        Ok(is_first.then_some(secret))
    }

    pub(crate) fn client(&self) -> &Client {
        &self.0.client
    }

    pub(crate) fn store(&self) -> &Arc<dyn FrontStore> {
        &self.0.store
    }

    pub(crate) fn models(&self) -> &Models {
        &self.0.models
    }

    pub(crate) fn ends(&self) -> &Ends {
        &self.0.ends
    }

    pub(crate) fn limits(&self) -> Limits {
        self.0.limits
    }

    pub(crate) fn streams(&self) -> &Arc<Semaphore> {
        &self.0.streams
    }

    pub(crate) fn batches(&self) -> &Notify {
        &self.0.batches
    }

    pub(crate) fn changes(&self) -> &Changes {
        &self.0.changes
    }

    pub(crate) fn webhooks(&self) -> &Notify {
        &self.0.webhooks
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    pub(crate) fn dashboard(&self) -> &Dashboard {
        &self.0.dashboard
    }
}
