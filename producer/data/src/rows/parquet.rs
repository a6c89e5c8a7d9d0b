//! Rows of Parquet files, read page by page.

use std::fs::File;

use parquet::{
    errors::ParquetError,
    file::{reader::FileReader as _, serialized_reader::SerializedFileReader},
    record::reader::RowIter,
};

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

impl ParquetRows {
    pub fn open(name: String, file: File) -> Result<Self, DataError> {
        let reader = SerializedFileReader::new(file).map_err(|error| damaged(&name, &error))?;
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
        match self.rows.next() {
            None if self.read < self.count => {
                let cause = format!("it ends after {} of {} rows", self.read, self.count);
                Err(DataError::Parquet { name: self.name.clone(), cause })
            }
            None => Ok(None),
            Some(Err(error)) => Err(damaged(&self.name, &error)),
            Some(Ok(row)) => {
                self.read += 1;
                let values = row.into_columns().into_iter();
                let values = values.map(|(name, field)| (name, field.to_json_value()));
                Ok(Some(Row::Values(values.collect())))
            }
        }
    }
}
