//! The schema of a Parquet file and the heads of its pages, as much of them as tells how much memory they need.

use std::io::{self, Read};

use parquet::errors::{ParquetError, Result};
use thrift::protocol::{TCompactInputProtocol, TInputProtocol, TType};

/// Deepest nesting of a schema, which the reader follows with the stack.
const DEPTH_MAX: usize = 64;
/// Largest number of columns. The reader keeps some 40 KB for each.
const COLUMNS_MAX: usize = 2000;

/// The head of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PageHead {
    /// Bytes of the head itself.
    pub head_bytes: u64,
    /// Bytes of the page after it is decompressed.
    pub bytes: u64,
    /// Bytes of the page in the file.
    pub compressed_bytes: u64,
    /// Bytes at the begin of the page that are never compressed.
    pub level_bytes: u64,
    pub is_dictionary: bool,
    pub is_compressed: bool,
}

/// Counts what is read.
struct Counted<R> {
    from: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.count += read as u64;
        Ok(read)
    }
}

type Input<R> = TCompactInputProtocol<R>;

fn unreadable(error: &thrift::Error) -> ParquetError {
    ParquetError::General(error.to_string())
}

/// Calls a function for each field of a struct, with its number and type; it reads the field.
fn each_field<R: Read>(
    input: &mut Input<R>,
    mut read: impl FnMut(&mut Input<R>, i16, TType) -> thrift::Result<()>,
) -> thrift::Result<()> {
    input.read_struct_begin()?;
    loop {
        let field = input.read_field_begin()?;
        match field.id {
            _ if field.field_type == TType::Stop => return input.read_struct_end(),
            Some(id) => read(input, id, field.field_type)?,
            None => input.skip(field.field_type)?,
        }
    }
}

/// Reads the head of a page (`PageHeader`) without the statistics.
///
/// # Errors
/// [`ParquetError`] if it is damaged.
pub(super) fn page_head(from: impl Read) -> Result<PageHead> {
    let mut counted = Counted { from, count: 0 };
    let mut input = TCompactInputProtocol::new(&mut counted);
    let (mut kind, mut bytes, mut compressed_bytes) = (0, 0, 0);
    let (mut levels, mut is_compressed) = ([0; 2], true);
    each_field(&mut input, |input, id, of| {
        match (id, of) {
            (1, TType::I32) => kind = input.read_i32()?,
            (2, TType::I32) => bytes = input.read_i32()?,
            (3, TType::I32) => compressed_bytes = input.read_i32()?,
            (8, TType::Struct) => {
                (levels, is_compressed) = ([0; 2], true);
                each_field(input, |input, id, of| {
                    match (id, of) {
                        (5, TType::I32) => levels[0] = input.read_i32()?,
                        (6, TType::I32) => levels[1] = input.read_i32()?,
                        (7, TType::Bool) => is_compressed = input.read_bool()?,
                        _ => input.skip(of)?,
                    }
                    Ok(())
                })?;
            }
            _ => input.skip(of)?,
        }
        Ok(())
    })
    .map_err(|error| unreadable(&error))?;
    Ok(PageHead {
        head_bytes: counted.count,
        bytes: u64::try_from(bytes)?,
        compressed_bytes: u64::try_from(compressed_bytes)?,
        level_bytes: u64::try_from(levels[0])? + u64::try_from(levels[1])?,
        // `PageType::DICTIONARY_PAGE`
        is_dictionary: kind == 2,
        is_compressed,
    })
}

/// Checks the schema in a footer (`FileMetaData`).
///
/// # Errors
/// [`ParquetError`] if it is nested too deeply, has too many columns, or is damaged.
pub(super) fn check_schema(footer: impl Read) -> Result<()> {
    let mut input = TCompactInputProtocol::new(footer);
    let mut problem = None;
    each_field(&mut input, |input, id, of| match (id, of) {
        (2, TType::List) => {
            problem = problem.take().or(problem_of_schema(input)?);
            Ok(())
        }
        _ => input.skip(of),
    })
    .map_err(|error| unreadable(&error))?;
    problem.map_or(Ok(()), |problem| Err(ParquetError::General(problem)))
}

/// Reads the list of a schema's elements, each of which is followed by its children.
fn problem_of_schema<R: Read>(input: &mut Input<R>) -> thrift::Result<Option<String>> {
    let list = input.read_list_begin()?;
    let (mut columns, mut is_too_deep) = (0, false);
    // Children that are still to come, of each group that is open.
    let mut open: Vec<i32> = Vec::new();
    for _ in 0..list.size {
        let mut children = 0;
        each_field(input, |input, id, of| {
            match (id, of) {
                (5, TType::I32) => children = input.read_i32()?,
                _ => input.skip(of)?,
            }
            Ok(())
        })?;
        while open.pop_if(|left| *left == 0).is_some() {}
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        match children > 0 {
            true if open.len() < DEPTH_MAX => open.push(children),
            true => is_too_deep = true,
            false => columns += 1,
        }
    }
    Ok(if is_too_deep {
        Some(format!("its columns are nested more than {DEPTH_MAX} deep"))
    } else if columns > COLUMNS_MAX {
        Some(format!("it has {columns} columns, and may have {COLUMNS_MAX}"))
    } else {
        None
    })
}
