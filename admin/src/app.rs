//! [`App`]: the state that all requests share.

use std::{net::IpAddr, ops::Deref, sync::Arc, time::Duration};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tritmill_client::{Client, http::AddressPolicy};
use tritmill_data::{AllowedAddresses, objects::Objects};
use tritmill_http::{Bounds, Server, Tls};
use tritmill_queue::{
    StoreError, Tenant, billing::Price, metrics::MeasuredStore, store::charges::PriceOf,
};

use crate::{
    ApiError, CallerLimits, Secret,
    abandoned_jobs::AbandonedJobs,
    budgets::BudgetChecks,
    changes::Changes,
    driver::{EXPORTS_MAX, Export, Kept, SOURCES_MAX, SourceReader},
    file_contents::FileContents,
    health::Readiness,
    job_waiter::JobWaiter,
    key_reads::KeyReads,
    key_uses::KeyUses,
    metrics::Metrics,
    models::Models,
    new_key,
    notices::mail::Mailer,
    rate_limits::RateLimiter,
    refusals::Limit,
    sign_on::SingleSignOn,
    site::{Site, WebOrigin},
    store::{FrontStore, KeyRole},
    throttle::Throttle,
};

/// Dashboard pages that may update live at once.
const LIVE_PAGES_MAX: usize = 512;
/// Dashboard logins that an address may try at once, and the time until it may try one more.
const LOGINS: u32 = 20;
const LOGIN_REFILL: Duration = Duration::from_secs(3);

/// Limits on what callers may request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest uploaded file, in bytes.
    pub file_bytes_max: u64,
    /// Most lines of a batch; at most `u32::MAX`.
    pub batch_lines_max: u64,
    /// Most unfinished batches of a tenant.
    pub open_batches_max: u32,
    /// Most batches of a tenant that are in progress. Others wait until one of them is finished. Batches that
    /// enter at the same moment may exceed it by their number.
    pub active_batches_max: u32,
    /// Longest time that a completion request may take.
    pub answer_within: Duration,
    /// Responses that may stream at once.
    pub streams_max: usize,
    /// Addresses that webhooks may call.
    pub webhook_addresses: AddressPolicy,
    /// How much of the capacity of a batch's window may be promised, in percent. `None` accepts every batch.
    pub overbooking_percent: Option<u32>,
    /// Limits per address and per key.
    pub callers: CallerLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes_max: 200_000_000,
            batch_lines_max: 50_000,
            open_batches_max: 1000,
            active_batches_max: 100,
            answer_within: Duration::from_secs(600),
            streams_max: 8192,
            webhook_addresses: AddressPolicy::PublicOnly,
            overbooking_percent: None,
            callers: CallerLimits::of_connections(Bounds::default().connections),
        }
    }
}

/// Settings of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Limits on what callers may request.
    pub limits: Limits,
    /// Where the service is on the web.
    pub site: Site,
    /// Completion windows that new batches may have; empty: any.
    pub windows: Vec<String>,
    /// Addresses that batches may read and write.
    pub urls: AllowedAddresses,
}

/// The state shared by all requests and background tasks; cheap to clone.
#[derive(Clone)]
pub struct App(Arc<State>);

/// The fields of [`App`].
pub struct State {
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn FrontStore>,
    /// The content of files, which may lie outside the store.
    pub(crate) files: FileContents,
    pub(crate) models: Models,
    pub(crate) job_waiter: JobWaiter,
    pub(crate) abandoned_jobs: AbandonedJobs,
    pub(crate) limits: Limits,
    pub(crate) site: Site,
    streams: Arc<Semaphore>,
    /// Dashboard pages that update live.
    pub(crate) live_pages: Arc<Semaphore>,
    /// Login attempts to the dashboard.
    pub(crate) logins: Throttle<IpAddr>,
    /// Login to the dashboard at a provider, beside keys.
    pub(crate) sign_on: Option<SingleSignOn>,
    pub(crate) rate_limiter: RateLimiter,
    pub(crate) key_reads: KeyReads,
    pub(crate) key_uses: KeyUses,
    pub(crate) readiness: Readiness,
    /// Wakes the batch driver.
    pub(crate) batch_changed: Notify,
    /// Wakes the deletion of what deleted batches had.
    pub(crate) batch_deleted: Notify,
    /// Wakes a sender of notices.
    pub(crate) notice_due: Notify,
    /// Sends notices as mails, if that is switched on.
    pub(crate) mailer: Option<Mailer>,
    pub(crate) metrics: Metrics,
    pub(crate) changes: Changes,
    pub(crate) budget_checks: BudgetChecks,
    /// Completion windows of new batches; empty: any.
    pub(crate) windows: Vec<String>,
    /// Addresses that batches may read and write.
    pub(crate) urls: AllowedAddresses,
    /// Sources that steps of batches read.
    pub(crate) sources: Kept<SourceReader>,
    /// Outputs that steps of batches write elsewhere.
    pub(crate) exports: Kept<Export>,
    /// Whether the service is stopping; ends streams that have no end of their own.
    stopping: watch::Sender<bool>,
}

