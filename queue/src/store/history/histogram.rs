//! Latencies in buckets with fixed bounds, which add up.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

/// Upper bounds of a histogram's buckets in milliseconds; what is longer falls into one more.
pub const BUCKETS_MS: [i64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 350, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000,
    30_000, 60_000, 180_000, 600_000, 1_800_000, 3_600_000, 14_400_000,
];

/// How often which latency was measured.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Histogram {
    /// By bucket.
    counts: BTreeMap<u8, u64>,
    /// All of them together.
    sum_ms: u64,
}

impl Histogram {
    /// Adds to a bucket, by its number (`0` is up to the first bound), so many that took so long
    /// together.
    pub fn add(&mut self, bucket: usize, count: u64, sum_ms: u64) {
        let bucket = bucket.min(BUCKETS_MS.len()) as u8;
        *self.counts.entry(bucket).or_default() += count;
        self.sum_ms += sum_ms;
    }

    /// Adds one latency.
    pub fn record(&mut self, latency: Duration) {
        let ms = i64::try_from(latency.as_millis()).unwrap_or(i64::MAX);
        let bucket = BUCKETS_MS.partition_point(|bound| *bound < ms);
        self.add(bucket, 1, ms.unsigned_abs());
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, count) in &other.counts {
            *self.counts.entry(*bucket).or_default() += count;
        }
        self.sum_ms += other.sum_ms;
    }

    /// All latencies together.
    pub fn sum(&self) -> Duration {
        Duration::from_millis(self.sum_ms)
    }

    /// How many were measured.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Each bucket's bound in milliseconds, none of the last one, and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<i64>, u64)> + '_ {
        (0..=BUCKETS_MS.len()).map(|bucket| {
            let count = self.counts.get(&(bucket as u8)).copied().unwrap_or(0);
            (BUCKETS_MS.get(bucket).copied(), count)
        })
    }

    /// The latency that this share of all do not exceed, between the bounds of its bucket by
    /// proportion; none of none.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = share.clamp(0.0, 1.0) * self.count() as f64;
        let mut below = 0.0;
        for (bucket, count) in self.counts.iter().filter(|(_, count)| **count > 0) {
            let (bucket, count) = (usize::from(*bucket), *count as f64);
            if below + count >= rank {
                let low = bucket.checked_sub(1).map_or(0, |before| BUCKETS_MS[before]) as f64;
                // Of what is beyond the last bound nothing is known but that.
                let high = BUCKETS_MS.get(bucket).map_or(low, |bound| *bound as f64);
                let ms = low + (high - low) * ((rank - below) / count).clamp(0.0, 1.0);
                return Some(Duration::from_secs_f64(ms / 1000.0));
            }
            below += count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_lies_in_the_bucket_of_its_rank() {
        let mut all = Histogram::default();
        assert_eq!(all.quantile(0.5), None);
        for ms in [3, 4, 30, 4000] {
            all.record(Duration::from_millis(ms));
        }
        let p = |share| all.quantile(share).expect("some").as_millis();
        assert!((2..=5).contains(&p(0.5)), "{}", p(0.5));
        assert!((20..=50).contains(&p(0.75)), "{}", p(0.75));
        assert!((3000..=5000).contains(&p(0.99)), "{}", p(0.99));
        all.record(Duration::from_secs(86_400));
        assert_eq!(all.quantile(1.0), Some(Duration::from_secs(14_400)), "the last bound");
        assert_eq!((all.buckets().last(), all.count()), (Some((None, 1)), 5));
        assert_eq!(all.sum(), Duration::from_millis(86_404_037));
    }
}
