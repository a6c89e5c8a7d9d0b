//! An opened model: its configuration, and tensors that are decoded on demand.
//!
//! Opening checks everything except the weights: headers, names, types, shapes, sizes, tokenizer and
//! template. Weights stay in the mapped file; [`Model::ternary`] decodes one tensor at a time, so that
//! loading needs memory for one decoded tensor instead of the whole model. Invalid data (a code that
//! is not a trit, say) is an error of that call: [`ModelError::BadTensor`], and of a model in one file that one in
//! [`ModelError::InFile`].

use std::sync::OnceLock;

use super::{
    encodings::{
        dense::{Dense, widen},
        stored::{Packing, Stored},
    },
    error::{ModelError, Problem},
    fingerprint::{Fingerprint, FingerprintHasher},
    mmap::{Bytes, Source},
    parts::{DenseTensor, Parts, SkippedPart, Span, TensorInfo, Tensors, TernaryTensor},
    roles::{biases, half_split, layer_tensors, linears, norms},
    value_heads::Order,
};
use crate::{
    chat::ChatTemplate,
    config::{DeltaNet, LayerTensor, Linear, ModelConfig, Norm},
    formats::TernaryMatrix,
    tokenizer::Tokenizer,
};

/// An opened, memory-mapped, validated model.
#[derive(Debug)]
pub struct Model {
    parts: Parts,
    fingerprint: OnceLock<Fingerprint>,
}

impl Model {
    pub(super) fn new(parts: Parts) -> Self {
        Self { parts, fingerprint: OnceLock::new() }
    }

