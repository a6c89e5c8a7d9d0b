//! What a step of a batch leaves for the next one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tritmill_queue::{Charge, JobState, QueueName, Timestamp, Usage, store::EndMark};

use super::{batches::BatchState, files::FileId};

/// An error in a batch's file, or the error that ended the batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchError {
    /// Code for programs.
    pub code: String,
    /// The line (from 1), if the error is in one.
    pub line: Option<u64>,
    /// Message for people.
    pub message: String,
    /// Name of the invalid field.
    pub param: Option<String>,
}

/// A position in a file of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FilePosition {
    /// Lines before the position.
    pub line: u64,
    /// Bytes before the position.
    pub offset_bytes: u64,
}

/// What the next step of a batch continues from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepState {
    /// Unfinished lines of a batch after another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub making: Option<MakingState>,
    /// Unfinished lines of a batch of which the lines are read elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetching: Option<FetchState>,
    /// An unfinished validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationState>,
    /// Whether the validation ended without errors. The batch is in progress when its tenant has room.
    pub is_valid: bool,
    /// Time at which the numbers of finished lines changed last.
    pub changed_at: Option<Timestamp>,
    /// Time of the next count while lines are being submitted.
    pub count_at: Option<Timestamp>,
    /// Why the database refuses the jobs of lines, by line.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub not_storable: BTreeMap<u32, String>,
    /// How far the jobs that ended have numbers.
    pub numbering: NumberingState,
    /// Unfinished output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assembly: Option<AssemblyState>,
    /// Output that is complete, and yet to be written elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exporting: Option<ExportState>,
    /// Lines behind those that are submitted, of a batch of several queues of which some are full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead: Option<Ahead>,
    /// Whether jobs may be held that a batch in progress must release first.
    pub is_held: bool,
    /// Whether lines that have not begun run with the model that the batch names for its last part.
    pub is_escalated: bool,
    /// Whether a pause holds running jobs as well.
    pub holds_running: bool,
    /// Lines to run again. Each is a pass over the file; the first one is under way.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reruns: Vec<Rerun>,
}

/// How far lines are submitted behind one that waits for its full queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ahead {
    /// The last line that was reached.
    pub line: u64,
    /// Queues of which fewer lines are submitted, by their names, with the last one.
    pub behind: BTreeMap<String, u64>,
}

impl Ahead {
    /// Whether a line of a queue is submitted.
    pub fn has(&self, queue: &QueueName, line: u64) -> bool {
        line <= *self.behind.get(&queue.to_string()).unwrap_or(&self.line)
    }
}

/// Lines that run again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rerun {
    /// Which lines.
    pub lines: RerunLines,
    /// Time of the request: what ended later was run again since, or was not there to be chosen.
    pub at: Timestamp,
    /// The lines after this one were not reached before the pass began, so they run whether they are chosen or not.
    /// `None` before it begins.
    pub reached: Option<u64>,
}

/// Which lines run again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RerunLines {
    /// All that have no answer.
    Unanswered,
    /// All that were cancelled or never reached.
    Cancelled,
    /// These ranges of lines, in ascending order.
    Chosen {
        /// The first and the last line of each.
        ranges: Vec<(u32, u32)>,
        /// Whether a line with an answer runs again as well.
        answered: bool,
    },
}

impl Rerun {
    /// Whether the line of an ended job runs again.
    pub fn has_ended(&self, line: u32, state: JobState, finished_at: Timestamp) -> bool {
        if finished_at > self.at {
            return false;
        }
        let is_answered = state == JobState::Completed;
        match &self.lines {
            RerunLines::Unanswered => !is_answered,
            RerunLines::Cancelled => state == JobState::Cancelled,
            RerunLines::Chosen { ranges, answered } => {
                has_line(ranges, line) && (*answered || !is_answered)
            }
        }
    }

    /// Whether a line without a job runs.
    pub fn has_new(&self, line: u32) -> bool {
        let is_unreached = self.reached.is_none_or(|reached| u64::from(line) > reached);
        is_unreached
            || match &self.lines {
                RerunLines::Unanswered | RerunLines::Cancelled => true,
                RerunLines::Chosen { ranges, .. } => has_line(ranges, line),
            }
    }
}

/// Whether ascending ranges contain a line.
fn has_line(ranges: &[(u32, u32)], line: u32) -> bool {
    let next = ranges.partition_point(|(_, last)| *last < line);
    ranges.get(next).is_some_and(|(first, _)| *first <= line)
}

/// Returns lines as ascending ranges.
pub fn line_ranges(mut lines: Vec<u32>) -> Vec<(u32, u32)> {
    lines.sort_unstable();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for line in lines {
        match ranges.last_mut() {
            Some((_, last)) if line <= last.saturating_add(1) => *last = line,
            _ => ranges.push((line, line)),
        }
    }
    ranges
}

/// How far the jobs of a batch that ended have numbers; the default is that none has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NumberingState {
    /// Where the next pass over the ends begins.
    pub mark: EndMark,
    /// Jobs that have a number, as far as they were seen since the first pass began.
    pub jobs: u64,
    /// Whether the first pass over all ends is done. Until then every job that is found is a new one.
    pub is_caught_up: bool,
}

