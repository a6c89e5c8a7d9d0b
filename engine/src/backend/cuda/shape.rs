//! The sizes of a model that the kernels' structs contain.

use super::layout::{K_BLOCK, TILE_ROWS};
use crate::{
    backend::{class, cpu::KvType},
    config::{Activation, Linear, ModelConfig},
    kernels::Digits,
    kv::BLOCK_TOKENS,
};

/// Assigns addresses one after another: in an allocation, or from 0 to compute the size of one.
#[derive(Debug)]
pub struct Arena {
    start: u64,
    next: u64,
}

impl Arena {
    /// Starts at an address that is aligned like an allocation.
    pub fn at(start: u64) -> Self {
        Self { start, next: start }
    }

    /// Takes the next bytes.
    pub fn take(&mut self, bytes: usize) -> u64 {
        let at = self.next;
        self.next += bytes.next_multiple_of(256) as u64;
        at
    }

    /// Takes room for `count` f32 (or u32).
    pub fn words(&mut self, count: usize) -> u64 {
        self.take(count * 4)
    }

    /// Returns the bytes taken.
    pub fn size_bytes(&self) -> usize {
        (self.next - self.start) as usize
    }
}

/// Sizes and constants of a model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `head_dim` rounded up to 16.
    pub padded_dim: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub context: usize,
    /// Width of the widest linear's input, rounded up.
    pub stride_max: usize,
    /// Epsilon of the norms inside the blocks.
    pub eps: f32,
    /// Epsilon of the norms of the residual stream.
    pub stream_eps: f32,
    /// Factor of embedding rows in the residual stream.
    pub embedding_factor: f32,
    /// Epsilon of the linears' own norms.
    pub linear_eps: Option<f32>,
    /// Value of `ActivationKind`.
    pub activation: u32,
    pub kv: KvType,
    /// Whether matrices, embedding and head have scales of groups.
    pub group_scales: bool,
    /// Digits of the activations of linears.
    pub digits: usize,
}

impl Shape {
    /// Reads the sizes and constants from a model's configuration.
    pub fn from_config(config: &ModelConfig, kv: KvType, activations: Option<Digits>) -> Self {
        let inputs = Linear::OF_ATTENTION.map(|linear| config.linear_shape(linear).1);
        Self {
            layers: config.layer_count,
            hidden: config.hidden_size,
            heads: config.head_count,
            kv_heads: config.kv_head_count,
            head_dim: config.head_dim,
            padded_dim: config.head_dim.next_multiple_of(16),
            intermediate: config.intermediate_size,
            vocab: config.vocab_size,
            context: config.context_length,
            stride_max: stride(inputs.into_iter().max().unwrap_or_default()),
            eps: config.rms_norm_eps,
            stream_eps: config.stream_norm_eps(),
            embedding_factor: config.embedding_factor(),
            linear_eps: config.linear_norm_eps,
            activation: match config.activation {
                Activation::SquaredRelu => 0,
                Activation::Silu => 1,
            },
            kv,
            group_scales: config.group_scales,
            digits: class::digits(config, activations).count(),
        }
    }

    /// Returns whether one kernel computes and joins the outputs of the gate and up matrices.
    pub fn joins_gate(&self) -> bool {
        self.linear_eps.is_none() && !self.group_scales
    }

    /// Returns the elements of a row of queries.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the elements of a row of keys, or of values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the number of groups of tokens that the screen bounds together.
    pub fn groups(&self) -> usize {
        self.vocab.div_ceil(TILE_ROWS)
    }

    /// Returns the bytes of a KV block in one layer.
    pub fn kv_layer_bytes(&self) -> usize {
        let position_bytes = self.padded_dim * self.kv.size_bytes() + self.kv.scale_bytes();
        2 * self.kv_heads * BLOCK_TOKENS * position_bytes
    }

    /// Returns the bytes of a KV block over all layers.
    pub fn kv_block_bytes(&self) -> usize {
        self.layers * self.kv_layer_bytes()
    }

    /// Returns the room for a query's scores, in positions, for a longest sequence. There are few different values,
    /// because each needs its own recordings.
    pub fn reach(&self, longest: usize) -> usize {
        let context = self.context.next_multiple_of(K_BLOCK);
        let mut reach = 1024;
        while reach < longest {
            reach *= 4;
        }
        reach.min(context)
    }
}

/// Returns the bytes of a row of int8 activations.
pub fn stride(width: usize) -> usize {
    width.next_multiple_of(K_BLOCK)
}
