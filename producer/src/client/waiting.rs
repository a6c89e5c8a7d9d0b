//! Waiting for jobs: their ends as they come, and the text of those that stream.

use std::{collections::HashSet, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use tokio::time::{Instant, sleep};
use tritmill_queue::{EventId, FinishedJob, JobEvent, JobId, JobState};

use super::{Client, ClientError};

/// Between two looks at the store: grows from the first to the last while nothing ends.
const POLL_FIRST: Duration = Duration::from_millis(10);
const POLL_LAST: Duration = Duration::from_millis(500);

/// Wait for the next event before the store is asked whether the job is over.
const EVENT_WAIT: Duration = Duration::from_secs(2);
/// Wait after a failure of Redis.
const EVENT_RETRY: Duration = Duration::from_millis(500);

/// How many of a set of jobs are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waited {
    /// Answered.
    pub completed: usize,
    /// Over without an answer.
    pub failed: usize,
    /// All of the set.
    pub total: usize,
}

impl Waited {
    /// Jobs that are over.
    pub fn done(&self) -> usize {
        self.completed + self.failed
    }
}

impl Client {
    /// Ends of jobs as they come, until all of `ids` are over. An error does not end the stream:
    /// the next item is tried again.
    pub fn results(
        &self,
        ids: Vec<JobId>,
    ) -> impl Stream<Item = Result<FinishedJob, ClientError>> + '_ {
        let waiting: HashSet<JobId> = ids.into_iter().collect();
        let state = (waiting, POLL_FIRST);
        let pages = stream::unfold(state, async move |(mut waiting, mut wait)| {
            if waiting.is_empty() {
                return None;
            }
            sleep(wait).await;
            let ids: Vec<JobId> = waiting.iter().copied().collect();
            let page: Vec<Result<FinishedJob, ClientError>> = match self.ended(&ids).await {
                Ok(ended) => ended.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            };
            wait = if page.is_empty() { (wait * 2).min(POLL_LAST) } else { POLL_FIRST };
            for ended in page.iter().flatten() {
                waiting.remove(&ended.id);
            }
            Some((stream::iter(page), (waiting, wait)))
        });
        pages.flatten()
    }

    /// What happens to a job that streams: from its start, however late the call, to its end. An
    /// outage of Redis is waited out; the end is then taken from the store. A client that does not
    /// hear events gets the end alone.
    pub fn subscribe(&self, id: JobId) -> impl Stream<Item = Result<JobEvent, ClientError>> + '_ {
        let start = Some(EventId::default());
        let pages = stream::unfold(start, move |after| async move {
            let after = after?;
            let (last, mut events) = self.heard(id, after).await;
            let is_end = |event: &JobEvent| matches!(event, JobEvent::Finished { .. });
            if events.is_empty() {
                match self.poll(id).await {
                    Ok(state) if state.is_terminal() => events.push(JobEvent::Finished { state }),
                    Ok(_) => {}
                    Err(error) => {
                        let over = matches!(error, ClientError::Unknown(_));
                        let page = stream::iter(vec![Err(error)]);
                        return Some((page, (!over).then_some(last)));
                    }
                }
            }
            let next = (!events.iter().any(is_end)).then_some(last);
            let page: Vec<Result<JobEvent, ClientError>> = events.into_iter().map(Ok).collect();
            Some((stream::iter(page), next))
        });
        pages.flatten()
    }

    /// What happened to a job that streams since `after`, without waiting. A client that does not
    /// hear events, or cannot reach them now, hears nothing: the end is in the store.
    pub async fn events_after(&self, id: JobId, after: EventId) -> Vec<(EventId, JobEvent)> {
        let Some(events) = &self.events else { return Vec::new() };
        events.read_events(id, after, Duration::ZERO).await.unwrap_or_else(|error| {
            tracing::debug!(%error, "events not read");
            Vec::new()
        })
    }

    /// The next events, if any came within [`EVENT_WAIT`], and where they end.
    async fn heard(&self, id: JobId, after: EventId) -> (EventId, Vec<JobEvent>) {
        let Some(events) = &self.events else {
            sleep(EVENT_RETRY).await;
            return (after, Vec::new());
        };
        match events.read_events(id, after, EVENT_WAIT).await {
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

    /// Waits until all of `ids` are over, or `limit` has passed; tells `progress` of every change.
    /// Outages of the store are waited out.
    pub async fn wait_all(
        &self,
        ids: &[JobId],
        limit: Duration,
        mut progress: impl FnMut(Waited),
    ) -> Waited {
        let now = Instant::now();
        // A limit beyond the clock is none.
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
