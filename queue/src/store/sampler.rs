//! Samples from observations of the queues. The databases only count; everything else is the same
//! for both.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::history::{Depth, Latencies, QueueSnapshot, SAMPLE_EVERY, Sample, Subject};
use crate::job::{JobState, QueueName, Tenant, Timestamp};

/// A queue without activity for this long is dropped until it has activity again.
const FORGOTTEN_AFTER_MS: i64 = 24 * 60 * 60 * 1000;
/// Longest time that one observation covers; more time passes only if no process samples.
const COVERED_MS_MAX: i64 = 60_000;

/// Observations take at most 1/`SHARE` of the time: counting a million queued jobs takes longer than
/// counting a few.
const SHARE: u64 = 20;

/// State of the sampler.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct State {
    /// Position up to which finished jobs were counted, in the store's own measure.
    pub cursor: i64,
    /// The queues at the latest sample, by name.
    pub queues: Vec<QueueSnapshot>,
    /// Least time until the next observation, derived from the duration of the last one.
    #[serde(default)]
    pub rest_ms: u64,
}

impl State {
    /// Returns whether the next observation is due.
    pub fn is_due(&self, taken_at: Timestamp, now: Timestamp) -> bool {
        now.since(taken_at) >= SAMPLE_EVERY.max(Duration::from_millis(self.rest_ms))
    }

    /// Records the duration of an observation.
    pub fn took(&mut self, time: Duration) {
        self.rest_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).saturating_mul(SHARE);
    }
}

/// Counts of one queue.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Observation {
    /// Its unfinished jobs.
    pub depth: Depth,
    /// Slots of its workers.
    pub slots: u64,
    /// Jobs that finished since the last observation: counts, tokens, latencies.
    pub ended: Sample,
}

/// Counts by queue.
pub(super) type Observations = BTreeMap<QueueName, Observation>;

/// Most tenants and most workers of one sample: the busiest. A bound on what a sample writes.
pub(super) const SUBJECTS_MAX: usize = 1000;

/// Counts of tenants and workers.
#[derive(Debug, Default)]
pub(super) struct Subjects(BTreeMap<Subject, Sample>);

/// What a worker reports of the present.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Load {
    pub running: u64,
    pub slots: u64,
    pub kv_used: u64,
    pub kv_total: u64,
    pub prefill_tokens_per_s: f64,
    pub decode_tokens_per_s: f64,
    /// Share of the time in which a step ran.
    pub utilisation: f64,
}

impl Subjects {
    /// Adds jobs that a worker ended for a tenant, where these are known. A worker's tokens come from its load: those of
    /// jobs come late and all at once.
    pub fn ended(&mut self, tenant: Option<String>, worker: Option<String>, ended: &Sample) {
        if let Some(tenant) = tenant {
            self.0.entry(Subject::Tenant(Tenant(tenant))).or_default().merge(ended);
        }
        if let Some(worker) = worker {
            let ended = Sample { prompt_tokens: 0, completion_tokens: 0, ..ended.clone() };
            self.0.entry(Subject::Worker(worker)).or_default().merge(&ended);
        }
    }

    /// Adds a worker's load over the time of a sample.
    pub fn load(&mut self, worker: String, load: Load, covered_ms: u64) {
        let tokens = |per_s: f64| (per_s.max(0.0) * covered_ms as f64 / 1000.0).round() as u64;
        let sample = Sample {
            looks: 1,
            running_sum: load.running,
            slots_sum: load.slots,
            kv_used_sum: load.kv_used,
            kv_total_sum: load.kv_total,
            busy_permille_sum: (load.utilisation.clamp(0.0, 1.0) * 1000.0).round() as u64,
            prompt_tokens: tokens(load.prefill_tokens_per_s),
            completion_tokens: tokens(load.decode_tokens_per_s),
            ..Sample::default()
        };
        self.0.entry(Subject::Worker(worker)).or_default().merge(&sample);
    }

