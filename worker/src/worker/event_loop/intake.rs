//! Takes jobs in: deliveries are pulled, claimed, turned into requests and given to the engines.

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
/// Longest wait for the first delivery of a pull; a stop request does not wait for it.
const PULL_WAIT: Duration = Duration::from_secs(5);
/// Wait before checking again whether a retrying job is due.
const IDLE_WAIT: Duration = Duration::from_millis(50);

impl EventLoop<'_> {
    /// Pulls as many jobs as there is room for.
    pub(super) fn pull(&mut self) {
        let (worker, feed) = (self.worker, self.feed);
        let max = self.devices.free_slots(&self.in_flight);
        if max == 0 {
            return;
        }
        // Deliveries of dead workers are taken over at most this much later than possible.
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

    /// Checks whether an embedded worker has nothing left, and queues jobs that have become due.
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
        finished: Result<bool, WorkerError>,
    ) -> Result<bool, WorkerError> {
        self.feed = Feed::default();
        finished.or_else(|error| self.on_dependency_error(error).map(|()| false))
    }

    /// Claims the delivered jobs.
    pub(super) fn claim(&mut self, pulled: Pulled) -> Result<(), WorkerError> {
        self.feed = pulled.feed;
        let deliveries = match pulled.deliveries {
            Ok(deliveries) => deliveries,
            Err(error) => return self.on_dependency_error(error),
        };
        self.worker.metrics.queue_read();
        if !deliveries.is_empty() {
            self.calls.claim = Some(Box::pin(claim(self.worker, self.call_limit(), deliveries)));
        }
        Ok(())
    }

    /// Longest duration of a call. A service's claims last for a lease, so a later answer is useless,
    /// and waiting longer would only delay the next attempt. An embedded worker waits without limit.
    pub(super) fn call_limit(&self) -> Duration {
        match self.worker.config.mode {
            Mode::Service => self.worker.config.lease,
            Mode::Embedded => Duration::MAX,
        }
    }

    /// Adds new claims; from now on their leases are renewed.
    pub(super) fn handle_claimed(&mut self, claimed: Claimed) -> Result<Vec<Claim>, WorkerError> {
        let Claimed { deliveries, claimed_at, claims } = claimed;
        let claims = match claims {
            Ok(claims) => claims,
            Err(error) => return self.on_dependency_error(error).map(|()| Vec::new()),
        };
        self.backoff.reset();
        let (held, rest): (Vec<Delivery>, Vec<Delivery>) = deliveries
            .into_iter()
            .partition(|delivery| claims.iter().any(|claim| claim.job.id == delivery.id));
        // These jobs are finished, cancelled, or under the live lease of another worker: there is
        // nothing to do.
        self.worker.metrics.add_duplicates(rest.len());
        self.acknowledge(rest);
        for claim in &claims {
            if let Some(delivery) = held.iter().find(|delivery| delivery.id == claim.job.id) {
                let device = self.devices.choose(&self.in_flight);
                self.in_flight.start(claim, delivery.clone(), claimed_at, device);
            }
        }
        self.publish_leases();
        Ok(claims)
    }

    /// Tokenizes prompts on a thread for blocking work.
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

    /// Gives requests to the engines, except for claims that were lost in the meantime.
    pub(super) fn submit(&mut self, prepared: Vec<Prepared>) {
        for Prepared { held, stream, request } in prepared {
            let Some(claim) = self.in_flight.get_mut(held) else { continue };
            let device = self.devices.get(claim.device);
            if device.breaker.is_open() {
                claim.hand_back = true;
                self.in_flight.end(held, None);
                continue;
            }
            let stream = stream && self.events.is_some();
            let accepted = match request {
                Ok(request) => {
                    claim.submitted = device.thread.submit(held, request, stream);
                    claim.hand_back = !claim.submitted;
                    claim.submitted
                }
                Err(error) => {
                    self.in_flight.end(held, Some(Outcome::Error(error)));
                    true
                }
            };
            if !accepted {
                // The engine has too many unread commands.
                self.in_flight.end(held, None);
            } else if stream {
                self.streaming.insert(held.id);
                self.publish(held.id, JobEvent::Started);
            }
        }
        self.publish_leases();
    }
}

/// Keeps the dispatcher of an embedded worker filled, and pulls from it.
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
        // If this fails too, the deliveries stay pending until they are reclaimed.
        let _ = within(limit, dispatcher.hand_back(&config.owner, &deliveries)).await;
    }
    Claimed { deliveries, claimed_at, claims }
}
