//! Jobs and their entries in one step, and how a submission is spelled for its script.

use std::collections::HashSet;

use futures_util::{FutureExt as _, StreamExt as _, TryStreamExt as _, future::BoxFuture, stream};

use super::{Arguments, CHUNK, RedisStore, record, scripts};
use crate::{
    dispatch::{BacklogLimit, DispatchError, keys, refusal},
    job::{Job, Timestamp},
    store::StoreError,
};

/// Chunks on their way at a time: the next is encoded while Redis takes one.
const CHUNKS_AHEAD: usize = 2;
/// Jobs that were not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// The queue is full, or Redis cannot be reached.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// They cannot be kept here.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RedisStore {
    /// Submits jobs and adds their entries to the dispatcher, one script for each chunk of some
    /// hundreds. Known ids stay as they are. Jobs that are scheduled get their entry when they are
    /// due, from a reconciler.
    ///
    /// # Errors
    /// [`AcceptError`], with [`DispatchError::Busy`] over the queue's bound. Of several chunks some
    /// may be accepted, and the call may be repeated.
    pub async fn accept(&self, jobs: &[Job]) -> Result<(), AcceptError> {
        let chunks: Vec<BoxFuture<'_, _>> =
            jobs.chunks(CHUNK).map(|chunk| self.accept_chunk(chunk).boxed()).collect();
        stream::iter(chunks).buffered(CHUNKS_AHEAD).try_collect().await
    }

    async fn accept_chunk(&self, jobs: &[Job]) -> Result<(), AcceptError> {
        let arguments = self.submission(jobs, Some(self.limit))?;
        let run = self.connections.run_again(&scripts::SUBMIT, &self.prefix, &arguments.0);
        let (added, which, retry_ms): (i64, u8, u64) =
            run.await.map_err(|error| refusal(&self.queue, error))?;
        if added < 0 {
            return Err(self.limit.busy(&self.queue, which, retry_ms).into());
        }
        Ok(())
    }

    /// The arguments of `submit.lua`; without bounds it adds no entries.
    pub(super) fn submission(
        &self,
        jobs: &[Job],
        bounds: Option<BacklogLimit>,
    ) -> Result<Arguments, StoreError> {
        let mut arguments = self.arguments();
        arguments.push(bounds.map_or_else(String::new, |limit| limit.entries.to_string()));
        arguments.push(bounds.map_or_else(String::new, |limit| limit.tokens.to_string()));
        let mut seen = HashSet::with_capacity(jobs.len());
        for job in jobs.iter().filter(|job| seen.insert(job.id)) {
            if job.queue != self.queue {
                return Err(StoreError::OtherQueue { job: job.id, queue: self.queue.clone() });
            }
            let place = keys::place(job.priority, &job.tenant);
            arguments.number(job.id);
            arguments.push(record::encode(job, &place, bounds.is_some())?);
            arguments.push(place);
            arguments.number(job.cost());
            arguments.push(match (job.run_at, job.expires_at) {
                (None, None) => String::new(),
                (run_at, expires_at) => [run_at, expires_at].map(time).join(","),
            });
        }
        Ok(arguments)
    }
}

fn time(time: Option<Timestamp>) -> String {
    time.map_or_else(String::new, |time| record::exact(time).to_string())
}
