//! Assigns safetensors to roles: for each matrix and norm, the tensor of a Hugging Face folder, its
//! type, and the location of its bytes.

use std::collections::HashMap;

use super::{
    config::WeightStorage,
    names::{expert_name, layer_tensor_name, linear_module, linear_name, norm_name},
    safetensors::{Dtype, TensorEntry},
    understood,
};
use crate::{
    config::{LayerTensor, Linear, ModelConfig, Norm},
    files::{
        encodings::{
            blocks::GROUP_MIN,
            dense::{DenseType, widen},
            stored::Packing,
        },
        error::{ModelError, Problem, shorten},
        mmap::Bytes,
        parts::{DenseTensor, HybridLayout, Span, Tensors, TernaryTensor, is_same_shape},
        roles::{biases, layer_tensor_shape, layer_tensors, linears, norm_len, norms},
    },
    formats::Scale,
};

/// Assigns a tensor of the files to each role of the model.
///
/// # Errors
/// Names the first tensor that is missing, has the wrong type or shape, or has no role.
pub(crate) fn find(
    entries: HashMap<String, (usize, TensorEntry)>,
    files: &[Bytes],
    config: &ModelConfig,
    storage: WeightStorage,
) -> Result<Tensors, ModelError> {
    let mut finder = Finder { entries, files };
    let tensors = finder.tensors(config, storage)?;
    finder.refuse_leftovers(config)?;
    Ok(tensors)
}

/// Returns whether the matrices of rates of a hybrid model are dense: whether a group of the first one's inputs has several
/// magnitudes.
pub(crate) fn has_dense_rates(
    entries: &HashMap<String, (usize, TensorEntry)>,
    files: &[Bytes],
) -> bool {
    let Some((file, entry)) = entries.get(&layer_tensor_name(0, LayerTensor::DecayRate)) else {
        return false;
    };
    let Ok(dtype) = dense_type(entry, "F32, F16 or BF16") else { return false };
    let count = entry.shape.iter().fold(1u64, |product, dim| product.saturating_mul(*dim));
    let bytes = &files[*file][entry.range.clone()];
    if dtype.row_bytes(usize::try_from(count).unwrap_or(usize::MAX)) != Some(bytes.len()) {
        return false;
    }
    let mut values = vec![0f32; count as usize];
    widen(dtype, bytes, &mut values);
    values.chunks(GROUP_MIN).any(|group| {
        let mut magnitudes = group.iter().map(|x| x.abs()).filter(|x| *x != 0.0);
        let first = magnitudes.next();
        magnitudes.any(|x| Some(x) != first)
    })
}

/// Takes tensors out of the files' listing, one role at a time.
struct Finder<'a> {
    entries: HashMap<String, (usize, TensorEntry)>,
    files: &'a [Bytes],
}

