//! The numbers of a model that the kernels' structs are made of.

use super::layout::{K_BLOCK, TILE_ROWS};
use crate::{
    backend::cpu::KvType,
    config::{Activation, Linear, ModelConfig},
    kv::BLOCK_TOKENS,
};

/// Hands out addresses one after another: of a region that is there, or to see how large one must be.
#[derive(Debug)]
pub struct Arena {
    start: u64,
    next: u64,
}

impl Arena {
    /// Addresses from a start on, which is aligned as an allocation is.
    pub fn at(start: u64) -> Self {
        Self { start, next: start }
    }

    /// The next so many bytes.
    pub fn take(&mut self, bytes: usize) -> u64 {
        let at = self.next;
        self.next += bytes.next_multiple_of(256) as u64;
        at
    }

    /// Room for so many f32 (or u32).
    pub fn words(&mut self, count: usize) -> u64 {
        self.take(count * 4)
    }

    /// What was handed out.
    pub fn size_bytes(&self) -> usize {
        (self.next - self.start) as usize
    }
}

/// A model's numbers.
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
    pub eps: f32,
    /// Epsilon of linears' norms of their own.
    pub linear_eps: Option<f32>,
    /// `ActivationKind`
    pub activation: u32,
    pub kv: KvType,
}

impl Shape {
    /// The numbers of a model.
    pub fn of(config: &ModelConfig, kv: KvType) -> Self {
        let inputs = Linear::ALL.map(|linear| config.linear_shape(linear).1);
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
            linear_eps: config.linear_norm_eps,
            activation: match config.activation {
                Activation::SquaredRelu => 0,
                Activation::Silu => 1,
            },
            kv,
        }
    }

    /// Elements of a row of queries.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of keys, and of values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Groups of tokens that the screen looks at together.
    pub fn groups(&self) -> usize {
        self.vocab.div_ceil(TILE_ROWS)
    }

    /// Bytes of a KV block in one layer.
    pub fn kv_layer_bytes(&self) -> usize {
        let position_bytes = self.padded_dim * self.kv.size_bytes() + self.kv.scale_bytes();
        2 * self.kv_heads * BLOCK_TOKENS * position_bytes
    }

    /// Bytes of a KV block over all layers.
    pub fn kv_block_bytes(&self) -> usize {
        self.layers * self.kv_layer_bytes()
    }

    /// Positions a query's scores have room for when the longest sequence has so many: few different
    /// numbers, because each has recordings of its own.
    pub fn reach(&self, longest: usize) -> usize {
        let context = self.context.next_multiple_of(K_BLOCK);
        let mut reach = 1024;
        while reach < longest {
            reach *= 4;
        }
        reach.min(context)
    }
}

/// Bytes of a row of int8 activations of a width.
pub fn stride(width: usize) -> usize {
    width.next_multiple_of(K_BLOCK)
}
