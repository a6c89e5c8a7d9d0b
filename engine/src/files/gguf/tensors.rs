//! Assigns GGUF tensors to roles: for each matrix and norm, the tensor of the file, its type, and the
//! location of its bytes.
//!
//! Sizes follow from type and shape, never from the start of the next tensor. `I2_S` is the exception
//! to ggml's block rule: `K·M/4` bytes of codes, then 32 bytes. The encoder only writes the first four
//! of these (the f32 scale), so the others are not read. Ids above 35 mean different types in
//! bitnet.cpp and llama.cpp; of those, `I2_S` and the blocks of [`crate::files::encodings`] are supported. Type 42 stands for
//! two layouts, which only the distance to the next tensor tells apart.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
};

use super::{
    architecture::Architecture,
    container::{Gguf, TensorEntry, type_name},
    names::{
        EMBEDDING, HEAD, bias_name, block_of, layer_tensor_name, linear_name, norm_name,
        post_attention_norm_name,
    },
};
use crate::{
    config::{LayerTensor, Linear, ModelConfig, Norm},
    files::{
        encodings::{
            blocks::{GROUP_MIN, TQ_BLOCK, TQ1_0_BYTES, TQ2_0_BYTES},
            dense::DenseType,
            gguf_ternary::{I2_S_BLOCK, I2_S_TAIL},
            stored::Packing,
        },
        error::{ModelError, Problem, check_overlaps},
        needs::DRAFTS,
        parts::{
            DenseTensor, HybridLayout, SkippedPart, Span, TensorInfo, Tensors, TernaryTensor,
            is_same_shape,
        },
        roles::{biases, layer_tensor_shape, layer_tensors, norm_len, norms},
    },
};

/// Accepted types of matrices with scales of groups.
const GROUPED_TYPES: &str =
    "Q2_0, PQ2_0, PTQ1_0, TQ1_0 or TQ2_0, or ternary weights as F32, F16 or BF16";

/// Takes tensors out of the directory, one role at a time.
pub(crate) struct Finder<'a> {
    pub entries: HashMap<&'a str, &'a TensorEntry<'a>>,
    pub bytes: &'a [u8],
    data_start: u64,
    alignment: u64,
    /// Offsets of all tensors in the data section.
    starts: BTreeSet<u64>,
    is_bitnet_cpp: bool,
    listing: Vec<TensorInfo>,
    ranges: Vec<(Range<usize>, &'a str)>,
}

impl<'a> Finder<'a> {
    /// Returns the directory of a file, of which no tensor has a role yet.
    pub fn new(gguf: &'a Gguf<'a>, bytes: &'a [u8], architecture: Architecture) -> Self {
        Self {
            entries: gguf.tensors.iter().map(|entry| (entry.name, entry)).collect(),
            bytes,
            data_start: gguf.data_start,
            alignment: gguf.alignment,
            starts: gguf.tensors.iter().map(|entry| entry.offset).collect(),
            is_bitnet_cpp: architecture.is_bitnet(),
            listing: Vec::new(),
            ranges: Vec::new(),
        }
    }

