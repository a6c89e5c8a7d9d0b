//! Parquet files made to take the memory or the stack of the process that reads them.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{fs, io::Write as _, path::Path};

use flate2::{Compression, write::GzEncoder};
use serde_json::Map;
use tempfile::TempDir;
use thrift::protocol::{
    TCompactOutputProtocol, TFieldIdentifier, TListIdentifier, TOutputProtocol as _,
    TStructIdentifier, TType,
};
use tokio::runtime::Runtime;
use tritmill_data::{Address, Columns, DataRun, DataSettings, EndpointOfRows};

const PLAIN: i32 = 0;
const SNAPPY: i32 = 1;
const GZIP: i32 = 2;

type Output<'a> = TCompactOutputProtocol<&'a mut Vec<u8>>;

/// A field of a struct: its number, its type, and what writes it.
type Field<'a> = (i16, TType, &'a mut dyn FnMut(&mut Output<'_>));

/// Writes a struct.
fn record(to: &mut Output<'_>, fields: &mut [Field<'_>]) {
    to.write_struct_begin(&TStructIdentifier::new("")).unwrap();
    for (id, of, write) in fields {
        to.write_field_begin(&TFieldIdentifier::new("", *of, *id)).unwrap();
        write(to);
    }
    to.write_field_stop().unwrap();
    to.write_struct_end().unwrap();
}

fn list(
    to: &mut Output<'_>,
    of: TType,
    count: usize,
    mut write: impl FnMut(&mut Output<'_>, usize),
) {
    to.write_list_begin(&TListIdentifier::new(of, i32::try_from(count).unwrap())).unwrap();
    for number in 0..count {
        write(to, number);
    }
}

/// A file with one row and, in each column, one page with one value.
struct Made {
    codec: i32,
    /// What the page has after compression.
    page: Vec<u8>,
    /// The size before it that its head says.
    said_bytes: i32,
    columns: usize,
    /// Groups in each other above the columns.
    depth: usize,
    /// The begin of each column in the footer, instead of where it is.
    begin: Option<i64>,
}

impl Made {
    fn new(codec: i32, page: Vec<u8>, said_bytes: i32) -> Self {
        Self { codec, page, said_bytes, columns: 1, depth: 0, begin: None }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut page = Vec::new();
        let head = &mut TCompactOutputProtocol::new(&mut page);
        let compressed = i32::try_from(self.page.len()).unwrap();
        record(
            head,
            &mut [
                (1, TType::I32, &mut |to| to.write_i32(0).unwrap()),
                (2, TType::I32, &mut |to| to.write_i32(self.said_bytes).unwrap()),
                (3, TType::I32, &mut |to| to.write_i32(compressed).unwrap()),
                (5, TType::Struct, &mut |to| {
                    record(
                        to,
                        &mut [
                            (1, TType::I32, &mut |to| to.write_i32(1).unwrap()),
                            (2, TType::I32, &mut |to| to.write_i32(0).unwrap()),
                            (3, TType::I32, &mut |to| to.write_i32(3).unwrap()),
                            (4, TType::I32, &mut |to| to.write_i32(3).unwrap()),
                        ],
                    );
                }),
            ],
        );
        page.extend(&self.page);

        let mut file = b"PAR1".to_vec();
        let begins: Vec<i64> = (0..self.columns)
            .map(|_| {
                let begin = i64::try_from(file.len()).unwrap();
                file.extend(&page);
                self.begin.unwrap_or(begin)
            })
            .collect();
        let mut footer = Vec::new();
        let size = i64::try_from(page.len()).unwrap();
        self.write_footer(&mut TCompactOutputProtocol::new(&mut footer), &begins, size);
        file.extend(&footer);
        file.extend(u32::try_from(footer.len()).unwrap().to_le_bytes());
        file.extend(b"PAR1");
        file
    }

    fn write_footer(&self, to: &mut Output<'_>, begins: &[i64], size: i64) {
        let name =
            |column: usize| if column == 0 { "prompt".to_owned() } else { format!("c{column}") };
        let element = |to: &mut Output<'_>, number: usize| {
            let (is_group, children) = (number <= self.depth, self.columns);
            let children = if number == self.depth { i32::try_from(children).unwrap() } else { 1 };
            match is_group {
                true => record(
                    to,
                    &mut [
                        (3, TType::I32, &mut |to| to.write_i32(0).unwrap()),
                        (4, TType::String, &mut |to| to.write_string("g").unwrap()),
                        (5, TType::I32, &mut |to| to.write_i32(children).unwrap()),
                    ],
                ),
                false => record(
                    to,
                    &mut [
                        (1, TType::I32, &mut |to| to.write_i32(6).unwrap()),
                        (3, TType::I32, &mut |to| to.write_i32(0).unwrap()),
                        (4, TType::String, &mut |to| {
                            to.write_string(&name(number - self.depth - 1)).unwrap()
                        }),
                        (6, TType::I32, &mut |to| to.write_i32(0).unwrap()),
                    ],
                ),
            }
        };
        let chunk = |to: &mut Output<'_>, column: usize| {
            record(
                to,
                &mut [
                    (2, TType::I64, &mut |to| to.write_i64(begins[column]).unwrap()),
                    (3, TType::Struct, &mut |to| {
                        record(
                            to,
                            &mut [
                                (1, TType::I32, &mut |to| to.write_i32(6).unwrap()),
                                (2, TType::List, &mut |to| {
                                    list(to, TType::I32, 1, |to, _| to.write_i32(0).unwrap())
                                }),
                                (3, TType::List, &mut |to| {
                                    list(to, TType::String, 1, |to, _| {
                                        to.write_string(&name(column)).unwrap()
                                    });
                                }),
                                (4, TType::I32, &mut |to| to.write_i32(self.codec).unwrap()),
                                (5, TType::I64, &mut |to| to.write_i64(1).unwrap()),
                                (6, TType::I64, &mut |to| to.write_i64(size).unwrap()),
                                (7, TType::I64, &mut |to| to.write_i64(size).unwrap()),
                                (9, TType::I64, &mut |to| to.write_i64(begins[column]).unwrap()),
                            ],
                        );
                    }),
                ],
            );
        };
        record(
            to,
            &mut [
                (1, TType::I32, &mut |to| to.write_i32(2).unwrap()),
                (2, TType::List, &mut |to| {
                    list(to, TType::Struct, 1 + self.depth + self.columns, element)
                }),
                (3, TType::I64, &mut |to| to.write_i64(1).unwrap()),
                (4, TType::List, &mut |to| {
                    list(to, TType::Struct, 1, |to, _| {
                        record(
                            to,
                            &mut [
                                (1, TType::List, &mut |to| {
                                    list(to, TType::Struct, self.columns, chunk)
                                }),
                                (2, TType::I64, &mut |to| to.write_i64(size).unwrap()),
                                (3, TType::I64, &mut |to| to.write_i64(1).unwrap()),
                            ],
                        );
                    });
                }),
            ],
        );
    }
}

