//! Splits the input into parts of one endpoint and one model, with no more lines and bytes than servers
//! allow by default.
//!
//! A line keeps its number: a part has blank lines in place of the lines of other parts, so a server's
//! message about line 7 is about line 7 of the input. The same input always has the same parts.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write as _},
};

use serde_json::{Map, Value, json};

use super::state::{Folder, Part};
use crate::{
    answer,
    batch_file::Input,
    body::Endpoint,
    lines::{LineReader, RawLine},
    request::{RefusedLine, Request, duplicate_line, parse_request},
};

/// Maximum lines of a part.
const PART_LINES: u64 = 50_000;
/// Maximum bytes of a part, give or take one line.
const PART_BYTES: u64 = 190_000_000;
/// Maximum parts of a run.
const PARTS_MAX: usize = 4096;
/// Lines between two reports.
const REPORT_EVERY: u64 = 1000;

/// Result of splitting an input.
#[derive(Debug, Default)]
pub(super) struct Split {
    /// BLAKE3 hash of the input.
    pub hash: String,
    /// Lines that are not blank.
    pub lines: u64,
    /// Lines that were refused and are in no part.
    pub refused: u64,
    /// The parts to upload.
    pub parts: Vec<Part>,
}

/// An error while splitting.
#[derive(Debug)]
pub(super) enum SplitFailure {
    /// The input cannot be read.
    Input(io::Error),
    /// The parts cannot be written.
    Parts(io::Error),
}

impl From<io::Error> for SplitFailure {
    fn from(error: io::Error) -> Self {
        Self::Parts(error)
    }
}

/// Reads the input into the files of a folder. `model` is for lines that do not name one. `report` gets
/// lines and bytes read; if it returns false, the reading stops and this returns `None`.
pub(super) fn split(
    input: Input,
    folder: &Folder,
    model: &str,
    mut report: impl FnMut(u64, u64) -> bool,
) -> Result<Option<Split>, SplitFailure> {
    let mut hasher = blake3::Hasher::new();
    let hashed = Hashed { input, hasher: &mut hasher };
    let mut reader = LineReader::new(BufReader::with_capacity(1 << 16, hashed));
    let mut split = Split::default();
    let mut writer = Writer::begin(folder)?;
    let mut first_lines: HashMap<[u8; 16], u64> = HashMap::new();
    while let Some(line) = reader.next_line().map_err(SplitFailure::Input)? {
        split.lines += 1;
        match request_of(&line, &mut first_lines) {
            Ok(request) => writer.line(&line, &request, model)?,
            Err(refused) => {
                split.refused += 1;
                writer.refuse(&refused)?;
            }
        }
        if split.lines.is_multiple_of(REPORT_EVERY) && !report(split.lines, reader.bytes_read()) {
            return Ok(None);
        }
    }
    if !report(split.lines, reader.bytes_read()) {
        return Ok(None);
    }
    split.parts = writer.end()?;
    split.hash = hasher.finalize().to_hex().to_string();
    Ok(Some(split))
}

/// Returns the request of a line, or its refusal. The later of two lines with the same `custom_id` is
/// refused.
fn request_of(
    line: &RawLine,
    first_lines: &mut HashMap<[u8; 16], u64>,
) -> Result<Request, Box<RefusedLine>> {
    let parsed = parse_request(line);
    let name = match &parsed {
        Ok(request) => Some(request.custom_id.as_str()),
        Err(refused) => refused.custom_id.as_deref(),
    };
    let Some(name) = name else { return parsed };
    let hash = *blake3::hash(name.as_bytes()).as_bytes();
    let short: [u8; 16] = hash[..16].try_into().expect("a hash has 32 bytes");
    match first_lines.entry(short) {
        Entry::Vacant(free) => {
            free.insert(line.number);
            parsed
        }
        Entry::Occupied(first) => Err(Box::new(duplicate_line(line, name, *first.get()))),
    }
}

/// The files of the parts.
struct Writer<'a> {
    folder: &'a Folder,
    refused: BufWriter<File>,
    parts: Vec<(Part, Spool)>,
    /// Index of the part that takes lines of an endpoint and a model.
    open: HashMap<(&'static str, String), usize>,
}

/// A part's file.
struct Spool {
    file: BufWriter<File>,
    /// Lines, blank ones included.
    line: u64,
    bytes: u64,
}

