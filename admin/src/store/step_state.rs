//! What a step of a batch leaves for the next one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tritmill_queue::{Timestamp, Usage};

use super::files::FileId;

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
    /// Unfinished output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assembly: Option<AssemblyState>,
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
    /// Errors so far.
    pub errors: Vec<BatchError>,
    /// The first named model, and its line.
    pub model: Option<(String, u64)>,
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
            overdue: false,
        }
    }
}

/// An output file that is being written.
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
