//! [`Output`]: the two output files, continued from step to step.

use std::sync::Arc;

use tritmill_queue::StoreError;

use super::super::appended::{Appended, NewFile, Placed};
use crate::{
    file_contents::FileContents,
    store::{
        Batch, FrontStore, batch_ends::LineEnd, files::FilePurpose, step_state::AssemblyState,
    },
};

/// The two output files with their counts, and the bytes that a step adds.
#[derive(Default)]
pub(super) struct Output {
    /// State after the lines that were added.
    pub state: AssemblyState,
    /// Bytes that were added.
    pub written_bytes: u64,
    /// Lines that were added and had no number.
    pub ends: Vec<LineEnd>,
    answers: Appended,
    errors: Appended,
}

impl Output {
    /// Continues the output of a batch, or begins it. If a file of it was swept, because no step was done for a
    /// long time, it begins again.
    pub async fn open(files: &FileContents, batch: &Batch) -> Result<Self, StoreError> {
        let Some(state) = batch.steps.assembly.clone() else { return Ok(Self::default()) };
        let opened = (
            Appended::open(files, state.answers).await?,
            Appended::open(files, state.errors).await?,
        );
        let (Some(answers), Some(errors)) = opened else {
            tracing::warn!(batch = %batch.id, "unfinished output was swept, writing it again");
            return Ok(Self::default());
        };
        Ok(Self { state, written_bytes: 0, ends: Vec::new(), answers, errors })
    }

    /// Appends a line to one of the files.
    pub async fn write_line(
        &mut self,
        store: &Arc<dyn FrontStore>,
        batch: &Batch,
        is_answer: bool,
        line: &str,
    ) -> Result<(), StoreError> {
        let state = &mut self.state;
        let (part, added, count, kind) = match is_answer {
            true => (&mut state.answers, &mut self.answers, &mut state.completed, "output"),
            false => (&mut state.errors, &mut self.errors, &mut state.failed, "error"),
        };
        let new = NewFile { batch, purpose: FilePurpose::BatchOutput, kind };
        self.written_bytes += added.write_line(store, part, new, line).await?;
        *count += 1;
        Ok(())
    }

    /// Returns the chunks with what was added, after their objects are written, if they have any.
    pub async fn place(&self, files: &FileContents) -> Result<Vec<Placed<'_>>, StoreError> {
        let mut placed = Vec::new();
        self.answers.place(files, self.state.answers, &mut placed).await?;
        self.errors.place(files, self.state.errors, &mut placed).await?;
        Ok(placed)
    }
}
