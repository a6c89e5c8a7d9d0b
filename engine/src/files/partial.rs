//! A file that gets its name once it is complete.
//!
//! Other processes may map the target, so it must never be half-written. The bytes go to
//! `NAME.partial`, which is renamed at the end, or removed if writing fails.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use super::error::ModelError;

/// A file being written.
#[derive(Debug)]
pub(crate) struct Partial {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    finished: bool,
}

impl Partial {
    /// Creates `target.partial`, replacing a leftover of a crash.
    pub fn create(target: &Path) -> Result<Self, ModelError> {
        let mut name = target.file_name().map_or_else(OsString::new, OsString::from);
        name.push(".partial");
        let temporary = target.with_file_name(name);
        let file = File::create(&temporary).map_err(|error| ModelError::io(&temporary, error))?;
        Ok(Self { file, temporary, target: target.to_owned(), finished: false })
    }

    /// Returns the file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the error of a failed write to the file.
    pub fn error(&self, source: io::Error) -> ModelError {
        ModelError::io(&self.temporary, source)
    }

    /// Syncs the file and renames it to the target.
    pub fn finish(mut self) -> Result<(), ModelError> {
        self.file.sync_all().map_err(|error| self.error(error))?;
        fs::rename(&self.temporary, &self.target)
            .map_err(|error| ModelError::io(&self.target, error))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.finished {
            // A leftover is harmless: its name ends in `.partial`.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
