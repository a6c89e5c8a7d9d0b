//! Rows of CSV and TSV files. The first row has the names of the columns; every value is a text.

use std::{
    collections::HashSet,
    io::{self, Read},
};

use serde_json::{Map, Value};
use tritmill_client::LINE_BYTES_MAX;

use super::{BadRow, Row, Rows};
use crate::DataError;

/// Most columns.
const COLUMNS_MAX: usize = 4096;
/// Bytes that a row may have: those of a batch line, and what the parser reads ahead.
const ROW_BYTES_MAX: u64 = LINE_BYTES_MAX as u64 + (1 << 17);

/// Rows of a CSV file.
pub(super) struct CsvRows {
    name: String,
    reader: csv::Reader<Bounded>,
    columns: Vec<String>,
    record: csv::ByteRecord,
    row: u64,
}

/// Ends a row that never ends: a quote that is not closed would take the rest of the file as one value.
struct Bounded {
    file: Box<dyn Read + Send>,
    left: u64,
    delimiter: u8,
    is_first: bool,
    place: Place,
}

/// Where in a row the bytes read so far end, as the parser sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before the first byte of a value.
    Begin,
    /// In a value without quotes, or behind its closing quote and more.
    Plain,
    Quoted,
    /// Behind a quote in a quoted value: it closes the value, or is the first of two.
    Quote,
}

impl Place {
    fn after(self, byte: u8, delimiter: u8) -> Self {
        match (self, byte) {
            (Self::Begin | Self::Quote, b'"') => Self::Quoted,
            (Self::Quoted, b'"') => Self::Quote,
            (Self::Quoted, _) => Self::Quoted,
            (_, b'\n' | b'\r') => Self::Begin,
            (_, byte) if byte == delimiter => Self::Begin,
            _ => Self::Plain,
        }
    }
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        let mut bytes = &buffer[..read];
        if self.is_first {
            // The parser leaves the mark out, too.
            bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
            self.is_first = read == 0;
        }
        let place = bytes.iter().fold(self.place, |place, byte| place.after(*byte, self.delimiter));
        if read == 0 && place == Place::Quoted {
            let problem = "a quote is not closed at the end of the file";
            return Err(io::Error::other(problem));
        }
        self.place = place;
        match self.left.checked_sub(read as u64) {
            Some(left) => self.left = left,
            None => {
                let problem =
                    format!("a row has more than {LINE_BYTES_MAX} bytes: is a quote not closed?");
                return Err(io::Error::other(problem));
            }
        }
        Ok(read)
    }
}

impl CsvRows {
    pub fn open(
        name: String,
        content: Box<dyn Read + Send>,
        delimiter: u8,
    ) -> Result<Self, DataError> {
        let bounded = Bounded {
            file: content,
            left: ROW_BYTES_MAX,
            delimiter,
            is_first: true,
            place: Place::Begin,
        };
        let reader = csv::ReaderBuilder::new()
            .delimiter(delimiter)
            .flexible(true)
            .has_headers(false)
            .from_reader(bounded);
        let mut rows =
            Self { name, reader, columns: Vec::new(), record: csv::ByteRecord::new(), row: 0 };
        if rows.read()? {
            let begin = |at: usize, name: &[u8]| {
                let mark: &[u8] = if at == 0 { b"\xEF\xBB\xBF" } else { b"" };
                String::from_utf8(name.strip_prefix(mark).unwrap_or(name).to_vec())
            };
            let names = rows.record.iter().enumerate().map(|(at, name)| begin(at, name));
            let names: Result<Vec<String>, _> = names.collect();
            rows.columns =
                names.map_err(|_| rows.failed("the names of its columns are not UTF-8"))?;
        }
        if rows.columns.len() > COLUMNS_MAX {
            return Err(rows.failed(&format!("it has more than {COLUMNS_MAX} columns")));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = rows.columns.iter().find(|name| !seen.insert(*name)) {
            return Err(rows.failed(&format!("two of its columns have the name '{twice}'")));
        }
        Ok(rows)
    }

    fn failed(&self, problem: &str) -> DataError {
        DataError::Read { name: self.name.clone(), source: io::Error::other(problem) }
    }

    /// Reads the next record; false at the end.
    fn read(&mut self) -> Result<bool, DataError> {
        self.reader.get_mut().left = ROW_BYTES_MAX;
        let row = self.row;
        self.reader.read_byte_record(&mut self.record).map_err(|error| {
            let source = match error.into_kind() {
                csv::ErrorKind::Io(source) => source,
                other => io::Error::other(format!("{other:?}")),
            };
            let problem = format!("{source} (after row {row})");
            let source = io::Error::new(source.kind(), problem);
            DataError::Read { name: self.name.clone(), source }
        })
    }
}

impl Rows for CsvRows {
    fn columns(&self) -> Option<&[String]> {
        Some(&self.columns)
    }

