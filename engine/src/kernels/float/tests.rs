//! Every ISA against the scalar lanes, bit for bit, at lengths around the lane width.
#![allow(clippy::unwrap_used, reason = "tests")]

use half::f16;

use super::*;
use crate::{formats::Scale, kv::BlockId};

fn isas() -> impl Iterator<Item = &'static FloatKernels> {
    Isa::ALL.into_iter().filter(|isa| *isa != Isa::Scalar).filter_map(FloatKernels::for_isa)
}

fn scalar() -> &'static FloatKernels {
    FloatKernels::for_isa(Isa::Scalar).unwrap()
}

/// Deterministic values with a wide spread of magnitudes.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let unit = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            unit * [0.01, 1.0, 30.0][(state >> 4) as usize % 3]
        })
        .collect()
}

/// Values with some that are NaN, infinite, beyond f16, tiny or halfway between two int8.
fn special_values(count: usize) -> Vec<f32> {
    let special = [f32::NAN, f32::NEG_INFINITY, 1e9, -65505.0, 1e-7, -0.0, 2.5 * 65504.0 / 127.0];
    let mut x = values(count, 9);
    x.iter_mut().step_by(5).zip(special.iter().cycle()).for_each(|(x, special)| *x = *special);
    x
}

fn assert_same(a: &[f32], b: &[f32], what: &str) {
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}, element {i}: {a} and {b}");
    }
}

const LENGTHS: [usize; 10] = [1, 2, 15, 16, 17, 31, 32, 100, 640, 2561];

#[test]
fn norm_quantize_and_gates_are_equal_on_every_isa() {
    for kernels in isas() {
        for len in LENGTHS {
            let (x, w) = (values(len, 1), values(len, 2));
            let (mut a, mut b) = (vec![0.0; len], vec![0.0; len]);
            scalar().rms_norm(&x, &w, 1e-5, &mut a);
            kernels.rms_norm(&x, &w, 1e-5, &mut b);
            assert_same(&a, &b, "rms_norm");
            let (mut qa, mut qb) = (vec![0; len], vec![0; len]);
            let (sa, sb) = (scalar().quantize(&a, &mut qa), kernels.quantize(&a, &mut qb));
            assert_eq!((sa.to_bits(), &qa), (sb.to_bits(), &qb), "quantize {len}");
            let (mut na, mut nb) = (vec![f16::ZERO; len], vec![f16::ZERO; len]);
            f16::narrow(scalar(), &x, 1.0, &mut na);
            f16::narrow(kernels, &x, 1.0, &mut nb);
            assert_eq!(na, nb);
            for x in [&x, &special_values(len)] {
                let (mut na, mut nb) = (vec![0i8; len], vec![0i8; len]);
                let (sa, sb) = (i8::scale(scalar(), x), i8::scale(kernels, x));
                i8::narrow(scalar(), x, sa, &mut na);
                i8::narrow(kernels, x, sa, &mut nb);
                assert_eq!((sa.to_bits(), na), (sb.to_bits(), nb), "narrow_int8 {len}");
            }
        }
    }
}

/// Returns the output of a linear.
fn value(sum: i32, s: f32, scale: Scale) -> f32 {
    match scale {
        Scale::Multiply(scale) => sum as f32 / s * scale,
        Scale::Divide(scale) => sum as f32 / (s * scale),
    }
}

