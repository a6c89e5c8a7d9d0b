//! Writes the answers of a run, in the order of its rows, to where they are wanted.
//!
//! The answers are read twice: once for the columns and their kinds, once for the values. So memory holds a page of rows.

mod parquet;

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tritmill_client::{json_line, rename_to_old};

use crate::{
    Address, DataError, Encoding, Format,
    answers::{ALWAYS, Kind, flat, text},
    encoding::Encoder,
    http,
    objects::Objects,
};

/// Most columns of a table.
const COLUMNS_MAX: usize = 4096;

/// Where answers go, and in which form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sink {
    address: Address,
    format: Format,
    encoding: Encoding,
}

/// Answers in the order of their rows.
pub trait Answers {
    /// Calls `each` for every answer, until one fails. It is called several times, each time with the same answers.
    ///
    /// # Errors
    /// That of `each`, or why the answers cannot be read.
    fn each(&self, each: &mut dyn FnMut(Answered) -> io::Result<()>) -> io::Result<()>;
}

/// An answer with what its row carried.
#[derive(Debug, Clone, PartialEq)]
pub struct Answered {
    /// The output line.
    pub line: Value,
    /// The columns of its row.
    pub carried: Map<String, Value>,
}

/// Local files with the answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnswerFiles<'a> {
    /// Output lines.
    pub lines: &'a Path,
    /// What the row of each line carried; empty if the source had lines.
    pub carried: &'a Path,
}

/// A column of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    /// Its name.
    pub name: String,
    /// Whether it came with the row; then `key` is its name there.
    pub carried: bool,
    pub key: String,
    pub kind: Kind,
}

impl Sink {
    /// Tells the form of a sink by its name. `format` overrides it.
    ///
    /// # Errors
    /// [`DataError::Sink`] if the name asks for what cannot be.
    pub fn of(address: Address, format: Option<Format>) -> Result<Self, DataError> {
        let name = address.name().to_ascii_lowercase();
        let (_, encoding) = Encoding::of_name(&name);
        let is_unsupported = format.is_none() && Format::is_unsupported(&name);
        let format = format.or_else(|| Format::of_name(&name)).unwrap_or(Format::Lines);
        let refused = |problem: &str| {
            Err(DataError::Sink { address: address.to_string(), problem: problem.to_owned() })
        };
        match &address {
            _ if is_unsupported => refused(
                "files are .jsonl, .csv, .tsv or .parquet, compressed .gz or .zst: name another or its format",
            ),
            _ if format == Format::Parquet && encoding != Encoding::Plain => {
                refused("Parquet is compressed inside: name it .parquet")
            }
            Address::Object { key, .. } if key.is_empty() || key.ends_with('/') => {
                refused("it names no object")
            }
            Address::Path(path) if path.is_dir() => refused("it is a folder"),
            _ => Ok(Self { address, format, encoding }),
        }
    }

    /// Writes the answers to another machine, by way of a temporary file.
    ///
    /// # Errors
    /// [`DataError`] if they cannot be written; then the sink is as it was.
    pub fn write_remote(&self, answers: &dyn Answers, runtime: &Handle) -> Result<(), DataError> {
        let failed = |source| DataError::Write { path: std::env::temp_dir(), source };
        let folder = TempDir::new().map_err(failed)?;
        self.write(answers, runtime, &folder.path().join("sink"), false).map(drop)
    }

