//! Where a run reads its lines, writes its answers and keeps its state.

use std::{
    fs::{File, TryLockError},
    io::{self, BufRead as _, BufReader, Read, Write},
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::BatchFileError;

/// Bytes read at once.
const BUFFER_BYTES: usize = 1 << 16;

/// Source of the lines.
#[derive(Debug)]
pub(crate) enum Input {
    File(BufReader<File>),
    Stdin(BufReader<io::Stdin>),
}

impl Input {
    /// Opens a file, or standard input for `-`, and waits for its first bytes.
    ///
    /// # Errors
    /// If it cannot be read, or is compressed or in another encoding.
    pub fn open(path: &Path) -> Result<Self, BatchFileError> {
        let failed = |source| BatchFileError::Input { path: path.to_owned(), source };
        if path.as_os_str() != "-" && path.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let mut input = match path.as_os_str() == "-" {
            true => Self::Stdin(BufReader::with_capacity(BUFFER_BYTES, io::stdin())),
            false => {
                let file = File::open(path).map_err(failed)?;
                Self::File(BufReader::with_capacity(BUFFER_BYTES, file))
            }
        };
        let begin = match &mut input {
            Self::File(file) => file.fill_buf(),
            Self::Stdin(stdin) => stdin.fill_buf(),
        };
        match format_of(begin.map_err(failed)?) {
            None => Ok(input),
            Some((format, remedy)) => {
                Err(BatchFileError::Format { path: path.to_owned(), format, remedy })
            }
        }
    }
}

/// Returns the format of a file that is not lines of text, and a command that makes lines of it.
fn format_of(begin: &[u8]) -> Option<(&'static str, &'static str)> {
    const FORMATS: [(&[u8], &str, &str); 7] = [
        (&[0x1f, 0x8b], "gzip", "zcat IN"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "zstdcat IN"),
        (b"\xfd7zXZ\0", "xz", "xzcat IN"),
        (b"BZh", "bzip2", "bzcat IN"),
        (b"PK\x03\x04", "zip", "unzip -p IN"),
        (&[0xff, 0xfe], "UTF-16", "iconv -f UTF-16 -t UTF-8 IN"),
        (&[0xfe, 0xff], "UTF-16", "iconv -f UTF-16 -t UTF-8 IN"),
    ];
    let found = FORMATS.iter().find(|(magic, ..)| begin.starts_with(magic));
    found.map(|(_, format, remedy)| (*format, *remedy))
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(buffer),
            Self::Stdin(stdin) => stdin.read(buffer),
        }
    }
}

/// What a run writes its answers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// A file, which follows the store and can be written again.
    File(PathBuf),
    /// Standard output for `-`, or a pipe or terminal: every run writes all answers.
    Stream(PathBuf),
}

impl Target {
    /// Finds out what an output is.
    ///
    /// # Errors
    /// [`BatchFileError::NotAFile`] for a folder, a disk or a socket.
    pub fn of(output: &Path) -> Result<Self, BatchFileError> {
        let refused = |what| Err(BatchFileError::NotAFile { path: output.to_owned(), what });
        // The file behind these is not the run's to replace, whatever it is.
        let is_open_file =
            ["/dev/fd", "/proc/self/fd"].iter().any(|folder| output.starts_with(folder))
                || ["-", "/dev/stdout", "/dev/stderr"].iter().any(|name| output == Path::new(name));
        if is_open_file {
            return Ok(Self::Stream(output.to_owned()));
        }
        match std::fs::metadata(output).map(|metadata| metadata.file_type()) {
            Ok(kind) if kind.is_dir() => refused("a folder"),
            Ok(kind) if kind.is_block_device() => refused("a disk"),
            Ok(kind) if kind.is_socket() => refused("a socket"),
            Ok(kind) if kind.is_fifo() || kind.is_char_device() => {
                Ok(Self::Stream(output.to_owned()))
            }
            _ => Ok(Self::File(output.to_owned())),
        }
    }

    /// Opens a stream; waits for the reader of a pipe.
    pub fn open_stream(path: &Path) -> io::Result<Box<dyn Write + Send>> {
        Ok(match path.as_os_str() == "-" {
            true => Box::new(io::stdout()),
            false => Box::new(File::options().write(true).open(path)?),
        })
    }
}

/// The files of a run beside input and output.
#[derive(Debug)]
pub(crate) struct Place {
    pub target: Target,
    /// Path of the state, without its suffix.
    base: PathBuf,
    /// A folder that lasts as long as the run.
    _temporary: Option<TempDir>,
}

impl Place {
    /// Chooses the place: in the folder `state`, or beside the output if it is a file, or else beside the input. A run
    /// from a stream to a stream without a folder keeps nothing.
    pub fn choose(
        input: &Path,
        output: &Path,
        state: Option<&Path>,
    ) -> Result<Self, BatchFileError> {
        let target = Target::of(output)?;
        let failed = |path: &Path, source| BatchFileError::Output { path: path.to_owned(), source };
        let named = match &target {
            Target::File(path) => path,
            Target::Stream(_) => input,
        };
        let mut temporary = None;
        let base = match (state, &target) {
            (Some(folder), _) => {
                std::fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
                let name = named.file_name().filter(|name| *name != "-");
                folder.join(name.unwrap_or("stdin".as_ref()))
            }
            (None, Target::File(path)) => path.clone(),
            (None, Target::Stream(_)) if input.is_file() => input.to_owned(),
            (None, Target::Stream(_)) => {
                let folder = TempDir::new().map_err(|e| failed(&std::env::temp_dir(), e))?;
                temporary.insert(folder).path().join("run")
            }
        };
        Ok(Self { target, base, _temporary: temporary })
    }

    /// Returns the path of the state with this suffix.
    pub fn with_suffix(&self, suffix: &str) -> PathBuf {
        with_suffix(&self.base, suffix)
    }

    /// Returns the output, if it is a file.
    pub fn file(&self) -> Option<&Path> {
        match &self.target {
            Target::File(path) => Some(path),
            Target::Stream(_) => None,
        }
    }
}

/// Opens the input and locks the output, which must be another file.
pub(crate) fn open_and_lock(input: &Path, place: &Place) -> Result<(Input, File), BatchFileError> {
    if let Some(output) = place.file()
        && let (Ok(a), Ok(b)) = (input.canonicalize(), output.canonicalize())
        && a == b
    {
        return Err(BatchFileError::SameFile(output.to_owned()));
    }
    let opened = Input::open(input)?;
    Ok((opened, lock(place)?))
}

/// Returns `OUT.jsonl` + `suffix`.
pub(crate) fn with_suffix(output: &Path, suffix: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn lock(place: &Place) -> Result<File, BatchFileError> {
    let path = place.with_suffix(".tritmill-lock");
    let failed = |source| BatchFileError::Output { path: path.clone(), source };
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(BatchFileError::Locked(place.base.clone())),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Deletes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Renames an output to `OUT.jsonl.old`, or to the first free name of `.old-2`, `.old-3`, …, which is returned.
///
/// # Errors
/// If it cannot be renamed.
pub fn rename_to_old(output: &Path) -> io::Result<PathBuf> {
    let mut kept_as = with_suffix(output, ".old");
    let mut number = 2;
    while kept_as.exists() {
        kept_as = with_suffix(output, &format!(".old-{number}"));
        number += 1;
    }
    std::fs::rename(output, &kept_as)?;
    Ok(kept_as)
}
