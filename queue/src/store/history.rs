//! How queues fare over time: samples that add up.
//!
//! Every few seconds one process, whichever comes first, looks at the queues
//! ([`Operations::sample`](super::Operations::sample)) and adds what it sees to a period of ten seconds,
//! one of a minute and one of an hour, of each queue and of all together. So a coarse period is exactly
//! the sum of the fine ones, and each kind is kept for as long as somebody would look at it so closely.
//! Percentiles are read from histograms with fixed bounds, which add up too.
//!
//! A sample counts what ended since the one before it: no job is counted twice, and none is read again.

mod histogram;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::histogram::{BUCKETS_MS, Histogram};
use crate::job::{QueueName, Timestamp};

/// Least time between two samples.
pub(super) const SAMPLE_EVERY: Duration = Duration::from_secs(2);
/// Waiting jobs of a queue that are counted one by one.
pub(super) const DEPTH_MAX: i64 = 1_000_000;

/// How long a sample's period is.
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
    /// All of them, the shortest first.
    pub const ALL: [Self; 3] = [Self::Seconds, Self::Minute, Self::Hour];

    /// Its length.
    pub const fn length(self) -> Duration {
        Duration::from_secs(match self {
            Self::Seconds => 10,
            Self::Minute => 60,
            Self::Hour => 3600,
        })
    }

    /// How long samples of it are kept.
    pub const fn kept(self) -> Duration {
        const HOUR: u64 = 3600;
        Duration::from_secs(match self {
            Self::Seconds => 3 * HOUR,
            Self::Minute => 3 * 24 * HOUR,
            Self::Hour => 90 * 24 * HOUR,
        })
    }

    /// The shortest one that is kept so long and has no more than a day's minutes in it.
    pub fn for_span(span: Duration) -> Self {
        const SAMPLES_MAX: u32 = 24 * 60;
        let fits = |period: &Self| {
            period.kept() >= span && period.length().saturating_mul(SAMPLES_MAX) >= span
        };
        Self::ALL.into_iter().find(fits).unwrap_or(Self::Hour)
    }

    /// The begin of the period that a time falls in.
    pub fn begin(self, at: Timestamp) -> Timestamp {
        let length = self.length().as_millis() as i64;
        Timestamp(at.0.div_euclid(length) * length)
    }
}

/// What happened in a period; two of them add up.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// How often it was looked; the sums below are over these.
    pub looks: u64,
    /// Time that the counts below cover, in milliseconds.
    pub covered_ms: u64,
    /// Queued jobs, summed over the looks.
    pub queued_sum: u64,
    /// Queued jobs at most.
    pub queued_max: u64,
    /// Running jobs, summed over the looks.
    pub running_sum: u64,
    /// Jobs that the workers had room for, summed over the looks.
    pub slots_sum: u64,
    /// How long the oldest queued job had waited at most, in milliseconds.
    pub oldest_ms_max: u64,
    /// Jobs that came.
    pub arrived: u64,
    /// Jobs that were answered.
    pub completed: u64,
    /// Jobs that failed for good.
    pub failed: u64,
    /// Jobs that were withdrawn.
    pub cancelled: u64,
    /// Jobs whose deadline passed.
    pub expired: u64,
    /// Prompt tokens of answered jobs.
    pub prompt_tokens: u64,
    /// Generated tokens of answered jobs.
    pub completion_tokens: u64,
    /// How long jobs took.
    pub latencies: Latencies,
}

/// How long jobs took that ended.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Latencies {
    /// From submission to the first claim.
    pub start: Histogram,
    /// From the last claim to the end, of answered jobs.
    pub run: Histogram,
    /// From submission to the first token, of answered jobs.
    pub first_token: Histogram,
}

impl Latencies {
    /// Adds another's.
    pub fn merge(&mut self, other: &Self) {
        self.start.merge(&other.start);
        self.run.merge(&other.run);
        self.first_token.merge(&other.first_token);
    }
}

impl Sample {
    /// Adds another period's.
    pub fn merge(&mut self, other: &Self) {
        self.looks += other.looks;
        self.covered_ms += other.covered_ms;
        self.queued_sum += other.queued_sum;
        self.queued_max = self.queued_max.max(other.queued_max);
        self.running_sum += other.running_sum;
        self.slots_sum += other.slots_sum;
        self.oldest_ms_max = self.oldest_ms_max.max(other.oldest_ms_max);
        self.arrived += other.arrived;
        self.completed += other.completed;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.expired += other.expired;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.latencies.merge(&other.latencies);
    }