    fn next(&mut self) -> Result<Option<Row>, DataError> {
        if !self.read()? {
            return Ok(None);
        }
        self.row += 1;
        let (found, wanted) = (self.record.len(), self.columns.len());
        if found != wanted {
            let problem = format!("has {found} values, the file has {wanted} columns");
            return Ok(Some(Row::Bad(BadRow { column: None, code: "wrong_columns", problem })));
        }
        let mut values = Map::with_capacity(wanted);
        for (column, value) in self.columns.iter().zip(&self.record) {
            let Ok(text) = std::str::from_utf8(value) else {
                let problem = format!("has bytes in column '{column}' that are not UTF-8");
                let column = Some(column.clone());
                return Ok(Some(Row::Bad(BadRow { column, code: "invalid_utf8", problem })));
            };
            values.insert(column.clone(), Value::String(text.to_owned()));
        }
        Ok(Some(Row::Values(values)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rows(text: &[u8]) -> Result<Vec<Row>, DataError> {
        let content = Box::new(io::Cursor::new(text.to_vec()));
        let mut rows = CsvRows::open("x.csv".to_owned(), content, b',')?;
        let mut found = Vec::new();
        while let Some(row) = rows.next()? {
            found.push(row);
        }
        Ok(found)
    }

    #[test]
    fn quotes_line_ends_and_bad_rows_are_understood() {
        let found = rows(b"\xEF\xBB\xBFprompt,id\r\n\"a, \"\"b\"\"\nc\",1\r\nd\ne,\xff\n")
            .expect("readable");
        let Row::Values(first) = &found[0] else { panic!("{found:?}") };
        assert_eq!(json!(first), json!({ "prompt": "a, \"b\"\nc", "id": "1" }));
        let problem = |at: usize| match &found[at] {
            Row::Bad(bad) => bad.problem.clone(),
            Row::Values(_) => panic!("{found:?}"),
        };
        assert_eq!(problem(1), "has 1 values, the file has 2 columns");
        assert_eq!(problem(2), "has bytes in column 'id' that are not UTF-8");
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn quote_that_is_not_closed_is_an_error() {
        let error = rows(b"prompt,note\na,b\nc,\"d\ne,f\n").expect_err("not closed").to_string();
        assert!(
            error.contains("a quote is not closed") && error.contains("after row 1"),
            "{error}"
        );
        for fine in [
            "prompt\n5\" pipe\n",
            "prompt\n\"a\"\"b\"\n",
            "prompt\n\"a\"",
            "prompt\n\"a\" b\"\n",
            "\u{feff}\"prompt\n\",b\n1,2\n",
        ] {
            assert_eq!(rows(fine.as_bytes()).expect("readable").len(), 1, "{fine}");
        }
    }

    #[test]
    fn quote_that_is_not_closed_ends_within_bounds() {
        let mut text = b"prompt\nfine\n\"".to_vec();
        text.extend(vec![b'x'; LINE_BYTES_MAX + (1 << 18)]);
        let error = rows(&text).expect_err("too long").to_string();
        assert!(error.contains("is a quote not closed? (after row 1)"), "{error}");
    }
}
