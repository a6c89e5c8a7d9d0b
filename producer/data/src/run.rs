//! [`DataRun`]: a batch run over any source and sink, as a run over local files of lines.
//!
//! A folder beside the output (`OUT.tritmill-data`) keeps what a run needs to continue:
//!
//! - `input.jsonl`: the source as lines of a batch, written once and again when the source changed;
//! - `carried.jsonl`: what each row carries to its answer;
//! - `answers.jsonl`: the answers, in the order of the rows, and the state of the run itself;
//! - `run.json`: what the files were made of.
//!
//! The sink is written from them when all lines are answered. A sink of plain local lines needs no second copy, if the
//! rows carry nothing: the run writes there itself.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Handle;

use crate::{
    Address, Columns, DataError, Encoding, Format,
    http::Redirects,
    sink::{AnswerFiles, Sink},
    source::{self, SourceFile, Wanted},
    spool::{Spool, Spooled},
};

/// Suffix of the folder of a run.
const FOLDER: &str = ".tritmill-data";
/// Suffix of the folder of a run to a stream, which is named after its input: that may be the output of another run.
const FOLDER_OF_IN: &str = ".tritmill-in";

/// Source and sink of a run.
#[derive(Debug, Clone)]
pub struct DataSettings {
    /// The source.
    pub input: Address,
    /// The sink.
    pub output: Address,
    /// The form of the source, if its name does not tell it.
    pub input_format: Option<Format>,
    /// The form of the sink, if its name does not tell it.
    pub output_format: Option<Format>,
    /// Files of a folder to read, such as `train`.
    pub split: Option<String>,
    /// How rows become requests.
    pub columns: Columns,
    /// Folder of the state, instead of beside the output.
    pub state: Option<PathBuf>,
    /// Whether to forget an earlier run.
    pub restart: bool,
}

impl DataSettings {
    /// Returns whether source and sink are plain local lines, which need none of this.
    pub fn is_plain(&self) -> bool {
        !self.has_rows()
            && self.split.is_none()
            && match &self.input {
                Address::Stdio => true,
                Address::Path(path) => !path.is_dir() && is_plain_file(path),
                Address::Http(_) | Address::Object { .. } => false,
            }
            && self.has_plain_sink()
    }

    fn has_plain_sink(&self) -> bool {
        let name = self.output.name().to_ascii_lowercase();
        let format = self.output_format.or_else(|| Format::of_name(&name));
        !self.output.is_remote()
            && (self.output_format.is_some() || !Format::is_unsupported(&name))
            && format.unwrap_or(Format::Lines) == Format::Lines
            && Encoding::of_name(&name).1 == Encoding::Plain
    }

    /// Returns whether the source has rows instead of lines of a batch.
    fn has_rows(&self) -> bool {
        let name = self.input.name();
        let format = self.input_format.or_else(|| Format::of_name(name)).unwrap_or(Format::Lines);
        let is_folder = match &self.input {
            Address::Path(path) => path.is_dir(),
            _ => false,
        };
        format != Format::Lines || is_folder || self.columns.are_told()
    }
}

/// Returns whether a file is not compressed: an empty one, if its name does not say that it should be. What cannot be read is the run's to report.
fn is_plain_file(path: &Path) -> bool {
    use io::Read as _;
    // A pipe can be read only once.
    if !path.is_file() {
        return true;
    }
    let mut begin = Vec::new();
    let read = File::open(path).and_then(|file| file.take(4).read_to_end(&mut begin));
    let encoding = match begin.is_empty() {
        true => Encoding::of_name(&path.to_string_lossy()).1,
        false => Encoding::of_begin(&begin),
    };
    read.is_err() || encoding == Encoding::Plain
}

/// What the files of a run were made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Record {
    input: String,
    output: String,
    /// Versions of the files, and how rows become requests; null if a version is not known.
    made_of: serde_json::Value,
    lines: u64,
    is_whole: bool,
    is_written: bool,
    /// Length and time of the local file that was written last: another one is not overwritten.
    #[serde(default)]
    written: Option<serde_json::Value>,
}

/// A run over any source and sink. Its folder is locked.
#[derive(Debug)]
pub struct DataRun {
    settings: DataSettings,
    sink: Sink,
    folder: PathBuf,
    record: Record,
    has_own_output: bool,
    ended: Option<DataError>,
    /// Held until the run ends. The system releases it when the process dies.
    _lock: File,
    /// A folder that lasts as long as the run.
    _temporary: Option<TempDir>,
}

