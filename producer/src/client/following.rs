//! Reading the events of one job as they come.

use std::time::Duration;

use tokio::time::Instant;
use tritmill_queue::{EventId, JobEvent, JobId};

use super::Client;

/// The pause between two reads is this share of the time since the last event, within these bounds: an event is seen
/// late by an eighth of the time that it took, and a job without events is seldom read.
const PAUSE_SHARE: u32 = 8;
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Reads the events of one job, without a connection of its own.
pub struct EventFollower {
    client: Client,
    id: JobId,
    last: EventId,
    /// Time of the last event, or of the start.
    quiet_since: Instant,
}

impl EventFollower {
    pub(super) fn new(client: Client, id: JobId, after: EventId) -> Self {
        Self { client, id, last: after, quiet_since: Instant::now() }
    }

    /// Waits for events for a moment and returns those that came since the last call; often none. Where the events are in
    /// this process it returns as soon as one comes; otherwise it pauses for 20 to 200 ms, at least for `least`, and
    /// reads.
    ///
    /// A call that is dropped loses no event.
    pub async fn next(&mut self, least: Duration) -> Vec<(EventId, JobEvent)> {
        let pause = pause_after(self.quiet_since.elapsed()).max(least);
        self.client.events.wait_for_events(self.id, self.last, pause).await;
        let events = self.client.events_after(self.id, self.last).await;
        if let Some((last, _)) = events.last() {
            (self.last, self.quiet_since) = (*last, Instant::now());
        }
        events
    }
}

fn pause_after(quiet: Duration) -> Duration {
    (quiet / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_is_late_by_an_eighth_of_its_time_or_by_the_shortest_pause() {
        for gap_ms in [5, 20, 60, 150, 400, 1600] {
            let (gap, mut read_at) = (Duration::from_millis(gap_ms), Duration::ZERO);
            while read_at < gap {
                read_at += pause_after(read_at);
            }
            let late = read_at - gap;
            assert!(late <= PAUSE_MIN.max(gap / PAUSE_SHARE), "{gap_ms} ms: {late:?}");
        }
        assert_eq!(pause_after(Duration::from_secs(3600)), PAUSE_MAX);
    }
}
