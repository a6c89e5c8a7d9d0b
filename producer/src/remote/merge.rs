//! Merges the answers and errors of all parts into the output: one line for each line of the input,
//! in its order.
//!
//! Every file is read once, in parallel: a part's lines show which line is next, and the answers and
//! errors, in the same order, have that line at their heads.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    path::Path,
};

use serde_json::Value;

use super::state::{Folder, Written};
use crate::lines::LineReader;

/// Writes the merged output to a file.
pub(super) fn merge(folder: &Folder, parts: usize, to: &Path) -> io::Result<Written> {
    let mut output = Output {
        file: BufWriter::new(File::create(to)?),
        hasher: blake3::Hasher::new(),
        written: Written::default(),
    };
    let mut refused = Refused::open(folder)?;
    let mut sources: Vec<Source> =
        (0..parts).map(|index| Source::open(folder, index)).collect::<io::Result<_>>()?;
    loop {
        let next = sources
            .iter()
            .enumerate()
            .filter_map(|(at, source)| source.next.as_ref().map(|(number, _)| (*number, at)));
        let next = next.min();
        if let Some(number) = refused.next.as_ref().map(|(number, _)| *number)
            && next.is_none_or(|(other, _)| number < other)
        {
            output.line(&refused.take()?, false)?;
            continue;
        }
        let Some((_, at)) = next else { break };
        let (line, is_answer) = sources[at].take()?;
        output.line(&line, is_answer)?;
    }
    output.end()
}

struct Output {
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    written: Written,
}

impl Output {
    fn line(&mut self, line: &[u8], is_answer: bool) -> io::Result<()> {
        for bytes in [line, b"\n"] {
            self.file.write_all(bytes)?;
            self.hasher.update(bytes);
        }
        match is_answer {
            false => self.written.failed += 1,
            true => {
                self.written.completed += 1;
                let line = serde_json::from_slice::<Value>(line)?;
                self.add_usage(&line["response"]["body"]["usage"]);
            }
        }
        Ok(())
    }

    /// Counts the tokens of an answer, by the names of chat completions, of responses or of messages.
    fn add_usage(&mut self, usage: &Value) {
        let count = |pointers: &[&str]| -> u64 {
            pointers.iter().filter_map(|pointer| usage.pointer(pointer)?.as_u64()).sum()
        };
        let written = &mut self.written;
        written.tokens += count(&["/completion_tokens", "/output_tokens"]);
        // A message counts cached tokens apart from its input.
        let apart = "/cache_read_input_tokens";
        written.prompt_tokens += count(&["/prompt_tokens", "/input_tokens", apart]);
        written.cached_tokens += count(&[
            "/prompt_tokens_details/cached_tokens",
            "/input_tokens_details/cached_tokens",
            apart,
        ]);
    }

    fn end(mut self) -> io::Result<Written> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        Ok(Written { hash: self.hasher.finalize().to_hex().to_string(), ..self.written })
    }
}

/// Reads a line, without its end; returns `None` at the end of the file.
fn next_line(reader: &mut BufReader<File>) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    if reader.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.ends_with(b"\n") {
        line.pop();
    }
    Ok(Some(line))
}

/// Returns a line's `custom_id`.
fn custom_id(line: &[u8]) -> io::Result<String> {
    let value: Value = serde_json::from_slice(line)?;
    Ok(value["custom_id"].as_str().unwrap_or_default().to_owned())
}

/// Lines that were refused locally.
struct Refused {
    reader: BufReader<File>,
    next: Option<(u64, Vec<u8>)>,
}

impl Refused {
    fn open(folder: &Folder) -> io::Result<Self> {
        let mut refused =
            Self { reader: BufReader::new(File::open(folder.refused())?), next: None };
        refused.take()?;
        Ok(refused)
    }

    /// Takes the line at the head and reads the next one.
    fn take(&mut self) -> io::Result<Vec<u8>> {
        let next = next_line(&mut self.reader)?.map(|line| {
            let tab = line.iter().position(|byte| *byte == b'\t').unwrap_or(line.len());
            let number = std::str::from_utf8(&line[..tab]).ok().and_then(|text| text.parse().ok());
            let number = number.ok_or_else(|| io::Error::other("a refused line has no number"))?;
            Ok::<_, io::Error>((number, line[tab + 1..].to_vec()))
        });
        let taken = std::mem::replace(&mut self.next, next.transpose()?);
        Ok(taken.map(|(_, line)| line).unwrap_or_default())
    }
}

/// A part with its answers and errors.
struct Source {
    lines: LineReader<BufReader<File>>,
    /// Number and `custom_id` of the next line.
    next: Option<(u64, String)>,
    answers: Downloaded,
    errors: Downloaded,
}

impl Source {
    fn open(folder: &Folder, index: usize) -> io::Result<Self> {
        let lines = LineReader::new(BufReader::new(File::open(folder.part(index))?));
        let [answers, errors] = ["output", "errors"].map(|what| folder.downloaded(index, what));
        let (answers, errors) = (Downloaded::open(&answers)?, Downloaded::open(&errors)?);
        let mut source = Self { lines, next: None, answers, errors };
        source.advance()?;
        Ok(source)
    }

    fn advance(&mut self) -> io::Result<()> {
        self.next = match self.lines.next_line()? {
            None => None,
            Some(line) => {
                let bytes = line.content.map_err(|_| io::Error::other("a part has a long line"))?;
                Some((line.number, custom_id(&bytes)?))
            }
        };
        Ok(())
    }

    /// Takes the output line of the next line, and whether it is an answer.
    fn take(&mut self) -> io::Result<(Vec<u8>, bool)> {
        let (number, wanted) = self.next.take().unwrap_or_default();
        let found = match self.answers.take_if(&wanted)? {
            Some(line) => Some((line, true)),
            None => self.errors.take_if(&wanted)?.map(|line| (line, false)),
        };
        self.advance()?;
        found.ok_or_else(|| {
            io::Error::other(format!("the server returned nothing for line {number}"))
        })
    }
}

/// A downloaded file; a file that the server did not create counts as empty.
struct Downloaded {
    reader: Option<BufReader<File>>,
    head: Option<(String, Vec<u8>)>,
}

impl Downloaded {
    fn open(path: &Path) -> io::Result<Self> {
        let reader = match File::open(path) {
            Ok(file) => Some(BufReader::new(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let mut downloaded = Self { reader, head: None };
        downloaded.advance()?;
        Ok(downloaded)
    }

    fn advance(&mut self) -> io::Result<()> {
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let line = next_line(reader)?;
        self.head = line.map(|line| Ok::<_, io::Error>((custom_id(&line)?, line))).transpose()?;
        Ok(())
    }

    fn take_if(&mut self, wanted: &str) -> io::Result<Option<Vec<u8>>> {
        let Some((_, line)) = self.head.take_if(|(name, _)| name == wanted) else {
            return Ok(None);
        };
        self.advance()?;
        Ok(Some(line))
    }
}
