//! Rows of Parquet files, read page by page.

mod bounded;
mod heads;

use std::{
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
};

use parquet::{
    errors::ParquetError,
    file::{reader::FileReader as _, serialized_reader::SerializedFileReader},
    record::reader::RowIter,
};

use self::bounded::BoundedFile;
use super::{Row, Rows};
use crate::DataError;

/// Rows of a Parquet file.
pub(super) struct ParquetRows {
    name: String,
    rows: RowIter<'static>,
    columns: Vec<String>,
    /// Rows that the file says it has, and those that were read.
    count: u64,
    read: u64,
}

fn damaged(name: &str, error: &ParquetError) -> DataError {
    DataError::Parquet { name: name.to_owned(), cause: error.to_string() }
}

/// Calls the reader, which panics at some damaged files.
fn read<T>(name: &str, call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, DataError> {
    let called = catch_unwind(AssertUnwindSafe(call));
    let called = called.unwrap_or_else(|_| Err(ParquetError::General("it is damaged".to_owned())));
    called.map_err(|error| damaged(name, &error))
}

impl ParquetRows {
    pub fn open(name: String, file: File) -> Result<Self, DataError> {
        let reader = read(&name, || {
            let file = BoundedFile::open(file)?;
            let reader = SerializedFileReader::new(file.clone())?;
            file.bound_pages(reader.metadata())?;
            Ok(reader)
        })?;
        let meta = reader.metadata().file_metadata();
        let columns = meta.schema().get_fields().iter().map(|field| field.name().to_owned());
        let (columns, count) = (columns.collect(), meta.num_rows());
        let rows = RowIter::from_file_into(Box::new(reader));
        let count = u64::try_from(count).unwrap_or_default();
        Ok(Self { name, rows, columns, count, read: 0 })
    }
}

impl Rows for ParquetRows {
    fn columns(&self) -> Option<&[String]> {
        Some(&self.columns)
    }

    fn next(&mut self) -> Result<Option<Row>, DataError> {
        let next = || {
            let row = self.rows.next().transpose()?;
            // The reader's own form of a value.
            let values = |row: parquet::record::Row| {
                let columns = row.into_columns().into_iter();
                columns.map(|(name, field)| (name, field.to_json_value())).collect()
            };
            Ok(row.map(values))
        };
        match read(&self.name, next)? {
            None if self.read < self.count => {
                let cause = format!("it ends after {} of {} rows", self.read, self.count);
                Err(DataError::Parquet { name: self.name.clone(), cause })
            }
            None => Ok(None),
            Some(values) => {
                self.read += 1;
                Ok(Some(Row::Values(values)))
            }
        }
    }
}
