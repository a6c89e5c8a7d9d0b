//! Samples of queues over time.
//!
//! Every few seconds one process samples the queues ([`QueueHistory::sample`]) and adds the result to a
//! period of ten seconds, one of a minute and one of an hour, for each queue and for all together. So a
//! long period is exactly the sum of the short ones, and each kind has its own retention. Percentiles
//! are read from histograms with fixed bounds, which can be added too.
//!
//! A sample counts the jobs that finished since the previous one: each job is counted and read once.
//!
//! Tenants and workers ([`Subject`]) are sampled too, in periods of a minute and an hour: of tenants the jobs that
//! finished, of workers also what their heartbeats say.

mod histogram;

use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

pub use self::histogram::{BUCKETS_MS, Histogram};
use super::StoreError;
use crate::job::{QueueName, Tenant, Timestamp};

/// Shortest time between two samples.
pub(super) const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// Maximum number of jobs of a queue and state that are counted.
pub(super) const DEPTH_MAX: i64 = 1_000_000;

/// Adds fields of one value to the same fields of another.
macro_rules! add_fields {
    ($to:ident, $from:ident, $($field:ident),+) => {
        $($to.$field += $from.$field;)+
    };
}

/// Length of a sample's period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Period {
    /// Ten seconds.
    Seconds,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
}

impl Period {
    /// All periods, the shortest first.
    pub const ALL: [Self; 3] = [Self::Seconds, Self::Minute, Self::Hour];

    /// Returns the length of the period.
    pub const fn length(self) -> Duration {
        Duration::from_secs(match self {
            Self::Seconds => 10,
            Self::Minute => 60,
            Self::Hour => 3600,
        })
    }

    /// Returns how long samples of the period are kept.
    pub const fn kept(self) -> Duration {
        const HOUR: u64 = 3600;
        Duration::from_secs(match self {
            Self::Seconds => 3 * HOUR,
            Self::Minute => 3 * 24 * HOUR,
            Self::Hour => 90 * 24 * HOUR,
        })
    }

    /// Returns the shortest period that is kept for `span` and divides it into at most 1440
    /// samples.
    pub fn for_span(span: Duration) -> Self {
        const SAMPLES_MAX: u32 = 24 * 60;
        let fits = |period: &Self| {
            period.kept() >= span && period.length().saturating_mul(SAMPLES_MAX) >= span
        };
        Self::ALL.into_iter().find(fits).unwrap_or(Self::Hour)
    }

    /// Returns the start of the period that contains a time.
    pub fn begin(self, at: Timestamp) -> Timestamp {
        let length = self.length().as_millis() as i64;
        Timestamp(at.0.div_euclid(length) * length)
    }
}

/// Counts over a period. Samples of two periods can be added.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Number of observations; the sums below are over these.
    pub looks: u64,
    /// Time covered by the counts below, in milliseconds.
    pub covered_ms: u64,
    /// Queued jobs, summed over the observations.
    pub queued_sum: u64,
    /// Highest number of queued jobs.
    pub queued_max: u64,
    /// Running jobs, summed over the observations.
    pub running_sum: u64,
    /// Slots of the workers, summed over the observations.
    pub slots_sum: u64,
    /// KV blocks in use, summed over the observations. This and the two below are of workers alone.
    #[serde(skip_serializing_if = "is_zero")]
    pub kv_used_sum: u64,
    /// All KV blocks, summed over the observations.
    #[serde(skip_serializing_if = "is_zero")]
    pub kv_total_sum: u64,
    /// Time in which a step ran, in thousandths of the time, summed over the observations.
    #[serde(skip_serializing_if = "is_zero")]
    pub busy_permille_sum: u64,
    /// Highest age of the oldest queued job, in milliseconds.
    pub oldest_ms_max: u64,
    /// Submitted jobs.
    pub arrived: u64,
    /// Completed jobs.
    pub completed: u64,
    /// Failed jobs.
    pub failed: u64,
    /// Cancelled jobs.
    pub cancelled: u64,
    /// Expired jobs.
    pub expired: u64,
    /// Prompt tokens of completed jobs.
    pub prompt_tokens: u64,
    /// Generated tokens of completed jobs.
    pub completion_tokens: u64,
    /// Latencies of finished jobs.
    pub latencies: Latencies,
}

/// Latencies of finished jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Latencies {
    /// From submission to the first claim.
    pub start: Histogram,
    /// From the last claim to the end, of completed jobs.
    pub run: Histogram,
    /// From submission to the first token, of completed jobs.
    pub first_token: Histogram,
}