    /// Returns the model under another name: that of a folder may mean nothing, such as a hash.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.parts.name);
        self
    }

    /// Returns the name of the folder, or of the file without its extension, unless it was given another one.
    pub fn name(&self) -> &str {
        &self.parts.name
    }

    /// `safetensors` or `gguf`.
    pub fn container(&self) -> &'static str {
        self.parts.container
    }

    /// Returns the shape and conventions of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.parts.config
    }

    /// Returns the tokenizer; its ids are below `config().vocab_size`.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.parts.tokenizer
    }

    /// Returns the chat template, which turns messages into a prompt.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.parts.chat_template.as_ref()
    }

    /// Returns the end token for formats with a single key for it: the template's `eos_token`, else the
    /// first one of the configuration.
    pub(crate) fn eos_token(&self) -> Option<u32> {
        self.chat_template()
            .and_then(|template| template.special_tokens().get("eos_token"))
            .and_then(|text| self.tokenizer().token_id(text))
            .or_else(|| self.config().eos_tokens.first().copied())
    }

    /// Returns the tensors, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.parts.listing
    }

    /// Returns the parts of the files that are not read.
    pub fn skipped(&self) -> &[SkippedPart] {
        &self.parts.skipped
    }

    /// Decodes one ternary matrix, its Q and K rows in half-split RoPE order.
    ///
    /// # Errors
    /// [`ModelError::BadTensor`] if a code is not a trit, the scale is not a positive number, or blocks
    /// have different scales.
    ///
    /// # Panics
    /// If `layer` is not below `config().layer_count`, or has no such linear.
    pub fn ternary(&self, layer: usize, linear: Linear) -> Result<TernaryMatrix, ModelError> {
        let tensors = self.linear(layer, linear);
        let parts = tensors.iter().map(|tensor| self.decode(tensor));
        let stacked = TernaryMatrix::stacked(parts.collect::<Result<_, _>>()?);
        let mut matrix = stacked.expect("a linear has a tensor");
        let tensor = &tensors[0];
        let Some(delta) = self.tiled_heads() else { return Ok(matrix) };
        let is_in_order =
            linear == Linear::DeltaOutput && self.parts.tensors.hybrid.output_is_grouped;
        if !is_in_order && !Order::ToForward.apply(delta, linear, &mut matrix) {
            let (value, of) = (delta.head_dim as u64, matrix.groups.map_or(1, |g| g.size) as u64);
            let problem = Problem::NotAMultiple { what: "width of a value head", value, of };
            return Err(self.bad_tensor(&tensor.name, tensor.span.range.start, problem));
        }
        Ok(matrix)
    }

    /// Returns the tensors that have the rows of a linear; at least one.
    fn linear(&self, layer: usize, linear: Linear) -> &[TernaryTensor] {
        let place = self.config().linears(layer).iter().position(|of| *of == linear);
        &self.parts.tensors.linears[layer][place.expect("a linear of the layer")]
    }

    /// Returns the heads of recurrent layers, if the file has them in another order than the forward pass.
    fn tiled_heads(&self) -> Option<&DeltaNet> {
        self.config().delta_net.as_ref().filter(|_| self.parts.tensors.hybrid.tiled)
    }

    /// Returns a dense tensor of a layer, widened to f32.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] if the layer has none, [`ModelError::BadTensor`] if an element is infinite or not a
    /// number.
    pub fn layer_tensor(&self, layer: usize, tensor: LayerTensor) -> Result<Vec<f32>, ModelError> {
        let Some(found) = self.parts.tensors.layer_tensors.get(&(layer, tensor)) else {
            return Err(ModelError::MissingTensor {
                tensor: format!("{tensor:?} of layer {layer}"),
            });
        };
        let mut values = self.finite(found)?;
        if tensor == LayerTensor::Decay && self.parts.tensors.hybrid.log_decay {
            values.iter_mut().for_each(|rate| *rate = -(crate::math::exp(f64::from(*rate)) as f32));
        }
        if tensor == LayerTensor::Decay && values.iter().any(|rate| *rate > 0.0) {
            let problem = Problem::Growth(values.into_iter().fold(0.0, f32::max));
            return Err(self.bad_tensor(&found.name, found.span.range.start, problem));
        }
        if let Some(delta) = self.tiled_heads() {
            values = Order::ToForward.apply_to(delta, (tensor, found.cols), values);
        }
        if tensor == LayerTensor::Convolution {
            // By channel in files, by tap here.
            let (channels, taps) = (found.rows, found.cols);
            let of_tap = |tap| (0..channels).map(move |channel| channel * taps + tap);
            values = (0..taps).flat_map(of_tap).map(|at| values[at]).collect();
        }
        Ok(values)
    }

    /// Returns the inputs of the smallest groups that a matrix may have by its type in the file; [`Self::ternary`] may join
    /// pairs of them. `None` if its groups have no scales.
    pub(crate) fn group_min(&self, layer: usize, linear: Linear) -> Option<usize> {
        match self.linear(layer, linear)[0].packing {
            Packing::Grouped(dtype) => Some(dtype.group_min()),
            _ => None,
        }
    }

    fn decode(&self, tensor: &TernaryTensor) -> Result<TernaryMatrix, ModelError> {
        let stored = Stored {
            name: &tensor.name,
            rows: tensor.rows,
            cols: tensor.cols,
            packing: tensor.packing,
            bytes: self.bytes(&tensor.span),
            offset: tensor.span.range.start as u64,
        };
        let mut matrix = stored.decode().map_err(|error| self.in_file(error))?;
        if let Some(heads) = tensor.permuted_heads {
            unpermute(&mut matrix, heads);
        }
        Ok(matrix)
    }

    /// Decodes the embedding matrix, `[vocab_size, hidden_size]`, if it is ternary.
    ///
    /// # Errors
    /// As [`Self::ternary`].
    pub fn ternary_embedding(&self) -> Result<Option<TernaryMatrix>, ModelError> {
        self.ternary_table(&self.parts.tensors.embedding)
    }

    /// Decodes the head, `[vocab_size, hidden_size]`, if it is ternary; the embedding when tied.
    ///
    /// # Errors
    /// As [`Self::ternary`].
    pub fn ternary_head(&self) -> Result<Option<TernaryMatrix>, ModelError> {
        let tensors = &self.parts.tensors;
        self.ternary_table(tensors.head.as_ref().unwrap_or(&tensors.embedding))
    }

    fn ternary_table(&self, tensor: &DenseTensor) -> Result<Option<TernaryMatrix>, ModelError> {
        let is_ternary = self.parts.config.ternary_tables;
        is_ternary.then(|| self.decode(&tensor.clone().into())).transpose()
    }

    /// Returns the name of a ternary tensor in the file.
    ///
    /// # Panics
    /// If `layer` is not below `config().layer_count`.
    pub fn ternary_name(&self, layer: usize, linear: Linear) -> &str {
        &self.linear(layer, linear)[0].name
    }

    /// Returns a norm's weights, widened to f32.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] if the model does not have this norm, [`ModelError::BadTensor`] if
    /// a weight is infinite or not a number.
    pub fn norm(&self, norm: Norm) -> Result<Vec<f32>, ModelError> {
        let Some(tensor) = self.parts.tensors.norms.get(&norm) else {
            return Err(ModelError::MissingTensor { tensor: format!("{norm:?}") });
        };
        let mut weights = self.finite(tensor)?;
        if self.parts.tensors.hybrid.centred_norms && !matches!(norm, Norm::Delta(_)) {
            weights.iter_mut().for_each(|weight| *weight += 1.0);
        }
        Ok(weights)
    }

    /// Returns the bias of a linear, widened to f32; `None` if it has none.
    ///
    /// # Errors
    /// [`ModelError::BadTensor`] if an element is infinite or not a number.
    pub fn bias(&self, layer: usize, linear: Linear) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.parts.tensors.biases.get(&(layer, linear)) else { return Ok(None) };
        let bias = self.finite(tensor)?;
        // In the order of the linear's rows.
        let heads = self.linear(layer, linear)[0].permuted_heads;
        Ok(Some(match heads {
            Some(heads) => half_split(bias.len(), heads).map(|row| bias[row]).collect(),
            None => bias,
        }))
    }

    fn finite(&self, tensor: &DenseTensor) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0f32; tensor.rows * tensor.cols];
        widen(tensor.dtype, self.bytes(&tensor.span), &mut values);
        if values.iter().any(|value| !value.is_finite()) {
            let offset = tensor.span.range.start;
            return Err(self.bad_tensor(&tensor.name, offset, Problem::NotFinite));
        }
        Ok(values)
    }

    fn bad_tensor(&self, name: &str, offset: usize, problem: Problem) -> ModelError {
        self.in_file(ModelError::bad_tensor(name, offset as u64, problem))
    }

    /// Adds the path of a model that is one file to an error in its tensors: they are read after the model was opened, by callers
    /// that do not know the path.
    fn in_file(&self, error: ModelError) -> ModelError {
        let source = match self.parts.files.as_slice() {
            [file] if self.parts.container == "gguf" => file.source(),
            _ => None,
        };
        match source {
            Some(source) => {
                ModelError::InFile { path: source.path.clone(), source: Box::new(error) }
            }
            None => error,
        }
    }

    /// Returns the norms of this model, in the order of the forward pass.
    pub fn norms(&self) -> Vec<Norm> {
        norms(&self.parts.config)
    }

    /// Returns the embedding matrix, `[vocab_size, hidden_size]`.
    pub fn embedding(&self) -> Dense<'_> {
        self.dense(&self.parts.tensors.embedding)
    }

    /// Returns the head, `[vocab_size, hidden_size]`; the embedding when tied.
    pub fn head(&self) -> Dense<'_> {
        self.dense(self.parts.tensors.head.as_ref().unwrap_or(&self.parts.tensors.embedding))
    }

    /// Checks that the embedding and the head have only finite values. Ternary ones are checked when they are decoded.
    ///
    /// # Errors
    /// [`ModelError::BadTensor`] with the first value that is infinite or not a number.
    pub(crate) fn check_tables(&self) -> Result<(), ModelError> {
        let tensors = &self.parts.tensors;
        let tables = [&tensors.embedding].into_iter().chain(&tensors.head);
        for table in tables.filter(|_| !self.parts.config.ternary_tables) {
            if let Some(at) = self.dense(table).first_not_finite() {
                let offset = table.span.range.start + at;
                return Err(self.bad_tensor(&table.name, offset, Problem::NotFinite));
            }
        }
        Ok(())
    }

    /// Returns the identity of what the model computes; see [`Fingerprint`]. The first call reads the
    /// whole model, and so finds every value that cannot be decoded.
    ///
    /// # Errors
    /// As [`Model::ternary`] and [`Model::norm`], or a value of the embedding or the head is infinite or not a number.
    pub fn fingerprint(&self) -> Result<Fingerprint, ModelError> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(*known);
        }
        let computed = self.compute_fingerprint()?;
        Ok(*self.fingerprint.get_or_init(|| computed))
    }

    /// Hashes the parts in the order that [`Fingerprint`] states. Tensors follow one another, so that memory holds one
    /// decoded tensor.
    fn compute_fingerprint(&self) -> Result<Fingerprint, ModelError> {
        self.check_tables()?;
        let config = self.config();
        let mut hasher = FingerprintHasher::new(config, self.tokenizer());
        for (layer, linear) in linears(config) {
            hasher.add_ternary(&self.ternary(layer, linear)?);
        }
        for norm in self.norms() {
            hasher.add_vector(&self.norm(norm)?);
        }
        for (layer, linear) in biases(config) {
            hasher.add_vector(&self.bias(layer, linear)?.unwrap_or_default());
        }
        for (layer, tensor) in layer_tensors(config) {
            hasher.add_vector(&self.layer_tensor(layer, tensor)?);
        }
        hasher.add_table(self.ternary_embedding()?, self.embedding());
        if !config.tied_head {
            hasher.add_table(self.ternary_head()?, self.head());
        }
        Ok(hasher.finish())
    }

    /// Returns whether [`Self::fingerprint`] need not read the model.
    pub(crate) fn knows_fingerprint(&self) -> bool {
        self.fingerprint.get().is_some()
    }

    /// Sets the fingerprint, which was computed for the same files before.
    pub(crate) fn set_fingerprint(&self, known: Fingerprint) {
        let _ = self.fingerprint.set(known);
    }

    /// Returns the files that hold the tensors, in the order of the model; `None` if some are not files.
    pub(crate) fn sources(&self) -> Option<Vec<&Source>> {
        self.parts.files.iter().map(Bytes::source).collect()
    }

    /// Returns a hash of what decoding depends on besides the bytes of [`Self::sources`]: configuration, tokenizer, and
    /// where each tensor lies and how it is stored.
    pub(crate) fn plan_digest(&self) -> [u8; 32] {
        let Parts { config, tensors, tokenizer, .. } = &self.parts;
        let Tensors { linears, norms: by_norm, biases: by_linear, .. } = tensors;
        let Tensors { layer_tensors: of_layers, hybrid, embedding, head, .. } = tensors;
        let norms = norms(config);
        let norms = norms.iter().map(|norm| by_norm.get(norm));
        let biases = biases(config).map(|of| by_linear.get(&of));
        let others = layer_tensors(config).map(|of| of_layers.get(&of));
        let in_order: Vec<_> = norms.chain(biases).chain(others).collect();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&tokenizer.digest());
        hasher.update(
            format!("{:?}", (config, linears, in_order, hybrid, embedding, head)).as_bytes(),
        );
        *hasher.finalize().as_bytes()
    }

    /// Lets the system drop the file's pages from memory, for use after the weights are packed. A later
    /// access reads the file again. Does nothing for embedded models.
    pub fn release_pages(&self) {
        self.parts.files.iter().for_each(Bytes::release_pages);
    }

    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    fn bytes(&self, span: &Span) -> &[u8] {
        &self.parts.files[span.file][span.range.clone()]
    }

    fn dense(&self, tensor: &DenseTensor) -> Dense<'_> {
        Dense {
            dtype: tensor.dtype,
            rows: tensor.rows,
            cols: tensor.cols,
            bytes: self.bytes(&tensor.span),
        }
    }
}

/// Undoes the row order of Q and K of files for adjacent-pair RoPE.
fn unpermute(matrix: &mut TernaryMatrix, heads: usize) {
    let order: Vec<usize> = half_split(matrix.rows, heads).collect();
    matrix.reorder_rows(|row| order[row]);
}
