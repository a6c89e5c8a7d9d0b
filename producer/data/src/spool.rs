//! Writes a source once into local files: the lines of a batch, and what each row carries to its answer.

use std::{
    fs::File,
    io::{self, BufWriter, Read, Seek as _, Write as _},
    path::Path,
};

use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tritmill_client::json_line;

use crate::{
    Columns, DataError, Format,
    requests::Request,
    rows::{self, Row},
    source::SourceFile,
};

/// Rows between two reports.
const REPORT_EVERY: u64 = 1000;

/// Where a source is written.
pub(crate) struct Spool<'a> {
    pub runtime: &'a Handle,
    /// A folder for copies.
    pub folder: &'a Path,
    /// The lines.
    pub lines: &'a Path,
    /// What rows carry, a JSON object per line.
    pub carried: &'a Path,
}

/// What was written.
#[derive(Debug)]
pub(crate) struct Spooled {
    /// Lines, or rows.
    pub lines: u64,
    /// Why the source ended in the middle, if it did.
    pub ended: Option<DataError>,
}

impl Spool<'_> {
    /// Writes every file of a source; as lines of requests if there are no `columns`.
    ///
    /// # Errors
    /// [`DataError`] if nothing can be read, or files cannot be written. For a source that ends in the middle see
    /// [`Spooled::ended`].
    pub fn write(
        &self,
        files: &mut [SourceFile],
        columns: Option<&Columns>,
        report: &mut dyn FnMut(u64),
    ) -> Result<Spooled, DataError> {
        let mut lines = Target::create(self.lines)?;
        let mut carried = Target::create(self.carried)?;
        let mut count = 0;
        let mut ended = None;
        for file in files {
            let done = match columns {
                Some(columns) => {
                    self.rows(file, columns, &mut count, &mut (&mut lines, &mut carried), report)
                }
                None => self.copy(file, &mut count, &mut lines, report),
            };
            match done {
                Ok(()) => {}
                Err(error @ DataError::Write { .. }) => return Err(error),
                Err(error) if count == 0 => return Err(error),
                Err(error) => {
                    ended = Some(error);
                    break;
                }
            }
        }
        report(count);
        lines.finish()?;
        carried.finish()?;
        Ok(Spooled { lines: count, ended })
    }

    fn rows(
        &self,
        file: &mut SourceFile,
        columns: &Columns,
        count: &mut u64,
        (lines, carried): &mut (&mut Target, &mut Target),
        report: &mut dyn FnMut(u64),
    ) -> Result<(), DataError> {
        let mut rows = rows::open(file, self.runtime, self.folder)?;
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
                    Request { line: json_line(&Value::Object(values)), carried: Map::new() }
                }
                found => columns.request(found, *count, &place),
            };
            lines.line(&request.line)?;
            carried.line(&json_line(&Value::Object(request.carried)))?;
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
        lines: &mut Target,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), DataError> {
        let mut content = rows::content(file, self.runtime)?;
        let mut piece = vec![0; 1 << 16];
        loop {
            let read = match content.read(&mut piece) {
                Ok(0) => return lines.end_line(count),
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

/// A file that is being written.
struct Target {
    file: BufWriter<File>,
    path: std::path::PathBuf,
    /// Its length, and its length up to the last line end.
    bytes: u64,
    whole: u64,
}

impl Target {
    fn create(path: &Path) -> Result<Self, DataError> {
        let file = File::create(path);
        let file = file.map_err(|source| DataError::Write { path: path.to_owned(), source })?;
        Ok(Self { file: BufWriter::new(file), path: path.to_owned(), bytes: 0, whole: 0 })
    }

    fn failed(&self) -> impl Fn(io::Error) -> DataError + use<> {
        let path = self.path.clone();
        move |source| DataError::Write { path: path.clone(), source }
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.file.write_all(bytes).map_err(self.failed())?;
        if let Some(at) = bytes.iter().rposition(|byte| *byte == b'\n') {
            self.whole = self.bytes + at as u64 + 1;
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn line(&mut self, line: &str) -> Result<(), DataError> {
        self.add(line.as_bytes())?;
        self.add(b"\n")
    }

    /// Ends a last line without a line end.
    fn end_line(&mut self, count: &mut u64) -> Result<(), DataError> {
        if self.whole < self.bytes {
            *count += 1;
            self.add(b"\n")?;
        }
        Ok(())
    }

    /// Removes an incomplete last line.
    fn cut(&mut self) -> Result<(), DataError> {
        let failed = self.failed();
        self.file.flush().map_err(&failed)?;
        let file = self.file.get_mut();
        file.set_len(self.whole).map_err(&failed)?;
        file.seek(io::SeekFrom::Start(self.whole)).map_err(&failed)?;
        self.bytes = self.whole;
        Ok(())
    }

    fn finish(mut self) -> Result<(), DataError> {
        let failed = self.failed();
        self.file.flush().map_err(&failed)?;
        self.file.get_ref().sync_all().map_err(failed)
    }
}
