//! [`StoredAnswers`]: the output of a batch in the order of its lines, with what their rows carried.
//!
//! The files of answers and of errors are each in the order of the input, and a line is in one of them. So both are read beside the
//! input, by the names of the lines.

use std::{
    io::{self, BufRead as _, Lines},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use serde::Deserialize;
use serde_json::{Map, Value};
use tritmill_client::{LineReader, RawLine};
use tritmill_data::{Answered, Answers};

use super::lines::Chunks;
use crate::{file_contents::FileContents, store::FileId};

/// The output of a batch. It is read on a thread without tasks.
pub(super) struct StoredAnswers {
    pub files: FileContents,
    pub input: FileId,
    pub answers: Option<FileId>,
    pub errors: Option<FileId>,
    /// Whether it is not wanted any more.
    pub stop: Arc<AtomicBool>,
}

/// A file of output lines, of which the next one is known.
struct Output {
    lines: Option<Lines<Chunks>>,
    next: Option<Value>,
}

impl Output {
    fn open(files: &FileContents, file: Option<FileId>) -> io::Result<Self> {
        let lines = file.map(|file| Chunks::at(files.clone(), file, 0).lines());
        let mut output = Self { lines, next: None };
        output.take()?;
        Ok(output)
    }

    /// Whether the next line has this name.
    fn is_of(&self, name: Option<&str>) -> bool {
        self.next.as_ref().is_some_and(|line| line["custom_id"].as_str() == name)
    }

    /// Returns the next line.
    fn take(&mut self) -> io::Result<Option<Value>> {
        let line = self.lines.as_mut().and_then(Iterator::next).transpose()?;
        let line = line.map(|line| serde_json::from_str(&line)).transpose()?;
        Ok(std::mem::replace(&mut self.next, line))
    }
}

/// Returns the name of an input line, and what its row carried.
fn named(line: &RawLine) -> (Option<String>, Map<String, Value>) {
    // Of a refused line either may be anything.
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Parts {
        custom_id: Value,
        row: Value,
    }
    let Ok(bytes) = &line.content else { return (None, Map::new()) };
    let Parts { custom_id, row } = serde_json::from_slice(bytes).unwrap_or_default();
    let name = custom_id.as_str().map(str::to_owned);
    let carried = if let Value::Object(row) = row { row } else { Map::new() };
    (name, carried)
}

impl Answers for StoredAnswers {
    fn each(&self, each: &mut dyn FnMut(Answered) -> io::Result<()>) -> io::Result<()> {
        let mut input = LineReader::new(Chunks::at(self.files.clone(), self.input, 0));
        let mut answers = Output::open(&self.files, self.answers)?;
        let mut errors = Output::open(&self.files, self.errors)?;
        while let Some(line) = input.next_line()? {
            if self.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("it is not wanted any more"));
            }
            let (name, carried) = named(&line);
            let output = if answers.is_of(name.as_deref()) { &mut answers } else { &mut errors };
            let missing = || io::Error::other(format!("the output has no line {}", line.number));
            each(Answered { line: output.take()?.ok_or_else(missing)?, carried })?;
        }
        Ok(())
    }
}
