//! What a reader returns: the configuration of a model, and its tensors by role, with their places in the files.

use std::{collections::HashMap, ops::Range};

use super::{
    encodings::{dense::DenseType, stored::Packing},
    mmap::Bytes,
};
use crate::{
    chat::ChatTemplate,
    config::{LayerTensor, Linear, ModelConfig, Norm},
    tokenizer::Tokenizer,
};

/// A tensor as the file lists it.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Type name in the file.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Dimensions, slowest first (GGUF files store them the other way round).
    pub shape: Vec<u64>,
    /// Bytes in the file.
    pub size_bytes: u64,
}

/// A part of a file that is not read, because no answer to a text depends on it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SkippedPart {
    /// The names of its tensors, such as `model.visual.*`.
    pub tensors: String,
    /// The number of its tensors.
    pub count: usize,
    /// What it is for.
    pub purpose: &'static str,
}

impl SkippedPart {
    /// Returns the parts of a model that some of these names are of. A part is known by the beginning of its names.
    pub(crate) fn among<'a>(
        prefixes: impl IntoIterator<Item = (String, &'static str)>,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Vec<Self> {
        let part = |(prefix, purpose): (String, &'static str)| Self {
            count: names.clone().filter(|name| name.starts_with(&prefix)).count(),
            tensors: prefix + "*",
            purpose,
        };
        prefixes.into_iter().map(part).filter(|part| part.count > 0).collect()
    }
}

/// Returns whether two shapes are of the same elements in the same order: dimensions of 1 say nothing of it.
pub(crate) fn is_same_shape(a: &[u64], b: &[u64]) -> bool {
    let counts = |dim: &&u64| **dim != 1;
    a.iter().filter(counts).eq(b.iter().filter(counts))
}

/// Location of a tensor's bytes: index of the file, and range in it.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub file: usize,
    pub range: Range<usize>,
}

/// A ternary tensor of the file.
#[derive(Debug, Clone)]
pub(crate) struct TernaryTensor {
    pub name: String,
    pub span: Span,
    pub rows: usize,
    pub cols: usize,
    pub packing: Packing,
    /// Number of heads, if the file has their rows in adjacent-pair RoPE order.
    pub permuted_heads: Option<usize>,
}

/// A dense tensor of the file, or the table of a model with scales of groups.
#[derive(Debug, Clone)]
pub(crate) struct DenseTensor {
    pub name: String,
    pub span: Span,
    pub rows: usize,
    pub cols: usize,
    pub dtype: DenseType,
}

impl From<DenseTensor> for TernaryTensor {
    /// Returns a matrix with scales of groups.
    fn from(tensor: DenseTensor) -> Self {
        let DenseTensor { name, span, rows, cols, dtype } = tensor;
        let packing = Packing::Grouped(dtype);
        Self { name, span, rows, cols, packing, permuted_heads: None }
    }
}

/// How files of hybrid models differ from what the forward pass reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HybridLayout {
    /// Value heads are tiled: head `i * key_heads + k` of the file is head `k * group + i`.
    pub tiled: bool,
    /// The columns of the output linear are in the order of the forward pass all the same.
    pub output_is_grouped: bool,
    /// The decay is stored as the logarithm of the negated rate.
    pub log_decay: bool,
    /// Norms, but for those of value heads, are stored less 1.
    pub centred_norms: bool,
}

/// The tensors of a model, by role.
#[derive(Debug)]
pub(crate) struct Tensors {
    /// Ternary linears, by layer and then in the order of [`ModelConfig::linears`]. The rows of one are those of its tensors, one
    /// after another: folders have a tensor for each expert.
    pub linears: Vec<Vec<Vec<TernaryTensor>>>,
    pub norms: HashMap<Norm, DenseTensor>,
    pub biases: HashMap<(usize, Linear), DenseTensor>,
    /// Other dense tensors of layers.
    pub layer_tensors: HashMap<(usize, LayerTensor), DenseTensor>,
    pub hybrid: HybridLayout,
    pub embedding: DenseTensor,
    /// The head; `None` when it is the embedding.
    pub head: Option<DenseTensor>,
}

/// The result of reading the files of a model.
#[derive(Debug)]
pub(crate) struct Parts {
    pub name: String,
    pub container: &'static str,
    pub config: ModelConfig,
    pub files: Vec<Bytes>,
    pub tensors: Tensors,
    pub listing: Vec<TensorInfo>,
    /// Parts that were not read.
    pub skipped: Vec<SkippedPart>,
    pub tokenizer: Tokenizer,
    pub chat_template: Option<ChatTemplate>,
}
