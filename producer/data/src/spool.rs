//! Writes a source once into local files: the lines of a batch, and what each row carries to its answer.

use std::{
    fs::File,
    io::{self, BufWriter, Seek as _, Write as _},
    path::Path,
};

use serde_json::Value;
use tokio::runtime::Handle;
use tritmill_client::json_line;

use crate::{
    Columns, DataError,
    reading::{Lines, Reader},
    requests::Request,
    source::SourceFile,
};

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
        let (runtime, folder) = (self.runtime, self.folder);
        let reader = Reader { runtime, folder, copy_bytes_max: u64::MAX, columns };
        let mut spooled =
            Files { lines: Target::create(self.lines)?, carried: Target::create(self.carried)? };
        let mut count = 0;
        let mut ended = None;
        for file in files {
            match reader.read(file, &mut count, &mut spooled, report) {
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
        spooled.lines.finish()?;
        spooled.carried.finish()?;
        Ok(Spooled { lines: count, ended })
    }
}

/// The two files.
struct Files {
    lines: Target,
    carried: Target,
}

impl Lines for Files {
    fn request(&mut self, request: Request) -> Result<(), DataError> {
        self.lines.line(&json_line(&request.line))?;
        self.carried.line(&json_line(&Value::Object(request.carried)))
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.lines.add(bytes)
    }

    fn end_line(&mut self) -> Result<bool, DataError> {
        self.lines.end_line()
    }

    fn cut(&mut self) -> Result<(), DataError> {
        self.lines.cut()
    }
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

    /// Ends a last line without a line end. Returns whether there was one.
    fn end_line(&mut self) -> Result<bool, DataError> {
        let is_open = self.whole < self.bytes;
        if is_open {
            self.add(b"\n")?;
        }
        Ok(is_open)
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
