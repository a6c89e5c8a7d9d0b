//! [`Reference`]: the name of a model on the hub, `ORG/NAME[@REVISION][:FILE]`.

use std::{fmt, str::FromStr};

/// What precedes a reference where a path is possible too.
pub const PREFIX: &str = "hf:";

/// Longest organisation or name that the hub allows.
const NAME_LEN_MAX: usize = 96;
/// Longest revision or file name accepted.
const PATH_LEN_MAX: usize = 512;

/// A model on the hub: a repository, and which state and file of it. No part leaves its folder in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    organisation: String,
    name: String,
    revision: String,
    file: Option<String>,
}

/// The part of a reference that is not valid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReferenceError {
    /// Not `ORG/NAME`, or a character that the hub does not allow.
    #[error("'{0}' is not a repository of the form ORG/NAME")]
    Repository(String),
    /// Not the name of a branch, a tag or a commit.
    #[error("'{0}' is not a branch, tag or commit")]
    Revision(String),
    /// Not a relative path.
    #[error("'{0}' is not a file of a repository")]
    File(String),
}

impl Reference {
    /// Creates a reference to the branch `main` of `ORG/NAME`.
    ///
    /// # Errors
    /// [`ReferenceError::Repository`].
    pub fn new(repository: &str) -> Result<Self, ReferenceError> {
        match repository.split_once('/') {
            Some((organisation, name)) if is_name(organisation) && is_name(name) => Ok(Self {
                organisation: organisation.to_owned(),
                name: name.to_owned(),
                revision: "main".to_owned(),
                file: None,
            }),
            _ => Err(ReferenceError::Repository(repository.to_owned())),
        }
    }

    /// Returns the reference at another branch, tag or commit.
    ///
    /// # Errors
    /// [`ReferenceError::Revision`].
    pub fn at(self, revision: &str) -> Result<Self, ReferenceError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-+/".contains(c);
        if !is_path(revision) || !revision.chars().all(allowed) {
            return Err(ReferenceError::Revision(revision.to_owned()));
        }
        Ok(Self { revision: revision.to_owned(), ..self })
    }

    /// Returns the reference to one file.
    ///
    /// # Errors
    /// [`ReferenceError::File`].
    pub fn with_file(self, file: &str) -> Result<Self, ReferenceError> {
        if !is_path(file) {
            return Err(ReferenceError::File(file.to_owned()));
        }
        Ok(Self { file: Some(file.to_owned()), ..self })
    }

    /// Returns `ORG/NAME`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organisation, self.name)
    }

    /// Returns `ORG` and `NAME`.
    pub(crate) fn parts(&self) -> [&str; 2] {
        [&self.organisation, &self.name]
    }

    /// Returns `NAME`: a good name for the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Returns the file, if one is chosen.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Returns whether the revision is a commit, which never changes.
    pub(crate) fn is_pinned(&self) -> bool {
        is_commit(&self.revision)
    }
}

/// Parses `ORG/NAME[@REVISION][:FILE]`, with or without [`PREFIX`].
impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let text = text.strip_prefix(PREFIX).unwrap_or(text);
        // Repositories and revisions have no colon, repositories no at sign.
        let (place, file) = match text.split_once(':') {
            Some((place, file)) => (place, Some(file)),
            None => (text, None),
        };
        let reference = match place.split_once('@') {
            Some((repository, revision)) => Self::new(repository)?.at(revision)?,
            None => Self::new(place)?,
        };
        match file {
            Some(file) => reference.with_file(file),
            None => Ok(reference),
        }
    }
}

/// Writes the shortest text that means this model, with [`PREFIX`].
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}/{}", self.organisation, self.name)?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

/// Returns whether this is a full commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Returns whether this can be the name of an organisation or a repository. The cache joins both with `--`.
fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let edge = |c: char| c == '.' || c == '-';
    !text.is_empty()
        && text.len() <= NAME_LEN_MAX
        && text.chars().all(allowed)
        && !text.contains("--")
        && !text.contains("..")
        && !text.starts_with(edge)
        && !text.ends_with(edge)
}

/// Returns whether this is a relative path that stays below its folder, on every system.
pub(crate) fn is_path(text: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    let forbidden = |c: char| c.is_control() || c == '\\' || c == ':';
    text.len() <= PATH_LEN_MAX && text.split('/').all(plain) && !text.contains(forbidden)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_has_a_repository_and_maybe_revision_and_file() {
        let check = |text: &str, expect: (&str, &str, Option<&str>), shortest: &str| {
            let reference: Reference = text.parse().expect(text);
            let found = (&*reference.repository(), reference.revision(), reference.file());
            assert_eq!(found, expect, "{text}");
            assert_eq!(reference.to_string(), shortest);
            assert_eq!(shortest.parse(), Ok(reference));
        };
        check("o/n", ("o/n", "main", None), "hf:o/n");
        check("hf:o/n-1.58@main", ("o/n-1.58", "main", None), "hf:o/n-1.58");
        check(
            "o/n@refs/pr/1:a/b.gguf",
            ("o/n", "refs/pr/1", Some("a/b.gguf")),
            "hf:o/n@refs/pr/1:a/b.gguf",
        );
        check("hf:o/n:x@y.gguf", ("o/n", "main", Some("x@y.gguf")), "hf:o/n:x@y.gguf");
    }

    #[test]
    fn parts_that_leave_the_cache_are_refused() {
        for bad in
            ["", "n", "o/", "/n", "../n", "o/..", "o/n/m", "o/a--b", "o/.n", "o/n b", "o/n\n"]
        {
            let parsed = bad.parse::<Reference>();
            assert!(matches!(parsed, Err(ReferenceError::Repository(_))), "{bad}: {parsed:?}");
        }
        for bad in ["o/n@", "o/n@..", "o/n@/a", "o/n@a//b", "o/n@a/../b", "o/n@a b"] {
            let parsed = bad.parse::<Reference>();
            assert!(matches!(parsed, Err(ReferenceError::Revision(_))), "{bad}: {parsed:?}");
        }
        for bad in
            ["o/n:", "o/n:..", "o/n:/etc/x", "o/n:a/../../b", "o/n:a\\b", "o/n:c:d", "o/n:a\0b"]
        {
            let parsed = bad.parse::<Reference>();
            assert!(matches!(parsed, Err(ReferenceError::File(_))), "{bad}: {parsed:?}");
        }
    }
}
