//! What comes in: entries are pulled, claimed, turned into requests and given to the engine.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tritmill_queue::{Claim, Claimant, Delivery, JobEvent, JobId, Outcome, Pull};

use super::{
    EventLoop,
    calls::{Claimed, Feed, Prepared, Pulled, within},
};
use crate::{
    translate,
    worker::{Mode, Worker, WorkerError},
};

/// Jobs fed to the dispatcher at a time when it runs low.
const FEED_COUNT: u32 = 256;
/// Longest wait for the first entry of a pull; a stop does not wait for it.
const PULL_WAIT: Duration = Duration::from_secs(5);
/// Wait before looking again whether a retrying job is due.
const IDLE_WAIT: Duration = Duration::from_millis(50);

impl EventLoop<'_> {
    /// Asks the dispatcher for what fits, if there is room.
    pub(super) fn pull(&mut self) {
        let (worker, feed, max) = (self.worker, self.feed, self.devices.room(&self.in_flight));
        if max == 0 {
            return;
        }
        // Entries of workers that are gone are taken at most this much later than they could be.
        let reclaim_interval = worker.config.lease / 3;
        let pull = Pull {
            queue: &worker.config.queue,
            consumer: &worker.config.owner,
            max,
            wait: PULL_WAIT.min(reclaim_interval),
        };
        if worker.config.mode == Mode::Embedded {
            self.calls.pull = Some(Box::pin(feed_and_pull(worker, feed, pull)));
            return;
        }
        let reclaim = Instant::now() >= self.reclaim_at;
        if reclaim {
            self.reclaim_at = Instant::now() + reclaim_interval;
        }
        self.calls.pull = Some(Box::pin(async move {
            let deliveries = match reclaim {
                true => worker.dispatcher.reclaim(pull, worker.config.lease).await,
                false => worker.dispatcher.pull(pull).await,
            };
            Pulled { feed, deliveries: deliveries.map_err(WorkerError::from) }
        }));
    }

    /// Asks whether an embedded run has nothing left, and moves what has become due.
    pub(super) fn check_finished(&mut self) {
        let Worker { store, config, .. } = self.worker;
        self.calls.check = Some(Box::pin(async move {
            store.reconcile().await?;
            if store.unfinished(&config.queue).await? == 0 {
                return Ok(true);
            }
            if store.queued(&config.queue, None, 1).await?.is_empty() {
                sleep(IDLE_WAIT).await;
            }
            Ok(false)
        }));
    }

    pub(super) fn handle_checked(
        &mut self,
        done: Result<bool, WorkerError>,
    ) -> Result<bool, WorkerError> {
        self.feed = Feed::default();
        done.or_else(|error| self.on_dependency_error(error).map(|()| false))
    }

    /// Claims what was delivered.
    pub(super) fn claim(&mut self, pulled: Pulled) -> Result<(), WorkerError> {
        self.feed = pulled.feed;
        let deliveries = match pulled.deliveries {
            Ok(deliveries) => deliveries,
            Err(error) => return self.on_dependency_error(error),
        };
        self.worker.metrics.pulled();
        if !deliveries.is_empty() {
            self.calls.claim = Some(Box::pin(claim(self.worker, self.call_limit(), deliveries)));
        }
        Ok(())
    }

    /// Longest a call may take. A service's claims live for a lease: later answers are worth
    /// nothing, and whoever waits longer does not try again. An embedded worker has nobody to wait
    /// for.
    pub(super) fn call_limit(&self) -> Duration {
        match self.worker.config.mode {
            Mode::Service => self.worker.config.lease,
            Mode::Embedded => Duration::MAX,
        }
    }

    /// Takes note of what was claimed: from here on its leases are renewed.
    pub(super) fn handle_claimed(&mut self, claimed: Claimed) -> Result<Vec<Claim>, WorkerError> {
        let Claimed { deliveries, claimed_at, claims } = claimed;
        let claims = match claims {
            Ok(claims) => claims,
            Err(error) => return self.on_dependency_error(error).map(|()| Vec::new()),
        };
        self.backoff.worked();
        let (held, over): (Vec<Delivery>, Vec<Delivery>) = deliveries
            .into_iter()
            .partition(|delivery| claims.iter().any(|claim| claim.job.id == delivery.id));
        // Final, withdrawn, or under somebody's live lease: nothing to do here.
        self.worker.metrics.duplicates(over.len());
        self.acknowledge(over);
        for claim in &claims {
            if let Some(delivery) = held.iter().find(|delivery| delivery.id == claim.job.id) {
                let device = self.devices.place(&self.in_flight);
                self.in_flight.start(claim, delivery.clone(), claimed_at, device);
            }
        }
        self.publish_leases();
        Ok(claims)
    }

    /// Tokenizes on a thread where that may take its time.
    pub(super) fn prepare(&mut self, claims: Vec<Claim>) {
        if claims.is_empty() {
            return;
        }
        let served = Arc::clone(&self.worker.served);
        let prepare = move |claim: Claim| Prepared {
            held: claim.claim_ref(),
            stream: claim.job.stream,
            request: translate::request(&served, &claim),
        };
        let work = move || claims.into_iter().map(prepare).collect();
        self.calls.prepare = Some(Box::pin(async {
            tokio::task::spawn_blocking(work).await.expect("preparing a prompt does not panic")
        }));
    }

    /// Gives requests to the engine, but for those whose claim was lost meanwhile.
    pub(super) fn submit(&mut self, prepared: Vec<Prepared>) {
        for Prepared { held, stream, request } in prepared {
            let Some(place) = self.in_flight.device(held) else { continue };
            if self.devices.at(place).breaker.is_open() {
                self.in_flight.mark_for_hand_back(held);
                self.in_flight.end(held, None);
                continue;
            }
            self.in_flight.submitted(held);
            let stream = stream && self.events.is_some();
            if stream {
                self.streaming.insert(held.id);
                self.publish(held.id, JobEvent::Started);
            }
            match request {
                Ok(request) => self.devices.at(place).thread.submit(held, request, stream),
                Err(error) => self.in_flight.end(held, Some(Outcome::Error(error))),
            }
        }
        self.publish_leases();
    }
}

