//! The output file as a view of the store.
//!
//! The store defines one sequence of lines: refused lines by number, then answers by commit; or,
//! ordered, everything by number up to the first line without an answer. It only ever grows at its
//! end while a run lasts, so the file is right when it is a prefix of the sequence, and following
//! the store is appending.

use std::{
    fs::{self, File},
    io::{self, BufReader, Read, Write},
    path::{Path, PathBuf},
};

use tritmill_queue::{
    StoreError,
    store::{AnsweredLine, RejectedLine, SqliteStore},
};

use super::{BatchFileError, Notice, Settings, with_suffix};
use crate::{answer, request::Refusal};

/// Lines rendered at a time.
const PAGE: u32 = 64;

/// What went wrong, before it is said of which file.
#[derive(Debug)]
pub(super) enum Failure {
    Io(io::Error),
    Store(StoreError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Failure {
    pub(super) fn at(self, settings: &Settings, store: &Path) -> BatchFileError {
        match self {
            Self::Io(source) => BatchFileError::Output { path: settings.output.clone(), source },
            Self::Store(source) => BatchFileError::Store { path: store.to_owned(), source },
        }
    }
}

/// How far the sequence was read.
#[derive(Debug, Clone, Copy)]
enum Position {
    /// Refused lines up to this number.
    Refused(u64),
    /// All refused lines, and answers up to this commit.
    Answers(i64),
    /// Ordered: lines up to this number.
    InOrder(u64),
}

/// The output file and how far it follows the store.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    ordered: bool,
    position: Position,
    file: Option<File>,
}

/// How the file compares with the sequence.
enum Comparison {
    /// It is a prefix up to this length; then comes a torn line, or nothing.
    Prefix { length: u64 },
    /// It says something else.
    Differs,
}

impl Output {
    pub(super) fn new(path: PathBuf, ordered: bool) -> Self {
        let position = Self::start(ordered);
        Self { path, ordered, position, file: None }
    }

    const fn start(ordered: bool) -> Position {
        if ordered { Position::InOrder(0) } else { Position::Refused(0) }
    }

    /// Makes the file what the store says it is.
    pub(super) async fn catch_up(
        &mut self,
        store: &SqliteStore,
    ) -> Result<Option<Notice>, Failure> {
        self.position = Self::start(self.ordered);
        self.file = None;
        let notice = match File::open(&self.path) {
            Ok(file) => {
                let found = file.metadata()?.len();
                match self.compare(store, file).await? {
                    Comparison::Prefix { length } => {
                        let file = File::options().append(true).open(&self.path)?;
                        file.set_len(length)?;
                        self.file = Some(file);
                        let bytes = found - length;
                        (bytes > 0).then_some(Notice::OutputTorn { bytes })
                    }
                    Comparison::Differs => {
                        self.rewrite(store).await?;
                        Some(Notice::OutputRewritten)
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.file = Some(File::options().create(true).append(true).open(&self.path)?);
                let answered = !store.answers(0, 1).await?.is_empty();
                answered.then_some(Notice::OutputMissing)
            }
            Err(error) => return Err(error.into()),
        };
        self.follow(store).await?;
        Ok(notice)
    }

    /// Reads file and sequence side by side and leaves the position behind the last equal line.
    async fn compare(&mut self, store: &SqliteStore, file: File) -> Result<Comparison, Failure> {
        let mut reader = BufReader::with_capacity(1 << 16, file);
        let mut length = 0;
        let mut found = Vec::new();
        loop {
            let lines = page(store, self.position).await?;
            if lines.is_empty() {
                // What the store does not know: a torn line, or lines that are nobody's.
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

    /// Writes the whole file again beside the old one, then puts it in its place.
    async fn rewrite(&mut self, store: &SqliteStore) -> Result<(), Failure> {
        let temporary = with_suffix(&self.path, ".tritmill-tmp");
        let mut file = File::create(&temporary)?;
        self.position = Self::start(self.ordered);
        self.position = append(store, self.position, &mut file).await?;
        file.sync_all()?;
        drop(file);
        fs::rename(&temporary, &self.path)?;
        self.file = Some(File::options().append(true).open(&self.path)?);
        Ok(())
    }

    /// Appends what is committed and missing.
    pub(super) async fn follow(&mut self, store: &SqliteStore) -> Result<(), Failure> {
        let Some(file) = &mut self.file else { return Ok(()) };
        self.position = append(store, self.position, file).await?;
        Ok(())
    }

    /// Makes the file durable.
    pub(super) fn sync(&mut self) -> Result<(), Failure> {
        match &self.file {
            Some(file) => Ok(file.sync_all()?),
            None => Ok(()),
        }
    }
}

/// Writes the sequence from `position` to its end; returns the position there.
async fn append(
    store: &SqliteStore,
    mut position: Position,
    file: &mut File,
) -> Result<Position, Failure> {
    loop {
        let lines = page(store, position).await?;
        let Some((_, end)) = lines.last() else { return Ok(position) };
        position = *end;
        let bytes: String = lines.into_iter().filter_map(|(text, _)| text).collect();
        file.write_all(bytes.as_bytes())?;
    }
}

/// The next lines, each with its line end and the position behind it; empty at the end. A `None`
/// only moves the position.
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
