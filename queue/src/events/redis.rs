//! Events of jobs in Redis.
//!
//! One stream per job. Jobs are spread over [`BUCKETS`] buckets by their id; the keys of a bucket share a
//! cluster slot, `tm:events:{BUCKET}`, and the streams of each bucket have a cap in number and bytes. So the cap
//! of the whole Redis is [`EventLimits`], whatever the number of queues. A script appends events, sets the
//! stream's expiry and counts, in one step: a stream without an expiry cannot remain. Counts of streams that
//! have expired are taken back by the next script of their bucket, or expire with the bucket's last stream.
//!
//! Beyond the cap a job's events are dropped and counted: none if its stream cannot begin, or those after
//! the first that does not fit until its next attempt, so that a subscriber never sees text with a gap. The
//! end of a stream always fits.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use redis::{RedisResult, streams::StreamReadReply};

use super::{EventId, Events, JobEvent};
use crate::{
    dispatch::{
        BLOCK_MAX, Connections, DispatchError, DispatchStats,
        scripts::{FREEING, GROWING, Script},
        unavailable,
    },
    job::JobId,
    wire,
};

/// Number of buckets, a power of two.
const BUCKETS: u8 = 64;
/// Maximum number of events of one read.
const READ_MAX: usize = 256;
/// Maximum number of events of one script.
const CHUNK: usize = 256;
/// Longest time that a stream is kept: a year.
const KEPT_MAX_MS: u64 = 365 * 86_400_000;

/// Refused when Redis's memory is full.
static PUBLISH: LazyLock<Script> =
    LazyLock::new(|| Script::from_parts(&[GROWING, include_str!("redis/publish.lua")]));
/// The same when Redis's memory is full: only for ends, which free memory.
static END: LazyLock<Script> =
    LazyLock::new(|| Script::from_parts(&[FREEING, include_str!("redis/publish.lua")]));

/// Limits of all event streams in one Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventLimits {
    /// Maximum number of streams, expired ones excluded.
    pub streams: u64,
    /// Maximum size of all streams, in bytes of memory.
    pub bytes: u64,
    /// Maximum size of one stream, in bytes of memory.
    pub stream_bytes: u64,
    /// Maximum number of events of one stream.
    pub stream_events: u64,
    /// How long the stream of an unfinished job is kept after its last event.
    pub running: Duration,
    /// How long the stream of a finished job is kept.
    pub finished: Duration,
}

impl Default for EventLimits {
    /// 65,536 streams with 256 MiB together.
    fn default() -> Self {
        Self {
            streams: 1 << 16,
            bytes: 256 << 20,
            stream_bytes: 1 << 20,
            stream_events: 16 << 10,
            running: Duration::from_secs(15 * 60),
            finished: Duration::from_secs(60),
        }
    }
}

/// Events of jobs in Redis.
#[derive(Debug, Clone)]
pub struct RedisEvents {
    connections: Arc<Connections>,
    limits: EventLimits,
    /// Shared with the dispatcher.
    stats: Arc<Mutex<DispatchStats>>,
}

/// Returns the keys of a job's stream and of its bucket's ends and sizes.
fn keys(job: JobId) -> [String; 3] {
    let bucket = job.as_bytes()[15] % BUCKETS;
    let prefix = format!("tm:events:{{{bucket}}}");
    [format!("{prefix}:{job}"), format!("{prefix}:ends"), format!("{prefix}:sizes")]
}

/// Returns the kind of an event for `publish.lua`.
fn kind(event: &JobEvent) -> &'static str {
    match event {
        JobEvent::Queued | JobEvent::Started => "start",
        JobEvent::Call { .. } | JobEvent::Delta { .. } => "text",
        JobEvent::Finished { .. } => "end",
    }
}

impl RedisEvents {
    pub(crate) fn new(connections: Arc<Connections>, stats: Arc<Mutex<DispatchStats>>) -> Self {
        Self { connections, limits: EventLimits::default(), stats }
    }

    /// Replaces the limits. All publishers of a Redis should have the same.
    #[must_use]
    pub fn with_limits(self, limits: EventLimits) -> Self {
        Self { limits, ..self }
    }

    /// Appends events to a job's stream, in order. Events beyond the limits are dropped and counted.
    /// Callers may ignore a failure.
    pub async fn publish(&self, job: JobId, events: &[JobEvent]) -> Result<(), DispatchError> {
        for chunk in events.chunks(CHUNK) {
            let appended = match self.append(&PUBLISH, job, chunk).await {
                Err(error) if error.code() == Some("OOM") => {
                    // Without its end the stream would be kept as that of a running job.
                    let is_end = |event: &&JobEvent| matches!(event, JobEvent::Finished { .. });
                    let ends: Vec<JobEvent> = chunk.iter().filter(is_end).cloned().collect();
                    self.count_dropped((chunk.len() - ends.len()) as u64);
                    if ends.is_empty() { Err(error) } else { self.append(&END, job, &ends).await }
                }
                appended => appended,
            };
            self.count_dropped(appended.map_err(unavailable)?);
        }
        Ok(())
    }