/// Keeps an embedded worker's dispatcher from running dry, and takes from it.
async fn feed_and_pull(worker: &Worker, mut feed: Feed, pull: Pull<'_>) -> Pulled {
    let deliveries = async {
        let Worker { store, dispatcher, config, .. } = worker;
        let depth = dispatcher.depth(&config.queue).await?;
        let mut fed = 0;
        if depth < pull.max && !feed.fed_all {
            let entries = store.queued(&config.queue, feed.cursor, FEED_COUNT).await?;
            feed.cursor = entries.last().map(|entry| entry.id).or(feed.cursor);
            (feed.fed_all, fed) = (entries.is_empty(), entries.len());
            dispatcher.enqueue(&entries).await?;
        }
        feed.is_dry = depth + fed == 0;
        if feed.is_dry { Ok(Vec::new()) } else { Ok(dispatcher.pull(pull).await?) }
    };
    let deliveries = deliveries.await;
    Pulled { feed, deliveries }
}

async fn claim(worker: &Worker, limit: Duration, deliveries: Vec<Delivery>) -> Claimed {
    let Worker { store, dispatcher, config, .. } = worker;
    let ids: Vec<JobId> = deliveries.iter().map(|delivery| delivery.id).collect();
    let by = Claimant { owner: &config.owner, lease: config.lease };
    let claimed_at = Instant::now();
    let claims = within(limit, store.claim(&ids, by)).await;
    if claims.is_err() {
        // Left pending if this fails too: idle entries are reclaimed.
        let _ = within(limit, dispatcher.hand_back(&config.owner, &deliveries)).await;
    }
    Claimed { deliveries, claimed_at, claims }
}
