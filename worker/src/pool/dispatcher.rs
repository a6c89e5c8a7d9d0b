//! Faults that the dispatcher has found and repaired.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::counter::ConstCounter,
};
use tritmill_queue::dispatch::RedisDispatcher;

/// Counters of the dispatcher, read at each scrape.
#[derive(Debug)]
pub(super) struct DispatcherCounters(pub RedisDispatcher);

impl Collector for DispatcherCounters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = self.0.stats();
        let counts = [
            (
                "stream_entries_foreign",
                "Stream entries dropped because they are not jobs",
                stats.foreign_entries,
            ),
            (
                "stream_entries_deleted",
                "Pending entries that were deleted from the stream",
                stats.deleted_entries,
            ),
            ("stream_entries_reclaimed", "Entries taken over from dead workers", stats.reclaimed),
            ("stream_entries_recovered", "Entries of reads with a lost answer", stats.recovered),
            (
                "acknowledgements_fenced",
                "Acknowledgements refused because another worker has the entry",
                stats.fenced_acknowledgements,
            ),
            ("redis_losses", "Times that Redis lost the data of a queue", stats.group_recreations),
        ];
        for (name, help, count) in counts {
            let counter = ConstCounter::new(count);
            let kind = prometheus_client::metrics::MetricType::Counter;
            counter.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        Ok(())
    }
}