    /// Takes the tensors of all roles.
    pub fn tensors(
        &mut self,
        config: &ModelConfig,
        architecture: Architecture,
    ) -> Result<Tensors, ModelError> {
        let shape = [config.hidden_size, config.vocab_size];
        let mut table = |name: &str| match config.ternary_tables {
            true => self.grouped(name, &shape),
            false => self.dense(name, &shape),
        };
        let embedding = table(EMBEDDING)?;
        let head = if config.tied_head { None } else { Some(table(HEAD)?) };
        // Not reserved ahead: a false layer count must fail at the first missing tensor.
        let mut linears = Vec::new();
        for layer in 0..config.layer_count {
            let mut of_layer = Vec::with_capacity(Linear::OF_ATTENTION.len());
            for &linear in config.linears(layer) {
                let heads = match linear {
                    Linear::Q => Some(config.head_count),
                    Linear::K => Some(config.kv_head_count),
                    _ => None,
                };
                let permuted_heads = heads.filter(|_| architecture.permutes_heads());
                let tensor = self.linear(&linear_name(layer, linear), config, linear)?;
                of_layer.push(vec![TernaryTensor { permuted_heads, ..tensor }]);
            }
            linears.push(of_layer);
        }
        let mut by_role = HashMap::new();
        for norm in norms(config) {
            let name = match norm {
                Norm::FeedForward(layer) if config.delta_net.is_some() => {
                    post_attention_norm_name(layer)
                }
                norm => norm_name(norm),
            };
            by_role.insert(norm, self.dense(&name, &[norm_len(config, norm)])?);
        }
        let mut by_linear = HashMap::new();
        for (layer, linear) in biases(config) {
            let (rows, _) = config.linear_shape(linear);
            by_linear.insert((layer, linear), self.dense(&bias_name(layer, linear), &[rows])?);
        }
        let mut of_layers = HashMap::new();
        for (layer, tensor) in layer_tensors(config) {
            let (rows, cols) = layer_tensor_shape(config, tensor);
            let shape = [cols, rows];
            let shape = if rows == 1 { &shape[..1] } else { &shape };
            of_layers
                .insert((layer, tensor), self.dense(&layer_tensor_name(layer, tensor), shape)?);
        }
        let hybrid = HybridLayout {
            tiled: config.delta_net.is_some(),
            output_is_grouped: config.rotation.is_some(),
            ..HybridLayout::default()
        };
        Ok(Tensors {
            linears,
            norms: by_role,
            biases: by_linear,
            layer_tensors: of_layers,
            hybrid,
            embedding,
            head,
        })
    }

    /// Returns whether the matrices of rates are dense, by the type of the first one.
    pub fn has_dense_rates(&self) -> bool {
        let entry = self.entries.get(layer_tensor_name(0, LayerTensor::DecayRate).as_str());
        entry.is_some_and(|entry| !matches!(entry.type_id, 34 | 35 | 42 | 142 | 143))
    }

    /// Returns the linears that have a bias in the first layer. One of gate and up alone stays without a role, and is refused.
    pub fn linear_biases(&self) -> Vec<Linear> {
        let has_bias = |linear| self.entries.contains_key(bias_name(0, linear).as_str());
        let has_gate_and_up = has_bias(Linear::Gate) && has_bias(Linear::Up);
        let counts = |linear: &Linear| match linear {
            Linear::Gate | Linear::Up => has_gate_and_up,
            linear => has_bias(*linear),
        };
        Linear::OF_ATTENTION.into_iter().filter(counts).collect()
    }

    /// Returns whether the first linear has a scale for each group of inputs: by its type, or by the scales of its `TQ`
    /// blocks, which are equal in a model with one scale per matrix.
    pub fn has_group_scales(&self) -> bool {
        let entry = self.entries.get(linear_name(0, Linear::Q).as_str());
        let block_bytes = match entry.map(|entry| entry.type_id) {
            Some(42 | 142 | 143) => return true,
            Some(34) => TQ1_0_BYTES,
            Some(35) => TQ2_0_BYTES,
            _ => return false,
        };
        let Some(entry) = entry else { return false };
        let weights = entry.dims.iter().fold(1u64, |product, &dim| product.saturating_mul(dim));
        let len = (weights / TQ_BLOCK as u64).saturating_mul(block_bytes as u64);
        let start = self.data_start.saturating_add(entry.offset).min(self.bytes.len() as u64);
        let end = start.saturating_add(len).min(self.bytes.len() as u64);
        let blocks = self.bytes[start as usize..end as usize].chunks_exact(block_bytes);
        let scales = blocks.map(|block| &block[block_bytes - 2..]);
        // A block of zeros may have the scale 0.
        let mut scales = scales.filter(|scale| *scale != [0, 0]);
        let first = scales.next();
        scales.any(|scale| Some(scale) != first)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorEntry<'a>, ModelError> {
        let Some(entry) = self.entries.remove(name) else {
            return Err(ModelError::MissingTensor { tensor: name.to_owned() });
        };
        let expected: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
        let found: Vec<u64> = entry.dims.iter().rev().copied().collect();
        if !is_same_shape(&found, &expected) {
            return Err(ModelError::TensorShape { tensor: name.to_owned(), found, expected });
        }
        Ok(entry)
    }