    /// Jobs that ended.
    pub fn ended(&self) -> u64 {
        self.completed + self.failed + self.cancelled + self.expired
    }

    /// So many of something in this period, by the second.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 * 1000.0 / self.covered_ms.max(1) as f64
    }

    /// Queued jobs in the mean.
    pub fn queued_mean(&self) -> f64 {
        self.queued_sum as f64 / self.looks.max(1) as f64
    }

    /// Which share of the room for running jobs was used in the mean; none where there was no room.
    pub fn batch_fill(&self) -> Option<f64> {
        (self.slots_sum > 0).then(|| self.running_sum as f64 / self.slots_sum as f64)
    }

    /// Whether nothing waited, ran or happened.
    pub(super) fn is_idle(&self) -> bool {
        self.queued_sum + self.running_sum + self.slots_sum + self.arrived + self.ended() == 0
    }
}

/// A period's sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// When the period begins.
    pub at: Timestamp,
    /// What happened in it.
    pub sample: Sample,
}

/// The same points in no more than `most`, by adding up neighbours.
pub fn downsample(points: Vec<Point>, most: usize) -> Vec<Point> {
    let together = points.len().div_ceil(most.max(1)).max(1);
    let mut thinned: Vec<Point> = Vec::with_capacity(most);
    for (index, point) in points.into_iter().enumerate() {
        match thinned.last_mut() {
            Some(last) if index % together != 0 => last.sample.merge(&point.sample),
            _ => thinned.push(point),
        }
    }
    thinned
}

/// What a queue holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Depth {
    /// Waiting for their time.
    pub scheduled: u64,
    /// Ready.
    pub queued: u64,
    /// Under a lease.
    pub running: u64,
    /// Waiting for another attempt.
    pub retrying: u64,
    /// There are more than these: so many were counted.
    pub or_more: bool,
    /// When the oldest queued job came.
    pub oldest_queued_at: Option<Timestamp>,
}

impl Depth {
    /// Jobs that are not over.
    pub fn open(&self) -> u64 {
        self.scheduled + self.queued + self.running + self.retrying
    }

    /// Adds another queue's.
    pub fn merge(&mut self, other: &Self) {
        self.scheduled += other.scheduled;
        self.queued += other.queued;
        self.running += other.running;
        self.retrying += other.retrying;
        self.or_more |= other.or_more;
        self.oldest_queued_at = match (self.oldest_queued_at, other.oldest_queued_at) {
            (Some(one), Some(two)) => Some(one.min(two)),
            (one, two) => one.or(two),
        };
    }
}

/// Jobs and tokens since sampling began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Answered.
    pub completed: u64,
    /// Failed for good.
    pub failed: u64,
    /// Withdrawn.
    pub cancelled: u64,
    /// Too late.
    pub expired: u64,
    /// Prompt tokens of answered jobs.
    pub prompt_tokens: u64,
    /// Generated tokens of answered jobs.
    pub completion_tokens: u64,
}

impl Totals {
    /// Adds a period's.
    pub fn add(&mut self, sample: &Sample) {
        self.completed += sample.completed;
        self.failed += sample.failed;
        self.cancelled += sample.cancelled;
        self.expired += sample.expired;
        self.prompt_tokens += sample.prompt_tokens;
        self.completion_tokens += sample.completion_tokens;
    }
}

/// What happens a second, over the last minute or so.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// Jobs that come.
    pub arrived: f64,
    /// Jobs that end, however.
    pub ended: f64,
    /// Jobs that fail for good.
    pub failed: f64,
    /// Prompt tokens of answered jobs.
    pub prompt_tokens: f64,
    /// Generated tokens of answered jobs.
    pub completion_tokens: f64,
}

impl Rates {
    /// After another sample: what is a minute old counts for little more than a third.
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

/// A queue when it was sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    /// The queue.
    pub queue: QueueName,
    /// What it held.
    pub depth: Depth,
    /// What it did since sampling began.
    pub totals: Totals,
    /// What it does a second.
    pub rates: Rates,
    /// When anything of it was seen last.
    pub seen_at: Timestamp,
    /// Its latencies since sampling began.
    #[serde(default)]
    pub latencies: Latencies,
}

/// All queues when they were sampled.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// When.
    pub at: Timestamp,
    /// Each queue, by name.
    pub queues: Vec<QueueSnapshot>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_add_up() {
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
    fn a_span_is_shown_in_the_shortest_period_that_is_not_too_much() {
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