impl<'a> Writer<'a> {
    fn begin(folder: &'a Folder) -> io::Result<Self> {
        let refused = BufWriter::new(File::create(folder.refused())?);
        Ok(Self { folder, refused, parts: Vec::new(), open: HashMap::new() })
    }

    fn refuse(&mut self, line: &RefusedLine) -> io::Result<()> {
        let text = answer::refusal_line(&line.key, line.custom_id.as_deref(), &line.refusal);
        writeln!(self.refused, "{}\t{text}", line.refusal.line)
    }

    fn line(&mut self, raw: &RawLine, request: &Request, model: &str) -> io::Result<()> {
        let model = request.body.model.as_deref().unwrap_or(model);
        let endpoint = request.answered_by();
        let text = rendered(raw, request, endpoint, model);
        let (part, spool) = self.part(endpoint, model)?;
        while spool.line + 1 < raw.number {
            spool.file.write_all(b"\n")?;
            (spool.line, spool.bytes) = (spool.line + 1, spool.bytes + 1);
        }
        spool.file.write_all(&text)?;
        spool.file.write_all(b"\n")?;
        (spool.line, spool.bytes) = (spool.line + 1, spool.bytes + text.len() as u64 + 1);
        part.lines += 1;
        Ok(())
    }

    /// Returns the part that takes the next line of this kind.
    fn part(&mut self, endpoint: Endpoint, model: &str) -> io::Result<&mut (Part, Spool)> {
        let kind = (endpoint.as_str(), model.to_owned());
        let is_full =
            |(part, spool): &(Part, Spool)| part.lines >= PART_LINES || spool.bytes >= PART_BYTES;
        let found = self.open.get(&kind).copied().filter(|at| !is_full(&self.parts[*at]));
        let at = match found {
            Some(at) => at,
            None => {
                let at = self.parts.len();
                if at == PARTS_MAX {
                    let problem = format!("the input needs more than {PARTS_MAX} batches");
                    return Err(io::Error::other(problem));
                }
                let (endpoint, model) = (endpoint.as_str().to_owned(), model.to_owned());
                let part = Part { endpoint, model, ..Part::default() };
                let file = BufWriter::new(File::create(self.folder.part(at))?);
                self.parts.push((part, Spool { file, line: 0, bytes: 0 }));
                if let Some(before) = self.open.insert(kind, at) {
                    // The old part is full; its file is closed with the others.
                    self.parts[before].1.file.flush()?;
                }
                at
            }
        };
        Ok(&mut self.parts[at])
    }

    fn end(mut self) -> io::Result<Vec<Part>> {
        self.refused.flush()?;
        let end = |(part, mut spool): (Part, Spool)| spool.file.flush().map(|()| part);
        self.parts.into_iter().map(end).collect()
    }
}

/// Returns a line as the server takes it: unchanged if it has a model; else with its model, and the
/// seed that a local run would use.
fn rendered(raw: &RawLine, request: &Request, endpoint: Endpoint, model: &str) -> Vec<u8> {
    let bytes = raw.content.as_ref().map(Vec::as_slice).unwrap_or_default();
    if request.body.model.is_some() && request.endpoint != Endpoint::Plain {
        return bytes.to_vec();
    }
    let mut map: Map<String, Value> = serde_json::from_slice(bytes).unwrap_or_default();
    let mut body = match map.remove("body") {
        Some(Value::Object(body)) => body,
        _ => {
            map.remove("custom_id");
            map
        }
    };
    if request.endpoint == Endpoint::Plain && endpoint == Endpoint::Chat {
        let question = body.remove("prompt");
        body.insert("messages".to_owned(), json!([{ "role": "user", "content": question }]));
        if let Some(top) = body.get("logprobs").and_then(Value::as_u64) {
            body.insert("logprobs".to_owned(), json!(true));
            body.insert("top_logprobs".to_owned(), json!(top));
        }
    }
    body.insert("model".to_owned(), json!(model));
    body.insert("seed".to_owned(), json!(request.body.seed));
    let line = json!({
        "custom_id": request.custom_id,
        "method": "POST",
        "url": endpoint.as_str(),
        "body": body,
    });
    line.to_string().into_bytes()
}

/// An input that is hashed while it is read.
struct Hashed<'a> {
    input: Input,
    hasher: &'a mut blake3::Hasher,
}

impl Read for Hashed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}