    /// Returns the samples of the busiest ones.
    pub fn samples(self, covered_ms: u64) -> Vec<(Subject, Sample)> {
        let (mut tenants, mut workers): (Vec<_>, Vec<_>) =
            self.0.into_iter().partition(|(subject, _)| matches!(subject, Subject::Tenant(_)));
        for all in [&mut tenants, &mut workers] {
            all.sort_by_key(|(_, sample)| std::cmp::Reverse((sample.ended(), sample.running_sum)));
            all.truncate(SUBJECTS_MAX);
        }
        let mut all: Vec<(Subject, Sample)> = tenants.into_iter().chain(workers).collect();
        all.iter_mut().for_each(|(_, sample)| sample.covered_ms = covered_ms);
        // One order for all processes.
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        all
    }
}

/// Returns the time that an observation covers, in milliseconds.
pub(super) fn covered_ms(taken_at: Timestamp, now: Timestamp) -> u64 {
    now.0.saturating_sub(taken_at.0).clamp(1, COVERED_MS_MAX).unsigned_abs()
}

/// Adds to the histogram with this name.
pub(super) fn latency(sample: &mut Sample, name: &str, bucket: usize, jobs: u64, sum_ms: u64) {
    match name {
        "start" => sample.latencies.start.add(bucket, jobs, sum_ms),
        "run" => sample.latencies.run.add(bucket, jobs, sum_ms),
        _ => sample.latencies.first_token.add(bucket, jobs, sum_ms),
    }
}

/// Adds to the number of jobs that finished in a state.
pub(super) fn finished(sample: &mut Sample, state: &str, jobs: u64) {
    match state.parse() {
        Ok(JobState::Completed) => sample.completed += jobs,
        Ok(JobState::Failed) => sample.failed += jobs,
        Ok(JobState::Cancelled) => sample.cancelled += jobs,
        Ok(JobState::Expired) => sample.expired += jobs,
        // The job has left its terminal state since: it finishes again.
        _ => {}
    }
}

/// Sets the number of jobs in a state; at most `most` were counted.
pub(super) fn open(depth: &mut Depth, state: JobState, jobs: u64, most: u64) {
    match state {
        JobState::Queued => depth.queued = jobs,
        JobState::Running => depth.running = jobs,
        JobState::Scheduled => depth.scheduled = jobs,
        JobState::Retrying => depth.retrying = jobs,
        _ => {}
    }
    depth.or_more |= jobs >= most;
}

/// Adds observations to the state; returns the samples to add to each queue's periods, and to the
/// periods of all queues together (`None`).
pub(super) fn advance(
    state: &mut State,
    taken_at: Timestamp,
    now: Timestamp,
    mut observed: Observations,
) -> Vec<(Option<QueueName>, Sample)> {
    let covered_ms = covered_ms(taken_at, now);
    for known in &state.queues {
        // A queue without counts gets a sample of zeros.
        observed.entry(known.queue.clone()).or_default();
    }
    let mut known: BTreeMap<QueueName, QueueSnapshot> =
        std::mem::take(&mut state.queues).into_iter().map(|one| (one.queue.clone(), one)).collect();
    let (mut samples, mut all) = (Vec::with_capacity(observed.len() + 1), Sample::default());
    for (queue, observation) in observed {
        let before = known.remove(&queue);
        let is_first = before.is_none();
        let mut sampled = before.unwrap_or_else(|| QueueSnapshot {
            queue: queue.clone(),
            depth: Depth::default(),
            totals: Default::default(),
            rates: Default::default(),
            seen_at: now,
            latencies: Latencies::default(),
        });
        let sample = sample(&sampled.depth, &observation, covered_ms, now, is_first);
        sampled.totals.add(&sample);
        sampled.rates = sampled.rates.after(&sample);
        sampled.latencies.merge(&sample.latencies);
        sampled.depth = observation.depth;
        merge_concurrent(&mut all, &sample);
        if !sample.is_idle() {
            sampled.seen_at = now;
            samples.push((Some(queue), sample));
        }
        if now.0 - sampled.seen_at.0 < FORGOTTEN_AFTER_MS {
            state.queues.push(sampled);
        }
    }
    all.looks = 1;
    all.covered_ms = covered_ms;
    samples.push((None, all));
    samples
}

