//! How far a run is: one JSON file, replaced as a whole, among the files of the run.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::batch_file::with_suffix;

/// What is remembered of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct State {
    /// Names it, for the server.
    pub run: Uuid,
    /// BLAKE3 of the input.
    pub input: String,
    /// Its batches.
    pub parts: Vec<Part>,
    /// The output, once it is written.
    pub written: Option<Written>,
}

/// A batch of the run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Part {
    /// The endpoint of its lines.
    pub endpoint: String,
    /// The model that they name.
    pub model: String,
    /// Lines that it has.
    pub lines: u64,
    /// An upload was begun, under the name of this try.
    pub is_begun: bool,
    /// How often it was begun.
    pub tries: u32,
    /// The uploaded file.
    pub file: Option<String>,
    /// The batch.
    pub batch: Option<String>,
    /// What came of it.
    #[serde(rename = "over")]
    pub result: Option<PartResult>,
}

/// A batch that is over.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct PartResult {
    /// Answers.
    pub output: Option<String>,
    /// Errors.
    pub errors: Option<String>,
    /// Lines answered.
    pub completed: u64,
    /// Lines with an error.
    pub failed: u64,
}

/// An output as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    /// BLAKE3 of it.
    pub hash: String,
    /// Lines with an answer.
    pub completed: u64,
    /// Lines with an error.
    pub failed: u64,
    /// Tokens generated for them.
    pub tokens: u64,
}

/// The files of a run.
#[derive(Debug, Clone)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// The folder beside an output.
    pub fn of(output: &Path) -> Self {
        Self(with_suffix(output, ".tritmill-server"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A part's lines.
    pub fn part(&self, index: usize) -> PathBuf {
        self.0.join(format!("part-{index}.jsonl"))
    }

    /// A part's answers, or its errors.
    pub fn fetched(&self, index: usize, what: &str) -> PathBuf {
        self.0.join(format!("part-{index}.{what}.jsonl"))
    }

    /// Lines that are no server's business, each behind its number.
    pub fn refused(&self) -> PathBuf {
        self.0.join("refused.jsonl")
    }

    fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    /// What is remembered, if there is anything; one that cannot be read is an error.
    pub fn load(&self) -> io::Result<Option<State>> {
        let text = match fs::read(self.state()) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&text).map(Some).map_err(io::Error::other)
    }

    /// Remembers; when it returns, a crash of the machine forgets it no more.
    pub fn save(&self, state: &State) -> io::Result<()> {
        let temporary = self.0.join("state.json.tmp");
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec(state).map_err(io::Error::other)?)?;
        file.sync_all()?;
        fs::rename(&temporary, self.state())?;
        File::open(&self.0)?.sync_all()
    }

    /// Forgets everything.
    pub fn remove(&self) -> io::Result<bool> {
        match fs::remove_dir_all(&self.0) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes all files but the state: what they say can be had again.
    pub fn tidy(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.0)? {
            let path = entry?.path();
            if path != self.state() {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}
