//! A store and a dispatcher in memory, with the semantics of the real ones and a clock of their own. The
//! conformance tests of the queue crate hold the real ones to the same rules.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tritmill_queue::{Claim, ClaimRef, Delivery, Job, JobId, JobState, Outcome, Settled};

use super::super::io::{Commit, PullPlan};

/// As in `queue/src/store/attempts.rs`.
const LOSSES_MAX: u32 = 2;
const AWAY_AFTER: u64 = 5_000;
const AWAY_LEASE: u64 = 30_000;
const RETRY_WAIT: u64 = 500;
/// As in `queue/src/store/postgres/announcements.rs`.
const ANNOUNCED_AGAIN_AFTER: u64 = 5_000;

/// A row of the store.
#[derive(Debug, Clone)]
pub(super) struct Row {
    job: Job,
    pub state: JobState,
    epoch: i64,
    claim_id: Option<i64>,
    pub attempts: u32,
    losses: u32,
    pub alone: bool,
    lease_until: u64,
    run_at: u64,
    pub checkpoint: Option<Vec<u8>>,
    pub owner: String,
}

impl Row {
    fn is_claim(&self, held: ClaimRef) -> bool {
        self.epoch == held.epoch && self.claim_id == Some(held.claim_id)
    }
}

/// The store. Times are milliseconds on its clock.
#[derive(Debug, Default)]
pub(super) struct Store {
    pub rows: BTreeMap<JobId, Row>,
    pulse: u64,
    /// Jobs that were queued again, and when: they are enqueued at once and once more.
    announced: BTreeMap<JobId, u64>,
    /// Leases that ended.
    pub lapses: u32,
    /// Attempts that were charged: a step failed, or a job lost its worker while it ran alone.
    pub charged: BTreeMap<JobId, u32>,
}

impl Store {
    pub fn submit(&mut self, job: Job) {
        let row = Row {
            state: JobState::Queued,
            epoch: 0,
            claim_id: None,
            attempts: 0,
            losses: 0,
            alone: false,
            lease_until: 0,
            run_at: 0,
            checkpoint: None,
            owner: String::new(),
            job,
        };
        self.rows.insert(row.job.id, row);
    }

    pub fn claim(&mut self, ids: &[JobId], owner: &str, claim_id: i64, until: u64) -> Vec<Claim> {
        let mut claims = Vec::new();
        for id in ids {
            let row = self.rows.get_mut(id).expect("only known jobs are enqueued");
            if row.state != JobState::Queued {
                continue;
            }
            (row.state, row.epoch, row.claim_id) =
                (JobState::Running, row.epoch + 1, Some(claim_id));
            (row.lease_until, row.alone) = (until, row.losses >= LOSSES_MAX);
            row.owner = owner.to_owned();
            claims.push(Claim {
                job: row.job.clone(),
                epoch: row.epoch,
                claim_id,
                attempts: row.attempts,
                alone: row.alone,
                expires_in: None,
                checkpoint: row.checkpoint.clone(),
            });
        }
        claims
    }

    pub fn renew(&mut self, claims: &[ClaimRef], until: u64) -> Vec<ClaimRef> {
        let mut lost = Vec::new();
        for held in claims {
            let row = self.rows.get_mut(&held.id).expect("a known job");
            match row.state {
                JobState::Running if row.is_claim(*held) => row.lease_until = until,
                JobState::Queued if row.is_claim(*held) => {
                    (row.state, row.lease_until, row.losses) =
                        (JobState::Running, until, row.losses - 1);
                }
                _ => lost.push(*held),
            }
        }
        lost
    }

    pub fn save(&mut self, saved: &[(ClaimRef, Vec<u32>)]) {
        for (held, tokens) in saved {
            let row = self.rows.get_mut(&held.id).expect("a known job");
            if row.state == JobState::Running && row.is_claim(*held) {
                row.checkpoint = Some(tokens.iter().map(|token| *token as u8).collect());
            }
        }
    }

    pub fn commit(&mut self, commit: &Commit, now: u64) -> Vec<Settled> {
        let back = commit.back.iter().map(|held| (held, 0));
        for (held, losses) in back.chain(commit.suspects.iter().map(|held| (held, LOSSES_MAX))) {
            let row = self.rows.get_mut(&held.id).expect("a known job");
            if row.state == JobState::Running && row.claim_id == Some(held.claim_id) {
                (row.state, row.epoch, row.claim_id) = (JobState::Queued, row.epoch + 1, None);
                row.losses = row.losses.max(losses);
                self.announced.insert(held.id, now);
            }
        }
        let mut settled = Vec::new();
        for done in &commit.finished {
            let row = self.rows.get_mut(&done.claim.id).expect("a known job");
            let is_open = matches!(row.state, JobState::Running | JobState::Queued);
            if !is_open || !row.is_claim(done.claim) {
                continue;
            }
            row.claim_id = None;
            row.state = match &done.outcome {
                Outcome::Completed(_) => JobState::Completed,
                Outcome::Expired => JobState::Expired,
                Outcome::Error(_) => {
                    row.attempts += 1;
                    *self.charged.entry(done.claim.id).or_default() += 1;
                    row.run_at = now + RETRY_WAIT;
                    let is_last = row.attempts >= row.job.attempts_max;
                    if is_last { JobState::Failed } else { JobState::Retrying }
                }
            };
            settled.push(Settled { id: done.claim.id, state: row.state });
        }
        settled
    }

    /// Returns whether a job runs under another claim.
    pub fn is_claimed_by_another(&self, held: ClaimRef) -> bool {
        self.rows[&held.id].state == JobState::Running && !self.rows[&held.id].is_claim(held)
    }

