//! The batch file of an embedded run: `IN.jsonl` is read into the store, `OUT.jsonl` follows it.
//!
//! The store (`OUT.jsonl.tritmill`) is the truth; the output file is a view of it and can be made
//! again at any time. Every start
//!
//! 1. takes the lock, so that one run at a time owns the files;
//! 2. reads the whole input: known lines keep their answers, new and changed ones become jobs, lines
//!    that are gone lose their rows;
//! 3. compares the output file with what the store says it should be, byte for byte: what follows
//!    the last equal line is cut off when it is a torn line, the whole file is written again (to a
//!    temporary file, then renamed) when it says anything else;
//! 4. appends what is committed and missing, then every answer as it is committed.
//!
//! Memory is bounded by a chunk of lines, whatever the length of the files.

mod notice;
mod output;
mod place;

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
};

use tritmill_queue::{
    QueueName, Store, StoreError,
    store::{IngestCounts, IngestedLine, SqliteStore},
};

pub use self::notice::{BatchFileError, Notice};
use self::output::Output;
pub(crate) use self::place::{Input, open_and_lock, remove_output, rename_to_old, with_suffix};
use crate::{
    lines::{LineReader, RawLine},
    request::{duplicate, parse_line},
};

/// Lines recorded per transaction at most.
const CHUNK_LINES: usize = 1000;
/// Bytes of lines recorded per transaction, give or take one line.
const CHUNK_BYTES: usize = 4 << 20;

/// Which model answers: answers of another one must not be mixed in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Its name.
    pub model: String,
    /// What its tokens depend on besides the job.
    pub numerics_class: String,
}

/// Which files, and how.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Batch lines; `-` is standard input.
    pub input: PathBuf,
    /// Answers; the store lies beside it.
    pub output: PathBuf,
    /// Answers in the order of the input rather than of their completion.
    pub ordered: bool,
    /// Forget every answer there is.
    pub restart: bool,
    /// Run lines again that failed though nothing was wrong with them.
    pub retry_failed: bool,
    /// Who answers.
    pub identity: Identity,
    /// Where the jobs wait.
    pub queue: QueueName,
}

/// What the input holds and what of it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Lines that are not blank.
    pub lines: u64,
    /// Lines that were refused.
    pub refused: u64,
    /// Lines answered by earlier runs, answers that are errors included.
    pub resumed: u64,
    /// Of those, the errors.
    pub resumed_failed: u64,
}

/// The files of one run, locked.
#[derive(Debug)]
pub struct BatchFile {
    settings: Settings,
    /// Until it is read. A pipe can be opened only once.
    input: Option<Input>,
    store: SqliteStore,
    store_path: PathBuf,
    /// Held until the run ends; the system lets go when the process dies.
    _lock: File,
    output: Output,
    notices: Vec<Notice>,
}

impl BatchFile {
    /// Locks the output and opens the store beside it.
    ///
    /// # Errors
    /// [`BatchFileError`]; nothing was changed.
    pub async fn open(settings: Settings) -> Result<Self, BatchFileError> {
        let (input, lock) = open_and_lock(&settings.input, &settings.output)?;
        let store_path = with_suffix(&settings.output, ".tritmill");
        let mut notices = Vec::new();
        let store = open_store(&settings, &store_path, &mut notices).await?;
        let output = Output::new(settings.output.clone(), settings.ordered);
        let input = Some(input);
        let file = Self { settings, input, store, store_path, _lock: lock, output, notices };
        // The lock is ours, so whoever claimed jobs is dead; and its format may have been another.
        file.store.hand_back_all().await.map_err(|e| file.store_failed(e))?;
        file.adopt_queue().await.map_err(|e| file.store_failed(e))?;
        Ok(file)
    }

    /// Moves unfinished jobs of a run in another format to this run's queue.
    async fn adopt_queue(&self) -> Result<(), StoreError> {
        let queue = self.settings.queue.to_string();
        if self.store.fact("queue").await?.as_ref() != Some(&queue) {
            self.store.move_unfinished(&self.settings.queue).await?;
            self.store.set_fact("queue", &queue).await?;
        }
        Ok(())
    }

    /// The store beside the output.
    pub fn store(&self) -> &SqliteStore {
        &self.store
    }

