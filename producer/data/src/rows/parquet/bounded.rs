//! [`BoundedFile`]: a Parquet file that is refused before it takes more memory than it may.
//!
//! The reader of Parquet believes what a file says of itself: it reserves the size that a page claims, and follows a schema as deep
//! as it goes, and a stranger may have written both. So the footer and the head of each page are read here first, by the format's
//! definition (<https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>).

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader, Read, Seek as _, SeekFrom},
    ops::Range,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use parquet::{
    basic::Compression,
    errors::{ParquetError, Result},
    file::{
        FOOTER_SIZE,
        metadata::{FooterTail, ParquetMetaData},
        reader::{ChunkReader, Length},
    },
};

use super::heads::{PageHead, check_schema, page_head};

/// Largest footer.
const FOOTER_BYTES_MAX: u64 = 16 << 20;
/// Largest sum of the pages that are open at once: of each column a dictionary and a page, as they are in the file and decompressed.
const PAGE_BYTES_MAX: u64 = 256 << 20;

/// A Parquet file.
#[derive(Clone)]
pub(super) struct BoundedFile(Arc<Inner>);

struct Inner {
    file: File,
    /// Where columns are, by their begin; empty before the footer is known.
    chunks: OnceLock<Vec<Chunk>>,
    open: Mutex<Open>,
}

/// The part of a row group that has one column.
struct Chunk {
    bytes: Range<u64>,
    row_group: usize,
    gzip: bool,
}

/// The pages that are open.
#[derive(Default)]
struct Open {
    row_group: usize,
    /// Bytes of each chunk's dictionary and page.
    chunks: HashMap<usize, [u64; 2]>,
    /// Pages with gzip that were announced: where their content begins, and their heads.
    gzip: HashMap<u64, PageHead>,
}

impl BoundedFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`ParquetError`] if its footer or its schema is larger than it may be.
    pub fn open(file: File) -> Result<Self> {
        let length = file.metadata()?.len();
        if let Some(tail) = length.checked_sub(FOOTER_SIZE as u64) {
            let mut bytes = [0; FOOTER_SIZE];
            file.get_read(tail)?.read_exact(&mut bytes)?;
            let footer = FooterTail::try_new(&bytes)?.metadata_length() as u64;
            if footer > FOOTER_BYTES_MAX {
                return Err(over("its footer", footer, FOOTER_BYTES_MAX));
            }
            if let Some(begin) = tail.checked_sub(footer) {
                check_schema(file.get_read(begin)?.take(footer))?;
            }
        }
        let (chunks, open) = (OnceLock::new(), Mutex::default());
        Ok(Self(Arc::new(Inner { file, chunks, open })))
    }

    /// Begins to bound pages.
    ///
    /// # Errors
    /// [`ParquetError`] if the columns of the footer overlap, or lie outside the file.
    pub fn bound_pages(&self, footer: &ParquetMetaData) -> Result<()> {
        let mut chunks = Vec::new();
        for (row_group, columns) in footer.row_groups().iter().enumerate() {
            for column in columns.columns() {
                let begin = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
                let bytes = u64::try_from(begin).ok().zip(column.compressed_size().try_into().ok());
                let bytes = bytes.and_then(|(begin, count)| Some(begin..begin.checked_add(count)?));
                let bytes = bytes.filter(|bytes| bytes.end <= self.len());
                let bytes = bytes.ok_or_else(|| refused("a column lies outside the file"))?;
                let gzip = matches!(column.compression(), Compression::GZIP(_));
                chunks.push(Chunk { bytes, row_group, gzip });
            }
        }
        chunks.retain(|chunk| !chunk.bytes.is_empty());
        chunks.sort_by_key(|chunk| chunk.bytes.start);
        if chunks.windows(2).any(|pair| pair[0].bytes.end > pair[1].bytes.start) {
            return Err(refused("two of its columns overlap"));
        }
        let _ = self.0.chunks.set(chunks);
        Ok(())
    }

    /// Reads the head of the page at an offset, and counts its bytes.
    fn announce(&self, start: u64) -> Result<()> {
        let Some(chunks) = self.0.chunks.get() else { return Ok(()) };
        let after = chunks.partition_point(|chunk| chunk.bytes.start <= start);
        let found = after.checked_sub(1).map(|number| (number, &chunks[number]));
        let found = found.filter(|(_, chunk)| chunk.bytes.contains(&start));
        let (number, chunk) = found.ok_or_else(|| refused("a page lies outside its column"))?;
        let head = page_head(self.0.file.get_read(start)?.take(chunk.bytes.end - start))?;

        let mut open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.row_group != chunk.row_group {
            *open = Open { row_group: chunk.row_group, ..Open::default() };
        }
        let bytes = open.chunks.entry(number).or_default();
        bytes[usize::from(!head.is_dictionary)] = head.compressed_bytes + head.bytes;
        let sum = open.chunks.values().flatten().sum();
        if sum > PAGE_BYTES_MAX {
            return Err(over("the pages that must be open at once", sum, PAGE_BYTES_MAX));
        }
        if chunk.gzip && head.is_compressed {
            open.gzip.insert(start + head.head_bytes, head);
        }
        Ok(())
    }

    /// Checks that a page with gzip has no more bytes than it says, for which the reader does not look.
    fn check_gzip(&self, start: u64, page: &[u8]) -> Result<()> {
        let mut open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(head) = open.gzip.remove(&start) else { return Ok(()) };
        drop(open);
        let levels = usize::try_from(head.level_bytes)?;
        let compressed = page.get(levels..).unwrap_or_default();
        let bytes = head.bytes.saturating_sub(head.level_bytes);
        let mut content = MultiGzDecoder::new(compressed).take(bytes + 1);
        match io::copy(&mut content, &mut io::sink())? > bytes {
            true => Err(refused("a page has more bytes than it says")),
            false => Ok(()),
        }
    }
}

fn refused(problem: &str) -> ParquetError {
    ParquetError::General(problem.to_owned())
}

fn over(what: &str, bytes: u64, bytes_max: u64) -> ParquetError {
    let (bytes, most) = (bytes >> 20, bytes_max >> 20);
    ParquetError::General(format!("the size of {what} is {bytes} MiB, and may be {most} MiB"))
}

impl Length for BoundedFile {
    fn len(&self) -> u64 {
        self.0.file.len()
    }
}

impl ChunkReader for BoundedFile {
    type T = PageStart;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        let bytes = self.0.file.get_read(start)?;
        Ok(PageStart { file: self.clone(), start: Some(start), bytes })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let end = start.checked_add(length as u64).filter(|end| *end <= self.len());
        end.ok_or_else(|| refused("a part lies outside the file"))?;
        let bytes = self.0.file.get_bytes(start, length)?;
        self.check_gzip(start, &bytes)?;
        Ok(bytes)
    }
}

/// Reads the head of a page, and what follows it. The page is announced when its head is read: the reader asks for the bytes of
/// pages, too, of which it knows the head.
pub(super) struct PageStart {
    file: BoundedFile,
    start: Option<u64>,
    bytes: BufReader<File>,
}

impl Read for PageStart {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(start) = self.start.take() {
            self.file.announce(start).map_err(io::Error::other)?;
            // Readers of a file share its position.
            self.bytes.seek(SeekFrom::Start(start))?;
        }
        self.bytes.read(buffer)
    }
}
