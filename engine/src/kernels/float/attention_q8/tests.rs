//! Every ISA against the definition in plain loops, bit for bit.

use super::*;
use crate::{
    kernels::{
        Isa,
        float::{FloatKernels, KvElement, Stored, scalar::ScalarLanes},
    },
    kv::BlockId,
};

/// Pseudorandom bytes.
fn bytes(count: usize, seed: u64) -> Vec<i8> {
    let mut state = seed;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as i8
    };
    (0..count).map(|_| next().max(-127)).collect()
}

fn floats(count: usize, seed: u64, largest: f32) -> Vec<f32> {
    bytes(count, seed).iter().map(|byte| f32::from(*byte) / 127.0 * largest).collect()
}

/// Keys and values of two heads in 24 blocks, of which a sequence has 20 in another order.
struct Case {
    head_dim: usize,
    keys: Vec<i8>,
    values: Vec<i8>,
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    blocks: Vec<BlockId>,
}

const HEADS: usize = 2;
const POOL: usize = 24;

impl Case {
    fn new(head_dim: usize) -> Self {
        let (key_dim, padded) = Self::padded(head_dim);
        let scales = |seed| {
            let of = floats(POOL * HEADS * LANES, seed, 1.0);
            of.iter().map(|scale| 0.01 + scale.abs()).collect::<Vec<_>>()
        };
        let blocks = (0..20).map(|block| BlockId(block * 7 % POOL as u32)).collect();
        Self {
            head_dim,
            keys: bytes(POOL * HEADS * key_dim * LANES, 1),
            values: bytes(POOL * HEADS * padded * LANES, 2),
            key_scales: scales(3),
            value_scales: scales(4),
            blocks,
        }
    }

    fn padded(head_dim: usize) -> (usize, usize) {
        (head_dim.next_multiple_of(DEPTH), head_dim.next_multiple_of(LANES))
    }

    /// Returns the tile of the last head.
    fn tile(&self, window: usize) -> AttentionTile<'_, i8> {
        let (key_dim, padded) = Self::padded(self.head_dim);
        AttentionTile {
            keys: Stored::from(&self.keys[..]),
            values: Stored::from(&self.values[..]),
            key_block_stride: HEADS * key_dim * LANES,
            value_block_stride: HEADS * padded * LANES,
            key_head_offset: (HEADS - 1) * key_dim * LANES,
            value_head_offset: (HEADS - 1) * padded * LANES,
            key_scales: Stored::from(&self.key_scales[..]),
            value_scales: Stored::from(&self.value_scales[..]),
            scale_block_stride: HEADS * LANES,
            scale_head_offset: (HEADS - 1) * LANES,
            blocks: &self.blocks,
            head_dim: self.head_dim,
            padded_head_dim: padded,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window,
        }
    }

    /// Computes the output of one query as the module's documentation says.
    fn defined(&self, query: &[f32], position: usize, window: usize) -> Vec<f32> {
        let (key_dim, padded) = Self::padded(self.head_dim);
        let head = |p: usize| self.blocks[p / LANES].0 as usize * HEADS + HEADS - 1;
        let scalar = FloatKernels::for_isa(Isa::Scalar).expect("always there");
        let query_scale = i8::scale(scalar, query);
        let mut narrow = vec![0i8; self.head_dim];
        i8::narrow(scalar, query, query_scale, &mut narrow);
        let score = |p: usize| {
            let key = |d| self.keys[head(p) * key_dim * LANES + i8::key_at(p % LANES, d)];
            let product = |d: usize| i64::from(narrow[d]) * i64::from(key(d));
            let sum: i64 = (0..self.head_dim).map(product).sum();
            let scale = 1.0 / (self.head_dim as f32).sqrt();
            sum as f32 * (self.key_scales[head(p) * LANES + p % LANES] * (scale * query_scale))
        };
        let scores: Vec<f32> = (0..=position).map(score).collect();
        let hidden = (position + 1).saturating_sub(window);
        let largest = scores[hidden..].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut lanes, mut out) = ([0f32; LANES], vec![0f32; self.head_dim]);
        let weights: Vec<f32> = scores
            .iter()
            .enumerate()
            .map(|(p, score)| match p < hidden {
                true => 0.0,
                // SAFETY: plain Rust.
                false => unsafe { ScalarLanes::splat(score - largest).exp().max_lane() },
            })
            .collect();
        for (segment, weights) in weights.chunks(SEGMENT).enumerate() {
            let first = segment * SEGMENT;
            let factor = |i: usize| {
                weights[i] * self.value_scales[head(first + i) * LANES + (first + i) % LANES]
            };
            let largest = (0..weights.len()).map(factor).fold(1e-30, f32::max);
            for (i, weight) in weights.iter().enumerate() {
                lanes[(first + i) % LANES] += weight;
            }
            for (d, out) in out.iter_mut().enumerate() {
                let sum: i64 = (0..weights.len())
                    .map(|i| {
                        let weight = (factor(i) * (32767.0 / largest)).round_ties_even() as i64;
                        let at = i8::value_at(padded, (first + i) % LANES, d);
                        weight * i64::from(self.values[head(first + i) * padded * LANES + at])
                    })
                    .sum();
                *out = (sum as f32).mul_add(largest / 32767.0, *out);
            }
        }
        // SAFETY: sixteen lanes in plain Rust.
        let divisor = unsafe { ScalarLanes::load(lanes.as_ptr()).sum() };
        out.iter().map(|out| out / divisor).collect()
    }
}

#[test]
fn every_isa_has_the_defined_bits() {
    let positions = [0, 319, 15, 16, 127, 128, 129, 255, 300, 63, 5, 200, 256];
    let windows = [usize::MAX, 1, 20, 140];
    for (head_dim, window) in
        [16, 22, 40, 128].into_iter().flat_map(|dim| windows.map(|window| (dim, window)))
    {
        let case = Case::new(head_dim);
        let queries = floats(positions.len() * head_dim, 5, 0.4);
        let expected: Vec<Vec<f32>> = queries
            .chunks(head_dim)
            .zip(positions)
            .map(|(query, position)| case.defined(query, position, window))
            .collect();
        let check = |what: &str, run: &dyn Fn(&mut Vec<f32>, &mut [f32])| {
            let padded = head_dim.next_multiple_of(LANES);
            let mut out = vec![f32::NAN; positions.len() * padded];
            // Scratch of an earlier call.
            let mut scratch = vec![f32::NAN; 99];
            run(&mut scratch, &mut out);
            for (q, expected) in expected.iter().enumerate() {
                let got = &out[q * padded..][..head_dim];
                assert!(
                    got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{what}, {head_dim} elements, window {window}, position {}: {got:?}, not {expected:?}",
                    positions[q]
                );
            }
        };
        let tile = case.tile(window);
        for isa in Isa::ALL {
            let Some(kernels) = FloatKernels::for_isa(isa) else { continue };
            check(&format!("{isa:?}"), &|scratch, out| {
                kernels.attention(&tile, &queries, &positions, scratch, out);
            });
        }
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx512.is_available() {
            check("AVX-512 without VNNI", &|scratch, out| {
                // SAFETY: the ISA is available.
                unsafe { avx512_without_vnni::of_one(&tile, &queries, &positions, scratch, out) };
            });
        }
    }
}
