//! The identity of what a model computes, as 32 bytes.

use std::fmt;

use rayon::prelude::*;

use super::encodings::dense::{Dense, f32_bytes};
use crate::{
    config::{Activation, Experts, ModelConfig, Multipliers, RopeScaling},
    formats::{Scale, TernaryMatrix},
    tokenizer::Tokenizer,
};

/// A BLAKE3 hash of everything that the output of a model depends on, independent of the container:
/// a packed folder and a GGUF file with the same values have the same fingerprint.
///
/// It hashes the hashes of these parts, in this order:
/// 1. the configuration: the sizes, epsilons and theta as little-endian u64 and f32 bits, gate,
///    norms, tied head, the recurrent layers, the rotation, the windows, the experts, the linears with biases and the
///    multipliers if there are some, the sorted end tokens, and the scaling of RoPE if there is one (context length and names
///    are left out);
/// 2. the tokenizer: tokens by id, merges, pre-tokenizer, tokens put around a prompt;
/// 3. per layer and linear (`Linear::OF_ATTENTION`): rows, columns, trits in row-major 2-bit codes
///    (trit + 1, first in the lowest bits), then whether the scale multiplies or divides, and its
///    f32 bits; or, for scales of groups, the size of a group and the f16 bits of every scale;
/// 4. every norm in the order of the forward pass, as f32, then every bias, and then the other dense tensors of layers;
/// 5. the embedding, and the head unless tied: all elements widened to f32, in groups of 1024 rows; or
///    as in 3 if they are ternary.
///
/// The chat template is not included: it shapes the prompt, not the answer to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Returns the 32 bytes of the hash.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the fingerprint that these bytes were taken from.
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl serde::Serialize for Fingerprint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Rows of the embedding hashed as one part.
const DENSE_ROWS: usize = 1024;

/// Hashes the parts of a model, which are added in the order that [`Fingerprint`] states. The parts of a tensor are
/// hashed in parallel.
pub(crate) struct FingerprintHasher(blake3::Hasher);

impl FingerprintHasher {
    /// Returns a hasher that has the configuration and the tokenizer.
    pub fn new(config: &ModelConfig, tokenizer: &Tokenizer) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("tritmill model fingerprint");
        hasher.update(&config_digest(config));
        hasher.update(&tokenizer.digest());
        Self(hasher)
    }

    /// Adds a ternary matrix.
    pub fn add_ternary(&mut self, matrix: &TernaryMatrix) {
        self.0.update(&ternary_digest(matrix));
    }

    /// Adds a norm or a bias.
    pub fn add_vector(&mut self, values: &[f32]) {
        self.0.update(blake3::hash(&f32_bytes(values)).as_bytes());
    }

    /// Adds the embedding or the head, by its trits if it is ternary.
    pub fn add_table(&mut self, ternary: Option<TernaryMatrix>, dense: Dense<'_>) {
        match ternary {
            Some(matrix) => self.add_ternary(&matrix),
            None => dense_digests(&mut self.0, dense),
        }
    }

    /// Returns the fingerprint of what was added.
    pub fn finish(&self) -> Fingerprint {
        Fingerprint(*self.0.finalize().as_bytes())
    }
}

fn config_digest(config: &ModelConfig) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for size in [
        config.hidden_size,
        config.layer_count,
        config.head_count,
        config.kv_head_count,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
    ] {
        hasher.update(&(size as u64).to_le_bytes());
    }
    for number in [config.rms_norm_eps, config.rope_theta, config.linear_norm_eps.unwrap_or(0.0)] {
        hasher.update(&number.to_bits().to_le_bytes());
    }
    let gate = match config.activation {
        Activation::SquaredRelu => 0,
        Activation::Silu => 1,
    };
    hasher.update(&[gate, u8::from(config.sub_norms), u8::from(config.tied_head)]);
    // Only what a model has is hashed, so that other models keep their fingerprints.
    if config.qk_norm {
        hasher.update(b"qk_norm");
    }
    if let Some(pooling) = config.pooling {
        hasher.update(b"pooling");
        hasher.update(pooling.name().as_bytes());
    }
    if let Some(delta) = &config.delta_net {
        hasher.update(b"delta_net");
        let sizes = [delta.attention_interval, delta.key_heads, delta.value_heads, delta.head_dim];
        sizes.iter().for_each(|size| {
            hasher.update(&(*size as u64).to_le_bytes());
        });
        hasher.update(&[u8::from(delta.dense_rates)]);
        hasher.update(&(config.rotary_dim() as u64).to_le_bytes());
    }
    if let Some(rotation) = &config.rotation {
        hasher.update(b"rotation");
        hasher.update(&(rotation.block as u64).to_le_bytes());
        rotation.signs.iter().for_each(|signs| {
            hasher.update(&f32_bytes(signs));
        });
    }
    if let Some(windows) = &config.windows {
        hasher.update(b"windows");
        hasher.update(&(windows.size as u64).to_le_bytes());
        let layers: Vec<u8> = windows.layers.iter().map(|has| u8::from(*has)).collect();
        hasher.update(&layers);
        hasher.update(&(config.rotary_dim() as u64).to_le_bytes());
    }
    if let Some(Experts { count, used, clamp }) = &config.experts {
        hasher.update(b"experts");
        for size in [count, used] {
            hasher.update(&(*size as u64).to_le_bytes());
        }
        hasher.update(&f32_bytes(clamp));
    }
    for linear in &config.linear_biases {
        hasher.update(b"bias");
        hasher.update(&[*linear as u8]);
    }
    if !config.multipliers.is_none() {
        let Multipliers { embedding, residual, logit_divisor } = config.multipliers;
        hasher.update(b"multipliers");
        hasher.update(&f32_bytes(&[embedding, residual, logit_divisor]));
    }
    let mut ends = config.eos_tokens.clone();
    ends.sort_unstable();
    for token in ends {
        hasher.update(&token.to_le_bytes());
    }
    hash_rope_scaling(&mut hasher, &config.rope_scaling);
    *hasher.finalize().as_bytes()
}

