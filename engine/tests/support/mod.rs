//! Golden data, comparisons of models, and edits of model files.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(dead_code, reason = "each test binary uses a different part")]

pub mod forward;

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tritmill_engine::{
    backend::{Backend, Chunk, Logits, LogitsFor},
    chat::Message,
    config::Linear,
    files::{Dense, Model, ModelError, hugging_face::config as hf_config},
    formats::TernaryMatrix,
};

/// The golden folders.
pub const MODELS: [&str; 4] =
    ["bitnet-tiny", "llama-tiny", "llama-norm-tiny", "bitnet-online-tiny"];

/// Returns the path of a golden file or folder.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn open(name: &str) -> Model {
    Model::open(&golden(name)).unwrap()
}

/// Returns the recorded cases of a golden folder.
pub fn cases(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name).join("cases.json")).unwrap()).unwrap()
}

/// Returns a list of numbers.
pub fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Returns the logits of every position of a prompt, computed in one step with this many KV blocks of each group of layers.
/// // (position, vocab)
pub fn all_logits(backend: &mut dyn Backend, blocks: usize, tokens: &[u32]) -> Vec<Vec<f32>> {
    let (blocks, windows) = backend.layer_groups().tables(0, blocks);
    let mut logits = Logits::default();
    let chunk = Chunk {
        tokens,
        position: 0,
        blocks: &blocks,
        windows: &windows,
        logits: LogitsFor::All,
        state: 0.into(),
    };
    backend.step(&[chunk], &mut logits).unwrap();
    logits.all().chunks_exact(backend.vocab_size()).map(<[f32]>::to_vec).collect()
}

/// A prompt of a model with scales of groups, and what the reference says of it.
pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
    /// Of the mathematics with int8 activations, and with none.
    pub int8_logits: Vec<f32>,
    pub full_logits: Vec<f32>,
    pub greedy: Vec<usize>,
    pub margins: Vec<f64>,
}

/// Returns the prompts of a golden model, with the greedy answers under this key.
pub fn recorded_prompts(model: &str, greedy: &str) -> Vec<Prompt> {
    let bytes = std::fs::read(golden(&format!("{model}/logits.safetensors"))).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: String| -> Vec<f32> {
        let data = tensors.tensor(&name).unwrap().data().to_vec();
        data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let prompt = |p: &Value| {
        let name = p["name"].as_str().unwrap().to_owned();
        Prompt {
            ids: numbers(&p["ids"]).into_iter().map(|id| id as u32).collect(),
            int8_logits: floats(format!("{name}.last_logits")),
            full_logits: floats(format!("{name}.full_logits")),
            greedy: numbers(&p[greedy]["ids"]).into_iter().map(|id| id as usize).collect(),
            margins: numbers(&p[greedy]["margin"]),
            name,
        }
    };
    cases(model)["prompts"].as_array().unwrap().iter().map(prompt).collect()
}

/// Returns the largest difference, and the RMS of the differences relative to that of `want`.
pub fn differences(got: &[f32], want: &[f32]) -> (f64, f64) {
    let (mut largest, mut error, mut power) = (0f64, 0f64, 0f64);
    for (g, w) in got.iter().zip(want) {
        let d = (f64::from(*g) - f64::from(*w)).abs();
        largest = largest.max(d);
        error += d * d;
        power += f64::from(*w) * f64::from(*w);
    }
    (largest, (error / power).sqrt())
}

/// Parses a `config.json` of a golden folder after an edit.
pub fn parsed(
    folder: &str,
    edit: impl FnOnce(&mut Value),
) -> Result<hf_config::HfConfig, ModelError> {
    let bytes = std::fs::read(golden(folder).join("config.json")).unwrap();
    let mut json = serde_json::from_slice(&bytes).unwrap();
    edit(&mut json);
    hf_config::parse(json.to_string().as_bytes())
}

/// Returns the error message for a `config.json` after an edit.
pub fn config_refusal(folder: &str, edit: impl FnOnce(&mut Value)) -> String {
    parsed(folder, edit).expect_err("the configuration must be refused").to_string()
}

/// Returns the index of the largest logit; of equal ones, the first.
pub fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Returns a conversation of one message.
pub fn messages(content: &str) -> Vec<Message> {
    vec![Message::new("user", content)]
}

/// SHA-256 of a matrix as row-major int8, in hexadecimal.
pub fn sha256(matrix: &TernaryMatrix) -> String {
    sha256_of(matrix.trits.iter().map(|&trit| trit as u8).collect())
}

/// SHA-256 in hexadecimal.
pub fn sha256_of(bytes: Vec<u8>) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the name of a linear's module in a Hugging Face model.
pub fn hf_module(linear: Linear) -> &'static str {
    match linear {
        Linear::Q => "self_attn.q_proj",
        Linear::K => "self_attn.k_proj",
        Linear::V => "self_attn.v_proj",
        Linear::O => "self_attn.o_proj",
        Linear::Gate => "mlp.gate_proj",
        Linear::Up => "mlp.up_proj",
        Linear::Down => "mlp.down_proj",
        other => panic!("{other:?} has no such module"),
    }
}

