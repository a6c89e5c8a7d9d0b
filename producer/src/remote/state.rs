//! State of a run: one JSON file, replaced as a whole, in the folder of the run.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::batch_file::Place;

/// State of a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct State {
    /// Id of the run, part of the names on the server.
    pub run: Uuid,
    /// BLAKE3 hash of the input.
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
    /// The model of its lines.
    pub model: String,
    /// Number of lines.
    pub lines: u64,
    /// Whether an upload was started, under the name of this try.
    pub is_begun: bool,
    /// Number of earlier tries.
    pub tries: u32,
    /// Id of the uploaded file.
    pub file: Option<String>,
    /// Id of the batch.
    pub batch: Option<String>,
    /// Result, once the batch is finished.
    #[serde(rename = "over")]
    pub result: Option<PartResult>,
}

impl Part {
    /// Returns whether it has neither a batch nor, without one, errors of all its lines.
    pub fn is_unsent(&self) -> bool {
        self.batch.is_none() && self.result.is_none()
    }
}

/// Result of a finished batch, or of lines that were not sent.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct PartResult {
    /// Id of the file of answers.
    pub output: Option<String>,
    /// Id of the file of errors.
    pub errors: Option<String>,
    /// Lines with an answer.
    pub completed: u64,
    /// Lines with an error.
    pub failed: u64,
}

/// The output as it was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    /// BLAKE3 hash of the file.
    pub hash: String,
    /// Lines with an answer.
    pub completed: u64,
    /// Lines with an error.
    pub failed: u64,
    /// Tokens generated for them.
    pub tokens: u64,
    /// Tokens of their prompts.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Those of them that were not computed.
    #[serde(default)]
    pub cached_tokens: u64,
}

/// The folder with the files of a run.
#[derive(Debug, Clone)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Returns the folder of a run.
    pub fn of(place: &Place) -> Self {
        Self(place.with_suffix(".tritmill-server"))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a part's lines.
    pub fn part(&self, index: usize) -> PathBuf {
        self.0.join(format!("part-{index}.jsonl"))
    }

    /// Returns the path of a part's answers or errors.
    pub fn downloaded(&self, index: usize, what: &str) -> PathBuf {
        self.0.join(format!("part-{index}.{what}.jsonl"))
    }

    /// Returns the path of the lines that are refused locally, each after its number.
    pub fn refused(&self) -> PathBuf {
        self.0.join("refused.jsonl")
    }

    /// Returns the path of all answers, for an output that is a stream.
    pub fn merged(&self) -> PathBuf {
        self.0.join("merged.jsonl")
    }

    fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    /// Reads the state, if there is one.
    ///
    /// # Errors
    /// If it cannot be read or parsed.
    pub fn load(&self) -> io::Result<Option<State>> {
        let text = match fs::read(self.state()) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&text).map(Some).map_err(io::Error::other)
    }

    /// Writes the state. When this returns, the state survives a crash of the machine.
    pub fn save(&self, state: &State) -> io::Result<()> {
        let temporary = self.0.join("state.json.tmp");
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec(state).map_err(io::Error::other)?)?;
        file.sync_all()?;
        fs::rename(&temporary, self.state())?;
        File::open(&self.0)?.sync_all()
    }

    /// Deletes the folder. Returns whether it existed.
    pub fn remove(&self) -> io::Result<bool> {
        match fs::remove_dir_all(&self.0) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes all files except the state; they can be made or downloaded again.
    pub fn clean(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.0)? {
            let path = entry?.path();
            if path != self.state() {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}
