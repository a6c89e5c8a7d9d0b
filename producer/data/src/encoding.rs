//! [`Encoding`]: gzip and zstd, told by the first bytes of a source and by the name of a sink.

use std::io::{self, BufReader, BufWriter, Cursor, Read, Write};

use flate2::{Compression, read::MultiGzDecoder, write::GzEncoder};

/// Bytes read at once.
const BUFFER_BYTES: usize = 1 << 16;
/// Level of compression of sinks.
const ZSTD_LEVEL: i32 = 3;

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Not at all.
    Plain,
    /// gzip
    Gzip,
    /// zstd
    Zstd,
}

impl Encoding {
    /// Splits a name into what is compressed and how.
    pub fn of_name(name: &str) -> (&str, Self) {
        for (end, encoding) in [
            (".gz", Self::Gzip),
            (".gzip", Self::Gzip),
            (".zst", Self::Zstd),
            (".zstd", Self::Zstd),
        ] {
            if let Some(rest) = name.strip_suffix(end) {
                return (rest, encoding);
            }
        }
        (name, Self::Plain)
    }

    /// Tells the encoding from a file's first bytes.
    pub fn of_begin(begin: &[u8]) -> Self {
        match begin {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

/// Reads a file's content, whatever its encoding.
///
/// # Errors
/// If it cannot be read, has an encoding that is not supported, or is empty with the name of a compressed file.
pub(crate) fn decoded(
    mut file: Box<dyn Read + Send>,
    name: &str,
) -> io::Result<Box<dyn Read + Send>> {
    let mut begin = Vec::with_capacity(6);
    file.by_ref().take(6).read_to_end(&mut begin)?;
    if begin.is_empty() && Encoding::of_name(name).1 != Encoding::Plain {
        let problem = "a compressed file is not empty: its content is missing";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, problem));
    }
    let encoding = Encoding::of_begin(&begin);
    let unsupported = [
        (&b"\xfd7zXZ\0"[..], "xz"),
        (b"BZh", "bzip2"),
        (b"PK\x03\x04", "zip"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
    ];
    if let Some((_, name)) = unsupported.iter().find(|(magic, _)| begin.starts_with(magic)) {
        return Err(io::Error::other(format!("it is {name}, which is not supported")));
    }
    let whole = BufReader::with_capacity(BUFFER_BYTES, Cursor::new(begin).chain(file));
    Ok(match encoding {
        Encoding::Plain => Box::new(whole),
        Encoding::Gzip => {
            Box::new(Compressed { content: MultiGzDecoder::new(whole), form: "gzip" })
        }
        Encoding::Zstd => {
            let content = zstd::stream::read::Decoder::with_buffer(whole)?;
            Box::new(Compressed { content, form: "zstd" })
        }
    })
}

/// Content that is decompressed. Its end in the middle has the same words in every form.
struct Compressed<R> {
    content: R,
    form: &'static str,
}

impl<R: Read> Read for Compressed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.content.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let problem = format!("the {} content ends in the middle: {error}", self.form);
                io::Error::new(io::ErrorKind::UnexpectedEof, problem)
            }
            _ => error,
        })
    }
}

/// A file that is compressed while it is written.
pub(crate) enum Encoder<W: Write> {
    Plain(BufWriter<W>),
    Gzip(GzEncoder<BufWriter<W>>),
    Zstd(zstd::stream::write::Encoder<'static, BufWriter<W>>),
}

impl<W: Write> Encoder<W> {
    pub fn new(encoding: Encoding, file: W) -> io::Result<Self> {
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(match encoding {
            Encoding::Plain => Self::Plain(file),
            Encoding::Gzip => Self::Gzip(GzEncoder::new(file, Compression::default())),
            Encoding::Zstd => {
                let mut encoder = zstd::stream::write::Encoder::new(file, ZSTD_LEVEL)?;
                encoder.include_checksum(true)?;
                Self::Zstd(encoder)
            }
        })
    }

    /// Writes the end and returns the file.
    pub fn finish(self) -> io::Result<W> {
        let file = match self {
            Self::Plain(file) => file,
            Self::Gzip(encoder) => encoder.finish()?,
            Self::Zstd(encoder) => encoder.finish()?,
        };
        file.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(file) => file.write(bytes),
            Self::Gzip(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(file) => file.flush(),
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(encoding: Encoding, text: &[u8]) -> Vec<u8> {
        let mut encoder = Encoder::new(encoding, Vec::new()).expect("memory");
        encoder.write_all(text).expect("memory");
        encoder.finish().expect("memory")
    }

    fn read(bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut found = Vec::new();
        decoded(Box::new(Cursor::new(bytes)), "x")?.read_to_end(&mut found).map(|_| found)
    }

    #[test]
    fn every_encoding_is_read_back_and_two_files_after_each_other_too() {
        for encoding in [Encoding::Plain, Encoding::Gzip, Encoding::Zstd] {
            let bytes = encoded(encoding, b"hello");
            assert_eq!(read(bytes.repeat(2)).expect("whole"), b"hellohello", "{encoding:?}");
        }
        assert_eq!(read(Vec::new()).expect("empty"), b"");
        let named = decoded(Box::new(Cursor::new(Vec::new())), "lines.jsonl.gz").map(drop);
        assert_eq!(named.expect_err("cut off").kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn file_that_ends_in_the_middle_and_unsupported_encodings_are_errors() {
        for encoding in [Encoding::Gzip, Encoding::Zstd] {
            let mut bytes = encoded(encoding, &b"some text, not too short".repeat(50));
            bytes.truncate(bytes.len() - 5);
            let error = read(bytes).expect_err("cut off");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{encoding:?}: {error}");
            assert!(error.to_string().contains("content ends in the middle"), "{error}");
        }
        let error = read(b"\xfd7zXZ\0...".to_vec()).expect_err("xz");
        assert_eq!(error.to_string(), "it is xz, which is not supported");
    }
}
