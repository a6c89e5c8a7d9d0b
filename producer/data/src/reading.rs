//! [`Reader`]: reads the files of a source, as lines of a batch or as rows that become such lines.

use std::path::Path;

use serde_json::{Map, Value};
use tokio::runtime::Handle;

use crate::{
    Columns, DataError, Format,
    requests::Request,
    rows::{self, Row},
    source::SourceFile,
};

/// Rows between two reports.
const REPORT_EVERY: u64 = 1000;

/// Where the lines of a source go.
pub(crate) trait Lines {
    /// Adds the line of a row.
    fn request(&mut self, request: Request) -> Result<(), DataError>;

    /// Adds lines as they are, in pieces.
    fn add(&mut self, bytes: &[u8]) -> Result<(), DataError>;

    /// Ends a last line without a line end. Returns whether there was one.
    fn end_line(&mut self) -> Result<bool, DataError>;

    /// Removes an incomplete last line.
    fn cut(&mut self) -> Result<(), DataError>;
}

/// How files are read.
pub(crate) struct Reader<'a> {
    pub runtime: &'a Handle,
    /// A folder for copies.
    pub folder: &'a Path,
    /// Most bytes of a copy.
    pub copy_bytes_max: u64,
    /// How rows become requests; `None` if there are only lines.
    pub columns: Option<&'a Columns>,
}

impl Reader<'_> {
    /// Reads a file. `count` counts the lines of all files.
    ///
    /// # Errors
    /// [`DataError`] if the file, or the rest of it, cannot be read.
    pub fn read(
        &self,
        file: &mut SourceFile,
        count: &mut u64,
        lines: &mut dyn Lines,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), DataError> {
        match self.columns {
            Some(columns) => self.rows(file, (columns, count), lines, report),
            None => self.copy(file, count, lines, report),
        }
    }

    fn rows(
        &self,
        file: &mut SourceFile,
        (columns, count): (&Columns, &mut u64),
        lines: &mut dyn Lines,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), DataError> {
        let mut rows = rows::open(file, self.runtime, self.folder, self.copy_bytes_max)?;
        if let Some(found) = rows.columns() {
            columns.check(&file.name, found)?;
        }
        let takes_requests = file.format == Format::Lines && columns.prompt.is_none();
        let mut row = 0_u64;
        while let Some(found) = rows.next()? {
            (*count, row) = (*count + 1, row + 1);
            let place = format!("{} row {row}", file.name);
            let request = match found {
                Row::Values(values) if takes_requests && is_request(&values) => {
                    Request { line: columns.told_request(values), carried: Map::new() }
                }
                found => columns.request(found, *count, &place),
            };
            lines.request(request)?;
            if count.is_multiple_of(REPORT_EVERY) {
                report(*count);
            }
        }
        Ok(())
    }

    /// Copies lines as they are. Of a file that ends in the middle, whole lines are kept.
    fn copy(
        &self,
        file: &mut SourceFile,
        count: &mut u64,
        lines: &mut dyn Lines,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), DataError> {
        let mut content = rows::content(file, self.runtime)?;
        let mut piece = vec![0; 1 << 16];
        loop {
            let read = match content.read(&mut piece) {
                Ok(0) => {
                    *count += u64::from(lines.end_line()?);
                    return Ok(());
                }
                Ok(read) => read,
                Err(source) => {
                    lines.cut()?;
                    return Err(DataError::Read { name: file.name.clone(), source });
                }
            };
            lines.add(&piece[..read])?;
            *count += piece[..read].iter().filter(|byte| **byte == b'\n').count() as u64;
            report(*count);
        }
    }
}

/// Returns whether the fields are those of a line of a batch.
fn is_request(values: &Map<String, Value>) -> bool {
    values.get("body").is_some_and(Value::is_object) && values.contains_key("url")
}
