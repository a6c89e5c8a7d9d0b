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
    /// Creates `target.partial`, replacing a leftover of a crash. A link stays: the file that it leads to is replaced.
    ///
    /// # Errors
    /// If the target is no regular file, such as a device, or the file cannot be created.
    pub fn create(target: &Path) -> Result<Self, ModelError> {
        let target = match fs::metadata(target) {
            Ok(found) if !found.is_file() => {
                let source = io::Error::new(io::ErrorKind::AlreadyExists, "not a regular file");
                return Err(ModelError::io(target, source));
            }
            Ok(_) => fs::canonicalize(target).map_err(|error| ModelError::io(target, error))?,
            Err(_) => target.to_owned(),
        };
        let mut name = target.file_name().map_or_else(OsString::new, OsString::from);
        name.push(".partial");
        let temporary = target.with_file_name(name);
        let file = File::create(&temporary).map_err(|error| ModelError::io(&temporary, error))?;
        Ok(Self { file, temporary, target, finished: false })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn write(target: &Path) -> Result<(), ModelError> {
        let partial = Partial::create(target)?;
        io::Write::write_all(&mut partial.file(), b"new").map_err(|error| partial.error(error))?;
        partial.finish()
    }

    #[test]
    fn links_stay_and_what_is_no_file_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").expect("a file");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        write(&link).expect("a regular file behind a link");
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "new");
        assert!(fs::symlink_metadata(&link).expect("it is there").is_symlink());
        for target in [folder.path(), Path::new("/dev/null")] {
            let error = write(target).expect_err("no regular file").to_string();
            assert_eq!(error, format!("{}: not a regular file", target.display()));
        }
    }
}
