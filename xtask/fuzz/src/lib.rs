//! Fuzz targets for every parser of untrusted bytes.
//!
//! A target takes any bytes and must return: an error is fine; a panic, an endless loop or memory use
//! out of proportion is a bug. The same functions serve three callers: the coverage-guided programs
//! in `targets/`, the mutation loop that needs nothing installed ([`mutate`]), and the test that
//! replays `corpus/`. An input that once caused a failure is added to the corpus.

pub mod mutate;

use std::path::{Path, PathBuf};

use tritmill_client::{LineReader, parse_line};
use tritmill_engine::{
    files::{
        gguf as gguf_file,
        hugging_face::{config as hf_config, safetensors as safetensors_file},
        shard_names,
    },
    tokenizer::TokenizerConfig,
};
use tritmill_queue::QueueName;

/// A parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target and of its folder in `corpus/`.
    pub name: &'static str,
    /// Parses any bytes and returns.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: [Target; 3] = [
    Target { name: "gguf", run: gguf },
    Target { name: "safetensors", run: safetensors },
    Target { name: "batch_line", run: batch_line },
];

impl Target {
    /// Returns the inputs of the corpus with their paths, sorted by path.
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

/// Parses a GGUF file: header, metadata, tensor table.
pub fn gguf(data: &[u8]) {
    let Ok(file) = gguf_file::parse("fuzzed", data) else { return };
    for value in file.metadata.values() {
        if let gguf_file::Value::Array(array) = value {
            // Every element takes at least one byte of the file.
            assert!(array.values("fuzzed").count() <= data.len());
        }
    }
    let length = data.len() as u64;
    assert!(file.tensors.iter().all(|tensor| tensor.entry_offset < length));
}

/// Parses one of the files of a Hugging Face folder that are read before the weights: the header of
/// `model.safetensors`, the index of a sharded model, or a configuration. The first byte selects the
/// file.
pub fn safetensors(data: &[u8]) {
    let Some((which, data)) = data.split_first() else { return };
    match which {
        b'c' => drop(hf_config::parse(data)),
        b'g' => drop(hf_config::parse_generation_eos(data, 1024)),
        b'i' => drop(shard_names("fuzzed", data)),
        b't' => drop(TokenizerConfig::parse(Some(data), None)),
        _ => {
            for tensor in safetensors_file::parse("fuzzed", data).unwrap_or_default() {
                assert!(tensor.range.end <= data.len(), "tensors lie inside the file");
            }
        }
    }
}

/// Parses a batch file. Every line that is not blank becomes a job or an error.
pub fn batch_line(data: &[u8]) {
    let queue = QueueName { model: "demo".to_owned(), format: "i2_s".to_owned() };
    let mut lines = LineReader::new(data);
    let mut last = 0;
    while let Ok(Some(line)) = lines.next_line() {
        assert!(line.number > last, "line numbers grow");
        last = line.number;
        let (once, again) = (parse_line(&line, &queue), parse_line(&line, &queue));
        assert_eq!(once.key, again.key, "a line's key depends on the line alone");
        assert_eq!(once.content.is_ok(), again.content.is_ok());
    }
    assert_eq!(lines.bytes_read(), data.len() as u64);
}