    /// Applies what time causes, and announces the jobs that are queued now.
    pub fn reconcile(&mut self, now: u64) {
        let away = self.pulse != 0 && self.pulse + AWAY_AFTER < now;
        self.pulse = now;
        for (id, row) in &mut self.rows {
            match row.state {
                JobState::Running if away => {
                    row.lease_until = row.lease_until.max(now + AWAY_LEASE)
                }
                JobState::Running if row.lease_until <= now => {
                    row.losses += 1;
                    self.lapses += 1;
                    *self.charged.entry(*id).or_default() += u32::from(row.alone);
                    row.attempts += u32::from(row.alone);
                    let is_last = row.alone && row.attempts >= row.job.attempts_max;
                    row.state = if is_last { JobState::Failed } else { JobState::Queued };
                    self.announced.insert(*id, now);
                }
                JobState::Retrying if row.run_at <= now => {
                    row.state = JobState::Queued;
                    self.announced.insert(*id, now);
                }
                _ => {}
            }
        }
        self.announced.retain(|id, _| self.rows[id].state == JobState::Queued);
    }

    /// Returns the jobs that were queued again lately, the older ones for the last time.
    pub fn announced(&mut self, now: u64) -> Vec<JobId> {
        let ids = self.announced.keys().copied().collect();
        self.announced.retain(|_, at| *at + ANNOUNCED_AGAIN_AFTER > now);
        ids
    }

    /// The queued jobs, for a dispatcher that may have lost them.
    pub fn queued(&self) -> Vec<JobId> {
        let is_queued = |row: &&Row| row.state == JobState::Queued;
        self.rows.values().filter(is_queued).map(|row| row.job.id).collect()
    }

    pub fn is_finished(&self) -> bool {
        self.rows.values().all(|row| row.state.is_terminal())
    }
}

/// An entry that a consumer holds.
#[derive(Debug, Clone)]
struct Pending {
    consumer: String,
    renewed_at: u64,
}

/// The dispatcher: each job is in it once.
#[derive(Debug, Default)]
pub(super) struct Dispatcher {
    waiting: VecDeque<JobId>,
    /// Jobs of priority high.
    pub high: BTreeSet<JobId>,
    pending: BTreeMap<JobId, Pending>,
    pub deliveries: BTreeMap<JobId, u32>,
    /// Entries that only the scan of all queued jobs restored.
    pub restored: usize,
}

impl Dispatcher {
    /// Returns how many were new.
    pub fn enqueue(&mut self, ids: &[JobId]) -> usize {
        let waited = self.waiting.len();
        for id in ids {
            if !self.pending.contains_key(id) && !self.waiting.contains(id) {
                self.waiting.push_back(*id);
            }
        }
        self.waiting.len() - waited
    }

    fn deliver(&mut self, id: JobId, consumer: &str, now: u64) -> Delivery {
        let count = self.deliveries.entry(id).or_default();
        *count += 1;
        let deliveries = *count;
        let pending = Pending { consumer: consumer.to_owned(), renewed_at: now };
        self.pending.insert(id, pending);
        Delivery { id, receipt: consumer.to_owned(), deliveries }
    }

    /// Returns waiting entries, after those that the consumer has and does not know of.
    pub fn pull(
        &mut self,
        consumer: &str,
        held: &BTreeSet<JobId>,
        plan: &PullPlan,
        now: u64,
    ) -> Vec<Delivery> {
        let max = plan.max;
        let high = &self.high;
        let takes = |id: &JobId| plan.only.is_none() || high.contains(id);
        let is_unknown =
            |(id, pending): &(&JobId, &Pending)| pending.consumer == consumer && !held.contains(id);
        let mut ids: Vec<JobId> =
            self.pending.iter().filter(is_unknown).map(|(id, _)| *id).collect();
        ids.truncate(max);
        while ids.len() < max
            && let Some(at) = self.waiting.iter().position(takes)
            && let Some(id) = self.waiting.remove(at)
        {
            ids.push(id);
        }
        ids.into_iter().map(|id| self.deliver(id, consumer, now)).collect()
    }

    pub fn reclaim(&mut self, consumer: &str, max: usize, idle: u64, now: u64) -> Vec<Delivery> {
        let is_idle = |(_, pending): &(&JobId, &Pending)| {
            pending.consumer != consumer && pending.renewed_at + idle <= now
        };
        let ids: Vec<JobId> =
            self.pending.iter().filter(is_idle).map(|(id, _)| *id).take(max).collect();
        ids.into_iter().map(|id| self.deliver(id, consumer, now)).collect()
    }

    fn take(&mut self, consumer: &str, id: JobId) -> bool {
        let is_mine = self.pending.get(&id).is_some_and(|pending| pending.consumer == consumer);
        is_mine && self.pending.remove(&id).is_some()
    }

    pub fn acknowledge(&mut self, consumer: &str, deliveries: &[Delivery]) {
        for delivery in deliveries {
            self.take(consumer, delivery.id);
        }
    }

    pub fn hand_back(&mut self, consumer: &str, deliveries: &[Delivery]) {
        for delivery in deliveries {
            if self.take(consumer, delivery.id) {
                self.waiting.push_front(delivery.id);
            }
        }
    }

    pub fn renew(&mut self, consumer: &str, deliveries: &[Delivery], now: u64) {
        for delivery in deliveries {
            if let Some(pending) = self.pending.get_mut(&delivery.id)
                && pending.consumer == consumer
            {
                pending.renewed_at = now;
            }
        }
    }

    /// Loses everything.
    pub fn lose(&mut self) {
        self.waiting.clear();
        self.pending.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.pending.is_empty()
    }
}