/// Lines that are being made of those of an earlier batch; the default is the state before the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakingState {
    /// Position in the file of the earlier batch.
    pub read: FilePosition,
    /// Number of lines that were made.
    pub lines: u64,
    /// The file with them, if there are any.
    pub file: Option<OutputPart>,
}

/// Lines that are being read from a source; the default is the state before the first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FetchState {
    /// The file with what was read, if there is something.
    pub file: Option<OutputPart>,
    /// Line ends in it.
    pub lines: u64,
    /// Hash of its pages, in hexadecimal digits: it tells whether a source that is read again is the same.
    pub hash: String,
    /// How often the source had changed while it was read.
    pub changes: u32,
    /// Its failures.
    pub tries: Tries,
}

/// An unfinished validation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationState {
    /// Position up to which lines were checked.
    pub read: FilePosition,
    /// Number of checked lines.
    pub lines: u64,
    /// Number of them that were refused.
    pub refused: u64,
    /// Estimated tokens of the valid ones.
    #[serde(default)]
    pub tokens: u64,
    /// Errors so far.
    pub errors: Vec<BatchError>,
    /// The first named model, and its line.
    pub model: Option<(String, u64)>,
    /// The queues of the models that were named so far, where lines may name several; `None` for those that are not served.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub queues: BTreeMap<String, Option<QueueName>>,
}

/// Unfinished output; the default is output without a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssemblyState {
    /// Position in the input up to which lines were written.
    pub read: FilePosition,
    /// File of the answers, if there are any.
    pub answers: Option<OutputPart>,
    /// File of the errors, if there are any.
    pub errors: Option<OutputPart>,
    /// Number of written answers.
    pub completed: u64,
    /// Number of written errors.
    pub failed: u64,
    /// Tokens of the written answers; `None` if a program without this count wrote some of them.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// What they cost, by currency.
    #[serde(default)]
    pub cost: Vec<Charge>,
    /// Whether a line expired.
    pub overdue: bool,
}

impl Default for AssemblyState {
    fn default() -> Self {
        Self {
            read: FilePosition::default(),
            answers: None,
            errors: None,
            completed: 0,
            failed: 0,
            usage: Some(Usage::default()),
            cost: Vec::new(),
            overdue: false,
        }
    }
}

/// Output that is written elsewhere, beside the files of the batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportState {
    /// The state that the batch enters afterwards.
    pub ends_as: BatchState,
    /// Its failures.
    #[serde(default)]
    pub tries: Tries,
}

/// Failures in a row of what a batch reads or writes elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tries {
    /// Their number.
    pub failures: u32,
    /// Time of the first one.
    pub failing_since: Option<Timestamp>,
}

/// A file that is being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputPart {
    /// The incomplete file.
    pub file: FileId,
    /// Bytes written so far.
    pub size_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rerun_has_the_chosen_lines_that_ended_before_it() {
        let (before, after) = (Timestamp(9), Timestamp(11));
        let rerun = |lines| Rerun { lines, at: Timestamp(10), reached: Some(5) };
        let ranges = line_ranges(vec![9, 4, 3, 3, 7]);
        assert_eq!(ranges, [(3, 4), (7, 7), (9, 9)]);
        let chosen = |answered| rerun(RerunLines::Chosen { ranges: ranges.clone(), answered });
        let (unanswered, cancelled) = (rerun(RerunLines::Unanswered), rerun(RerunLines::Cancelled));
        let has = |rerun: &Rerun, state| rerun.has_ended(3, state, before);
        assert!(has(&unanswered, JobState::Failed) && has(&unanswered, JobState::Expired));
        assert!(has(&unanswered, JobState::Cancelled) && has(&cancelled, JobState::Cancelled));
        assert!(!has(&unanswered, JobState::Completed) && !has(&cancelled, JobState::Failed));
        assert!(has(&chosen(false), JobState::Failed) && !has(&chosen(false), JobState::Completed));
        assert!(has(&chosen(true), JobState::Completed));
        assert!(!chosen(true).has_ended(5, JobState::Failed, before), "it is not chosen");
        assert!(!unanswered.has_ended(3, JobState::Failed, after), "it ended since");
        assert!(chosen(false).has_new(4) && !chosen(false).has_new(5), "as chosen");
        assert!(chosen(false).has_new(6) && cancelled.has_new(5), "never reached");
    }

    #[test]
    fn tokens_of_output_by_an_earlier_release_stay_unknown() {
        let begun = AssemblyState::default();
        assert_eq!(begun.usage, Some(Usage::default()));
        let mut stored = serde_json::to_value(&begun).expect("plain data");
        assert_eq!(serde_json::from_value::<AssemblyState>(stored.clone()).ok(), Some(begun));
        stored.as_object_mut().and_then(|fields| fields.remove("usage")).expect("it is stored");
        let continued: AssemblyState = serde_json::from_value(stored).expect("the older form");
        assert_eq!(continued.usage, None);
        let stored = serde_json::to_value(&continued).expect("plain data");
        assert_eq!(serde_json::from_value::<AssemblyState>(stored).ok(), Some(continued));
    }
}
