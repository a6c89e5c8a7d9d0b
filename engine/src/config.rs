//! The shape and conventions of a model, validated when its file is opened.

use serde::Serialize;

use crate::names::names;

/// The gate of the feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Activation {
    /// `relu(gate)² ⊙ up` (BitNet b1.58 2B4T).
    #[serde(rename = "relu2")]
    SquaredRelu,
    /// `silu(gate) ⊙ up` (Llama, Falcon, 1bitLLM).
    #[serde(rename = "silu")]
    Silu,
}

names!(Activation, "activation", SquaredRelu = "relu2", Silu = "silu");

/// An extension of the context by YaRN (Peng et al. 2023), at every position: low frequencies are divided by the
/// factor, high ones are kept, and cosines and sines are multiplied by `0.1 ln factor + 1`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Yarn {
    /// Factor of the extension, at least 1.
    pub factor: f32,
    /// Context of the model before the extension.
    pub original_context: usize,
}

impl Yarn {
    /// Largest factor accepted.
    pub(crate) const FACTOR_MAX: f32 = 65536.0;
}

/// A change of the RoPE frequencies, by which a model reads longer texts than it was first trained on.
/// `backend::rope_scaling` has the formulas.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum RopeScaling {
    /// The frequencies as they are.
    None,
    /// All frequencies divided by one factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1: long waves are divided, short ones kept, the ones between interpolated.
    Llama3 {
        /// Divisor of the frequencies of long waves.
        factor: f32,
        /// Waves longer than `original_context_length / low_frequency_factor` are long.
        low_frequency_factor: f32,
        /// Waves shorter than `original_context_length / high_frequency_factor` are short.
        high_frequency_factor: f32,
        /// Context of the first training, in tokens.
        original_context_length: usize,
    },
    /// YaRN.
    Yarn(Yarn),
    /// A divisor for each frequency (`rope_freqs.weight` of GGUF files).
    Divisors {
        /// Positive. // (head_dim / 2)
        divisors: Vec<f32>,
        /// Of LongRoPE, what replaces them in longer texts.
        #[serde(skip)]
        long_factors: Option<LongFactors>,
    },
}

/// The part of LongRoPE for texts that the engine refuses; conversions keep it.
#[derive(Debug, Clone, PartialEq)]
pub struct LongFactors {
    /// Longest text without it, in tokens.
    pub original_context: usize,
    /// Positive. // (head_dim / 2)
    pub divisors: Vec<f32>,
}

impl RopeScaling {
    /// Returns whether the frequencies stay as they are.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Returns the scaling by these divisors; all equal to 1 change nothing.
    pub(crate) fn of_divisors(divisors: Vec<f32>, long_factors: Option<LongFactors>) -> Self {
        match divisors.iter().all(|&divisor| divisor == 1.0) {
            true => Self::None,
            false => Self::Divisors { divisors, long_factors },
        }
    }
}

/// How a model turns a whole text into one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Pooling {
    /// The hidden row of the last token, after the final norm.
    #[serde(rename = "last")]
    LastToken,
}

names!(Pooling, "pooling", LastToken = "last");

/// The recurrent layers of a hybrid model: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025; transformers' `Qwen3_5`). A sequence has
/// a state of one size in each of them, whatever its length.
///
/// Value heads are in the order of folders: head `h` belongs to key head `h / (value_heads / key_heads)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DeltaNet {
    /// Of so many layers the last one has attention, and all others are recurrent.
    pub attention_interval: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, each with a state; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a head of queries, keys and values; a multiple of 16.
    pub head_dim: usize,
    /// Whether the matrices of decay and learning rate are dense instead of ternary.
    pub dense_rates: bool,
}

impl DeltaNet {
    /// Inputs of the convolution of a channel: the current one and those before it.
    pub const TAPS: usize = 4;

    /// Elements of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.head_dim
    }

    /// Elements of all heads of queries, or of keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.head_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Value heads of a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Elements of a sequence's state in a layer: the newest inputs of the convolution, and a matrix for each value head.
    pub fn state_len(&self) -> usize {
        (Self::TAPS - 1) * self.channels() + self.value_heads * self.head_dim * self.head_dim
    }
}

/// The feed-forward blocks of a mixture of experts. Each layer has a router: each token goes through the experts that it gives
/// most to, and their outputs are added with the router's weights. `intermediate_size` is the width of an expert.
///
/// `out = Σ p_e · down_e(silu(min(gate_e(x), clamp)) ⊙ clamp(up_e(x), −clamp, clamp))`, with `p` of the softmax of `router x`
/// over the chosen experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts of a token; at most `count`.
    pub used: usize,
    /// Bound of gate and up, by layer.
    #[serde(skip)]
    pub clamp: Vec<f32>,
}

