//! Options of the CPU backend and their names on the command line.

use crate::{
    formats::Format,
    kernels::{Digits, Isa},
    names::names,
};

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half precision, saturating.
    #[default]
    F16,
    /// Single precision, for comparison with references.
    F32,
    /// Int8; the keys and the values of each position and KV head each have an f32 scale. Half of f16's
    /// memory. Queries and weights become integers, too, and their products are exact.
    Q8,
}

impl KvType {
    /// Returns the number of bytes per element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
            Self::Q8 => 1,
        }
    }

    /// Returns the name in numerics classes: with a number that rises when answers change.
    pub fn class_name(self) -> &'static str {
        match self {
            Self::F16 | Self::F32 => self.name(),
            Self::Q8 => "q8-2",
        }
    }

    /// Returns the number of bytes of the scale of one position's keys, or values, for one KV head.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::F16 | Self::F32 => 0,
            Self::Q8 => size_of::<f32>(),
        }
    }
}

names!(KvType, "KV type", F16 = "f16", F32 = "f32", Q8 = "q8");

/// Storage of the head's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadMode {
    /// As in the file, and exact. When only the largest logits are requested, an int8 copy shows which
    /// rows can matter ([`super::screen`]).
    #[default]
    Exact,
    /// As in the file, without the copy: every logit is computed.
    Full,
    /// One int8 per weight and one scale per row: half the memory of f16, and lossy.
    Q8,
}

names!(HeadMode, "head", Exact = "exact", Full = "full", Q8 = "q8");

/// What is done with the packed weights in a file beside the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PackedCache {
    /// Nothing.
    #[default]
    Off,
    /// They are read, and kept for the next start.
    On,
    /// As `On`; experts stay in the file, of which the system keeps in memory what it has room for. The file is packed one layer at
    /// a time.
    Mapped,
}

names!(PackedCache, "packed cache", Off = "off", On = "on", Mapped = "mapped");

/// Options of [`super::load`].
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Threads of a step, at least 1.
    pub threads: usize,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head. A ternary head has one.
    pub head: HeadMode,
    /// Memory node that the threads stay on; `None`: they may run anywhere.
    pub node: Option<usize>,
    /// Digits of activations, for models with scales of groups; `None`: two. Other models have one.
    pub activations: Option<Digits>,
    /// KV blocks (of 16 positions) in the pool.
    pub block_count: usize,
    /// States that there is room for, of running sequences and others, of models with recurrent layers.
    pub slots: usize,
    /// What is done with packed weights in a file beside the model.
    pub packed_cache: PackedCache,
}

impl CpuOptions {
    /// Returns options with this many KV blocks: `i2_s`, the fastest ISA of this machine, one thread, an f16 KV cache
    /// and the head as it is in the file.
    pub fn new(block_count: usize) -> Self {
        Self {
            format: Format::I2S,
            isa: Isa::detect(),
            threads: 1,
            kv: KvType::default(),
            head: HeadMode::default(),
            activations: None,
            node: None,
            block_count,
            slots: 16,
            packed_cache: PackedCache::Off,
        }
    }
}
