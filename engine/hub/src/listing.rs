//! [`Listing`]: the hub's description of a repository at a revision.

use serde::Deserialize;

use crate::{
    choice::RemoteFile,
    digest::Digest,
    reference::{is_commit, is_path},
};

/// Largest description accepted, in bytes.
pub(crate) const LISTING_BYTES_MAX: usize = 32 << 20;
/// Most files of a repository that are considered.
const FILES_MAX: usize = 100_000;

/// A repository at a commit.
#[derive(Debug)]
pub(crate) struct Listing {
    /// The commit that the revision means now.
    pub commit: String,
    /// Files with relative paths as names.
    pub files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Stored>,
}

#[derive(Deserialize)]
struct Stored {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Parses the answer of the hub.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let answer: Answer = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if !is_commit(&answer.sha) {
            return Err("its `sha` is not a commit".to_owned());
        }
        let mut files: Vec<RemoteFile> = answer
            .siblings
            .into_iter()
            .take(FILES_MAX)
            .filter(|sibling| is_path(&sibling.rfilename))
            .map(Sibling::into_file)
            .collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { commit: answer.sha, files })
    }
}

impl Sibling {
    fn into_file(self) -> RemoteFile {
        let (digest, size) = match &self.lfs {
            Some(stored) => (stored.sha256.as_ref(), stored.size),
            None => (self.blob_id.as_ref(), None),
        };
        let digest = digest.and_then(|text| Digest::parse(text));
        RemoteFile { name: self.rfilename, size: size.or(self.size), digest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_ignored() {
        let text = r#"{"sha": "0123456789012345678901234567890123456789", "siblings": [
            {"rfilename": "b.gguf", "size": 7, "blobId": "aa",
             "lfs": {"sha256": "00000000000000000000000000000000000000000000000000000000000000aa", "size": 9}},
            {"rfilename": "../x"}, {"rfilename": "/x"}, {"rfilename": "a"}]}"#;
        let listing = Listing::parse(text.as_bytes()).expect("a listing");
        let names: Vec<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["a", "b.gguf"]);
        assert_eq!(listing.files[1].size, Some(9));
        assert!(matches!(listing.files[1].digest, Some(Digest::Sha256(_))));
    }

    #[test]
    fn answer_without_a_commit_is_refused() {
        for bad in ["", "[]", "{}", r#"{"sha": "../../etc"}"#] {
            assert!(Listing::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