/// Layers whose tokens attend to the newest positions only. The other layers attend to all, and have no RoPE.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Windows {
    /// Positions that a token attends to, with its own.
    pub size: usize,
    /// Whether each layer has the window.
    #[serde(skip)]
    pub layers: Vec<bool>,
}

/// A dense tensor of a layer beside norms and biases: of recurrent layers, and the router of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerTensor {
    /// Rate of the decay of each value head, negative. // (value_heads,)
    Decay,
    /// Added to what the input says of the decay. // (value_heads,)
    DecayBias,
    /// Weights of the convolution, the current input last. // (TAPS, channels)
    Convolution,
    /// Matrix of the decay, of models with `dense_rates`. // (value_heads, hidden)
    DecayRate,
    /// Matrix of the learning rate, of models with `dense_rates`. // (value_heads, hidden)
    LearningRate,
    /// What each expert gets of an input. // (experts, hidden)
    Router,
}

impl LayerTensor {
    /// Those of a recurrent layer, those of dense rates last.
    pub const OF_DELTA_NET: [Self; 5] =
        [Self::Decay, Self::DecayBias, Self::Convolution, Self::DecayRate, Self::LearningRate];
}

/// The basis of the weights, if it is rotated: every ternary linear, and the head, read their input times signs and then times a
/// normalised Walsh-Hadamard matrix in natural order, over each block of inputs. Embedding rows are turned back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rotation {
    /// Inputs of a block: a power of two, at least 16.
    pub block: usize,
    /// 1 or −1 for each input, by the number of inputs; empty: no signs.
    #[serde(skip)]
    pub signs: Vec<Vec<f32>>,
}

impl Rotation {
    /// Returns the signs of inputs of this width; empty without any.
    pub fn signs(&self, width: usize) -> &[f32] {
        self.signs.iter().find(|signs| signs.len() == width).map_or(&[], Vec::as_slice)
    }
}

/// Constant factors of MiniCPM models (maximal update parametrization, Hu et al. 2024, section 4).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Multipliers {
    /// Factor of the embedding rows (`scale_emb`).
    pub embedding: f32,
    /// Factor of what a block adds to the residual stream (`scale_depth / √layers`).
    pub residual: f32,
    /// Divisor of the logits (`hidden_size / dim_model_base`).
    pub logit_divisor: f32,
}

impl Multipliers {
    /// No factors: those of all other models.
    pub const NONE: Self = Self { embedding: 1.0, residual: 1.0, logit_divisor: 1.0 };

    /// Returns whether nothing is multiplied.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    /// Returns whether every factor is of a size that f32 sums bear.
    pub(crate) fn are_sound(&self) -> bool {
        let Self { embedding, residual, logit_divisor } = *self;
        [embedding, residual, logit_divisor].iter().all(|factor| (1e-3..=1e6).contains(factor))
    }
}

/// The shape and conventions of a model: what the forward pass needs besides the tensors.
///
/// Q and K rows are always in Hugging Face (half-split) order, so RoPE has one pairing: the reader of
/// `llama` GGUF files undoes the permutation of the converter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Architecture name in the file (`bitnet`, `llama`, `bitnet-b1.58`, …).
    #[serde(skip)]
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Transformer layers.
    pub layer_count: usize,
    /// Query heads.
    pub head_count: usize,
    /// Key/value heads; divides `head_count`.
    pub kv_head_count: usize,
    /// Elements per head; even. `head_count * head_dim` need not equal `hidden_size`.
    pub head_dim: usize,
    /// Width of the feed-forward block, or of each expert.
    pub intermediate_size: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub context_length: usize,
    /// Epsilon of the model's RMSNorms.
    pub rms_norm_eps: f32,
    /// Base of the RoPE frequencies.
    pub rope_theta: f32,
    /// Change of the RoPE frequencies.
    #[serde(skip_serializing_if = "RopeScaling::is_none")]
    pub rope_scaling: RopeScaling,
    /// Gate of the feed-forward block.
    pub activation: Activation,
    /// Whether attention and feed-forward have a norm before their last linear.
    pub sub_norms: bool,
    /// Epsilon of the norm in front of every ternary linear (`use_rms_norm`), if the model has them.
    pub linear_norm_eps: Option<f32>,
    /// Whether queries and keys have a norm per head before RoPE.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub qk_norm: bool,
    /// Whether each output of a linear has one scale per group of inputs instead of one per matrix. Such models
    /// were trained without int8 activations.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub group_scales: bool,
    /// Whether embedding and head are ternary, too, with scales of groups.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ternary_tables: bool,
    /// Linears with a bias, in the order of the forward pass; gate and up both or neither.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub linear_biases: Vec<Linear>,
    /// Constant factors of embedding, blocks and logits.
    #[serde(skip_serializing_if = "Multipliers::is_none")]
    pub multipliers: Multipliers,
    /// Elements at the start of a head that RoPE turns, if not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotary_dim: Option<usize>,
    /// Recurrent layers. The attention of such models has a gate: each head of Q has its query and then as many gate elements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_net: Option<DeltaNet>,
    /// The basis of the weights, if it is rotated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rotation: Option<Rotation>,
    /// Layers that attend within a window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windows: Option<Windows>,
    /// Experts in the place of feed-forward blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Of models that embed texts and generate none. They have no head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
    /// Whether the head is the embedding matrix.
    pub tied_head: bool,
    /// Token prepended to a prompt.
    pub bos_token: Option<u32>,
    /// Tokens that end a generation.
    pub eos_tokens: Vec<u32>,
}

