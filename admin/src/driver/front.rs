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
            let full: HashSet<String> = self.full.keys().map(QueueName::to_string).collect();
            ahead.behind.retain(|queue, line| {
                // A queue that has room again catches up.
                let reached = if full.contains(queue) { *line } else { position.line.max(*line) };
                *line = reached;
                reached < ahead.line
            });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::batches::MIXED;

    const RETRY: Duration = Duration::from_secs(2);

    fn queue(model: &str) -> QueueName {
        QueueName { model: model.to_owned(), format: "i2_s".to_owned() }
    }

    /// Submits lines, of a model each, from the batch's position on while their queues have room. Returns whether some wait.
    fn step(
        batch: &mut Batch,
        models: &[&str],
        room: &mut HashMap<&str, usize>,
        submitted: &mut Vec<(String, u64)>,
    ) -> Option<Duration> {
        let mut front = Front::default();
        let from = batch.submitted.line;
        for line in from + 1..=models.len() as u64 {
            let model = models[line as usize - 1];
            let position = FilePosition { line, offset_bytes: 10 * line };
            if front.is_next(batch, &queue(model), line) {
                let left = room.get_mut(model).expect("a queue");
                if *left == 0 {
                    if !front.wait(batch, (&queue(model), line), RETRY) {
                        break;
                    }
                    continue;
                }
                *left -= 1;
                submitted.push((model.to_owned(), line));
            }
            front.reach(batch, position);
            // What a step leaves is all that the next one knows.
            *batch = serde_json::from_str(&serde_json::to_string(batch).expect("a document"))
                .expect("the same batch");
        }
        front.retry()
    }

    fn batch_of(models: &[&str]) -> Batch {
        let mut batch = Batch::empty(MIXED);
        batch.set_queues(models.iter().map(|model| ((*model).to_owned(), queue(model))));
        batch
    }

    #[test]
    fn lines_of_other_queues_pass_those_that_wait_and_each_is_submitted_once() {
        let models = ["a", "b", "a", "a", "b", "c", "a", "b", "a", "c"];
        let mut batch = batch_of(&["a", "b", "c"]);
        let (mut room, mut submitted) = (HashMap::from([("a", 1), ("b", 9), ("c", 1)]), Vec::new());
        assert_eq!(step(&mut batch, &models, &mut room, &mut submitted), Some(RETRY));
        let lines: Vec<u64> = submitted.iter().map(|(_, line)| *line).collect();
        assert_eq!(lines, [1, 2, 5, 6, 8], "the rest waits");
        assert_eq!(batch.submitted.line, 2);
        // One more of each, then the rest.
        room = HashMap::from([("a", 1), ("b", 1), ("c", 0)]);
        assert!(step(&mut batch, &models, &mut room, &mut submitted).is_some());
        assert_eq!(batch.submitted.line, 3);
        room = HashMap::from([("a", 9), ("b", 9), ("c", 9)]);
        assert_eq!(step(&mut batch, &models, &mut room, &mut submitted), None);
        assert_eq!((batch.submitted.line, &batch.steps.ahead), (10, &None));
        let of_model = |model: &str| -> Vec<u64> {
            submitted.iter().filter(|(of, _)| of == model).map(|(_, line)| *line).collect()
        };
        assert_eq!(of_model("a"), [1, 3, 4, 7, 9]);
        assert_eq!(of_model("b"), [2, 5, 8]);
        assert_eq!(of_model("c"), [6, 10]);
    }

    #[test]
    fn a_queue_with_room_again_catches_up_while_another_waits() {
        let models = ["b", "a", "c", "a", "a"];
        let mut batch = batch_of(&["a", "b", "c"]);
        let mut submitted = Vec::new();
        for room_of_a in [0, 2, 0, 9, 9] {
            let mut room = HashMap::from([("a", room_of_a), ("b", 0), ("c", 9)]);
            assert!(step(&mut batch, &models, &mut room, &mut submitted).is_some());
        }
        let lines: Vec<u64> = submitted.iter().map(|(_, line)| *line).collect();
        assert_eq!(lines, [3, 2, 4, 5], "each once");
        let mut room = HashMap::from([("a", 0), ("b", 9), ("c", 0)]);
        assert_eq!(step(&mut batch, &models, &mut room, &mut submitted), None);
        assert_eq!((submitted.len(), &batch.steps.ahead), (5, &None));
    }

    #[test]
    fn a_step_ends_when_no_queue_has_room_or_it_is_far_ahead() {
        let mut batch = batch_of(&["a", "b"]);
        let mut front = Front::default();
        assert!(front.wait(&mut batch, (&queue("a"), 1), RETRY));
        let at = |line| FilePosition { line, offset_bytes: 0 };
        assert_eq!(front.is_far(at(LINES_MAX - 1)), None);
        assert_eq!(front.is_far(at(LINES_MAX)), Some(RETRY));
        assert_eq!(front.is_far(FilePosition { line: 2, offset_bytes: BYTES_MAX }), Some(RETRY));
        assert!(!front.wait(&mut batch, (&queue("b"), 2), RETRY / 2));
        assert_eq!(front.retry(), Some(RETRY / 2));
        let mut alone = batch_of(&["a"]);
        assert!(!Front::default().wait(&mut alone, (&queue("a"), 1), RETRY), "one queue");
    }
}
