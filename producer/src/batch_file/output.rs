//! The output file, a view of the store.
//!
//! The store defines one sequence of lines: refused lines by number, then answers by commit; or, if
//! ordered, all lines by number up to the first without an answer. During a run the sequence only
//! grows at its end. So the file is correct if it is a prefix of the sequence, and it follows the
//! store by appending.
//!
//! A stream gets the sequence from its begin in every run: nothing of it can be read back.

use std::{
    fmt,
    fs::{self, File},
    io::{self, BufReader, Read, Write},
    path::Path,
};

use tritmill_queue::{
    StoreError,
    store::{AnsweredLine, RejectedLine, SqliteStore},
};

use super::{BatchFileError, Notice, Settings, place::Target, with_suffix};
use crate::{answer, request::Refusal};

/// Lines formatted at a time.
const PAGE: u32 = 64;

/// An error without the name of its file.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Failure {
    pub(super) fn at(self, settings: &Settings, store: &Path) -> BatchFileError {
        match self {
            Self::Io(source) => BatchFileError::Output { path: settings.output.clone(), source },
            Self::Store(source) => BatchFileError::Store { path: store.to_owned(), source },
        }
    }
}

/// A position in the sequence.
#[derive(Debug, Clone, Copy)]
enum Position {
    /// After the refused lines up to this number.
    Refused(u64),
    /// After all refused lines and the answers up to this commit.
    Answers(i64),
    /// Ordered: after the lines up to this number.
    InOrder(u64),
}

/// The output and its position in the sequence.
#[derive(Debug)]
pub(super) struct Output {
    target: Target,
    ordered: bool,
    position: Position,
    sink: Option<Sink>,
}

/// What lines are appended to.
enum Sink {
    File(File),
    Stream(Box<dyn Write + Send>),
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::File(_)) { "File" } else { "Stream" })
    }
}

impl Sink {
    fn append(&mut self, lines: &str) -> io::Result<()> {
        match self {
            Self::File(file) => file.write_all(lines.as_bytes()),
            Self::Stream(stream) => {
                stream.write_all(lines.as_bytes())?;
                stream.flush()
            }
        }
    }
}

/// Result of comparing the file with the sequence.
enum Comparison {
    /// The file is a prefix up to this length, then ends or has an incomplete line.
    Prefix { length: u64 },
    /// The file has other lines.
    Differs,
}

impl Output {
    pub(super) fn new(target: Target, ordered: bool) -> Self {
        let position = Self::start(ordered);
        Self { target, ordered, position, sink: None }
    }

    const fn start(ordered: bool) -> Position {
        if ordered { Position::InOrder(0) } else { Position::Refused(0) }
    }

