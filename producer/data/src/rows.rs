//! The rows of a file, one at a time, whatever its format.

mod csv;
mod lines;
mod parquet;

use std::{fs::File, io::Read, path::Path};

use serde_json::{Map, Value};
use tokio::runtime::Handle;

use crate::{DataError, Format, encoding::decoded, source::SourceFile};

/// A row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Row {
    /// Its values by the names of the columns.
    Values(Map<String, Value>),
    /// It cannot be used; its neighbours can.
    Bad(BadRow),
}

/// Why a row cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadRow {
    /// The column with the fault.
    pub column: Option<String>,
    /// The kind of fault.
    pub code: &'static str,
    /// What is wrong, after the name of the row.
    pub problem: String,
}

/// The rows of a file.
pub(crate) trait Rows {
    /// Returns the names of the columns, if they are known before the rows.
    fn columns(&self) -> Option<&[String]>;

    /// Returns the next row; `None` at the end.
    ///
    /// # Errors
    /// [`DataError`] if the rest of the file cannot be read.
    fn next(&mut self) -> Result<Option<Row>, DataError>;
}

/// Opens the rows of a file. A Parquet file of another machine is copied into `folder` first, up to a number of bytes: its end
/// tells where its columns are.
///
/// # Errors
/// [`DataError`] if it cannot be read.
pub(crate) fn open(
    file: &mut SourceFile,
    runtime: &Handle,
    folder: &Path,
    copy_bytes_max: u64,
) -> Result<Box<dyn Rows>, DataError> {
    let name = file.name.clone();
    if file.format == Format::Parquet {
        let opened = match file.path() {
            Some(path) => {
                File::open(path).map_err(|source| DataError::Read { name: name.clone(), source })?
            }
            None => copied(file, runtime, folder, copy_bytes_max)?,
        };
        return Ok(Box::new(parquet::ParquetRows::open(name, opened)?));
    }
    let content = content(file, runtime)?;
    Ok(match file.format {
        Format::Csv => Box::new(csv::CsvRows::open(name, content, b',')?),
        Format::Tsv => Box::new(csv::CsvRows::open(name, content, b'\t')?),
        Format::Lines | Format::Parquet => Box::new(lines::LineRows::new(name, content)),
    })
}

/// Opens a file's content, decompressed.
///
/// # Errors
/// [`DataError`] if it cannot be read.
pub(crate) fn content(
    file: &mut SourceFile,
    runtime: &Handle,
) -> Result<Box<dyn Read + Send>, DataError> {
    let opened = file.open(runtime)?;
    decoded(opened, &file.name)
        .map_err(|source| DataError::Read { name: file.name.clone(), source })
}

fn copied(
    file: &mut SourceFile,
    runtime: &Handle,
    folder: &Path,
    bytes_max: u64,
) -> Result<File, DataError> {
    let failed = |source| DataError::Write { path: folder.to_owned(), source };
    // Without a name: it is gone when it is closed.
    let mut copy = tempfile::tempfile_in(folder).map_err(failed)?;
    let mut from = file.open(runtime)?.take(bytes_max.saturating_add(1));
    let copied = std::io::copy(&mut from, &mut copy);
    let copied = copied.map_err(|source| DataError::Read { name: file.name.clone(), source })?;
    match copied > bytes_max {
        true => Err(DataError::TooLarge { name: file.name.clone(), bytes_max }),
        false => Ok(copy),
    }
}
