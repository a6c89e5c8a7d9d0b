//! Waiting for jobs: results as jobs finish, and the text of jobs that stream.

use std::{collections::HashSet, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use tokio::time::{Instant, sleep};
use tritmill_queue::{EventId, FinishedJob, JobEvent, JobId, JobState};

use super::{Client, ClientError, following::EventFollower};

/// Time between two reads of the store: grows from the first to the last while no job finishes.
const POLL_FIRST: Duration = Duration::from_millis(10);
const POLL_LAST: Duration = Duration::from_millis(500);

/// Time to wait for the next event before the job's state is read from the store.
const EVENT_WAIT: Duration = Duration::from_secs(2);
/// Time to wait after a failure of Redis.
const EVENT_RETRY: Duration = Duration::from_millis(500);

/// Counts of a set of jobs that is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waited {
    /// Jobs with an answer.
    pub completed: usize,
    /// Jobs that finished without an answer.
    pub failed: usize,
    /// All jobs of the set.
    pub total: usize,
}

impl Waited {
    /// Finished jobs.
    pub fn finished(&self) -> usize {
        self.completed + self.failed
    }
}

impl Client {
    /// Yields jobs as they finish, until all of `ids` have. An error does not end the stream: the
    /// next item is another try.
    pub fn results(
        &self,
        ids: Vec<JobId>,
    ) -> impl Stream<Item = Result<FinishedJob, ClientError>> + '_ {
        let pending: HashSet<JobId> = ids.into_iter().collect();
        let state = (pending, POLL_FIRST);
        let pages = stream::unfold(state, async move |(mut pending, mut wait)| {
            if pending.is_empty() {
                return None;
            }
            sleep(wait).await;
            let ids: Vec<JobId> = pending.iter().copied().collect();
            let page: Vec<Result<FinishedJob, ClientError>> = match self.finished(&ids).await {
                Ok(ended) => ended.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            };
            wait = if page.is_empty() { (wait * 2).min(POLL_LAST) } else { POLL_FIRST };
            for ended in page.iter().flatten() {
                pending.remove(&ended.id);
            }
            Some((stream::iter(page), (pending, wait)))
        });
        pages.flatten()
    }

    /// Yields the events of a job that streams, from its start to its end, even if the call comes
    /// late. During an outage of Redis it waits; the end is then taken from the store.
    pub fn subscribe(&self, id: JobId) -> impl Stream<Item = Result<JobEvent, ClientError>> + '_ {
        let start = Some(EventId::default());
        let pages = stream::unfold(start, move |after| async move {
            let after = after?;
            let (last, mut events) = self.next_events(id, after).await;
            let is_end = |event: &JobEvent| matches!(event, JobEvent::Finished { .. });
            if events.is_empty() {
                match self.poll(id).await {
                    Ok(state) if state.is_terminal() => events.push(JobEvent::Finished { state }),
                    Ok(_) => {}
                    Err(error) => {
                        let is_unknown = matches!(error, ClientError::Unknown(_));
                        let page = stream::iter(vec![Err(error)]);
                        return Some((page, (!is_unknown).then_some(last)));
                    }
                }
            }
            let next = (!events.iter().any(is_end)).then_some(last);
            let page: Vec<Result<JobEvent, ClientError>> = events.into_iter().map(Ok).collect();
            Some((stream::iter(page), next))
        });
        pages.flatten()
    }

    /// Returns the events of a job that streams since `after`, without waiting. Returns an empty
    /// list if events cannot be read now: the result is in the store.
    pub async fn events_after(&self, id: JobId, after: EventId) -> Vec<(EventId, JobEvent)> {
        self.events.read_events(id, after, Duration::ZERO).await.unwrap_or_else(|error| {
            tracing::debug!(%error, "events not read");
            Vec::new()
        })
    }

    /// Returns a reader of the events of a job that streams, from the first one after `after` on.
    pub fn follow(&self, id: JobId, after: EventId) -> EventFollower {
        EventFollower::new(self.clone(), id, after)
    }

    /// Returns the events that arrive within [`EVENT_WAIT`], and the id of the last.
    async fn next_events(&self, id: JobId, after: EventId) -> (EventId, Vec<JobEvent>) {
        match self.events.read_events(id, after, EVENT_WAIT).await {
            Ok(page) => {
                let last = page.last().map_or(after, |(id, _)| *id);
                (last, page.into_iter().map(|(_, event)| event).collect())
            }
            Err(error) => {
                tracing::debug!(%error, "events not read, trying again");
                sleep(EVENT_RETRY).await;
                (after, Vec::new())
            }
        }
    }

    /// Waits until all of `ids` are finished, or for `limit`, and calls `progress` with every
    /// change. Retries while the store is down.
    pub async fn wait_all(
        &self,
        ids: &[JobId],
        limit: Duration,
        mut progress: impl FnMut(Waited),
    ) -> Waited {
        let now = Instant::now();
        // A limit beyond the clock's range never ends the wait.
        let until = now.checked_add(limit).unwrap_or_else(|| now + Duration::from_secs(1 << 32));
        let mut waited = Waited { total: ids.len(), ..Waited::default() };
        let mut results = Box::pin(self.results(ids.to_vec()));
        while let Ok(Some(result)) = tokio::time::timeout_at(until, results.next()).await {
            match result {
                Ok(ended) if ended.state == JobState::Completed => waited.completed += 1,
                Ok(_) => waited.failed += 1,
                Err(error) => {
                    tracing::warn!(%error, "waiting for results");
                    continue;
                }
            }
            progress(waited);
        }
        waited
    }
}