    /// Makes the output equal to the sequence.
    pub(super) async fn catch_up(
        &mut self,
        store: &SqliteStore,
    ) -> Result<Option<Notice>, Failure> {
        self.position = Self::start(self.ordered);
        self.sink = None;
        let path = match self.target.clone() {
            Target::File(path) => path,
            Target::Stream(path) => {
                self.sink = Some(Sink::Stream(Target::open_stream(&path)?));
                self.follow(store).await?;
                return Ok(None);
            }
        };
        let notice = match File::open(&path) {
            Ok(file) => {
                let found = file.metadata()?.len();
                match self.compare(store, file).await? {
                    Comparison::Prefix { length } => {
                        let file = File::options().append(true).open(&path)?;
                        file.set_len(length)?;
                        self.sink = Some(Sink::File(file));
                        let bytes = found - length;
                        (bytes > 0).then_some(Notice::OutputTorn { bytes })
                    }
                    Comparison::Differs => {
                        self.rewrite(&path, store).await?;
                        Some(Notice::OutputRewritten)
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = File::options().create(true).append(true).open(&path)?;
                self.sink = Some(Sink::File(file));
                let answered = !store.answers(0, 1).await?.is_empty();
                answered.then_some(Notice::OutputMissing)
            }
            Err(error) => return Err(error.into()),
        };
        self.follow(store).await?;
        Ok(notice)
    }

    /// Compares file and sequence and sets the position after the last equal line.
    async fn compare(&mut self, store: &SqliteStore, file: File) -> Result<Comparison, Failure> {
        let mut reader = BufReader::with_capacity(1 << 16, file);
        let mut length = 0;
        let mut found = Vec::new();
        loop {
            let lines = page(store, self.position).await?;
            if lines.is_empty() {
                // Beyond the sequence: an incomplete line, or lines that are not in the store.
                found.clear();
                reader.take(1 << 20).read_to_end(&mut found)?;
                return Ok(match found.contains(&b'\n') {
                    true => Comparison::Differs,
                    false => Comparison::Prefix { length },
                });
            }
            for (text, after) in lines {
                let Some(text) = text else {
                    self.position = after;
                    continue;
                };
                found.clear();
                let expected = text.len() as u64;
                reader.by_ref().take(expected).read_to_end(&mut found)?;
                if found == text.as_bytes() {
                    length += expected;
                    self.position = after;
                } else if text.as_bytes().starts_with(&found) {
                    return Ok(Comparison::Prefix { length });
                } else {
                    return Ok(Comparison::Differs);
                }
            }
        }
    }

    /// Writes the whole file to a temporary file, then renames that.
    async fn rewrite(&mut self, path: &Path, store: &SqliteStore) -> Result<(), Failure> {
        let temporary = with_suffix(path, ".tritmill-tmp");
        let file = File::create(&temporary)?;
        self.position = Self::start(self.ordered);
        let mut sink = Sink::File(file.try_clone()?);
        self.position = append(store, self.position, &mut sink).await?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        self.sink = Some(Sink::File(File::options().append(true).open(path)?));
        Ok(())
    }

    /// Appends the committed lines that are missing.
    pub(super) async fn follow(&mut self, store: &SqliteStore) -> Result<(), Failure> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        self.position = append(store, self.position, sink).await?;
        Ok(())
    }

    /// Makes the file durable.
    pub(super) fn sync(&mut self) -> Result<(), Failure> {
        match &self.sink {
            Some(Sink::File(file)) => Ok(file.sync_all()?),
            _ => Ok(()),
        }
    }
}

/// Writes the sequence from `position` to its end and returns the end position.
async fn append(
    store: &SqliteStore,
    mut position: Position,
    sink: &mut Sink,
) -> Result<Position, Failure> {
    loop {
        let lines = page(store, position).await?;
        let Some((_, end)) = lines.last() else { return Ok(position) };
        position = *end;
        let bytes: String = lines.into_iter().filter_map(|(text, _)| text).collect();
        sink.append(&bytes)?;
    }
}

/// Returns the next lines, each with its line end and the position after it; empty at the end. A
/// `None` only moves the position.
async fn page(
    store: &SqliteStore,
    position: Position,
) -> Result<Vec<(Option<String>, Position)>, StoreError> {
    match position {
        Position::Refused(after) => {
            let refused = store.rejected_lines(after, PAGE).await?;
            if refused.is_empty() {
                return Ok(vec![(None, Position::Answers(0))]);
            }
            refused
                .iter()
                .map(|line| Ok((Some(refused_text(line)?), Position::Refused(line.number))))
                .collect()
        }
        Position::Answers(after) => {
            let answers = store.answers(after, PAGE).await?;
            Ok(answers.iter().map(|a| (Some(answer_text(a)), Position::Answers(a.seq))).collect())
        }
        Position::InOrder(after) => store
            .answers_in_order(after, PAGE)
            .await?
            .iter()
            .map(|line| match line {
                Ok(answer) => Ok((Some(answer_text(answer)), Position::InOrder(answer.number))),
                Err(line) => Ok((Some(refused_text(line)?), Position::InOrder(line.number))),
            })
            .collect(),
    }
}

fn answer_text(found: &AnsweredLine) -> String {
    let mut text = answer::line(found);
    text.push('\n');
    text
}

fn refused_text(found: &RejectedLine) -> Result<String, StoreError> {
    let refusal: Refusal = serde_json::from_str(&found.refusal)
        .map_err(|error| StoreError::Damaged { what: "refusal", detail: error.to_string() })?;
    let mut text = answer::refusal_line(&found.key, found.custom_id.as_deref(), &refusal);
    text.push('\n');
    Ok(text)
}
