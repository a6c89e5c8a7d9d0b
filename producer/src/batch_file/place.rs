//! The input file, and the files beside the output.

use std::{
    fs::{File, TryLockError},
    io::{self, Read},
    path::{Path, PathBuf},
};

use super::BatchFileError;

/// Source of the lines.
#[derive(Debug)]
pub(crate) enum Input {
    File(File),
    Stdin(io::Stdin),
}

impl Input {
    /// Opens a file, or standard input for `-`.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(match path.as_os_str() == "-" {
            true => Self::Stdin(io::stdin()),
            false => Self::File(File::open(path)?),
        })
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(buffer),
            Self::Stdin(stdin) => stdin.read(buffer),
        }
    }
}

/// Opens the input and locks the output, which must be another file.
pub(crate) fn open_and_lock(input: &Path, output: &Path) -> Result<(Input, File), BatchFileError> {
    let failed = |source| BatchFileError::Input { path: input.to_owned(), source };
    let opened = Input::open(input).map_err(failed)?;
    if let (Ok(a), Ok(b)) = (input.canonicalize(), output.canonicalize())
        && a == b
    {
        return Err(BatchFileError::SameFile(output.to_owned()));
    }
    Ok((opened, lock(output)?))
}

/// Returns `OUT.jsonl` + `suffix`.
pub(crate) fn with_suffix(output: &Path, suffix: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn lock(output: &Path) -> Result<File, BatchFileError> {
    let path = with_suffix(output, ".tritmill-lock");
    let failed = |source| BatchFileError::Output { path: path.clone(), source };
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(BatchFileError::Locked(output.to_owned())),
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

/// Renames the output to `OUT.jsonl.old`, or to the first free name of `.old-2`, `.old-3`, …
pub(crate) fn rename_to_old(output: &Path) -> io::Result<PathBuf> {
    let mut kept_as = with_suffix(output, ".old");
    let mut number = 2;
    while kept_as.exists() {
        kept_as = with_suffix(output, &format!(".old-{number}"));
        number += 1;
    }
    std::fs::rename(output, &kept_as)?;
    Ok(kept_as)
}