/// Checks that weights and configuration are equal, except for the name of the architecture.
pub fn check_same_weights(a: &Model, b: &Model) {
    for layer in 0..a.config().layer_count {
        for linear in Linear::OF_ATTENTION {
            let (a, b) = (a.ternary(layer, linear).unwrap(), b.ternary(layer, linear).unwrap());
            assert!(a.trits == b.trits, "{layer} {linear:?}");
        }
    }
    for norm in a.norms() {
        assert_eq!(a.norm(norm).unwrap(), b.norm(norm).unwrap(), "{norm:?}");
    }
    let unnamed = |model: &Model| {
        let mut config = model.config().clone();
        config.architecture.clear();
        config
    };
    assert_eq!(unnamed(a), unnamed(b));
}

/// A GGUF file in parts. The parser is independent of the engine's and trusts the file: for well-formed
/// files only.
#[derive(Clone)]
pub struct RawGguf {
    pub version: u32,
    /// Key, and the bytes of type and value.
    pub metadata: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<RawTensor>,
}

#[derive(Clone)]
pub struct RawTensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub type_id: u32,
    /// The data, with the padding after it.
    pub bytes: Vec<u8>,
}

struct Cursor<'a>(&'a [u8], usize);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        self.1 += len;
        &self.0[self.1 - len..self.1]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let len = self.u64() as usize;
        String::from_utf8(self.take(len).to_vec()).unwrap()
    }

    fn skip_value(&mut self, type_id: u32) {
        match type_id {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            8 => drop(self.text()),
            9 => {
                let (inner, len) = (self.u32(), self.u64());
                (0..len).for_each(|_| self.skip_value(inner));
            }
            _ => drop(self.take(8)),
        }
    }
}

