//! Histograms of latencies with fixed bounds, so that two can be added.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

/// Upper bounds of a histogram's buckets in milliseconds; one more bucket holds longer values.
pub const BUCKETS_MS: [i64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 350, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000,
    30_000, 60_000, 180_000, 600_000, 1_800_000, 3_600_000, 14_400_000,
];

/// A histogram of latencies.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Histogram {
    /// Count by bucket.
    counts: BTreeMap<u8, u64>,
    /// Sum of all latencies.
    sum_ms: u64,
}

impl Histogram {
    /// Adds `count` latencies with the sum `sum_ms` to a bucket, by its index (`0` is up to the first
    /// bound).
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

    /// Adds another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, count) in &other.counts {
            *self.counts.entry(*bucket).or_default() += count;
        }
        self.sum_ms += other.sum_ms;
    }

    /// Returns the sum of all latencies.
    pub fn sum(&self) -> Duration {
        Duration::from_millis(self.sum_ms)
    }

    /// Returns the number of latencies.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Returns each bucket's bound in milliseconds (`None` for the last one) and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<i64>, u64)> + '_ {
        (0..=BUCKETS_MS.len()).map(|bucket| {
            let count = self.counts.get(&(bucket as u8)).copied().unwrap_or(0);
            (BUCKETS_MS.get(bucket).copied(), count)
        })
    }

    /// Returns the quantile for a share in `0..=1`, interpolated within its bucket; `None` without
    /// latencies.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = share.clamp(0.0, 1.0) * self.count() as f64;
        let mut below = 0.0;
        for (bucket, count) in self.counts.iter().filter(|(_, count)| **count > 0) {
            let (bucket, count) = (usize::from(*bucket), *count as f64);
            if below + count >= rank {
                let low = bucket.checked_sub(1).map_or(0, |before| BUCKETS_MS[before]) as f64;
                // Values beyond the last bound count as that bound.
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
    fn quantile_lies_in_the_bucket_of_its_rank() {
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