    /// Returns the bytes of a tensor of known size, checked against the file's length.
    fn span(&mut self, entry: &'a TensorEntry<'a>, size: usize) -> Result<Span, ModelError> {
        let start = self.data_start.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(size as u64));
        let (Some(start), Some(end)) = (start, end) else {
            let problem =
                Problem::TooLarge { what: "offset", value: entry.offset, limit: i64::MAX as u64 };
            return Err(ModelError::bad_tensor(entry.name, entry.entry_offset, problem));
        };
        let file_len = self.bytes.len() as u64;
        if end > file_len {
            let available = file_len.saturating_sub(start);
            let problem = Problem::Truncated { needed: size as u64, available };
            return Err(ModelError::bad_tensor(entry.name, start, problem));
        }
        let range = start as usize..end as usize;
        self.listing.push(TensorInfo {
            name: entry.name.to_owned(),
            type_name: type_name(entry.type_id, self.is_bitnet_cpp).to_owned(),
            shape: entry.dims.iter().rev().copied().collect(),
            size_bytes: size as u64,
        });
        self.ranges.push((range.clone(), entry.name));
        Ok(Span { file: 0, range })
    }

    fn wrong_type(&self, entry: &TensorEntry<'_>, expected: &'static str) -> ModelError {
        let name = type_name(entry.type_id, self.is_bitnet_cpp);
        let found = format!("{name} (id {})", entry.type_id);
        ModelError::TensorType { tensor: entry.name.to_owned(), found, expected }
    }

    pub fn dense(&mut self, name: &str, shape: &[usize]) -> Result<DenseTensor, ModelError> {
        let entry = self.take(name, shape)?;
        let dtype = match entry.type_id {
            0 => DenseType::F32,
            1 => DenseType::F16,
            30 => DenseType::Bf16,
            8 => DenseType::Q8_0,
            12 => DenseType::Q4K,
            14 => DenseType::Q6K,
            _ => return Err(self.wrong_type(entry, "F32, F16, BF16, Q8_0, Q6_K or Q4_K")),
        };
        let (cols, rows) = (shape[0], shape.get(1).copied().unwrap_or(1));
        let size = self.row_size(entry, dtype.row_bytes(cols), cols, dtype.block().0)?;
        let span = self.span(entry, size * rows)?;
        Ok(DenseTensor { name: name.to_owned(), span, rows, cols, dtype })
    }

    /// Returns `bytes`, or an error if a row is not a whole number of blocks.
    fn row_size(
        &self,
        entry: &TensorEntry<'_>,
        bytes: Option<usize>,
        cols: usize,
        block: usize,
    ) -> Result<usize, ModelError> {
        bytes.ok_or_else(|| {
            let problem =
                Problem::NotAMultiple { what: "row length", value: cols as u64, of: block as u64 };
            ModelError::bad_tensor(entry.name, entry.entry_offset, problem)
        })
    }

    fn linear(
        &mut self,
        name: &str,
        config: &ModelConfig,
        linear: Linear,
    ) -> Result<TernaryTensor, ModelError> {
        let (rows, cols) = config.linear_shape(linear);
        if let (Some(experts), true) = (&config.experts, linear.is_of_experts()) {
            let shape = [cols, rows / experts.count, experts.count];
            return Ok(self.grouped(name, &shape)?.into());
        }
        if config.group_scales {
            return Ok(self.grouped(name, &[cols, rows])?.into());
        }
        let entry = self.take(name, &[cols, rows])?;
        let blocks =
            |block: usize, bytes: usize| cols.is_multiple_of(block).then_some(cols / block * bytes);
        let (row_bytes, block, tail) = match entry.type_id {
            34 => (blocks(TQ_BLOCK, TQ1_0_BYTES), TQ_BLOCK, 0),
            35 => (blocks(TQ_BLOCK, TQ2_0_BYTES), TQ_BLOCK, 0),
            36 => (blocks(I2_S_BLOCK, I2_S_BLOCK / 4), I2_S_BLOCK, I2_S_TAIL),
            _ => return Err(self.wrong_type(entry, "I2_S, TQ1_0 or TQ2_0")),
        };
        let codes = self.row_size(entry, row_bytes, cols, block)? * rows;
        let mut span = self.span(entry, codes + tail)?;
        let packing = match entry.type_id {
            34 => Packing::Tq1_0,
            35 => Packing::Tq2_0,
            _ => {
                // The span keeps the codes. The scale is read now; the bytes after it are garbage.
                let at = span.range.start + codes;
                span.range.end = at;
                let tail = self.bytes[at..].first_chunk().copied().unwrap_or_default();
                let scale = f32::from_le_bytes(tail);
                if !(scale.is_finite() && scale > 0.0) {
                    return Err(ModelError::bad_tensor(name, at as u64, Problem::BadScale(scale)));
                }
                Packing::I2S(scale)
            }
        };
        Ok(TernaryTensor { name: name.to_owned(), span, rows, cols, packing, permuted_heads: None })
    }

    /// Finds a matrix with scales of groups; of three dimensions the last two are those of its rows.
    fn grouped(&mut self, name: &str, shape: &[usize]) -> Result<DenseTensor, ModelError> {
        let entry = self.take(name, shape)?;
        let (cols, rows) = (shape[0], shape[1..].iter().product());
        let dtype = match entry.type_id {
            0 => DenseType::F32,
            1 => DenseType::F16,
            30 => DenseType::Bf16,
            34 => DenseType::Tq1_0,
            35 => DenseType::Tq2_0,
            42 => self.layout_of_42(entry, rows, cols)?,
            142 => DenseType::Pq2_0,
            143 => DenseType::Ptq1_0,
            _ => return Err(self.wrong_type(entry, GROUPED_TYPES)),
        };
        let block = dtype.block().0.max(GROUP_MIN);
        let row_bytes = dtype.row_bytes(cols).filter(|_| cols.is_multiple_of(block));
        let size = self.row_size(entry, row_bytes, cols, block)?;
        let span = self.span(entry, size * rows)?;
        Ok(DenseTensor { name: name.to_owned(), span, rows, cols, dtype })
    }

    /// Returns the layout of a tensor of type 42: blocks of 64, or of 128 in older files of Bonsai models. The bytes
    /// up to the next tensor, or the end of the file, must be those of exactly one of the two, with its padding.
    fn layout_of_42(
        &self,
        entry: &TensorEntry<'_>,
        rows: usize,
        cols: usize,
    ) -> Result<DenseType, ModelError> {
        let start = self.data_start.saturating_add(entry.offset);
        let next = self.starts.range(entry.offset + 1..).next();
        let end =
            next.map_or(self.bytes.len() as u64, |next| self.data_start.saturating_add(*next));
        let available = end.saturating_sub(start);
        let size = |dtype: DenseType| Some(dtype.row_bytes(cols)?.checked_mul(rows)? as u64);
        let fits = |dtype: DenseType| {
            size(dtype).is_some_and(|size| {
                let padded = size.checked_next_multiple_of(self.alignment);
                padded == Some(available) || (next.is_none() && size == available)
            })
        };
        let bad = |problem| Err(ModelError::bad_tensor(entry.name, start, problem));
        match (fits(DenseType::Q2_0), fits(DenseType::Pq2_0)) {
            (true, false) => Ok(DenseType::Q2_0),
            (false, true) => Ok(DenseType::Pq2_0),
            (true, true) => bad(Problem::AmbiguousLayout { available }),
            (false, false) => match size(DenseType::Q2_0) {
                // Not a whole number of blocks, which the caller reports.
                None => Ok(DenseType::Q2_0),
                Some(needed) if needed > available => bad(Problem::Truncated { needed, available }),
                Some(expected) => bad(Problem::SizeMismatch { found: available, expected }),
            },
        }
    }

    /// Skips the tensors of blocks that draft tokens.
    pub fn skip_blocks(&mut self, blocks: Range<usize>) -> Vec<SkippedPart> {
        let prefixes = blocks.clone().map(|block| (format!("blk.{block}."), DRAFTS));
        let skipped = SkippedPart::among(prefixes, self.entries.keys().copied());
        self.entries.retain(|name, _| block_of(name).is_none_or(|block| !blocks.contains(&block)));
        skipped
    }

    /// Returns the listing in the order of the file.
    ///
    /// # Errors
    /// If a tensor has no role, or two tensors share bytes.
    pub fn finish(
        mut self,
        gguf: &Gguf<'_>,
        architecture: Architecture,
    ) -> Result<Vec<TensorInfo>, ModelError> {
        let left = self.entries.keys().copied().filter(|name| !architecture.ignores(name));
        ModelError::refuse_left_over(left)?;
        check_overlaps(self.ranges)?;
        let order: HashMap<&str, usize> =
            gguf.tensors.iter().enumerate().map(|(i, entry)| (entry.name, i)).collect();
        self.listing.sort_by_key(|info| order.get(info.name.as_str()).copied());
        Ok(self.listing)
    }
}