#[test]
fn outputs_of_linears_match_the_definition_and_stay_in_their_columns() {
    let (rows, width) = (3, 150);
    // One within `QUOTIENT_DIVISORS`, two outside.
    let scales = [3.7, 1e-20, 1e20];
    let random = |seed, count| values(count, seed).iter().map(|v| (v * 1e6) as i32).collect();
    for count in [0, 1, 15, 16, 17, 32, 64, 100] {
        let (columns, stride) = (37..37 + count, count + 5);
        let sums: [Vec<i32>; 2] = [1, 2].map(|seed| random(seed, rows * stride));
        let old = values(rows * width, 3);
        for scale in [Scale::Multiply(0.0173), Scale::Divide(57.3)] {
            let of = [0, 1].map(|n| Sums { sums: &sums[n], stride, scales: &scales, scale });
            let want = |f: &dyn Fn([f32; 2], f32) -> f32| {
                let mut out = old.clone();
                for (row, s) in scales.into_iter().enumerate() {
                    for column in 0..count {
                        let at = row * stride + column;
                        let values = [0, 1].map(|n| value(sums[n][at], s, scale));
                        let out = &mut out[row * width + columns.start + column];
                        *out = f(values, *out);
                    }
                }
                out
            };
            for kernels in isas().chain([scalar()]) {
                let run = |f: &dyn Fn(Columns<'_>)| {
                    let mut out = old.clone();
                    f(Columns::new(&mut out, width, columns.clone()));
                    out
                };
                let got = run(&|out| kernels.rescale(&of[0], out));
                assert_same(&want(&|[value, _], _| value), &got, "rescale");
                let got = run(&|out| kernels.add_rescaled(&of[0], out));
                assert_same(&want(&|[value, _], old| old + value), &got, "add_rescaled");
                let got = run(&|out| kernels.gate(Activation::SquaredRelu, &of[0], &of[1], out));
                let squared = |[gate, up]: [f32; 2], _| gate.max(0.0).powi(2) * up;
                assert_same(&want(&squared), &got, "squared ReLU");
                let silu = |kernels: &FloatKernels| {
                    run(&|out| kernels.gate(Activation::Silu, &of[0], &of[1], out))
                };
                assert_same(&silu(scalar()), &silu(kernels), "SiLU");
            }
        }
    }
}

#[test]
fn quotients_equal_those_of_a_division() {
    let mut state = 7u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    };
    let mut sums: Vec<i32> = (-2000..2000).chain([i32::MIN, i32::MAX, 1 << 24]).collect();
    let (mut want, mut got) = (Vec::new(), Vec::new());
    for round in 0..2000 {
        // Random and extreme mantissas; exponents inside and outside `QUOTIENT_DIVISORS`.
        let mantissa = [0, 1, 0x7f_ffff, 0x7f_fffe, random() >> 9, random() >> 9][round % 6];
        let divisor = f32::from_bits((random() % 254 + 1) << 23 | mantissa);
        sums.extend((0..300).map(|_| random() as i32 >> (random() % 31)));
        want.resize(sums.len(), 0.0);
        got.resize(sums.len(), 0.0);
        for scale in [Scale::Multiply(1.0), Scale::Divide(1.0), Scale::Multiply(-0.37)] {
            let width = sums.len();
            let of = Sums { sums: &sums, stride: width, scales: &[divisor], scale };
            scalar().rescale(&of, Columns::new(&mut want, width, 0..width));
            for kernels in isas() {
                kernels.rescale(&of, Columns::new(&mut got, width, 0..width));
                assert_same(&want, &got, &format!("quotients by {divisor}"));
            }
        }
        sums.truncate(4003);
    }
}

#[test]
fn head_is_equal_on_every_isa_and_for_every_tiling() {
    for len in [5, 16, 100] {
        for (r, n) in [(1, 1), (3, 2), (4, 6), (9, 13)] {
            let xs = values(n * len, 3);
            let wide = values(r * len, 4);
            let narrow: Vec<f16> = wide.iter().map(|v| f16::from_f32(*v)).collect();
            let brain: Vec<bf16> = wide.iter().map(|v| bf16::from_f32(*v)).collect();
            let bytes: Vec<i8> = wide.iter().map(|v| *v as i8).collect();
            check_head(&wide, len, r, &xs);
            check_head(&narrow, len, r, &xs);
            check_head(&brain, len, r, &xs);
            check_head(&bytes, len, r, &xs);
        }
    }
}