impl DataRun {
    /// Reads the source into local files, unless an earlier run did. `report` gets the rows read so far.
    ///
    /// # Errors
    /// [`DataError`]; what an earlier run answered is kept.
    pub fn open(
        settings: DataSettings,
        runtime: &Handle,
        report: &mut dyn FnMut(u64),
    ) -> Result<Self, DataError> {
        let sink = Sink::of(settings.output.clone(), settings.output_format)?;
        let wanted = Wanted {
            address: &settings.input,
            format: settings.input_format,
            split: settings.split.as_deref(),
            redirects: Redirects::Follow,
        };
        let mut files = source::files(wanted, runtime)?;
        let (folder, temporary) = place(&settings)?;
        let is_first = !folder.exists();
        if let Address::Path(output) = &settings.output
            && let Ok(output) = output.canonicalize()
        {
            // In the folder of the source, the output of an earlier run is left out.
            let is_output = |file: &SourceFile| {
                file.path().and_then(|path| path.canonicalize().ok()).as_ref() == Some(&output)
            };
            if files.iter().any(is_output) && (is_first || files.len() == 1) {
                let problem = if files.len() == 1 { "it is IN" } else { "it is a file of IN" };
                let (address, problem) = (settings.output.to_string(), problem.to_owned());
                return Err(DataError::Sink { address, problem });
            }
            files.retain(|file| !is_output(file));
        }
        let has_rows = settings.has_rows() || source::have_rows(&files);
        let columns = has_rows.then_some(&settings.columns);
        let failed = |source| DataError::Write { path: folder.clone(), source };
        if let Some(state) = &settings.state {
            fs::create_dir_all(state).map_err(failed)?;
        }
        create(&folder).map_err(failed)?;
        let lock = lock(&folder)?;
        if settings.restart {
            forget(&folder).map_err(failed)?;
        }
        let read = read(&settings, &folder, &mut files, columns, runtime, report);
        if read.is_err() && is_first {
            // Nothing was read, and nothing is left.
            fs::remove_dir_all(&folder).map_err(failed)?;
        }
        let (record, ended) = read?;
        save(&folder, &record).map_err(failed)?;
        let has_own_output = has_rows || !settings.has_plain_sink();
        let (_lock, _temporary) = (lock, temporary);
        Ok(Self { settings, sink, folder, record, has_own_output, ended, _lock, _temporary })
    }

    /// Returns the lines to answer.
    pub fn input(&self) -> PathBuf {
        self.folder.join("input.jsonl")
    }

    /// Returns the file for the answers. If it is the run's own, they must be in the order of the lines, and
    /// [`finish`](Self::finish) takes them to the sink.
    pub fn output(&self) -> PathBuf {
        match (&self.settings.output, self.has_own_output) {
            (Address::Path(path), false) => path.clone(),
            (Address::Stdio, false) => "-".into(),
            _ => self.folder.join("answers.jsonl"),
        }
    }

    /// Returns whether the answers are written to the sink by [`finish`](Self::finish).
    pub fn has_own_output(&self) -> bool {
        self.has_own_output
    }

    /// Returns why the source ended in the middle, if it did, and how many lines it gave.
    pub fn take_ended(&mut self) -> Option<(DataError, u64)> {
        let lines = self.record.lines;
        self.ended.take().map(|ended| (ended, lines))
    }

    /// Returns length and time of the sink, if it is a local file that is there.
    fn stamp(&self) -> Option<serde_json::Value> {
        let Address::Path(path) = &self.settings.output else { return None };
        let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let since = found.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(json!([found.len(), since.as_nanos().to_string()]))
    }

    /// Takes the answers to the sink. Returns the new name of a file that was there before.
    ///
    /// # Errors
    /// [`DataError`] if they cannot be written; the next run tries again.
    pub fn finish(&mut self, runtime: &Handle) -> Result<Option<PathBuf>, DataError> {
        if !self.has_own_output {
            return Ok(None);
        }
        let (lines, carried) = (self.output(), self.folder.join("carried.jsonl"));
        let answers = AnswerFiles { lines: &lines, carried: &carried };
        let temporary = self.folder.join("sink");
        // A sink that is gone, or that an earlier release wrote, is taken as unchanged.
        let (was, now) = (self.record.written.as_ref(), self.stamp());
        let is_changed = was.is_some_and(|was| now.is_some_and(|now| now != *was));
        let is_first = !self.record.is_written || is_changed;
        let old = self.sink.write(&answers, runtime, &temporary, is_first)?;
        (self.record.is_written, self.record.written) = (true, self.stamp());
        let failed = |source| DataError::Write { path: self.folder.clone(), source };
        save(&self.folder, &self.record).map_err(failed)?;
        Ok(old)
    }
}

/// Reads the source, unless an earlier run did and it has not changed.
fn read(
    settings: &DataSettings,
    folder: &Path,
    files: &mut [SourceFile],
    columns: Option<&Columns>,
    runtime: &Handle,
    report: &mut dyn FnMut(u64),
) -> Result<(Record, Option<DataError>), DataError> {
    let (input, output) = (settings.input.to_string(), settings.output.to_string());
    let earlier = load(folder)?;
    if let Some(was) = &earlier
        && (&was.input, &was.output) != (&input, &output)
    {
        let was = format!("a run from {} to {}", was.input, was.output);
        return Err(DataError::OtherRun { path: folder.to_owned(), was });
    }
    let is_written = earlier.as_ref().is_some_and(|earlier| earlier.is_written);
    let written = earlier.as_ref().and_then(|earlier| earlier.written.clone());
    let made_of = made_of(files, columns);
    match earlier {
        Some(was) if was.is_whole && !made_of.is_null() && was.made_of == made_of => {
            report(was.lines);
            Ok((was, None))
        }
        earlier => {
            let spooled = respool(folder, files, columns, runtime, report, earlier)?;
            let Spooled { lines, ended } = spooled;
            let is_whole = ended.is_none();
            let record = Record { input, output, made_of, lines, is_whole, is_written, written };
            Ok((record, ended))
        }
    }
}