/// A value as a page has it.
fn value(text: &[u8]) -> Vec<u8> {
    [&u32::try_from(text.len()).unwrap().to_le_bytes(), text].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Reads a file as a source of prompts; returns its lines, or what is wrong with it.
fn read(bytes: &[u8]) -> Result<String, String> {
    let (folder, runtime) = (TempDir::new().unwrap(), Runtime::new().unwrap());
    let path = |name: &str| folder.path().join(name);
    fs::write(path("in.parquet"), bytes).unwrap();
    let address = |path: &Path| Address::parse(path.to_str().unwrap()).unwrap();
    let settings = DataSettings {
        input: address(&path("in.parquet")),
        output: address(&path("out.jsonl")),
        input_format: None,
        output_format: None,
        split: None,
        columns: Columns {
            prompt: None,
            id: None,
            endpoint: EndpointOfRows::Chat,
            body: Map::new(),
            of_lines: false,
        },
        state: None,
        restart: false,
    };
    let run = DataRun::open(settings, runtime.handle(), &mut |_| {});
    let mut run = run.map_err(|error| error.to_string())?;
    match run.take_ended() {
        Some((error, _)) => Err(error.to_string()),
        None => Ok(fs::read_to_string(run.input()).unwrap()),
    }
}

#[track_caller]
fn refused(made: &Made, said: &str) {
    let error = read(&made.bytes()).unwrap_err();
    assert!(error.contains("in.parquet: not usable as Parquet") && error.contains(said), "{error}");
}

#[test]
fn files_that_claim_too_much_are_refused() {
    let page = value(b"hello");
    let bytes = i32::try_from(page.len()).unwrap();
    let good = || Made::new(GZIP, gzip(&page), bytes);
    let lines = read(&good().bytes()).unwrap();
    assert!(lines.contains("\"hello\""), "{lines}");
    let lines = read(&Made { columns: 3, ..good() }.bytes()).unwrap();
    assert!(lines.contains("\"hello\""), "{lines}");

    refused(
        &Made::new(SNAPPY, vec![0; 9], 1 << 30),
        "the size of the pages that must be open at once is 1024 MiB, and may be 256 MiB",
    );
    let claim = Made::new(PLAIN, page.clone(), 100 << 20);
    refused(&Made { columns: 3, ..claim }, "is 300 MiB");
    let zeros = value(&vec![b'0'; 32 << 20]);
    refused(&Made::new(GZIP, gzip(&zeros), 9), "a page has more bytes than it says");
    refused(&Made { depth: 200_000, ..good() }, "nested more than 64 deep");
    refused(&Made { columns: 3000, ..good() }, "it has 3000 columns, and may have 2000");
    refused(&Made { columns: 2, begin: Some(4), ..good() }, "two of its columns overlap");
    refused(&Made { begin: Some(-4), ..good() }, "a column lies outside the file");
    let mut footer = good().bytes();
    let tail = footer.len() - 8;
    footer[tail..tail + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = read(&footer).unwrap_err();
    assert!(error.contains("the size of its footer is 4095 MiB, and may be 16 MiB"), "{error}");
}

#[test]
fn a_file_with_any_byte_damaged_ends_in_rows_or_an_error() {
    let whole =
        fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/pyarrow.parquet")).unwrap();
    let mut damaged = 0;
    for place in (0..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x55;
        damaged += usize::from(read(&bytes).is_err());
    }
    assert!(damaged > 0);
}