fn check_head<E: HeadElement>(rows: &[E], len: usize, r: usize, xs: &[f32]) {
    let n = xs.len() / len;
    // One row and one vector at a time, with the scalar kernel.
    let mut want = vec![0.0; n * r];
    for x in 0..n {
        for row in 0..r {
            let out = &mut want[x * r + row..][..1];
            scalar().head(&rows[row * len..][..len], len, &xs[x * len..][..len], out);
        }
    }
    for kernels in isas().chain([scalar()]) {
        let mut got = vec![0.0; n * r];
        kernels.head(rows, len, xs, &mut got);
        assert_same(&want, &got, "head");
        let apart: Vec<&[E]> = rows.chunks_exact(len).rev().collect();
        for (x, got) in xs.chunks_exact(len).zip(got.chunks_exact_mut(r)) {
            kernels.head_some(&apart, x, got);
            got.reverse();
        }
        assert_same(&want, &got, "head rows apart");
    }
}

#[test]
fn int8_is_the_nearest_multiple_of_the_scale_within_127() {
    let narrowed = |x: &[f32]| {
        let (scale, mut out) = (i8::scale(scalar(), x), vec![0i8; x.len()]);
        i8::narrow(scalar(), x, scale, &mut out);
        (scale, out)
    };
    for len in LENGTHS {
        let x = values(len, 11);
        let (scale, out) = narrowed(&x);
        assert!(out.iter().any(|q| q.abs() == 127), "the largest value is at an end");
        for (x, q) in x.iter().zip(out) {
            let error = (f64::from(*x) - f64::from(q) * f64::from(scale)).abs();
            assert!(error <= f64::from(scale) * 0.500_01, "{x} as {q} times {scale}");
        }
    }
    // Ties go to even; values beyond f16 saturate as in f16.
    assert_eq!(narrowed(&[127.0, 0.5, 1.5, -2.5]), (1.0, vec![127, 0, 2, -2]));
    let (largest, infinity) = (65504.0 / 127.0, f32::INFINITY);
    let x = [f32::NAN, infinity, -infinity, 1e9, largest];
    assert_eq!(narrowed(&x), (largest, vec![127, 127, -127, 127, 1]));
    assert_eq!(narrowed(&[0.0, -0.0]), (1e-5 / 127.0, vec![0, 0]));
}

