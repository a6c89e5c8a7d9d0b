//! [`RemoteSource`]: a source that a server reads for a caller, as pages of lines.

use serde_json::{Value, json};
use tokio::runtime::Handle;
use tritmill_client::json_line;

use crate::{
    Address, Columns, DataError, Format,
    http::Redirects,
    reading::{Lines, Reader},
    requests::Request,
    source::{self, Wanted},
};

/// The status of a line that is made of a row which cannot be used: its neighbours go on.
const BAD_ROW: u16 = 400;

/// A source on another machine. It is read with bounded memory, and redirects of web servers are not followed.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoteSource {
    /// Where it is.
    pub address: Address,
    /// Its form, if its name does not tell it.
    pub format: Option<Format>,
    /// Files of a folder to read, such as `train`.
    pub split: Option<String>,
    /// How rows become requests; `None` if they cannot.
    pub columns: Option<Columns>,
    /// Size of every page but the last, in bytes. A page may end within a line.
    pub page_bytes: usize,
    /// Most bytes of a Parquet file, which is copied to this machine while it is read.
    pub copy_bytes_max: u64,
}

/// A part of the lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Line ends in it.
    pub lines: u64,
}

/// How the reading of a source ended.
#[derive(Debug)]
pub struct Ended {
    /// Lines, or rows, that were read.
    pub lines: u64,
    /// Why it ended before the end of the source.
    pub error: Option<DataError>,
}

impl RemoteSource {
    /// Reads the source and gives its pages, until there are no more or `give` returns false.
    pub fn read(&self, runtime: &Handle, give: &mut dyn FnMut(Page) -> bool) -> Ended {
        let mut count = 0;
        let page = Vec::with_capacity(self.page_bytes);
        let mut pages = Pages { page, lines: 0, is_open: false, page_bytes: self.page_bytes, give };
        let error = self.read_into(runtime, &mut count, &mut pages).err();
        Ended { lines: count, error }
    }

    fn read_into(
        &self,
        runtime: &Handle,
        count: &mut u64,
        pages: &mut Pages<'_>,
    ) -> Result<(), DataError> {
        let Self { address, format, split, columns, copy_bytes_max, .. } = self;
        let wanted = Wanted {
            address,
            format: *format,
            split: split.as_deref(),
            redirects: Redirects::Refuse,
        };
        let mut files = source::files(wanted, runtime)?;
        let table = files.iter().find(|file| file.format != Format::Lines);
        let columns = match (columns, table) {
            (None, Some(table)) => {
                return Err(DataError::NoEndpoint { name: table.name.clone() });
            }
            (Some(columns), _) if columns.are_told() || source::have_rows(&files) => Some(columns),
            _ => None,
        };
        let folder = std::env::temp_dir();
        let reader = Reader { runtime, folder: &folder, copy_bytes_max: *copy_bytes_max, columns };
        for file in &mut files {
            reader.read(file, count, pages, &mut |_| {})?;
        }
        pages.flush()
    }
}

/// The page that is being filled.
struct Pages<'a> {
    page: Vec<u8>,
    /// Line ends in it.
    lines: u64,
    /// Whether the last line has no end yet.
    is_open: bool,
    page_bytes: usize,
    give: &'a mut dyn FnMut(Page) -> bool,
}

impl Pages<'_> {
    fn flush(&mut self) -> Result<(), DataError> {
        if self.page.is_empty() {
            return Ok(());
        }
        let bytes = std::mem::replace(&mut self.page, Vec::with_capacity(self.page_bytes));
        let lines = std::mem::take(&mut self.lines);
        match (self.give)(Page { bytes, lines }) {
            true => Ok(()),
            false => Err(DataError::Unwanted),
        }
    }
}

impl Lines for Pages<'_> {
    fn request(&mut self, request: Request) -> Result<(), DataError> {
        let Request { mut line, carried } = request;
        if let Value::Object(fields) = &mut line {
            if let Some(Value::Object(error)) = fields.get_mut("row_error") {
                error.insert("status".to_owned(), json!(BAD_ROW));
            }
            if !carried.is_empty() {
                fields.insert("row".to_owned(), Value::Object(carried));
            }
        }
        self.add(json_line(&line).as_bytes())?;
        self.add(b"\n")
    }

    fn add(&mut self, mut bytes: &[u8]) -> Result<(), DataError> {
        self.is_open = bytes.last().map_or(self.is_open, |last| *last != b'\n');
        while !bytes.is_empty() {
            let room = self.page_bytes - self.page.len();
            let (head, tail) = bytes.split_at(bytes.len().min(room));
            self.page.extend_from_slice(head);
            self.lines += head.iter().filter(|byte| **byte == b'\n').count() as u64;
            bytes = tail;
            if self.page.len() == self.page_bytes {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn end_line(&mut self) -> Result<bool, DataError> {
        let is_open = self.is_open;
        if is_open {
            self.add(b"\n")?;
        }
        Ok(is_open)
    }

    fn cut(&mut self) -> Result<(), DataError> {
        // The caller gets no part of a source.
        Ok(())
    }
}
