//! Parameters of the kernels: the structs of `kernels/cuda/args.cuh`, field by field.

use bytemuck::{Pod, Zeroable};

use super::device::Address;
use crate::sampling::params::MAX_TOP_LOGPROBS;

/// Defines mirrors of C structs. `Pod` allows no padding between fields, so a size is the sum of
/// the fields' sizes.
macro_rules! structs {
    ($($(#[$doc:meta])* $name:ident = $size:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, Pod, Zeroable)]
            #[repr(C)]
            pub struct $name { $(pub $field: $type),* }
            const _: () = assert!(size_of::<$name>() == $size);
        )*

        /// Name, size, and each field's name and offset.
        #[cfg(test)]
        pub const LAYOUTS: &[(&str, usize, &[(&str, usize)])] = &[
            $((
                stringify!($name),
                size_of::<$name>(),
                &[$((stringify!($field), std::mem::offset_of!($name, $field))),*],
            )),*
        ];
    };
}

structs! {
    /// Counts of one step.
    Step = 32 { rows: u32, tasks: u32, whole: u32, screened: u32, carry: u32, reported: u32, unused: [u32; 2] }

    EmbedArgs = 56 {
        step: Address, tokens: Address, carried: Address, table: Address, residual: Address, width: u32, dtype: u32,
        factor: f32, unused: u32,
    }

    NormQuantizeArgs = 80 {
        step: Address, x: Address, weight: Address, weight2: Address, q: Address, scales: Address, sums: Address,
        width: u32, stride: u32, eps: f32, eps2: f32, order: u32, unused: u32,
    }

    /// One ternary matrix and the address of its outputs.
    Segment = 40 { weights: Address, bias: Address, out: Address, scale: f32, divide: u32, rows: u32, stride: u32 }

    LinearArgs = 168 {
        step: Address, x: Address, scales: Address, sums: Address, segments: [Segment; 3],
        segment_count: u32, k_blocks: u32, mode: u32, activation: u32,
    }

    NormLinearArgs = 208 {
        linear: LinearArgs, x: Address, weight: Address, weight2: Address,
        width: u32, eps: f32, eps2: f32, unused: u32,
    }

    /// Addresses of a layer's keys and values.
    KvPool = 40 {
        base: Address, block_bytes: u64, layer_offset: u64,
        kv_heads: u32, head_dim: u32, padded_dim: u32, heads: u32,
    }

    RotateStoreArgs = 104 {
        step: Address, positions: Address, tables: Address, blocks: Address, queries: Address, keys: Address,
        values: Address, rotations: Address, pool: KvPool,
    }

    /// Queries that share a sequence and a KV head.
    AttentionTask = 24 {
        first_row: u32, row_count: u32, first_head: u32, head_count: u32, position: u32, table: u32,
    }

    AttentionArgs = 104 {
        step: Address, tasks: Address, blocks: Address, queries: Address, attended: Address, scores: Address,
        maxima: Address, pool: KvPool, scores_stride: u32, scale: f32,
    }

    RotateScoresArgs = 128 { attention: AttentionArgs, keys: Address, values: Address, rotations: Address }

    /// Scale of 128 inputs of a row, and the sums of the integers of each half.
    InputBlock = 16 { scale: f32, sums: [i32; 2], unused: u32 }

    GroupQuantizeArgs = 80 {
        count: Address, wanted: Address, x: Address, weight: Address, weight2: Address, q: Address, blocks: Address,
        width: u32, stride: u32, eps: f32, eps2: f32, digits: u32, unused: u32,
    }

    /// One ternary matrix with scales of groups, and the address of its outputs.
    GroupSegment = 48 {
        weights: Address, scales: Address, bias: Address, out: Address, rows: u32, stride: u32, groups: u32, halves: u32,
    }

    GroupLinearArgs = 184 {
        count: Address, x: Address, blocks: Address, segments: [GroupSegment; 3],
        segment_count: u32, k_blocks: u32, digits: u32, mode: u32,
    }

    EmbedTernaryArgs = 64 {
        step: Address, tokens: Address, carried: Address, weights: Address, scales: Address, residual: Address,
        width: u32, groups: u32, factor: f32, unused: u32,
    }

    NormHeadsArgs = 56 {
        step: Address, queries: Address, keys: Address, query_weight: Address, key_weight: Address,
        heads: u32, kv_heads: u32, head_dim: u32, eps: f32,
    }

    ActivateArgs = 32 { step: Address, gate: Address, up: Address, width: u32, activation: u32 }

    FinalNormArgs = 48 {
        step: Address, wanted: Address, residual: Address, weight: Address, out: Address, width: u32, eps: f32,
    }

    HeadArgs = 48 {
        step: Address, rows: Address, scales: Address, x: Address, logits: Address, width: u32, vocab: u32,
    }

    /// The distribution of a row; see `backend::Distribution`.
    Distribution = 176 { largest: f32, is_known: u32, sum: f64, top: [Found; MAX_TOP_LOGPROBS] }

    DistributionArgs = 40 {
        step: Address, tops: Address, logits: Address, distributions: Address, vocab: u32, unused: u32,
    }

    /// Scale and error bounds of the digits of one hidden row.
    DigitRow = 16 { step: f32, by_error: f32, by_norm: f32, unused: u32 }

    DigitsArgs = 72 {
        step: Address, wanted: Address, residual: Address, weight: Address, x: Address, digits: Address,
        rows: Address, width: u32, stride: u32, digit_count: u32, eps: f32,
    }

    /// Which tokens a row needs.
    RowQuestion = 40 {
        count: u32, within: f32, temperature: f32, single: u32, keys: [u32; 4], first_change: u32, changes: u32,
    }

    /// A change of a token's logit; see `sampling::LogitChange`.
    LogitChange = 16 { token: u32, bias: f32, penalty: f32, less: f32 }

    /// What else decides a row's draw.
    RowFilter = 20 { is_on: u32, top_k: u32, top_p: f32, min_p: f32, reach: f32 }

    ScreenArgs = 104 {
        step: Address, head: Address, scales: Address, errors: Address, norms: Address, digits: Address,
        rows: Address, questions: Address, estimates: Address, lowest: Address, highest: Address,
        vocab: u32, k_blocks: u32, digit_count: u32, unused: u32,
    }

    /// A token and its logit.
    Found = 8 { token: u32, logit: f32 }

    /// Estimates of the logits of some rows, or the logits.
    Estimates = 32 { errors: Address, norms: Address, rows: Address, values: Address }

    LogitBoundsArgs = 80 {
        step: Address, questions: Address, filters: Address, estimates: Estimates, lowest: Address, highest: Address,
        vocab: u32, unused: u32,
    }

    SelectArgs = 104 {
        step: Address, questions: Address, filters: Address, estimates: Estimates, lowest: Address, highest: Address,
        found_counts: Address, found: Address, thresholds: Address, vocab: u32, capacity: u32,
    }

    RescoreArgs = 64 {
        step: Address, rows: Address, scales: Address, x: Address, filters: Address, found_counts: Address, found: Address,
        width: u32, capacity: u32,
    }

    TakeChangedArgs = 96 {
        step: Address, questions: Address, estimates: Estimates, values: Address, lowest: Address, highest: Address,
        changed_counts: Address, changed: Address, vocab: u32, changes_max: u32,
    }

    DrawArgs = 72 {
        step: Address, questions: Address, found_counts: Address, found: Address, changed: Address, firsts: Address,
        drawn: Address, carried: Address, capacity: u32, changes_max: u32,
    }

    /// Bounds of what tokens weigh that are not candidates.
    Rest = 16 { least: f32, most: f32, before: f32, unused: u32 }

    WeighRestArgs = 88 {
        step: Address, questions: Address, filters: Address, estimates: Estimates, thresholds: Address, firsts: Address,
        rests: Address, vocab: u32, unused: u32,
    }

    FilteredDrawArgs = 112 {
        step: Address, questions: Address, filters: Address, found_counts: Address, some_counts: Address, some: Address,
        thresholds: Address, rests: Address, changed: Address, firsts: Address, drawn: Address, carried: Address,
        capacity: u32, parts: u32, changes_max: u32, unused: u32,
    }

    /// Parameters of the kernels that measure the device's highest rates.
    PeakArgs = 32 { from: Address, to: Address, count: u64, rounds: u32, unused: u32 }
}

/// `IS_CARRIED` of `args.cuh`.
pub const IS_CARRIED: u32 = 1 << 31;
/// Values of `RowOrder`.
pub const ORDER_PLAIN: u32 = 0;
pub const ORDER_WGMMA: u32 = 1;
/// Values of `LinearMode`.
pub const LINEAR_STORE: u32 = 0;
pub const LINEAR_ADD: u32 = 1;
