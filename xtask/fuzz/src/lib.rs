//! Every parser of foreign bytes, fed with bytes that nobody meant.
//!
//! A target takes any bytes and must return: an error is fine, a panic, an endless loop or memory
//! out of proportion is a bug. The same functions serve three callers: the coverage-guided programs
//! in `targets/`, the mutation loop that needs nothing installed ([`mutate`]), and the test that
//! replays `corpus/`. An input that once broke something joins the corpus.

pub mod mutate;

use std::path::{Path, PathBuf};

use tritmill_engine::files::{gguf, hf_config, safetensors, shard_names};

/// One parser.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name, and folder of the corpus.
    pub name: &'static str,
    /// Takes any bytes and returns.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: [Target; 3] = [
    Target { name: "gguf", run: gguf },
    Target { name: "safetensors", run: safetensors },
    Target { name: "batch_line", run: batch_line },
];

impl Target {
    /// Its inputs, by name of the file.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn corpus(&self) -> std::io::Result<Vec<(PathBuf, Vec<u8>)>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name);
        let mut inputs = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let bytes = std::fs::read(&path)?;
            inputs.push((path, bytes));
        }
        inputs.sort();
        Ok(inputs)
    }
}
