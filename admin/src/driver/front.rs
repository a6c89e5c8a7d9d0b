//! How far the lines of a batch are submitted while some of its queues are full: lines of other queues do not wait for theirs.
//!
//! The position of the batch stays before the first line that waits. Every step reads on from there, passes over what is submitted
//! ([`Ahead`]), and goes on with the queues that have room, up to a number of lines and bytes behind the position.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tritmill_queue::QueueName;

use crate::store::{batches::Batch, step_state::FilePosition};

/// Lines and bytes behind the first line that waits: half of what a step reads, so that it comes to what is not submitted.
const LINES_MAX: u64 = 10_000;
const BYTES_MAX: u64 = 4 << 20;

/// The queues that have no room in this step.
#[derive(Debug, Default)]
pub(super) struct Front {
    full: HashMap<QueueName, Duration>,
    /// The position before the first line that waits.
    first: Option<FilePosition>,
}

impl Front {
    /// Whether a line's job is to be submitted now: it is not yet, and its queue is not known to be full.
    pub fn is_next(&self, batch: &Batch, queue: &QueueName, line: u64) -> bool {
        let is_ahead = batch.steps.ahead.as_ref().is_some_and(|ahead| ahead.has(queue, line));
        !is_ahead && !self.full.contains_key(queue)
    }

    /// Notes that the queue of a line is full. Returns whether other queues of the batch may have room.
    pub fn wait(
        &mut self,
        batch: &mut Batch,
        (queue, line): (&QueueName, u64),
        retry: Duration,
    ) -> bool {
        self.full.insert(queue.clone(), retry);
        self.first.get_or_insert(batch.submitted);
        let before = line.saturating_sub(1);
        let ahead = batch.steps.ahead.get_or_insert_default();
        ahead.line = ahead.line.max(before);
        ahead.behind.insert(queue.to_string(), before);
        let queues: HashSet<&QueueName> = batch.queues.values().collect();
        self.full.len() < queues.len()
    }

    /// Notes that all lines up to a position are submitted, but for those that wait.
    pub fn reach(&self, batch: &mut Batch, position: FilePosition) {
        if self.first.is_some() {
            let ahead = batch.steps.ahead.get_or_insert_default();
            ahead.line = ahead.line.max(position.line);
            return;
        }
        batch.submitted = position;
        if batch.steps.ahead.as_ref().is_some_and(|ahead| ahead.line <= position.line) {
            batch.steps.ahead = None;
        }
    }

    /// Returns the time to wait before the next step, if lines wait.
    pub fn retry(&self) -> Option<Duration> {
        self.full.values().min().copied()
    }

    /// Returns the same once enough lines behind the first one that waits were read.
    pub fn is_far(&self, read: FilePosition) -> Option<Duration> {
        let FilePosition { line, offset_bytes } = self.first?;
        let is_far = read.line.saturating_sub(line) >= LINES_MAX
            || read.offset_bytes.saturating_sub(offset_bytes) >= BYTES_MAX;
        self.retry().filter(|_| is_far)
    }
}