/// Chooses the folder: in `--state`, beside a local output or input, or else in the current folder.
fn place(settings: &DataSettings) -> Result<(PathBuf, Option<TempDir>), DataError> {
    let DataSettings { input, output, state, .. } = settings;
    let is_file = |path: &&PathBuf| !path.exists() || path.is_file() || path.is_dir();
    let file_of = |address: &Address| match address {
        Address::Path(path) => Some(path).filter(is_file).cloned(),
        _ => None,
    };
    let named = [(output, FOLDER), (input, FOLDER_OF_IN)].into_iter();
    let mut named = named.map(|(address, suffix)| (address.name(), suffix));
    let named = named.find(|(name, _)| !name.is_empty() && *name != "-");
    let of_input = || (!output.is_remote()).then(|| file_of(input)).flatten();
    let beside = file_of(output)
        .map(|path| (path, FOLDER))
        .or_else(|| of_input().map(|path| (path, FOLDER_OF_IN)));
    let (base, suffix) = match (state, beside, named) {
        (Some(folder), _, named) => {
            let (name, suffix) = named.unwrap_or(("stdin", FOLDER_OF_IN));
            (folder.join(name), suffix)
        }
        (None, Some(beside), _) => beside,
        (None, None, Some((name, suffix))) => (PathBuf::from(name), suffix),
        (None, None, None) => {
            let failed = |source| DataError::Write { path: std::env::temp_dir(), source };
            let folder = TempDir::new().map_err(failed)?;
            return Ok((folder.path().to_owned(), Some(folder)));
        }
    };
    let mut folder = base.into_os_string();
    folder.push(suffix);
    Ok((folder.into(), None))
}

/// Creates the folder, if it is not there. One above it that is missing is a typing error.
fn create(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        created => created,
    }
}

fn lock(folder: &Path) -> Result<File, DataError> {
    let path = folder.join("lock");
    let failed = |source| DataError::Write { path: path.clone(), source };
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DataError::Locked(folder.to_owned())),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Deletes what was made of the source; the state of the run itself is deleted by the run.
fn forget(folder: &Path) -> io::Result<()> {
    for name in ["run.json", "input.jsonl", "carried.jsonl"] {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn load(folder: &Path) -> Result<Option<Record>, DataError> {
    let path = folder.join("run.json");
    match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
    .map_err(|source| DataError::State { path, source })
}

fn save(folder: &Path, record: &Record) -> io::Result<()> {
    let temporary = folder.join("run.json.tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.sync_all()?;
    fs::rename(&temporary, folder.join("run.json"))?;
    File::open(folder)?.sync_all()
}

/// Returns what the lines depend on; null if a file does not tell its version.
fn made_of(files: &[SourceFile], columns: Option<&Columns>) -> serde_json::Value {
    let known: Option<Vec<_>> =
        files.iter().map(|file| file.version.as_ref().map(|v| [&file.name, v])).collect();
    let Some(known) = known else { return serde_json::Value::Null };
    let how = columns.map(|columns| {
        let Columns { prompt, id, endpoint, body, of_lines } = columns;
        let of_lines = if *of_lines { " of lines" } else { "" };
        json!([prompt, id, format!("{endpoint:?}{of_lines}"), body])
    });
    json!([known, how])
}

/// Writes the source to files of another name, which take the place of those of an earlier run.
fn respool(
    folder: &Path,
    files: &mut [SourceFile],
    columns: Option<&Columns>,
    runtime: &Handle,
    report: &mut dyn FnMut(u64),
    earlier: Option<Record>,
) -> Result<Spooled, DataError> {
    let [lines, carried] = ["input", "carried"].map(|name| folder.join(format!("{name}.tmp")));
    let spool = Spool { runtime, folder, lines: &lines, carried: &carried };
    let Spooled { lines: count, ended } = spool.write(files, columns, report)?;
    let ended = match (ended, earlier) {
        // An answered row is not forgotten because this time the source ended before it.
        (Some(cause), Some(was)) if was.lines > count => {
            return Err(DataError::Shorter {
                cause: Box::new(cause),
                lines: count,
                earlier: was.lines,
            });
        }
        (ended, _) => ended,
    };
    let failed = |source| DataError::Write { path: folder.to_owned(), source };
    // Until both are in place, the record is not true.
    forget(folder).map_err(failed)?;
    fs::rename(&carried, folder.join("carried.jsonl")).map_err(failed)?;
    fs::rename(&lines, folder.join("input.jsonl")).map_err(failed)?;
    Ok(Spooled { lines: count, ended })
}