/// One queue's sample.
fn sample(
    before: &Depth,
    observation: &Observation,
    covered_ms: u64,
    now: Timestamp,
    is_first: bool,
) -> Sample {
    let Observation { depth, slots, ended } = observation;
    // Jobs that are present or finished now and were not present before were submitted since. At the
    // first observation that is unknown.
    let arrived = match is_first {
        true => 0,
        false => (depth.open() + ended.ended()).saturating_sub(before.open()),
    };
    let oldest = depth.oldest_queued_at.map_or(0, |at| now.since(at).as_millis());
    Sample {
        looks: 1,
        covered_ms,
        queued_sum: depth.queued,
        queued_max: depth.queued,
        running_sum: depth.running,
        slots_sum: *slots,
        oldest_ms_max: u64::try_from(oldest).unwrap_or(u64::MAX),
        arrived,
        ..ended.clone()
    }
}

/// Adds another queue's sample of the same observation: the maxima occur at the same time, so they add
/// up.
fn merge_concurrent(all: &mut Sample, other: &Sample) {
    let queued_max = all.queued_max + other.queued_max;
    all.merge(other);
    all.queued_max = queued_max;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(model: &str) -> QueueName {
        QueueName { model: model.to_owned(), format: "i2_s".to_owned() }
    }

    fn observation(queued: u64, completed: u64) -> Observation {
        let depth = Depth { queued, ..Depth::default() };
        Observation { depth, slots: 4, ended: Sample { completed, ..Sample::default() } }
    }

    #[test]
    fn slow_observations_are_further_apart() {
        let (taken_at, after) = (Timestamp(0), |ms| Timestamp(ms));
        let mut state = State::default();
        assert!(!state.is_due(taken_at, after(1_999)) && state.is_due(taken_at, after(2_000)));
        state.took(Duration::from_millis(276));
        assert!(!state.is_due(taken_at, after(5_519)) && state.is_due(taken_at, after(5_520)));
        let stored = serde_json::to_string(&state).expect("numbers");
        assert_eq!(serde_json::from_str::<State>(&stored).expect("as written"), state);
        // As the first row of Postgres has it.
        let first: State = serde_json::from_str(r#"{"cursor": 7, "queues": []}"#).expect("a state");
        assert!(first.is_due(taken_at, after(2_000)));
    }

    #[test]
    fn submitted_jobs_are_derived_from_depth_and_finished_jobs() {
        let mut state = State::default();
        let at = |s: i64| Timestamp(s * 1000);
        let observed = Observations::from([
            (queue("a"), observation(100, 0)),
            (queue("b"), observation(0, 0)),
        ]);
        let first = advance(&mut state, at(0), at(2), observed);
        assert_eq!(first.len(), 3, "two queues and all");
        assert_eq!((first[0].1.arrived, first[2].1.queued_max), (0, 100));
        let observed = Observations::from([(queue("a"), observation(90, 30))]);
        let second = advance(&mut state, at(2), at(4), observed);
        assert_eq!((second[0].1.arrived, second[0].1.completed), (20, 30));
        let all = &second.last().expect("all").1;
        assert_eq!((all.looks, all.covered_ms, all.arrived), (1, 2000, 20));
        assert_eq!(state.queues[0].totals.completed, 30);
        assert!(state.queues[0].rates.ended > 0.4 && state.queues[0].rates.ended < 15.0);
        // No process sampled for days.
        let late = advance(&mut state, at(4), at(400_000), Observations::new());
        assert_eq!(late.last().expect("all").1.covered_ms, COVERED_MS_MAX.unsigned_abs());
        assert!(
            state.queues.iter().all(|queue| queue.seen_at == at(400_000))
                || state.queues.is_empty()
        );
    }
}