/// The ternary linears of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Linear {
    /// `[head_count * head_dim, hidden]`
    Q,
    /// `[kv_head_count * head_dim, hidden]`
    K,
    /// `[kv_head_count * head_dim, hidden]`
    V,
    /// `[hidden, head_count * head_dim]`
    O,
    /// `[intermediate, hidden]`
    Gate,
    /// `[intermediate, hidden]`
    Up,
    /// `[hidden, intermediate]`
    Down,
    /// Queries, keys and values of a recurrent layer. `[channels, hidden]`
    DeltaInput,
    /// Gate of what a recurrent layer reads. `[values, hidden]`
    DeltaGate,
    /// `[value_heads, hidden]`
    DecayRate,
    /// `[value_heads, hidden]`
    LearningRate,
    /// `[hidden, values]`
    DeltaOutput,
    /// The gates of all experts, one after another. `[experts * intermediate, hidden]`
    ExpertGate,
    /// `[experts * intermediate, hidden]`
    ExpertUp,
    /// `[experts * hidden, intermediate]`
    ExpertDown,
}

impl Linear {
    /// The linears of a layer with attention, in the order of the forward pass.
    pub const OF_ATTENTION: [Self; 7] =
        [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];

    /// The linears of a layer with attention and experts, in the order of the forward pass.
    const OF_EXPERTS: [Self; 7] =
        [Self::Q, Self::K, Self::V, Self::O, Self::ExpertGate, Self::ExpertUp, Self::ExpertDown];

    /// The linears of a recurrent layer, in the order of the forward pass.
    const OF_DELTA_NET: [Self; 8] = [
        Self::DeltaInput,
        Self::DeltaGate,
        Self::DecayRate,
        Self::LearningRate,
        Self::DeltaOutput,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// Returns whether the matrix holds those of all experts of a layer.
    pub fn is_of_experts(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertDown)
    }

    /// The same if the rates are dense.
    const WITH_DENSE_RATES: [Self; 6] =
        [Self::DeltaInput, Self::DeltaGate, Self::DeltaOutput, Self::Gate, Self::Up, Self::Down];
}

/// The norms of a model; `usize` is the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// Before attention, `[hidden]`.
    Attention(usize),
    /// Of each query head, before RoPE, `[head_dim]` (with `qk_norm`).
    Query(usize),
    /// Of each key head, before RoPE, `[head_dim]` (with `qk_norm`).
    Key(usize),
    /// Before the attention output linear, `[head_count * head_dim]` (with `sub_norms`).
    AttentionSub(usize),
    /// Before the feed-forward block, `[hidden]`.
    FeedForward(usize),
    /// Before the down linear, `[intermediate]` (with `sub_norms`).
    FeedForwardSub(usize),
    /// In front of one ternary linear, `[in]` (with `linear_norm_eps`).
    Linear(usize, Linear),
    /// Of what a recurrent layer reads, for each value head, `[head_dim]` of these.
    Delta(usize),
    /// Before the head, `[hidden]`.
    Final,
}