    fn count_dropped(&self, count: u64) {
        self.stats.lock().events_dropped += count;
    }

    /// Runs a script with these events; returns how many it dropped.
    async fn append(&self, script: &Script, job: JobId, events: &[JobEvent]) -> RedisResult<u64> {
        self.append_to(&keys(job), script, job, events).await
    }

    /// Runs a script with these events and keys.
    async fn append_to(
        &self,
        keys: &[String],
        script: &Script,
        job: JobId,
        events: &[JobEvent],
    ) -> RedisResult<u64> {
        let EventLimits { streams, bytes, stream_bytes, stream_events, running, finished } =
            self.limits;
        let kept = [running, finished]
            .map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).clamp(1, KEPT_MAX_MS));
        let of_bucket = [streams, bytes].map(|all| (all / u64::from(BUCKETS)).max(1));
        let numbers = kept.into_iter().chain(of_bucket).chain([stream_bytes, stream_events]);
        let mut arguments: Vec<Vec<u8>> = vec![job.to_string().into_bytes()];
        arguments.extend(numbers.map(|number| number.to_string().into_bytes()));
        for event in events {
            arguments.push(kind(event).into());
            arguments.push(wire::encode(event));
        }
        self.connections.run_on(script, keys, &arguments).await
    }

    /// Appends an event and reads it, in keys of its own that it deletes: checks what Redis allows.
    pub(crate) async fn check(&self, job: JobId) -> Result<(), DispatchError> {
        let keys = ["", ":ends", ":sizes"].map(|part| format!("tm:events:{{check-{job}}}{part}"));
        let used = async {
            let connections = &self.connections;
            self.append_to(&keys, &PUBLISH, job, &[JobEvent::Started]).await?;
            let mut read = redis::cmd("XREAD");
            read.arg("BLOCK").arg(1).arg("STREAMS").arg(&keys[0]).arg("0");
            connections.block::<redis::Value>(&read).await?;
            let mut delete = redis::cmd("DEL");
            delete.arg(&keys);
            connections.query::<redis::Value>(&delete).await.map(drop)
        };
        used.await.map_err(unavailable)
    }

    /// Returns a job's events after `after`, oldest first; waits up to `wait` for the first. Entries
    /// that are not events are skipped.
    pub async fn read_events(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<Vec<(EventId, JobEvent)>, DispatchError> {
        let started = std::time::Instant::now();
        let mut after = after;
        loop {
            let left = wait.saturating_sub(started.elapsed());
            let (last, events) = self.read(job, after, left).await?;
            if !events.is_empty() || (left.is_zero() && last == after) {
                return Ok(events);
            }
            after = last;
        }
    }

    /// One read: the last id seen, and the decoded events.
    async fn read(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<(EventId, Vec<(EventId, JobEvent)>), DispatchError> {
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(READ_MAX);
        if !wait.is_zero() {
            let ms = wait.min(BLOCK_MAX).as_millis().max(1);
            command.arg("BLOCK").arg(u64::try_from(ms).unwrap_or(1));
        }
        let [stream, ..] = keys(job);
        command.arg("STREAMS").arg(stream).arg(after.to_string());
        let reply: Result<Option<StreamReadReply>, _> = match wait.is_zero() {
            true => self.connections.query(&command).await,
            false => self.connections.block(&command).await,
        };
        let (mut last, mut events) = (after, Vec::new());
        let reply = reply.map_err(unavailable)?;
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            let Ok(id) = entry.id.parse::<EventId>() else { continue };
            last = id;
            let bytes: Option<Vec<u8>> = entry.get("event");
            match bytes.map(|bytes| wire::decode(&bytes)) {
                Some(Ok(event)) => events.push((id, event)),
                _ => tracing::warn!(%job, %id, "skipped an entry that is not an event"),
            }
        }
        Ok((last, events))
    }
}

#[async_trait]
impl Events for RedisEvents {
    async fn publish(&self, job: JobId, events: &[JobEvent]) -> Result<(), DispatchError> {
        Self::publish(self, job, events).await
    }

    async fn read_events(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<Vec<(EventId, JobEvent)>, DispatchError> {
        Self::read_events(self, job, after, wait).await
    }
}
