//! Events of jobs within one process.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::timeout};

use super::{EventId, Events, JobEvent};
use crate::{dispatch::DispatchError, job::JobId};

/// Maximum number of jobs with events; older jobs are dropped.
const JOBS_MAX: usize = 1024;
/// Maximum number of events of a job; older events are dropped.
const EVENTS_MAX: usize = 4096;

/// The latest events of the latest jobs, which are lost with the process.
#[derive(Debug, Default)]
pub struct MemoryEvents {
    state: Mutex<State>,
    /// Notified of every event.
    published: Notify,
}

#[derive(Debug, Default)]
struct State {
    by_job: HashMap<JobId, VecDeque<(EventId, JobEvent)>>,
    /// The order in which the jobs came.
    jobs: VecDeque<JobId>,
    last: u64,
}

impl MemoryEvents {
    fn after(&self, job: JobId, after: EventId) -> Vec<(EventId, JobEvent)> {
        let state = self.state.lock();
        let events = state.by_job.get(&job).into_iter().flatten();
        events.filter(|(id, _)| *id > after).cloned().collect()
    }

    fn has_any_after(&self, job: JobId, after: EventId) -> bool {
        let state = self.state.lock();
        let last = state.by_job.get(&job).and_then(VecDeque::back);
        last.is_some_and(|(id, _)| *id > after)
    }

    async fn published_after(&self, job: JobId, after: EventId) {
        loop {
            // Subscribe before looking, or an event in between would be missed.
            let published = self.published.notified();
            if self.has_any_after(job, after) {
                return;
            }
            published.await;
        }
    }
}

#[async_trait]
impl Events for MemoryEvents {
    async fn publish(&self, job: JobId, events: &[JobEvent]) -> Result<(), DispatchError> {
        {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let kept = state.by_job.entry(job).or_insert_with(|| {
                state.jobs.push_back(job);
                VecDeque::new()
            });
            for event in events {
                state.last += 1;
                kept.push_back((EventId { ms: state.last, sequence: 0 }, event.clone()));
            }
            kept.drain(..kept.len().saturating_sub(EVENTS_MAX));
            if state.jobs.len() > JOBS_MAX {
                state.jobs.pop_front().and_then(|oldest| state.by_job.remove(&oldest));
            }
        }
        self.published.notify_waiters();
        Ok(())
    }

    async fn read_events(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<Vec<(EventId, JobEvent)>, DispatchError> {
        self.wait_for_events(job, after, wait).await;
        Ok(self.after(job, after))
    }

    async fn wait_for_events(&self, job: JobId, after: EventId, longest: Duration) {
        // Whether there are events is seen by the read that follows.
        let _ = timeout(longest, self.published_after(job, after)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Part, *};

    fn delta(text: &str) -> JobEvent {
        let part = Part::Content;
        JobEvent::Delta { choice: 0, part, offset: 0, text: text.to_owned(), logprobs: None }
    }

    #[tokio::test]
    async fn late_reader_gets_all_events_and_waiting_reader_new_ones() {
        let (events, job) = (MemoryEvents::default(), JobId::generate());
        events.publish(job, &[JobEvent::Started, delta("a")]).await.expect("memory");
        let start = EventId::default();
        let all = events.read_events(job, start, Duration::ZERO).await.expect("memory");
        assert_eq!(all.len(), 2);
        let minute = Duration::from_secs(60);
        let more = events.read_events(job, all[1].0, minute);
        let next = [delta("b")];
        let tell = events.publish(job, &next);
        let (more, _) = tokio::join!(more, tell);
        assert_eq!(more.expect("memory")[0].1, delta("b"));
        let other = events.read_events(JobId::generate(), start, Duration::ZERO).await;
        assert!(other.expect("memory").is_empty());
    }

    #[tokio::test]
    async fn only_latest_events_and_jobs_are_kept() {
        let (events, first) = (MemoryEvents::default(), JobId::generate());
        let many = vec![delta("x"); EVENTS_MAX + 7];
        events.publish(first, &many).await.expect("memory");
        let kept = events.after(first, EventId::default());
        assert_eq!(kept.len(), EVENTS_MAX);
        for _ in 0..JOBS_MAX {
            events.publish(JobId::generate(), &[delta("y")]).await.expect("memory");
        }
        assert!(events.after(first, EventId::default()).is_empty());
        assert_eq!(events.state.lock().by_job.len(), JOBS_MAX);
    }
}