/// Attention in f64 with the same storage.
fn reference<E: KvElement>(
    tile: &AttentionTile<'_, E>,
    [keys, values]: [&[E]; 2],
    [key_scales, value_scales]: [&[f32]; 2],
    query: &[f32],
    position: usize,
) -> Vec<f64> {
    let block = |p: usize| tile.blocks[p / 16].0 as usize;
    let scale = |scales: &[f32], p: usize| {
        let at = block(p) * tile.scale_block_stride + tile.scale_head_offset + p % 16;
        if E::SCALED { f64::from(scales[at]) } else { 1.0 }
    };
    let key = |p: usize, d: usize| {
        let at = block(p) * tile.key_block_stride + tile.key_head_offset;
        f64::from(keys[at + E::key_at(p % 16, d)].widen()) * scale(key_scales, p)
    };
    let value = |p: usize, d: usize| {
        let at = block(p) * tile.value_block_stride + tile.value_head_offset;
        let value = values[at + E::value_at(tile.padded_head_dim, p % 16, d)].widen();
        f64::from(value) * scale(value_scales, p)
    };
    let visible = tile.visible(position);
    let scores: Vec<f64> = visible
        .clone()
        .map(|p| {
            let dot: f64 = (0..tile.head_dim).map(|d| f64::from(query[d]) * key(p, d)).sum();
            dot * f64::from(tile.scale)
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..tile.head_dim)
        .map(|d| {
            let values = weights.iter().zip(visible.clone());
            values.map(|(weight, p)| weight * value(p, d)).sum::<f64>() / total
        })
        .collect()
}

#[test]
fn attention_matches_f64_and_does_not_depend_on_the_tile_or_isa() {
    for (head_dim, heads) in [(32, 1), (20, 2), (64, 1)] {
        for window in [usize::MAX, 1, 5, 16, 37] {
            check_attention::<f32>((head_dim, heads), window);
            check_attention::<f16>((head_dim, heads), window);
            check_attention::<i8>((head_dim, heads), window);
        }
    }
}

fn check_attention<E: KvElement>((head_dim, heads): (usize, usize), window: usize) {
    let padded = usize::next_multiple_of(head_dim, LANES);
    let pool = 7;
    // Up to 30; in int8, up to 127 times 0.25.
    let narrowed = |count: usize, seed: u32, divisor: f32| {
        let x: Vec<f32> = values(count, seed).iter().map(|v| v / divisor).collect();
        let mut out = vec![E::default(); count];
        E::narrow(scalar(), &x, 30.0 / divisor / 127.0, &mut out);
        out
    };
    let random_scales = |seed: u32, divisor: f32| -> Vec<f32> {
        let count = pool * heads * 16;
        values(count, seed).iter().map(|v| (0.1 + v.abs() / 200.0) / divisor).collect()
    };
    let keys = narrowed(pool * heads * head_dim * 16, 5, 8.0);
    let values_stored = narrowed(pool * heads * padded * 16, 6, 1.0);
    let (key_scales, value_scales) = (random_scales(8, 8.0), random_scales(9, 1.0));
    let blocks: Vec<BlockId> = [3, 0, 6, 1].map(BlockId).to_vec();
    let tile = AttentionTile {
        keys: keys[..].into(),
        values: values_stored[..].into(),
        key_block_stride: heads * head_dim * 16,
        value_block_stride: heads * padded * 16,
        key_head_offset: (heads - 1) * head_dim * 16,
        value_head_offset: (heads - 1) * padded * 16,
        key_scales: key_scales[..].into(),
        value_scales: value_scales[..].into(),
        scale_block_stride: heads * 16,
        scale_head_offset: (heads - 1) * 16,
        blocks: &blocks,
        head_dim,
        padded_head_dim: padded,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window,
    };
    let (stored, scales) = ([&keys[..], &values_stored], [&key_scales[..], &value_scales]);
    let positions: Vec<usize> = vec![0, 63, 15, 16, 17, 40, 2, 62, 33, 5, 31, 32, 47];
    let queries = values(positions.len() * head_dim, 7);
    let mut alone = vec![0.0; positions.len() * padded];
    for (i, &position) in positions.iter().enumerate() {
        let query = &queries[i * head_dim..][..head_dim];
        let out = &mut alone[i * padded..][..padded];
        scalar().attention(&tile, query, &[position], &mut Vec::new(), out);
        let mut query = query.to_vec();
        if E::SCALED {
            // The query is narrowed, too; fifteen bits of a weight stay.
            let (scale, mut narrow) = (E::scale(scalar(), &query), vec![E::default(); head_dim]);
            E::narrow(scalar(), &query, scale, &mut narrow);
            query = narrow.iter().map(|element| element.widen() * scale).collect();
        }
        let most = if E::SCALED { 2e-3 } else { 2e-4 };
        for (d, want) in reference(&tile, stored, scales, &query, position).into_iter().enumerate()
        {
            let error = (f64::from(out[d]) - want).abs();
            assert!(error < most, "position {position}, element {d}: {} {want}", out[d]);
        }
    }
    for kernels in isas().chain([scalar()]) {
        let mut together = vec![0.0; positions.len() * padded];
        kernels.attention(&tile, &queries, &positions, &mut Vec::new(), &mut together);
        assert_same(&alone, &together, "attention");
    }
}

#[test]
fn sequences_together_have_the_bits_of_each_alone() {
    for (head_dim, heads, each) in [(128, 2, 4), (64, 1, 1), (40, 3, 3), (24, 1, 8)] {
        check_together::<f16>(head_dim, heads, each);
        check_together::<f32>(head_dim, heads, each);
        check_together::<i8>(head_dim, heads, each);
    }
}

/// Compares sequences of which all begin with two segments of the same blocks, with each alone.
fn check_together<E: KvElement>(head_dim: usize, heads: usize, each: usize) {
    let padded = usize::next_multiple_of(head_dim, LANES);
    let pool = 40;
    let narrowed = |count: usize, seed: u32| {
        let mut out = vec![E::default(); count];
        E::narrow(scalar(), &values(count, seed), 0.25, &mut out);
        out
    };
    let scales = |seed: u32| -> Vec<f32> {
        values(pool * heads * 16, seed).iter().map(|v| 0.1 + v.abs() / 200.0).collect()
    };
    let (keys, stored) =
        (narrowed(pool * heads * padded * 16, 5), narrowed(pool * heads * padded * 16, 6));
    let (key_scales, value_scales) = (scales(8), scales(9));
    let shared: Vec<BlockId> = (0..16).map(|block| BlockId(block * 7 % 40)).collect();
    let own: [&[u32]; 3] = [&[2], &[4, 11, 25], &[32, 39, 6, 13, 20, 27, 34, 1, 8, 15]];
    let tables =
        own.map(|own| [&shared[..], &own.iter().map(|b| BlockId(*b)).collect::<Vec<_>>()].concat());
    let tile = AttentionTile {
        keys: keys[..].into(),
        values: stored[..].into(),
        key_block_stride: heads * padded * 16,
        value_block_stride: heads * padded * 16,
        key_head_offset: (heads - 1) * padded * 16,
        value_head_offset: (heads - 1) * padded * 16,
        key_scales: key_scales[..].into(),
        value_scales: value_scales[..].into(),
        scale_block_stride: heads * 16,
        scale_head_offset: (heads - 1) * 16,
        blocks: &[],
        head_dim,
        padded_head_dim: padded,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: usize::MAX,
    };
    let last = [16 * 16, 16 * 16 + 40, 16 * 26 - 1];
    let positions: Vec<usize> = last.iter().flat_map(|last| vec![*last; each]).collect();
    let queries = values(positions.len() * head_dim, 7);
    let mut alone = vec![0.0; positions.len() * padded];
    for ((table, &last), part) in tables.iter().zip(&last).zip(0..) {
        let tile = AttentionTile { blocks: table, ..tile };
        let queries = &queries[part * each * head_dim..][..each * head_dim];
        let out = &mut alone[part * each * padded..][..each * padded];
        scalar().attention(&tile, queries, &vec![last; each], &mut Vec::new(), out);
    }
    let tables: Vec<&[BlockId]> = tables.iter().map(|table| &table[..]).collect();
    for kernels in isas().chain([scalar()]) {
        for segments in 0..3 {
            let together = Together { tables: &tables, segments };
            let mut out = vec![f32::NAN; positions.len() * padded];
            // What is left in the scratch changes nothing.
            let mut scratch = vec![f32::NAN; 1 << 16];
            kernels.attention_together(
                &tile,
                &together,
                &queries,
                &positions,
                &mut scratch,
                &mut out,
            );
            assert_same(&alone, &out, "together");
        }
    }
}

#[test]
fn exp_is_accurate() {
    let scale = |scale| Scale::Multiply(scale);
    for start in -400..400 {
        let steps: [i32; LANES] = std::array::from_fn(|i| start * 16 + i as i32);
        let gate = Sums { sums: &steps, stride: LANES, scales: &[1.0], scale: scale(0.0125) };
        let up = Sums { sums: &[1; LANES], scale: scale(1.0), ..gate };
        let mut got = [0f32; LANES];
        let out = Columns::new(&mut got, LANES, 0..LANES);
        scalar().gate(Activation::Silu, &gate, &up, out);
        for (step, y) in steps.into_iter().zip(got) {
            let x = step as f32 * 0.0125;
            let want = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(y) - want).abs() / want.abs().max(1e-30);
            assert!(error < 6e-7, "silu({x}) = {y}, not {want}");
        }
    }
}