impl Latencies {
    /// Adds other latencies.
    pub fn merge(&mut self, other: &Self) {
        self.start.merge(&other.start);
        self.run.merge(&other.run);
        self.first_token.merge(&other.first_token);
    }
}

impl Sample {
    /// Adds the sample of another period.
    pub fn merge(&mut self, other: &Self) {
        add_fields!(self, other, looks, covered_ms, queued_sum, running_sum, slots_sum, arrived);
        add_fields!(self, other, completed, failed, cancelled, expired);
        add_fields!(self, other, prompt_tokens, completion_tokens);
        add_fields!(self, other, kv_used_sum, kv_total_sum, busy_permille_sum);
        self.queued_max = self.queued_max.max(other.queued_max);
        self.oldest_ms_max = self.oldest_ms_max.max(other.oldest_ms_max);
        self.latencies.merge(&other.latencies);
    }

    /// Returns the number of finished jobs.
    pub fn ended(&self) -> u64 {
        self.completed + self.failed + self.cancelled + self.expired
    }

    /// Returns a count of this period per second.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 * 1000.0 / self.covered_ms.max(1) as f64
    }

    /// Mean number of queued jobs.
    pub fn queued_mean(&self) -> f64 {
        self.queued_sum as f64 / self.looks.max(1) as f64
    }

    /// Mean share of the slots that were in use; `None` without slots.
    pub fn batch_fill(&self) -> Option<f64> {
        (self.slots_sum > 0).then(|| self.running_sum as f64 / self.slots_sum as f64)
    }

    /// Mean share of the KV blocks that were in use; `None` without blocks.
    pub fn kv_fill(&self) -> Option<f64> {
        (self.kv_total_sum > 0).then(|| self.kv_used_sum as f64 / self.kv_total_sum as f64)
    }

    /// Mean share of the time in which a step ran; `None` without observations.
    pub fn utilisation(&self) -> Option<f64> {
        (self.looks > 0).then(|| self.busy_permille_sum as f64 / 1000.0 / self.looks as f64)
    }

    /// Returns whether all counts are zero.
    pub(super) fn is_idle(&self) -> bool {
        self.queued_sum + self.running_sum + self.slots_sum + self.arrived + self.ended() == 0
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What is sampled beside queues.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A tenant: its jobs that finished.
    Tenant(Tenant),
    /// A worker, by its incarnation: its load, what it computed, and the jobs that it ended.
    Worker(String),
}

impl Subject {
    /// The periods of its samples. A short one would cost a write for each tenant and sample.
    pub const PERIODS: [Period; 2] = [Period::Minute, Period::Hour];

    /// Returns the word for its kind in stores.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Tenant(_) => "tenant",
            Self::Worker(_) => "worker",
        }
    }

    /// Returns its name.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Tenant(Tenant(name)) | Self::Worker(name) => name,
        }
    }
}

/// The sample of one period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// Start of the period.
    pub at: Timestamp,
    /// Counts over the period.
    pub sample: Sample,
}

/// Reduces points to at most `most` by adding neighbours.
pub fn downsample(points: Vec<Point>, most: usize) -> Vec<Point> {
    let per_point = points.len().div_ceil(most.max(1)).max(1);
    let mut reduced: Vec<Point> = Vec::with_capacity(most);
    for (index, point) in points.into_iter().enumerate() {
        match reduced.last_mut() {
            Some(last) if index % per_point != 0 => last.sample.merge(&point.sample),
            _ => reduced.push(point),
        }
    }
    reduced
}

/// Unfinished jobs of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Depth {
    /// Jobs to run at a later time.
    pub scheduled: u64,
    /// Jobs ready to run.
    pub queued: u64,
    /// Jobs under a lease.
    pub running: u64,
    /// Jobs that wait for another attempt.
    pub retrying: u64,
    /// Whether there are more jobs than were counted.
    pub or_more: bool,
    /// Submission time of the oldest queued job.
    pub oldest_queued_at: Option<Timestamp>,
    /// Queueing time of the oldest jobs that the dispatcher may lack.
    pub unannounced_since: Option<Timestamp>,
}

impl Depth {
    /// Returns the number of unfinished jobs.
    pub fn open(&self) -> u64 {
        self.scheduled + self.queued + self.running + self.retrying
    }

