//! Submits jobs together with their entries, and encodes a submission for its script.

use std::collections::{HashMap, HashSet};

use futures_util::{FutureExt as _, StreamExt as _, TryStreamExt as _, future::BoxFuture, stream};

use super::{Arguments, CHUNK, RedisStore, record, scripts};
use crate::{
    dispatch::{BacklogLimit, DispatchError, keys, refusal},
    job::{Job, Timestamp},
    prefix_key,
    store::StoreError,
};

/// Chunks sent at a time: the next is encoded while Redis handles one.
const CHUNKS_AHEAD: usize = 2;

/// Jobs were not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// The queue is full, or Redis cannot be reached.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The store cannot keep the jobs.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RedisStore {
    /// Submits jobs and adds their entries to the dispatcher, with one script per chunk of some hundred
    /// jobs. Jobs with known ids stay as they are. A reconciler adds the entries of scheduled jobs when
    /// they are due.
    ///
    /// # Errors
    /// [`DispatchError::Busy`] if the queue is full. Some of several chunks may be accepted; the call can
    /// be repeated.
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

    /// Returns the arguments of `submit.lua`; without limits it adds no entries.
    pub(super) fn submission(
        &self,
        jobs: &[Job],
        bounds: Option<BacklogLimit>,
    ) -> Result<Arguments, StoreError> {
        let mut arguments = self.arguments();
        arguments.push(bounds.map_or_else(String::new, |limit| limit.entries.to_string()));
        arguments.push(bounds.map_or_else(String::new, |limit| limit.tokens.to_string()));
        let groups = self.by_place(jobs)?;
        let timed: Vec<(usize, &Job)> = (1..)
            .zip(groups.iter().flat_map(|group| &group.jobs).copied())
            .filter(|(_, job)| job.run_at.is_some() || job.expires_at.is_some())
            .collect();
        arguments.number(timed.len());
        for (number, job) in timed {
            arguments.number(number);
            arguments.push(time(job.run_at));
            arguments.push(time(job.expires_at));
        }
        for Group { place, jobs } in groups {
            arguments.push(place.as_str());
            arguments.number(jobs.len());
            arguments.number(jobs.iter().map(|job| u64::from(job.cost())).sum::<u64>());
            for job in jobs {
                arguments.push(format!("{}:{}", job.id, job.cost()));
                arguments.push(record::encode(job, &place, bounds.is_some())?);
            }
        }
        Ok(arguments)
    }

    /// Groups jobs by place, each id once. Those with prompts that begin alike follow each other.
    fn by_place<'a>(&self, jobs: &'a [Job]) -> Result<Vec<Group<'a>>, StoreError> {
        let (mut groups, mut known): (Vec<Group<'a>>, HashMap<_, usize>) = Default::default();
        let mut seen = HashSet::with_capacity(jobs.len());
        for job in jobs.iter().filter(|job| seen.insert(job.id)) {
            if job.queue != self.queue {
                return Err(StoreError::OtherQueue { job: job.id, queue: self.queue.clone() });
            }
            let index = *known.entry((job.priority, &job.tenant)).or_insert_with(|| {
                let place = keys::place(job.priority, &job.tenant);
                groups.push(Group { place, jobs: Vec::new() });
                groups.len() - 1
            });
            groups[index].jobs.push(job);
        }
        for group in &mut groups {
            group.jobs.sort_by_cached_key(|job| prefix_key::order(&job.prompt));
        }
        Ok(groups)
    }
}

/// Jobs of one place.
struct Group<'a> {
    place: String,
    jobs: Vec<&'a Job>,
}

fn time(time: Option<Timestamp>) -> String {
    time.map_or_else(String::new, |time| record::exact(time).to_string())
}