    /// What happened so far that the person should know.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn store_failed(&self, source: StoreError) -> BatchFileError {
        BatchFileError::Store { path: self.store_path.clone(), source }
    }

    /// Reads the input into the store. `each` is told the lines and bytes read after every chunk
    /// and may stop the reading by returning false; then `None` comes back and nothing that was
    /// known before is lost.
    ///
    /// # Errors
    /// [`BatchFileError`].
    pub async fn read(
        &mut self,
        mut each: impl FnMut(u64, u64) -> bool,
    ) -> Result<Option<Counts>, BatchFileError> {
        let path = self.settings.input.clone();
        let input_failed = |source| BatchFileError::Input { path: path.clone(), source };
        if self.settings.retry_failed {
            let lines = self.store.forget_failures().await.map_err(|e| self.store_failed(e))?;
            if lines > 0 {
                self.notices.push(Notice::Retried { lines });
            }
        }
        let input = match self.input.take() {
            Some(input) => input,
            None => Input::open(&path).map_err(input_failed)?,
        };
        let mut reader = LineReader::new(BufReader::with_capacity(1 << 16, input));
        let run = self.store.begin_run().await.map_err(|e| self.store_failed(e))?;
        let mut counts = Counts::default();
        loop {
            let chunk = next_chunk(&mut reader).map_err(input_failed)?;
            if chunk.is_empty() {
                break;
            }
            let lines = self.parse_chunk(run, &chunk).await?;
            let seen = self.store.ingest(run, &lines).await.map_err(|e| self.store_failed(e))?;
            let IngestCounts { added, known, refused } = seen;
            counts.lines += added + known + refused;
            counts.refused += refused;
            if !each(counts.lines, reader.bytes_read()) {
                return Ok(None);
            }
        }
        let pruned = self.store.prune(run).await.map_err(|e| self.store_failed(e))?;
        if pruned > 0 {
            self.notices.push(Notice::Pruned { lines: pruned });
        }
        let progress = self.store.progress(None).await.map_err(|e| self.store_failed(e))?;
        counts.resumed_failed = progress.failed + progress.expired + progress.cancelled;
        counts.resumed = progress.completed + counts.resumed_failed;
        Ok(Some(counts))
    }

    /// Parses a chunk; the later of two lines with one `custom_id` is refused.
    async fn parse_chunk(
        &self,
        run: i64,
        chunk: &[RawLine],
    ) -> Result<Vec<IngestedLine>, BatchFileError> {
        let mut lines: Vec<IngestedLine> =
            chunk.iter().map(|line| parse_line(line, &self.settings.queue)).collect();
        let names: Vec<&str> = lines.iter().filter_map(|line| line.custom_id.as_deref()).collect();
        let mut first: HashMap<String, u64> =
            self.store.first_lines(run, &names).await.map_err(|e| self.store_failed(e))?;
        for (line, raw) in lines.iter_mut().zip(chunk) {
            let Some(custom_id) = line.custom_id.clone() else { continue };
            match first.entry(custom_id) {
                Entry::Vacant(free) => {
                    free.insert(line.number);
                }
                Entry::Occupied(taken) => *line = duplicate(raw, taken.key(), *taken.get()),
            }
        }
        Ok(lines)
    }

    /// Brings the output file to what the store says, before anything runs.
    ///
    /// # Errors
    /// [`BatchFileError`].
    pub async fn catch_up(&mut self) -> Result<(), BatchFileError> {
        let notice = self.output.catch_up(&self.store).await;
        self.notices.extend(notice.map_err(|error| error.at(&self.settings, &self.store_path))?);
        Ok(())
    }

    /// Appends what was committed since.
    ///
    /// # Errors
    /// [`BatchFileError`].
    pub async fn follow(&mut self) -> Result<(), BatchFileError> {
        let done = self.output.follow(&self.store).await;
        done.map_err(|error| error.at(&self.settings, &self.store_path))
    }

    /// Appends the rest, makes the output file durable and closes the store.
    ///
    /// # Errors
    /// [`BatchFileError`].
    pub async fn close(mut self) -> Result<Vec<Notice>, BatchFileError> {
        if !self.settings.output.exists() {
            // Somebody deleted it under our hands.
            self.catch_up().await?;
        }
        self.follow().await?;
        let done = self.output.sync();
        done.map_err(|error| error.at(&self.settings, &self.store_path))?;
        self.store.close().await;
        Ok(self.notices)
    }
}

/// Opens the store and sees to it that its answers are this model's and the output its view.
async fn open_store(
    settings: &Settings,
    path: &Path,
    notices: &mut Vec<Notice>,
) -> Result<SqliteStore, BatchFileError> {
    let failed = |source| BatchFileError::Store { path: path.to_owned(), source };
    let write_failed = |source| BatchFileError::Output { path: settings.output.clone(), source };
    if settings.restart && path.exists() {
        for suffix in ["", "-wal", "-shm"] {
            match std::fs::remove_file(with_suffix(path, suffix)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(write_failed(error));
                }
                _ => {}
            }
        }
        remove_output(&settings.output).map_err(write_failed)?;
        notices.push(Notice::Restarted);
    }
    let store = SqliteStore::open(path).await.map_err(failed)?;
    let Identity { model, numerics_class } = &settings.identity;
    let was = store.fact("numerics class").await.map_err(failed)?;
    let was_model = store.fact("model").await.map_err(failed)?;
    match (was, was_model) {
        (Some(was), Some(was_model)) if was == *numerics_class && was_model == *model => {}
        (Some(was), was_model) => {
            store.close().await;
            return Err(BatchFileError::OtherModel {
                path: settings.output.clone(),
                was: format!("{} ({was})", was_model.unwrap_or_default()),
                now: format!("{model} ({numerics_class})"),
            });
        }
        (None, _) => {
            if std::fs::metadata(&settings.output).is_ok_and(|meta| meta.len() > 0) {
                let kept_as = rename_to_old(&settings.output).map_err(write_failed)?;
                notices.push(Notice::StoreMissing { kept_as });
            }
            store.set_fact("model", model).await.map_err(failed)?;
            store.set_fact("numerics class", numerics_class).await.map_err(failed)?;
        }
    }
    Ok(store)
}

/// Up to [`CHUNK_LINES`] lines and about [`CHUNK_BYTES`]; empty at the end.
fn next_chunk<R: io::BufRead>(reader: &mut LineReader<R>) -> io::Result<Vec<RawLine>> {
    let mut chunk = Vec::new();
    let mut bytes = 0;
    while chunk.len() < CHUNK_LINES && bytes < CHUNK_BYTES {
        let Some(line) = reader.next_line()? else { break };
        bytes += line.content.as_ref().map_or(0, Vec::len);
        chunk.push(line);
    }
    Ok(chunk)
}
