//! [`BatchFile`]: `IN.jsonl` is read into the store, `OUT.jsonl` follows the store.
//!
//! The store (`OUT.jsonl.tritmill`, or `IN.jsonl.tritmill` if the output is a stream) is the truth; the output file is a view of it and can be written
//! again at any time. Every start
//!
//! 1. takes the lock, so that one run at a time owns the files;
//! 2. reads the whole input: known lines keep their answers, new and changed lines become jobs, the
//!    rows of removed lines are deleted;
//! 3. compares the output file with the store, byte for byte: an incomplete last line is cut off; a
//!    file that differs otherwise is written again (to a temporary file, then renamed);
//! 4. appends the committed answers that are missing, then every answer as it is committed.
//!
//! Memory is bounded by a chunk of lines, for files of any length.

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
pub use self::place::rename_to_old;
pub(crate) use self::place::{Input, Place, Target, open_and_lock, remove_file, with_suffix};
use crate::{
    lines::{LineReader, RawLine},
    request::{duplicate, parse_line},
};

/// Lines recorded per transaction at most.
const CHUNK_LINES: usize = 1000;
/// Bytes of lines recorded per transaction, give or take one line.
const CHUNK_BYTES: usize = 4 << 20;

/// The model that answers. Answers of different models are never mixed in one output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Name of the model.
    pub model: String,
    /// What its tokens depend on besides the job: weights, KV type, device class.
    pub numerics_class: String,
    /// What else the operator set for its answers, in words.
    pub limits: String,
}

/// Files of a run, and how to answer them.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Batch lines; `-` is standard input.
    pub input: PathBuf,
    /// Answers: a file, a pipe, or `-` for standard output.
    pub output: PathBuf,
    /// Folder of the store; by default it is beside the output, or beside the input if the output is a stream.
    pub state: Option<PathBuf>,
    /// Whether answers are in the order of the input instead of completion.
    pub ordered: bool,
    /// Whether to delete all earlier answers.
    pub restart: bool,
    /// Whether to run lines again that failed with a server error (status 500).
    pub retry_failed: bool,
    /// The model that answers.
    pub identity: Identity,
    /// The queue of the jobs.
    pub queue: QueueName,
}

/// Lines of the input, and how many are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Lines that are not blank.
    pub lines: u64,
    /// Lines that were refused.
    pub refused: u64,
    /// Lines answered by earlier runs, answers that are errors included.
    pub resumed: u64,
    /// Lines of `resumed` with an error as their answer.
    pub resumed_failed: u64,
}

/// The files of one run, locked.
#[derive(Debug)]
pub struct BatchFile {
    settings: Settings,
    /// Taken when it is read: a pipe can be opened only once.
    input: Option<Input>,
    place: Place,
    store: SqliteStore,
    store_path: PathBuf,
    /// Held until the run ends. The system releases it when the process dies.
    _lock: File,
    output: Output,
    notices: Vec<Notice>,
}

impl BatchFile {
    /// Locks the output and opens the store beside it.
    ///
    /// # Errors
    /// [`BatchFileError`]; then nothing is changed.
    pub async fn open(settings: Settings) -> Result<Self, BatchFileError> {
        let place = Place::choose(&settings.input, &settings.output, settings.state.as_deref())?;
        let (input, lock) = open_and_lock(&settings.input, &place)?;
        let store_path = place.with_suffix(".tritmill");
        let mut notices = Vec::new();
        let store = open_store(&settings, &place, &store_path, &mut notices).await?;
        let output = Output::new(place.target.clone(), settings.ordered);
        let input = Some(input);
        let file = Self { settings, input, place, store, store_path, _lock: lock, output, notices };
        // This run holds the lock, so the process that claimed jobs is dead. Its format may differ.
        file.store.hand_back_all().await.map_err(|e| file.store_failed(e))?;
        file.adopt_queue().await.map_err(|e| file.store_failed(e))?;
        Ok(file)
    }