impl ModelConfig {
    /// Returns the factor of embedding rows in the residual stream.
    ///
    /// The stream is kept divided by `multipliers.residual`. Then blocks add what they compute as it is, and only norms read
    /// the stream: with [`Self::stream_norm_eps`] they give the same as those of the stream itself.
    pub(crate) fn embedding_factor(&self) -> f32 {
        self.multipliers.embedding / self.multipliers.residual
    }

    /// Returns the epsilon of norms of the residual stream; see [`Self::embedding_factor`].
    pub(crate) fn stream_norm_eps(&self) -> f32 {
        self.rms_norm_eps / (self.multipliers.residual * self.multipliers.residual)
    }

    /// Changes the number of layers. What differs from layer to layer begins again after the last one.
    pub fn set_layer_count(&mut self, count: usize) {
        fn repeated<T: Copy>(of_layers: &mut Vec<T>, count: usize) {
            *of_layers = of_layers.iter().copied().cycle().take(count).collect();
        }
        self.layer_count = count;
        if let Some(windows) = &mut self.windows {
            repeated(&mut windows.layers, count);
        }
        if let Some(experts) = &mut self.experts {
            repeated(&mut experts.clamp, count);
        }
    }

    /// Returns the recurrent part of a layer; `None` if it has attention.
    pub fn delta_layer(&self, layer: usize) -> Option<&DeltaNet> {
        let delta = self.delta_net.as_ref();
        delta.filter(|delta| !(layer + 1).is_multiple_of(delta.attention_interval))
    }

    /// Returns the ternary linears of a layer, in the order of the forward pass.
    pub fn linears(&self, layer: usize) -> &'static [Linear] {
        match self.delta_layer(layer) {
            None if self.experts.is_some() => &Linear::OF_EXPERTS,
            None => &Linear::OF_ATTENTION,
            Some(delta) if delta.dense_rates => &Linear::WITH_DENSE_RATES,
            Some(_) => &Linear::OF_DELTA_NET,
        }
    }

    /// Returns the number of layers with attention before a layer.
    pub fn attention_layers_before(&self, layer: usize) -> usize {
        self.delta_net.map_or(layer, |delta| layer / delta.attention_interval)
    }

    /// Returns the number of layers with attention.
    pub fn attention_layers(&self) -> usize {
        self.attention_layers_before(self.layer_count)
    }

    /// Returns the number of elements at the start of a head that RoPE turns.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.head_dim)
    }

    /// Returns the positions that a token of a layer attends to, with its own, if not all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let windows = self.windows.as_ref()?;
        windows.layers.get(layer).is_some_and(|has| *has).then_some(windows.size)
    }

    /// Returns the number of elements at the start of a head that RoPE turns in a layer.
    pub fn rotary_dim_of(&self, layer: usize) -> usize {
        match &self.windows {
            Some(_) if self.window(layer).is_none() => 0,
            _ => self.rotary_dim(),
        }
    }

    /// Returns the elements of a sequence's state in all recurrent layers.
    pub fn state_len(&self) -> usize {
        let layers = self.layer_count - self.attention_layers();
        self.delta_net.map_or(0, |delta| layers * delta.state_len())
    }

    /// Returns the rows and columns (`out`, `in`) of a ternary linear.
    pub fn linear_shape(&self, linear: Linear) -> (usize, usize) {
        let heads = self.head_count * self.head_dim;
        let kv = self.kv_head_count * self.head_dim;
        let delta = |of: fn(&DeltaNet) -> usize| self.delta_net.as_ref().map_or(0, of);
        let experts = self.experts.as_ref().map_or(0, |experts| experts.count);
        match linear {
            Linear::Q if self.delta_net.is_some() => (2 * heads, self.hidden_size),
            Linear::Q => (heads, self.hidden_size),
            Linear::K | Linear::V => (kv, self.hidden_size),
            Linear::O => (self.hidden_size, heads),
            Linear::Gate | Linear::Up => (self.intermediate_size, self.hidden_size),
            Linear::Down => (self.hidden_size, self.intermediate_size),
            Linear::DeltaInput => (delta(DeltaNet::channels), self.hidden_size),
            Linear::DeltaGate => (delta(DeltaNet::values), self.hidden_size),
            Linear::DecayRate | Linear::LearningRate => {
                (delta(|delta| delta.value_heads), self.hidden_size)
            }
            Linear::DeltaOutput => (self.hidden_size, delta(DeltaNet::values)),
            Linear::ExpertGate | Linear::ExpertUp => {
                (experts * self.intermediate_size, self.hidden_size)
            }
            Linear::ExpertDown => (experts * self.hidden_size, self.intermediate_size),
        }
    }
}