#[test]
fn delta_rule_and_gates_are_equal_on_every_isa_and_follow_the_formula() {
    for d in [16, 48, 64, 128] {
        let of = |seed| values(d, seed);
        let token =
            DeltaToken { query: &of(1), key: &of(2), value: &of(3), decay: 0.9, beta: 0.25 };
        let before = values(d * d, 4);
        let (mut state, mut out) = (before.clone(), vec![0.0; d]);
        scalar().delta_rule(&mut state, &token, &mut out);
        for column in 0..d {
            let decayed = |row: usize| 0.9 * f64::from(before[row * d + column]);
            let found: f64 = (0..d).map(|row| decayed(row) * f64::from(token.key[row])).sum();
            let e = 0.25 * (f64::from(token.value[column]) - found);
            let new = |row: usize| decayed(row) + f64::from(token.key[row]) * e;
            let read: f64 = (0..d).map(|row| new(row) * f64::from(token.query[row])).sum();
            let scale: f64 = (0..d).map(|r| (new(r) * f64::from(token.query[r])).abs()).sum();
            assert!(
                (f64::from(out[column]) - read).abs() <= 1e-4 * scale.max(1e-3),
                "{d} {column}"
            );
        }
        let weights = [of(5), of(6), of(7), of(8)];
        let inputs = [of(9), of(10), of(11), of(12)];
        let convolve = |kernels: &FloatKernels| {
            let mut out = vec![0.0; d];
            let [weights, inputs] =
                [&weights, &inputs].map(|of| std::array::from_fn(|i| &of[i][..]));
            kernels.convolve(weights, inputs, &mut out);
            out
        };
        let gated = |kernels: &FloatKernels| {
            let mut x = of(13);
            kernels.apply_sigmoid(&mut x, &of(14));
            kernels.apply_silu(&mut x, &of(15));
            kernels.to_length(&mut x, 0.5);
            x
        };
        let length = gated(scalar()).iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        assert!((length - 0.5).abs() < 1e-3, "{length}");
        for kernels in isas() {
            let (mut other, mut read) = (before.clone(), vec![0.0; d]);
            kernels.delta_rule(&mut other, &token, &mut read);
            assert_same(&state, &other, "state");
            assert_same(&out, &read, "read");
            assert_same(&convolve(scalar()), &convolve(kernels), "convolution");
            assert_same(&gated(scalar()), &gated(kernels), "gates");
        }
    }
}

#[test]
fn hadamard_is_equal_on_every_isa_and_its_own_inverse() {
    for (block, count) in [(16, 48), (128, 384), (1024, 2048)] {
        let x = values(count, 21);
        let transformed = |kernels: &FloatKernels| {
            let mut y = x.clone();
            kernels.hadamard(&mut y, block);
            y
        };
        let y = transformed(scalar());
        for (i, y) in y[..block].iter().enumerate() {
            let is_even = |j: usize| (i & j).count_ones().is_multiple_of(2);
            let sign = |j| if is_even(j) { 1.0 } else { -1.0 };
            let sum: f64 = (0..block).map(|j| sign(j) * f64::from(x[j])).sum();
            let want = sum / (block as f64).sqrt();
            assert!((f64::from(*y) - want).abs() < 3e-3, "{block}, {i}: {y} {want}");
        }
        let mut back = y.clone();
        scalar().hadamard(&mut back, block);
        for (back, x) in back.iter().zip(&x) {
            assert!((back - x).abs() < 1e-3, "{back} {x}");
        }
        isas().for_each(|kernels| assert_same(&y, &transformed(kernels), "hadamard"));
    }
}