    /// Moves the unfinished jobs of a run with another format to this run's queue.
    async fn adopt_queue(&self) -> Result<(), StoreError> {
        let queue = self.settings.queue.to_string();
        if self.store.fact("queue").await?.as_ref() != Some(&queue) {
            self.store.move_unfinished(&self.settings.queue).await?;
            self.store.set_fact("queue", &queue).await?;
        }
        Ok(())
    }

    /// Returns the store beside the output.
    pub fn store(&self) -> &SqliteStore {
        &self.store
    }

    /// Returns the notices since the last call.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn store_failed(&self, source: StoreError) -> BatchFileError {
        BatchFileError::Store { path: self.store_path.clone(), source }
    }

    /// Reads the input into the store. `each` gets the lines and bytes read after every chunk and
    /// stops the reading by returning false. Then this returns `None`, and the lines known before are
    /// still known.
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
            None => Input::open(&path)?,
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

    /// Parses a chunk. The later of two lines with the same `custom_id` is refused.
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

    /// Makes the output file equal to the store, before jobs run.
    pub async fn catch_up(&mut self) -> Result<(), BatchFileError> {
        let notice = self.output.catch_up(&self.store).await;
        self.notices.extend(notice.map_err(|error| error.at(&self.settings, &self.store_path))?);
        Ok(())
    }

    /// Appends the answers that were committed since the last call.
    pub async fn follow(&mut self) -> Result<(), BatchFileError> {
        let done = self.output.follow(&self.store).await;
        done.map_err(|error| error.at(&self.settings, &self.store_path))
    }

    /// Appends the rest, makes the output file durable and closes the store.
    pub async fn close(mut self) -> Result<Vec<Notice>, BatchFileError> {
        if self.place.file().is_some_and(|path| !path.exists()) {
            // It was deleted during the run.
            self.catch_up().await?;
        }
        self.follow().await?;
        let done = self.output.sync();
        done.map_err(|error| error.at(&self.settings, &self.store_path))?;
        self.store.close().await;
        Ok(self.notices)
    }
}

/// Opens the store, checks that its answers are of this model, and handles an output without store.
async fn open_store(
    settings: &Settings,
    place: &Place,
    path: &Path,
    notices: &mut Vec<Notice>,
) -> Result<SqliteStore, BatchFileError> {
    let failed = |source| BatchFileError::Store { path: path.to_owned(), source };
    let write_failed = |source| BatchFileError::Output { path: settings.output.clone(), source };
    if settings.restart && path.exists() {
        for suffix in ["", "-wal", "-shm"] {
            remove_file(&with_suffix(path, suffix)).map_err(write_failed)?;
        }
        place.file().map_or(Ok(()), remove_file).map_err(write_failed)?;
        notices.push(Notice::Restarted);
    }
    let store = SqliteStore::open(path).await.map_err(failed)?;
    let Identity { model, numerics_class, limits } = &settings.identity;
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
            let old = place.file();
            let has_bytes = |path: &&Path| std::fs::metadata(path).is_ok_and(|meta| meta.len() > 0);
            if let Some(old) = old.filter(has_bytes) {
                let kept_as = rename_to_old(old).map_err(write_failed)?;
                notices.push(Notice::StoreMissing { kept_as });
            }
            store.set_fact("model", model).await.map_err(failed)?;
            store.set_fact("numerics class", numerics_class).await.map_err(failed)?;
        }
    }
    // Earlier releases did not record them.
    match store.fact("limits").await.map_err(failed)? {
        Some(was) if was != *limits => {
            store.close().await;
            let (path, now) = (settings.output.clone(), limits.clone());
            return Err(BatchFileError::OtherLimits { path, was, now });
        }
        Some(_) => {}
        None => store.set_fact("limits", limits).await.map_err(failed)?,
    }
    Ok(store)
}

/// Reads up to [`CHUNK_LINES`] lines and about [`CHUNK_BYTES`]; returns an empty list at the end.
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
