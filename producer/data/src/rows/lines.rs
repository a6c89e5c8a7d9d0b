//! Rows of JSON lines: the fields of an object are its columns.

use std::io::{BufReader, Read};

use serde_json::Value;
use tritmill_client::LineReader;

use super::{BadRow, Row, Rows};
use crate::DataError;

/// Rows of a file of JSON lines.
pub(super) struct LineRows {
    name: String,
    reader: LineReader<BufReader<Box<dyn Read + Send>>>,
}

impl LineRows {
    pub fn new(name: String, content: Box<dyn Read + Send>) -> Self {
        Self { name, reader: LineReader::new(BufReader::with_capacity(1 << 16, content)) }
    }
}

impl Rows for LineRows {
    fn columns(&self) -> Option<&[String]> {
        None
    }

    fn next(&mut self) -> Result<Option<Row>, DataError> {
        let next = self.reader.next_line();
        let line = next.map_err(|source| DataError::Read { name: self.name.clone(), source })?;
        let Some(line) = line else { return Ok(None) };
        let bad = |code, problem| Ok(Some(Row::Bad(BadRow { column: None, code, problem })));
        let bytes = match line.content {
            Ok(bytes) => bytes,
            Err(long) => return bad("line_too_long", format!("is {} bytes long", long.bytes)),
        };
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(values)) => Ok(Some(Row::Values(values))),
            Ok(_) => bad("invalid_type", "must be a JSON object".to_owned()),
            Err(error) => bad("invalid_json", format!("is not JSON: {error}")),
        }
    }
}