    /// Writes the answers. A file that was there before the run is kept under another name if `is_first`.
    ///
    /// # Errors
    /// [`DataError`] if they cannot be written; then the sink is as it was.
    pub(crate) fn write(
        &self,
        answers: &dyn Answers,
        runtime: &Handle,
        temporary: &Path,
        is_first: bool,
    ) -> Result<Option<PathBuf>, DataError> {
        let target = match &self.address {
            Address::Path(path) if !is_stream(path) => Some(path.as_path()),
            _ => None,
        };
        let beside = target.map(|path| {
            let mut beside = path.as_os_str().to_owned();
            beside.push(".tritmill-tmp");
            PathBuf::from(beside)
        });
        let file = beside.as_deref().unwrap_or(temporary);
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| DataError::Write { path: path.clone(), source }
        };
        let written = match self.format {
            Format::Lines => self.write_lines(answers, file),
            Format::Csv => self.write_csv(answers, file, b','),
            Format::Tsv => self.write_csv(answers, file, b'\t'),
            Format::Parquet => parquet::write(answers, &columns(answers)?, file),
        };
        written.map_err(failed(file))?;
        match &self.address {
            Address::Path(path) if target.is_some() => {
                let has_bytes = fs::metadata(path).is_ok_and(|meta| meta.len() > 0);
                let old = (is_first && has_bytes).then(|| rename_to_old(path)).transpose();
                let old = old.map_err(failed(path))?;
                fs::rename(file, path).map_err(failed(path))?;
                return Ok(old);
            }
            Address::Path(path) => {
                let mut to = File::options().write(true).open(path).map_err(failed(path))?;
                File::open(file)
                    .and_then(|mut from| io::copy(&mut from, &mut to))
                    .map_err(failed(path))?;
            }
            Address::Stdio => {
                let mut to = io::stdout().lock();
                File::open(file)
                    .and_then(|mut from| io::copy(&mut from, &mut to))
                    .and_then(|_| to.flush())
                    .map_err(failed(Path::new("-")))?;
            }
            Address::Http(url) => http::put(runtime, url, file)?,
            Address::Object { .. } => Objects::open(&self.address)?.upload(runtime, file)?,
        }
        fs::remove_file(file).map_err(failed(file))?;
        Ok(None)
    }

    fn write_lines(&self, answers: &dyn Answers, to: &Path) -> io::Result<()> {
        let mut file = Encoder::new(self.encoding, File::create(to)?)?;
        answers.each(&mut |answered| {
            let Answered { mut line, carried } = answered;
            if let (Value::Object(fields), false) = (&mut line, carried.is_empty()) {
                fields.insert("row".to_owned(), Value::Object(carried));
            }
            file.write_all(json_line(&line).as_bytes())?;
            file.write_all(b"\n")
        })?;
        file.finish()?.sync_all()
    }

    fn write_csv(&self, answers: &dyn Answers, to: &Path, delimiter: u8) -> io::Result<()> {
        let columns = columns(answers)?;
        let file = Encoder::new(self.encoding, File::create(to)?)?;
        let mut csv = csv::WriterBuilder::new().delimiter(delimiter).from_writer(file);
        csv.write_record(columns.iter().map(|column| &column.name))?;
        answers.each(&mut |answered| {
            let row = flat(&answered.line);
            for column in &columns {
                let values = if column.carried { &answered.carried } else { &row };
                let value = values.get(&column.key).and_then(text);
                csv.write_field(value.unwrap_or_default())?;
            }
            Ok(csv.write_record(None::<&[u8]>)?)
        })?;
        let file = csv.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
        file.finish()?.sync_all()
    }
}

/// Returns whether a path is a pipe, a terminal or the like, which cannot be renamed.
fn is_stream(path: &Path) -> bool {
    let is_open = ["/dev/fd", "/proc/self/fd", "/dev/stdout", "/dev/stderr"];
    is_open.iter().any(|open| path.starts_with(open))
        || fs::metadata(path).is_ok_and(|meta| !meta.is_file())
}

impl Answers for AnswerFiles<'_> {
    fn each(&self, each: &mut dyn FnMut(Answered) -> io::Result<()>) -> io::Result<()> {
        let mut lines = BufReader::with_capacity(1 << 16, File::open(self.lines)?);
        let mut carried = BufReader::with_capacity(1 << 16, File::open(self.carried)?);
        let (mut line, mut row) = (String::new(), String::new());
        loop {
            (line, row) = (clear(line), clear(row));
            if lines.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let carried = match carried.read_line(&mut row)? {
                0 => Map::new(),
                _ => serde_json::from_str(&row)?,
            };
            each(Answered { line: serde_json::from_str(&line)?, carried })?;
        }
    }
}

fn clear(mut text: String) -> String {
    text.clear();
    text
}

/// Finds the columns of a table of answers.
fn columns(answers: &dyn Answers) -> Result<Vec<Column>, DataError> {
    let mut columns: Vec<Column> = ALWAYS
        .iter()
        .map(|(name, kind)| {
            let name = (*name).to_owned();
            Column { key: name.clone(), name, carried: false, kind: *kind }
        })
        .collect();
    let failed = |source| DataError::Read { name: "the answers".to_owned(), source };
    let mut add = |answered: Answered| {
        for (values, carried) in [(flat(&answered.line), false), (answered.carried, true)] {
            for (key, value) in values {
                let found = columns.iter().position(|c| c.carried == carried && c.key == key);
                let kind = Kind::of(&value);
                match found {
                    Some(at) => {
                        let column = &mut columns[at];
                        column.kind = kind.map_or(column.kind, |kind| column.kind.with(kind));
                    }
                    None if columns.len() == COLUMNS_MAX => {
                        return Err(io::Error::other(format!(
                            "it has more than {COLUMNS_MAX} columns"
                        )));
                    }
                    None => {
                        let Some(kind) = kind else { continue };
                        columns.push(Column { name: key.clone(), carried, key, kind });
                    }
                }
            }
        }
        Ok(())
    };
    answers.each(&mut add).map_err(failed)?;
    Ok(named(columns))
}

/// Gives a carried column with the name of a column of the answer another name, and puts carried columns last.
fn named(mut columns: Vec<Column>) -> Vec<Column> {
    columns.sort_by_key(|column| column.carried);
    let mut taken: Vec<String> = Vec::new();
    for column in &mut columns {
        while taken.contains(&column.name) {
            column.name.insert_str(0, "row_");
        }
        taken.push(column.name.clone());
    }
    columns
}