    /// Adds another queue.
    pub fn merge(&mut self, other: &Self) {
        add_fields!(self, other, scheduled, queued, running, retrying);
        self.or_more |= other.or_more;
        let earlier =
            |one: Option<Timestamp>, two: Option<Timestamp>| one.into_iter().chain(two).min();
        self.oldest_queued_at = earlier(self.oldest_queued_at, other.oldest_queued_at);
        self.unannounced_since = earlier(self.unannounced_since, other.unannounced_since);
    }
}

/// Jobs and tokens since sampling began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Completed jobs.
    pub completed: u64,
    /// Failed jobs.
    pub failed: u64,
    /// Cancelled jobs.
    pub cancelled: u64,
    /// Expired jobs.
    pub expired: u64,
    /// Prompt tokens of completed jobs.
    pub prompt_tokens: u64,
    /// Generated tokens of completed jobs.
    pub completion_tokens: u64,
}

impl Totals {
    /// Adds a period's.
    pub fn add(&mut self, sample: &Sample) {
        add_fields!(self, sample, completed, failed, cancelled, expired);
        add_fields!(self, sample, prompt_tokens, completion_tokens);
    }
}

/// Rates per second, averaged over about a minute.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// Submitted jobs.
    pub arrived: f64,
    /// Finished jobs in any terminal state.
    pub ended: f64,
    /// Failed jobs.
    pub failed: f64,
    /// Prompt tokens of completed jobs.
    pub prompt_tokens: f64,
    /// Generated tokens of completed jobs.
    pub completion_tokens: f64,
}

impl Rates {
    /// Rates after another sample; a sample that is a minute old has a weight of 1/e.
    pub(super) fn after(self, sample: &Sample) -> Self {
        const MINUTE_MS: f64 = 60_000.0;
        let kept = (-(sample.covered_ms as f64) / MINUTE_MS).exp();
        let mix = |old: f64, count: u64| old * kept + sample.per_second(count) * (1.0 - kept);
        Self {
            arrived: mix(self.arrived, sample.arrived),
            ended: mix(self.ended, sample.ended()),
            failed: mix(self.failed, sample.failed),
            prompt_tokens: mix(self.prompt_tokens, sample.prompt_tokens),
            completion_tokens: mix(self.completion_tokens, sample.completion_tokens),
        }
    }
}

/// A queue at its latest sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    /// The queue.
    pub queue: QueueName,
    /// Its unfinished jobs.
    pub depth: Depth,
    /// Its finished jobs and tokens since sampling began.
    pub totals: Totals,
    /// Its rates.
    pub rates: Rates,
    /// Time of the latest sample with any activity.
    pub seen_at: Timestamp,
    /// Its latencies since sampling began.
    #[serde(default)]
    pub latencies: Latencies,
}

/// All queues at the latest sample.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// Time of the sample.
    pub at: Timestamp,
    /// The queues, by name.
    pub queues: Vec<QueueSnapshot>,
}

/// Samples of the queues over time.
#[async_trait]
pub trait QueueHistory: Send + Sync {
    /// Samples the queues, unless another process did so a moment ago; returns whether it did. To be
    /// called every few seconds, by any number of processes.
    async fn sample(&self) -> Result<bool, StoreError>;

    /// Returns the queues at their latest sample; `None` before the first one.
    async fn snapshot(&self) -> Result<Option<Snapshot>, StoreError>;

    /// Returns the samples of a queue, or of all together, for periods that start in `from..to`, in
    /// order.
    async fn samples(
        &self,
        queue: Option<&QueueName>,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError>;

    /// Returns the samples of a tenant or worker, likewise. `covered_ms` of a tenant's sample is the time with jobs that
    /// ended.
    async fn subject_samples(
        &self,
        subject: &Subject,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_can_be_added() {
        let sample = |queued, completed| Sample {
            looks: 1,
            covered_ms: 2000,
            queued_sum: queued,
            queued_max: queued,
            completed,
            ..Sample::default()
        };
        let mut sum = sample(4, 10);
        sum.merge(&sample(2, 30));
        assert_eq!((sum.queued_mean(), sum.queued_max, sum.completed), (3.0, 4, 40));
        assert_eq!(sum.per_second(sum.completed), 10.0);
    }

    #[test]
    fn span_uses_the_shortest_period_that_fits() {
        for (hours, period) in [
            (1, Period::Seconds),
            (6, Period::Minute),
            (24, Period::Minute),
            (25, Period::Hour),
            (2000, Period::Hour),
        ] {
            assert_eq!(Period::for_span(Duration::from_secs(hours * 3600)), period, "{hours} h");
        }
        assert_eq!(Period::Minute.begin(Timestamp(119_999)), Timestamp(60_000));
    }
}