impl Finder<'_> {
    fn tensors(
        &mut self,
        config: &ModelConfig,
        storage: WeightStorage,
    ) -> Result<Tensors, ModelError> {
        if config.group_scales {
            self.check_groups(config)?;
        }
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = match &config.experts {
            Some(_) => "model.word_embeddings.weight",
            None => "model.embed_tokens.weight",
        };
        let embedding = self.dense(embedding.to_owned(), &[vocab, hidden])?;
        let head = (!config.tied_head)
            .then(|| self.dense("lm_head.weight".to_owned(), &[vocab, hidden]))
            .transpose()?;
        // Not reserved ahead: a false layer count must fail at the first missing tensor.
        let mut linears = Vec::new();
        for layer in 0..config.layer_count {
            linears.push(self.linears(config, layer, storage)?);
        }
        let mut by_role = HashMap::new();
        for norm in norms(config) {
            let name = match norm {
                Norm::AttentionSub(layer) if storage == WeightStorage::OneBitLlm => {
                    format!("model.layers.{layer}.self_attn.inner_attn_ln.weight")
                }
                Norm::FeedForwardSub(layer) if storage == WeightStorage::OneBitLlm => {
                    format!("model.layers.{layer}.mlp.ffn_layernorm.weight")
                }
                Norm::Linear(layer, linear) if storage == WeightStorage::Embedding => {
                    format!("model.layers.{layer}.{}.norm.weight", linear_module(linear))
                }
                _ => norm_name(norm),
            };
            by_role.insert(norm, self.dense(name, &[norm_len(config, norm)])?);
        }
        let mut by_linear = HashMap::new();
        for (layer, linear) in biases(config) {
            let name = format!("model.layers.{layer}.{}.bias", linear_module(linear));
            let (rows, _) = config.linear_shape(linear);
            by_linear.insert((layer, linear), self.dense(name, &[rows])?);
        }
        let mut of_layers = HashMap::new();
        for (layer, tensor) in layer_tensors(config) {
            let (rows, cols) = layer_tensor_shape(config, tensor);
            let shape = match tensor {
                LayerTensor::Convolution => vec![rows, 1, cols],
                _ if rows == 1 => vec![cols],
                _ => vec![rows, cols],
            };
            of_layers
                .insert((layer, tensor), self.dense(layer_tensor_name(layer, tensor), &shape)?);
        }
        let is_hybrid = config.delta_net.is_some();
        let hybrid = HybridLayout {
            log_decay: is_hybrid,
            centred_norms: is_hybrid,
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

    /// Returns the linears of a layer, each as one tensor or one of each expert.
    fn linears(
        &mut self,
        config: &ModelConfig,
        layer: usize,
        storage: WeightStorage,
    ) -> Result<Vec<Vec<TernaryTensor>>, ModelError> {
        let mut of_layer = Vec::with_capacity(Linear::OF_ATTENTION.len());
        for &linear in config.linears(layer) {
            let (rows, cols) = config.linear_shape(linear);
            let experts = config.experts.as_ref().filter(|_| linear.is_of_experts());
            of_layer.push(match experts {
                None => vec![self.linear(linear_name(layer, linear), rows, cols, storage)?],
                Some(experts) => {
                    let rows = rows / experts.count;
                    let of_expert = |expert| {
                        let name = expert_name(layer, expert, linear);
                        self.linear(name, rows, cols, storage)
                    };
                    (0..experts.count).map(of_expert).collect::<Result<_, _>>()?
                }
            });
        }
        Ok(of_layer)
    }

    /// Checks that every row is a whole number of groups.
    fn check_groups(&self, config: &ModelConfig) -> Result<(), ModelError> {
        for (layer, linear) in linears(config) {
            let (_, cols) = config.linear_shape(linear);
            if !cols.is_multiple_of(GROUP_MIN) {
                let name = linear_name(layer, linear);
                let offset = self.entries.get(&name).map_or(0, |(_, entry)| entry.range.start);
                let (value, of) = (cols as u64, GROUP_MIN as u64);
                let problem = Problem::NotAMultiple { what: "row length", value, of };
                return Err(ModelError::bad_tensor(&name, offset as u64, problem));
            }
        }
        Ok(())
    }

    fn take(&mut self, name: &str) -> Result<(usize, TensorEntry), ModelError> {
        self.entries
            .remove(name)
            .ok_or_else(|| ModelError::MissingTensor { tensor: name.to_owned() })
    }

    fn dense(&mut self, name: String, shape: &[usize]) -> Result<DenseTensor, ModelError> {
        let (file, entry) = self.take(&name)?;
        let dtype = dense_type(&entry, "F32, F16 or BF16")?;
        check_shape(&entry, shape)?;
        let span = Span { file, range: entry.range };
        let (rows, cols) = match *shape {
            [rows, cols] | [rows, 1, cols] => (rows, cols),
            _ => (1, shape[0]),
        };
        Ok(DenseTensor { name, span, rows, cols, dtype })
    }

    fn linear(
        &mut self,
        name: String,
        rows: usize,
        cols: usize,
        storage: WeightStorage,
    ) -> Result<TernaryTensor, ModelError> {
        let (file, entry) = self.take(&name)?;
        use WeightStorage::{Embedding, Grouped, OneBitLlm, Online};
        let packing = if matches!(storage, Online | OneBitLlm | Grouped | Embedding) {
            check_shape(&entry, &[rows, cols])?;
            let dtype = dense_type(&entry, "F32, F16 or BF16")?;
            match storage {
                Grouped => Packing::Grouped(dtype),
                _ => Packing::Online(dtype),
            }
        } else {
            if entry.dtype != Dtype::U8 {
                return Err(wrong_type(&entry, "U8 (packed ternary)"));
            }
            if !rows.is_multiple_of(4) {
                let problem =
                    Problem::NotAMultiple { what: "row count", value: rows as u64, of: 4 };
                return Err(ModelError::bad_tensor(&name, entry.range.start as u64, problem));
            }
            check_shape(&entry, &[rows / 4, cols])?;
            let scale = self.scale(format!("{name}_scale"))?;
            Packing::Planar(match storage {
                WeightStorage::PackedDivide => Scale::Divide(scale),
                _ => Scale::Multiply(scale),
            })
        };
        let span = Span { file, range: entry.range };
        Ok(TernaryTensor { name, span, rows, cols, packing, permuted_heads: None })
    }

    /// Reads a `weight_scale` tensor: one element, in any number of dimensions.
    fn scale(&mut self, name: String) -> Result<f32, ModelError> {
        let (file, entry) = self.take(&name)?;
        let dtype = dense_type(&entry, "F32, F16 or BF16")?;
        if entry.shape.iter().any(|&dim| dim != 1) {
            return Err(shape_error(&entry, &[1]));
        }
        let mut scale = [0f32];
        widen(dtype, &self.files[file][entry.range.clone()], &mut scale);
        if !(scale[0].is_finite() && scale[0] > 0.0) {
            let problem = Problem::BadScale(scale[0]);
            return Err(ModelError::bad_tensor(&name, entry.range.start as u64, problem));
        }
        Ok(scale[0])
    }

    /// Rejects tensors without a role, because they may change the computation.
    fn refuse_leftovers(self, config: &ModelConfig) -> Result<(), ModelError> {
        let names = self.entries.keys().map(String::as_str);
        ModelError::refuse_left_over(names.filter(|name| {
            !understood::ignores(name, config.tied_head, config.delta_net.is_some())
        }))
    }
}

fn dense_type(entry: &TensorEntry, expected: &'static str) -> Result<DenseType, ModelError> {
    match entry.dtype {
        Dtype::F32 => Ok(DenseType::F32),
        Dtype::F16 => Ok(DenseType::F16),
        Dtype::Bf16 => Ok(DenseType::Bf16),
        _ => Err(wrong_type(entry, expected)),
    }
}

fn wrong_type(entry: &TensorEntry, expected: &'static str) -> ModelError {
    let found = shorten(entry.dtype.name());
    ModelError::TensorType { tensor: entry.name.clone(), found, expected }
}

fn check_shape(entry: &TensorEntry, shape: &[usize]) -> Result<(), ModelError> {
    let expected: Vec<u64> = shape.iter().map(|&dim| dim as u64).collect();
    if is_same_shape(&entry.shape, &expected) { Ok(()) } else { Err(shape_error(entry, shape)) }
}

fn shape_error(entry: &TensorEntry, shape: &[usize]) -> ModelError {
    let found = entry.shape.iter().copied().take(8).collect();
    let expected = shape.iter().map(|&dim| dim as u64).collect();
    ModelError::TensorShape { tensor: entry.name.clone(), found, expected }
}