/// Without scaling nothing is hashed.
fn hash_rope_scaling(hasher: &mut blake3::Hasher, scaling: &RopeScaling) {
    let (kind, numbers, context) = match scaling {
        RopeScaling::None => return,
        RopeScaling::Linear { factor } => ("linear", vec![*factor], 0),
        RopeScaling::Llama3 {
            factor,
            low_frequency_factor,
            high_frequency_factor,
            original_context_length,
        } => {
            let numbers = vec![*factor, *low_frequency_factor, *high_frequency_factor];
            ("llama3", numbers, *original_context_length)
        }
        RopeScaling::Yarn(yarn) => ("yarn", vec![yarn.factor], yarn.original_context),
        RopeScaling::Divisors { divisors, .. } => ("divisors", divisors.clone(), 0),
    };
    hasher.update(kind.as_bytes());
    hasher.update(&f32_bytes(&numbers));
    hasher.update(&(context as u64).to_le_bytes());
}

fn ternary_digest(matrix: &TernaryMatrix) -> [u8; 32] {
    // A multiple of 4, so that no byte belongs to two parts.
    const TRITS: usize = 1 << 20;
    let parts: Vec<[u8; 32]> = matrix
        .trits
        .par_chunks(TRITS)
        .map(|trits| {
            let (groups, rest) = trits.as_chunks::<4>();
            let code = |trit: i8| (trit + 1) as u8;
            let mut bytes: Vec<u8> = groups
                .iter()
                .map(|t| code(t[0]) | code(t[1]) << 2 | code(t[2]) << 4 | code(t[3]) << 6)
                .collect();
            if !rest.is_empty() {
                bytes.push(rest.iter().rev().fold(0, |byte, &trit| byte << 2 | code(trit)));
            }
            *blake3::hash(&bytes).as_bytes()
        })
        .collect();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(matrix.rows as u64).to_le_bytes());
    hasher.update(&(matrix.cols as u64).to_le_bytes());
    hasher.update(parts.as_flattened());
    if let Some(groups) = &matrix.groups {
        let scales: Vec<u8> = groups.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        hasher.update(&[2]);
        hasher.update(&(groups.size as u64).to_le_bytes());
        hasher.update(&scales);
        return *hasher.finalize().as_bytes();
    }
    let (operation, scale) = match matrix.scale {
        Scale::Multiply(scale) => (0, scale),
        Scale::Divide(scale) => (1, scale),
    };
    hasher.update(&[operation]);
    hasher.update(&scale.to_bits().to_le_bytes());
    *hasher.finalize().as_bytes()
}

fn dense_digests(hasher: &mut blake3::Hasher, matrix: Dense<'_>) {
    let parts: Vec<[u8; 32]> = (0..matrix.rows.div_ceil(DENSE_ROWS))
        .into_par_iter()
        .map_init(
            || vec![0f32; matrix.cols],
            |row, part| {
                let mut hasher = blake3::Hasher::new();
                for index in part * DENSE_ROWS..((part + 1) * DENSE_ROWS).min(matrix.rows) {
                    matrix.row(index, row);
                    hasher.update(&f32_bytes(row));
                }
                *hasher.finalize().as_bytes()
            },
        )
        .collect();
    hasher.update(parts.as_flattened());
}
