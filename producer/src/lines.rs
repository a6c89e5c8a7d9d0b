//! [`LineReader`]: reads lines of untrusted bytes with a bounded buffer.

use std::io::{self, BufRead, Read as _};

/// Length of the longest line that is parsed, in bytes.
pub const LINE_BYTES_MAX: usize = 4 << 20;

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawLine {
    /// Its number, from 1; blank lines count but are not returned.
    pub number: u64,
    /// Where it begins in the file, in bytes.
    pub offset: u64,
    /// Its bytes without the line end, or the length and hash of a line above
    /// [`LINE_BYTES_MAX`].
    pub content: Result<Vec<u8>, TooLong>,
}

/// A line that is too long to be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TooLong {
    /// Its length.
    pub bytes: u64,
    /// BLAKE3 of its bytes.
    pub hash: [u8; 32],
}

/// Splits a reader into lines.
#[derive(Debug)]
pub struct LineReader<R> {
    reader: R,
    number: u64,
    bytes_read: u64,
}

impl<R: BufRead> LineReader<R> {
    /// Creates a reader that starts at line 1.
    pub fn new(reader: R) -> Self {
        Self { reader, number: 0, bytes_read: 0 }
    }

    /// Creates a reader that continues after line `number`, which ends `bytes_read` bytes into the
    /// file.
    pub fn after(reader: R, number: u64, bytes_read: u64) -> Self {
        Self { reader, number, bytes_read }
    }

    /// Returns the number of bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Returns the next line that is not blank. Removes a byte order mark before the first line.
    pub fn next_line(&mut self) -> io::Result<Option<RawLine>> {
        loop {
            let offset = self.bytes_read;
            let Some(mut content) = self.take_line()? else { return Ok(None) };
            self.number += 1;
            if let Ok(bytes) = &mut content {
                if self.number == 1 && bytes.starts_with(b"\xEF\xBB\xBF") {
                    bytes.drain(..3);
                }
                if bytes.ends_with(b"\r") {
                    bytes.pop();
                }
                if bytes.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
            }
            return Ok(Some(RawLine { number: self.number, offset, content }));
        }
    }

    /// Reads up to the next line feed or the end.
    fn take_line(&mut self) -> io::Result<Option<Result<Vec<u8>, TooLong>>> {
        let mut line = Vec::new();
        let mut is_complete = self.take_part(&mut line)?;
        if is_complete || line.len() <= LINE_BYTES_MAX {
            return Ok((is_complete || !line.is_empty()).then_some(Ok(line)));
        }
        let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0);
        while !line.is_empty() {
            hasher.update(&line);
            bytes += line.len() as u64;
            line.clear();
            if !is_complete {
                is_complete = self.take_part(&mut line)?;
            }
        }
        Ok(Some(Err(TooLong { bytes, hash: *hasher.finalize().as_bytes() })))
    }

    /// Appends bytes up to the next line feed, the end, or one more than the longest line has. Returns
    /// whether a line feed, which is left out, was found.
    fn take_part(&mut self, line: &mut Vec<u8>) -> io::Result<bool> {
        let limit = LINE_BYTES_MAX as u64 + 1;
        self.bytes_read += self.reader.by_ref().take(limit).read_until(b'\n', line)? as u64;
        let is_complete = line.ends_with(b"\n");
        if is_complete {
            line.pop();
        }
        Ok(is_complete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> Vec<(u64, String)> {
        // A tiny buffer, so that every line spans several fills.
        let mut reader = LineReader::new(io::BufReader::with_capacity(3, bytes));
        let mut found = Vec::new();
        while let Some(line) = reader.next_line().expect("memory cannot fail") {
            let bytes = line.content.expect("short");
            found.push((line.number, String::from_utf8(bytes).expect("text")));
        }
        assert_eq!(reader.bytes_read(), bytes.len() as u64);
        found
    }

    #[test]
    fn blank_lines_count_but_are_not_returned() {
        let expected = [(2, "a".to_owned()), (5, "b c".to_owned())];
        assert_eq!(lines(b"\na\n \t\r\n\nb c"), expected);
        assert_eq!(lines(b""), []);
    }

    #[test]
    fn line_ends_and_byte_order_mark_are_removed() {
        assert_eq!(lines(b"\xEF\xBB\xBFa\r\nb\n"), [(1, "a".to_owned()), (2, "b".to_owned())]);
    }

    #[test]
    fn line_over_the_limit_is_skipped_and_hashed() {
        let mut bytes = vec![b'x'; LINE_BYTES_MAX + 1];
        bytes.extend_from_slice(b"\nnext\n");
        let mut reader = LineReader::new(io::BufReader::new(bytes.as_slice()));
        let long = reader.next_line().expect("memory").expect("a line");
        let expected = blake3::hash(&bytes[..=LINE_BYTES_MAX]);
        let skipped = TooLong { bytes: LINE_BYTES_MAX as u64 + 1, hash: *expected.as_bytes() };
        assert_eq!(long, RawLine { number: 1, offset: 0, content: Err(skipped) });
        let next = reader.next_line().expect("memory").expect("a line");
        let offset = LINE_BYTES_MAX as u64 + 2;
        assert_eq!(next, RawLine { number: 2, offset, content: Ok(b"next".to_vec()) });
    }

    #[test]
    fn line_at_the_limit_is_read() {
        let bytes = vec![b'x'; LINE_BYTES_MAX];
        let mut reader = LineReader::new(io::BufReader::new(bytes.as_slice()));
        let line = reader.next_line().expect("memory").expect("a line");
        assert_eq!(line.content, Ok(bytes.clone()));
    }
}