impl RawGguf {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let mut cursor = Cursor(&bytes, 4);
        let version = cursor.u32();
        let (tensor_count, key_count) = (cursor.u64(), cursor.u64());
        let metadata = (0..key_count)
            .map(|_| {
                let key = cursor.text();
                let start = cursor.1;
                let type_id = cursor.u32();
                cursor.skip_value(type_id);
                (key, bytes[start..cursor.1].to_vec())
            })
            .collect();
        let mut directory = Vec::new();
        for _ in 0..tensor_count {
            let name = cursor.text();
            let dims = (0..cursor.u32()).map(|_| cursor.u64()).collect::<Vec<_>>();
            directory.push((name, dims, cursor.u32(), cursor.u64() as usize));
        }
        let data = &bytes[cursor.1.next_multiple_of(32)..];
        let mut starts: Vec<usize> = directory.iter().map(|entry| entry.3).collect();
        starts.push(data.len());
        starts.sort_unstable();
        let tensors = directory
            .into_iter()
            .map(|(name, dims, type_id, start)| {
                let end = *starts.iter().find(|&&next| next > start).unwrap();
                RawTensor { name, dims, type_id, bytes: data[start..end].to_vec() }
            })
            .collect();
        Self { version, metadata, tensors }
    }

    pub fn tensor(&mut self, name: &str) -> &mut RawTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    /// Returns the bytes of the type and the value of a key.
    pub fn value(&self, key: &str) -> Option<&[u8]> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| &**value)
    }

    /// Returns a list of texts.
    pub fn texts(&self, key: &str) -> Vec<String> {
        // After the types of the value and of its items.
        let mut cursor = Cursor(self.value(key).unwrap(), 8);
        (0..cursor.u64()).map(|_| cursor.text()).collect()
    }

    pub fn remove(&mut self, key: &str) {
        self.metadata.retain(|(name, _)| name != key);
    }

    fn set(&mut self, key: &str, type_id: u32, value: &[u8]) {
        self.remove(key);
        let bytes = [&type_id.to_le_bytes()[..], value].concat();
        self.metadata.push((key.to_owned(), bytes));
    }

    pub fn set_u32(&mut self, key: &str, value: u32) {
        self.set(key, 4, &value.to_le_bytes());
    }

    pub fn set_f32(&mut self, key: &str, value: f32) {
        self.set(key, 6, &value.to_le_bytes());
    }

    pub fn set_text(&mut self, key: &str, value: &str) {
        let bytes = [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat();
        self.set(key, 8, &bytes);
    }

    pub fn set_bool(&mut self, key: &str, value: bool) {
        self.set(key, 7, &[u8::from(value)]);
    }

    fn set_list(&mut self, key: &str, type_id: u32, len: usize, values: Vec<u8>) {
        let header = [&type_id.to_le_bytes()[..], &(len as u64).to_le_bytes()].concat();
        self.set(key, 9, &[header, values].concat());
    }

    pub fn set_bytes(&mut self, key: &str, values: &[u8]) {
        self.set_list(key, 0, values.len(), values.to_vec());
    }

    pub fn set_i32s(&mut self, key: &str, values: &[i32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.set_list(key, 5, values.len(), bytes);
    }

    pub fn set_f32s(&mut self, key: &str, values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.set_list(key, 6, values.len(), bytes);
    }

    pub fn set_texts(&mut self, key: &str, values: &[&str]) {
        let text = |value: &&str| [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat();
        let bytes = values.iter().flat_map(text).collect();
        self.set_list(key, 8, values.len(), bytes);
    }

    /// Writes the file, with tensors at multiples of `alignment`.
    pub fn bytes(&self, alignment: usize) -> Vec<u8> {
        let mut out = Vec::from(*b"GGUF");
        let text = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            out.extend(value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}

/// A copy of a golden folder, to edit its files.
pub struct Folder {
    pub dir: tempfile::TempDir,
}

impl Folder {
    pub fn copy(name: &str) -> Self {
        let dir = tempfile::TempDir::new().unwrap();
        for entry in std::fs::read_dir(golden(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        Self { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.path().join(file);
        let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
    }

    pub fn edit_weights(&self, edit: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
        let path = self.path().join("model.safetensors");
        let (mut header, mut data) = split_safetensors(&std::fs::read(&path).unwrap());
        edit(&mut header, &mut data);
        std::fs::write(&path, join_safetensors(&header, &data)).unwrap();
    }
}

pub fn split_safetensors(bytes: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + len]).unwrap(), bytes[8 + len..].to_vec())
}

pub fn join_safetensors(header: &Map<String, Value>, data: &[u8]) -> Vec<u8> {
    let json = Value::Object(header.clone()).to_string();
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), data].concat()
}

/// SplitMix64: the same mutations in every run.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }

    /// Changes one to four bytes, or cuts off the end.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, within: usize) {
        if self.below(8) == 0 {
            let len = self.below(bytes.len());
            bytes.truncate(len);
            return;
        }
        for _ in 0..=self.below(4) {
            let (at, how) = (self.below(within.min(bytes.len())), self.below(4));
            bytes[at] = match how {
                0 => 0,
                1 => 0xff,
                2 => bytes[at] ^ (1 << self.below(8)),
                _ => self.below(256) as u8,
            };
        }
    }
}

/// Writes f32 tensors, by name and shape, as the weights of a folder.
pub fn write_weights(tensors: &[(String, Vec<usize>, Vec<f32>)], folder: &Path) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Returns the shape and all values of a table.
pub fn table(matrix: Dense<'_>) -> (Vec<usize>, Vec<f32>) {
    let mut values = vec![0f32; matrix.rows * matrix.cols];
    let rows = values.chunks_exact_mut(matrix.cols).enumerate();
    rows.for_each(|(row, out)| matrix.row(row, out));
    (vec![matrix.rows, matrix.cols], values)
}