impl Deref for App {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl App {
    /// A service over `store`, to which `client` submits. Must be called within a Tokio runtime.
    pub fn new(
        client: Client,
        store: Arc<dyn FrontStore>,
        models: Models,
        settings: Settings,
    ) -> Self {
        let Settings { limits, site, windows, urls } = settings;
        let metrics = Metrics::new(client.connections());
        let client = client.measured(&metrics.calls);
        let store: Arc<dyn FrontStore> = Arc::new(MeasuredStore::new(store, &metrics.calls));
        Self(Arc::new(State {
            job_waiter: JobWaiter::new(client.clone()),
            abandoned_jobs: AbandonedJobs::new(client.clone()),
            client,
            files: FileContents::new(Arc::clone(&store), None),
            store,
            models,
            limits,
            site,
            streams: Arc::new(Semaphore::new(limits.streams_max)),
            live_pages: Arc::new(Semaphore::new(LIVE_PAGES_MAX)),
            logins: Throttle::new(LOGINS, LOGIN_REFILL),
            sign_on: None,
            rate_limiter: RateLimiter::new(limits.callers, metrics.http.clone()),
            key_reads: KeyReads::default(),
            key_uses: KeyUses::default(),
            readiness: Readiness::default(),
            batch_changed: Notify::new(),
            batch_deleted: Notify::new(),
            notice_due: Notify::new(),
            mailer: None,
            metrics,
            changes: Changes::default(),
            budget_checks: BudgetChecks::default(),
            windows,
            urls,
            sources: Kept::new(SOURCES_MAX),
            exports: Kept::new(EXPORTS_MAX),
            stopping: watch::Sender::new(false),
        }))
    }

    /// Lets visitors of the dashboard log in at a provider, too. To be called before the service is cloned.
    #[must_use]
    pub fn with_sign_on(mut self, sign_on: Option<SingleSignOn>) -> Self {
        Arc::get_mut(&mut self.0).expect("the service is not shared yet").sign_on = sign_on;
        self
    }

    /// Sends notices as mails, too. To be called before the service is cloned.
    #[must_use]
    pub fn with_mailer(mut self, mailer: Option<Mailer>) -> Self {
        Arc::get_mut(&mut self.0).expect("the service is not shared yet").mailer = mailer;
        self
    }

    /// Keeps the content of new files in an object store. To be called before the service is cloned.
    #[must_use]
    pub fn with_files(mut self, objects: Option<Objects>) -> Self {
        let state = Arc::get_mut(&mut self.0).expect("the service is not shared yet");
        state.files = FileContents::new(Arc::clone(&state.store), objects);
        self
    }

    /// A server of this service, for [`router`](crate::router). Its metrics are part of the service's.
    pub fn server(&self, bounds: Bounds, tls: Option<Tls>) -> Server {
        Server {
            bounds,
            tls,
            metrics: self.metrics.http.clone(),
            proxies: self.site.proxies.clone(),
            is_https: self.site.is_https(),
        }
    }

    /// Returns the addresses that get the notices of a tenant.
    pub(crate) fn mail_receivers(&self, tenant: &Tenant) -> Vec<String> {
        self.mailer.as_ref().map(|mailer| mailer.receivers(tenant)).unwrap_or_default()
    }

    /// The URL under which clients reach the service, if it was given.
    pub fn public_url(&self) -> Option<&str> {
        self.site.public_url.as_ref().map(WebOrigin::as_str)
    }

    /// Ends event streams, which would otherwise last until their reader leaves.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Resolves when the service stops.
    pub(crate) async fn stopped(&self) {
        // Cannot fail: `self` holds the sender.
        let _ = self.stopping.subscribe().wait_for(|stop| *stop).await;
    }

    /// Creates the first API key, with role operate, and returns its secret; `None` if a key exists.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn first_key(&self) -> Result<Option<Secret>, StoreError> {
        let (key, secret) = new_key(Tenant::default(), KeyRole::Operate, "first");
        let is_first = self.store.add_first_key(&key, &secret.hash()).await?;
        Ok(is_first.then_some(secret))
    }

    /// Sets a price, for the answers from now on.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn set_price(&self, of: &PriceOf, price: &Price) -> Result<(), StoreError> {
        self.store.set_price(of, price).await
    }

    /// Reserves one of the streams that may run at once.
    pub(crate) fn stream_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let full = |_| ApiError::busy("too many open streams: try again later").by(Limit::Streams);
        self.streams.clone().try_acquire_owned().map_err(full)
    }
}
