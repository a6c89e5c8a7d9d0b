//! What comes in: entries are pulled, claimed, turned into requests and given to the engine.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tritmill_queue::{Claim, Claimant, Delivery, DispatchError, JobEvent, JobId, Outcome, Pull};

use super::{
    Turn,
    calls::{Claimed, Prepared, within},
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

impl Turn<'_> {
    /// Asks the dispatcher for what fits, if there is room and anything to be had.
    pub(super) async fn pull(&mut self) -> Result<(), WorkerError> {
        let worker = self.worker;
        let max = worker.config.slots.saturating_sub(self.flights.choices());
        if max == 0 {
            return Ok(());
        }
        // Entries of workers that are gone are taken at most this much later than they could be.
        let reclaim_interval = worker.config.lease / 3;
        let pull = Pull {
            queue: &worker.config.queue,
            consumer: &worker.config.owner,
            max,
            wait: PULL_WAIT.min(reclaim_interval),
        };
        match worker.config.mode {
            Mode::Embedded if !self.feed(max).await? => return Ok(()),
            Mode::Service if Instant::now() >= self.reclaim_at => {
                self.reclaim_at = Instant::now() + reclaim_interval;
                self.calls.pull = Some(worker.dispatcher.reclaim(pull, worker.config.lease));
                return Ok(());
            }
            Mode::Embedded | Mode::Service => {}
        }
        self.calls.pull = Some(worker.dispatcher.pull(pull));
        Ok(())
    }

    /// Keeps the dispatcher from running dry; false when it is empty. Waited for: both are in this
    /// process.
    async fn feed(&mut self, wanted: usize) -> Result<bool, WorkerError> {
        let Worker { store, dispatcher, config, .. } = self.worker;
        let depth = dispatcher.depth(&config.queue).await?;
        if depth >= wanted || self.fed_all {
            return Ok(depth > 0);
        }
        let entries = store.queued(&config.queue, self.cursor, FEED_COUNT).await?;
        self.cursor = entries.last().map(|entry| entry.id).or(self.cursor);
        self.fed_all = entries.is_empty();
        dispatcher.enqueue(&entries).await?;
        Ok(depth > 0 || !entries.is_empty())
    }

    /// Whether an embedded run has nothing left; otherwise looks what has become due.
    pub(super) async fn is_done(&mut self) -> Result<bool, WorkerError> {
        let Worker { store, config, .. } = self.worker;
        store.reconcile().await?;
        (self.cursor, self.fed_all) = (None, false);
        if store.unfinished(&config.queue).await? == 0 {
            return Ok(true);
        }
        if store.queued(&config.queue, None, 1).await?.is_empty() {
            sleep(IDLE_WAIT).await;
        }
        Ok(false)
    }

    /// Claims what was delivered.
    pub(super) fn claim(
        &mut self,
        pulled: Result<Vec<Delivery>, DispatchError>,
    ) -> Result<(), WorkerError> {
        let deliveries = match pulled {
            Ok(deliveries) => deliveries,
            Err(error) => return self.excuse(error.into()),
        };
        self.worker.vitals.pulled();
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
    pub(super) fn note_claimed(&mut self, claimed: Claimed) -> Result<Vec<Claim>, WorkerError> {
        let Claimed { deliveries, claimed_at, claims } = claimed;
        let claims = match claims {
            Ok(claims) => claims,
            Err(error) => return self.excuse(error).map(|()| Vec::new()),
        };
        self.backoff.worked();
        let (held, over): (Vec<Delivery>, Vec<Delivery>) = deliveries
            .into_iter()
            .partition(|delivery| claims.iter().any(|claim| claim.job.id == delivery.id));
        // Final, withdrawn, or under somebody's live lease: nothing to do here.
        self.acknowledge(over);
        for claim in &claims {
            if let Some(delivery) = held.iter().find(|delivery| delivery.id == claim.job.id) {
                self.flights.start(claim, delivery.clone(), claimed_at);
            }
        }
        self.show();
        Ok(claims)
    }

    /// Tokenizes on a thread where that may take its time.
    pub(super) fn prepare(&mut self, claims: Vec<Claim>) {
        if claims.is_empty() {
            return;
        }
        let served = Arc::clone(&self.worker.served);
        let prepare = move |claim: Claim| Prepared {
            held: claim.held(),
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
            if !self.flights.submitted(held) {
                continue;
            }
            let stream = stream && self.telling.is_some();
            if stream {
                self.streaming.insert(held.id);
                self.tell(held.id, JobEvent::Started);
            }
            match request {
                Ok(request) => self.thread.submit(held, request, stream),
                Err(error) => self.flights.end(held, Some(Outcome::Error(error))),
            }
        }
        self.show();
    }
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
