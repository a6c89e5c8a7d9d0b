//! The tables of kernels: every generic definition, instantiated for each ISA.

use half::{bf16, f16};

use super::{
    super::screen::{self, Bounds, Products, RangeNoise},
    AttentionTile, Columns, DeltaToken, FloatKernels, KvElement, Sums, TAPS, Values, attention,
    attention_q8, delta, hadamard,
    lanes::Element,
    ops, outputs,
    together::{self, Together},
};
use crate::{config::Activation, kernels::Digits};

/// Instantiates every kernel for one ISA. The arguments are: module, lanes, target features, queries
/// per attention tile, and the register tile of the head (head rows × hidden rows).
macro_rules! instantiate {
    ($module:ident, $lanes:ty, $features:literal, $queries:literal, $rows:literal, $xs:literal) => {
        pub(super) mod $module {
            use super::*;

            pub(in super::super) static TABLE: FloatKernels = FloatKernels {
                rms_norm,
                quantize,
                rescale,
                add_rescaled,
                gate,
                quantize_groups,
                set_values,
                add_values,
                gate_values,
                narrow,
                int8_scale,
                narrow_int8,
                estimate,
                select_candidates,
                weigh_below,
                attention_f16,
                attention_f32,
                attention_i8: attention_q8::$module::of_one,
                together_f16,
                together_f32,
                together_i8: attention_q8::$module::together,
                head_f32,
                head_f16,
                head_bf16,
                head_i8,
                head_some_f32,
                head_some_f16,
                head_some_bf16,
                head_some_i8,
                delta_rule,
                convolve,
                to_length,
                apply_gate,
                hadamard,
            };

            instantiate!(@fn $features hadamard(x: &mut [f32], block: usize) {
                hadamard::hadamard::<$lanes>(x, block)
            });

            instantiate!(@fn $features delta_rule(
                state: &mut [f32],
                token: &DeltaToken<'_>,
                out: &mut [f32]
            ) {
                delta::delta_rule::<$lanes>(state, token, out)
            });
            instantiate!(@fn $features convolve(
                weights: [&[f32]; TAPS],
                inputs: [&[f32]; TAPS],
                out: &mut [f32]
            ) {
                delta::convolve::<$lanes>(weights, inputs, out)
            });
            instantiate!(@fn $features to_length(x: &mut [f32], factor: f32) {
                delta::to_length::<$lanes>(x, factor)
            });
            instantiate!(@fn $features apply_gate(x: &mut [f32], gate: &[f32], silu: bool) {
                delta::apply_gate::<$lanes>(x, gate, silu)
            });

            instantiate!(@fn $features rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
                ops::rms_norm::<$lanes>(x, w, eps, out)
            });
            instantiate!(@fn $features rescale(sums: &Sums<'_>, out: &mut Columns<'_>) {
                outputs::rescale::<$lanes>(sums, out)
            });
            instantiate!(@fn $features add_rescaled(sums: &Sums<'_>, out: &mut Columns<'_>) {
                outputs::add_rescaled::<$lanes>(sums, out)
            });
            instantiate!(@fn $features gate(
                act: Activation,
                gate: &Sums<'_>,
                up: &Sums<'_>,
                out: &mut Columns<'_>
            ) {
                outputs::gate::<$lanes>(act, gate, up, out)
            });
            instantiate!(@fn $features quantize_groups(
                x: &[f32],
                digits: Digits,
                q: &mut [i8],
                scales: &mut [f32]
            ) {
                ops::quantize_groups::<$lanes>(x, digits, q, scales)
            });
            instantiate!(@fn $features set_values(values: &Values<'_>, out: &mut Columns<'_>) {
                outputs::set_values::<$lanes>(values, out)
            });
            instantiate!(@fn $features add_values(values: &Values<'_>, out: &mut Columns<'_>) {
                outputs::add_values::<$lanes>(values, out)
            });
            instantiate!(@fn $features gate_values(
                act: Activation,
                gate: &Values<'_>,
                up: &Values<'_>,
                out: &mut Columns<'_>
            ) {
                outputs::gate_values::<$lanes>(act, gate, up, out)
            });
            instantiate!(@fn $features narrow(x: &[f32], out: &mut [f16]) {
                ops::narrow::<$lanes>(x, out)
            });
            instantiate!(@fn $features narrow_int8(x: &[f32], scale: f32, out: &mut [i8]) {
                ops::narrow_int8::<$lanes>(x, scale, out)
            });
            instantiate!(@attention $features attention_f16, f16);
            instantiate!(@attention $features attention_f32, f32);
            instantiate!(@together $features together_f16, f16);
            instantiate!(@together $features together_f32, f32);
            instantiate!(@head $features head_f32, head_some_f32, f32);
            instantiate!(@head $features head_f16, head_some_f16, f16);
            instantiate!(@head $features head_bf16, head_some_bf16, bf16);
            instantiate!(@head $features head_i8, head_some_i8, i8);

            #[target_feature(enable = $features)]
            unsafe fn select_candidates(
                bounds: &Bounds<'_>,
                noise: Option<&RangeNoise>,
                threshold: f32,
                estimates: &[f32],
                candidates: &mut Vec<usize>,
            ) {
                screen::select_candidates(bounds, noise, threshold, estimates, candidates)
            }

            #[target_feature(enable = $features)]
            unsafe fn weigh_below(
                bounds: &Bounds<'_>,
                threshold: f32,
                per_unit: f32,
                estimates: &[f32],
            ) -> f32 {
                screen::weigh_below(bounds, threshold, per_unit, estimates)
            }

            #[target_feature(enable = $features)]
            unsafe fn estimate(of: &Products<'_>, out: &mut [f32]) {
                screen::estimate(of, out)
            }

            #[target_feature(enable = $features)]
            unsafe fn quantize(x: &[f32], q: &mut [i8]) -> f32 {
                // SAFETY: this function's features are the lanes'.
                unsafe { ops::quantize::<$lanes>(x, q) }
            }

            #[target_feature(enable = $features)]
            unsafe fn int8_scale(x: &[f32]) -> f32 {
                // SAFETY: this function's features are the lanes'.
                unsafe { ops::int8_scale::<$lanes>(x) }
            }

            /// Runs whole tiles of queries, then smaller ones.
            #[inline(always)]
            unsafe fn attend<E: KvElement>(
                tile: &AttentionTile<'_, E>,
                queries: &[f32],
                positions: &[usize],
                scratch: &mut Vec<f32>,
                out: &mut [f32],
            ) {
                let (dim, padded) = (tile.head_dim, tile.padded_head_dim);
                let mut at = 0;
                while at < positions.len() {
                    let left = positions.len() - at;
                    // SAFETY: this function is inlined where the lanes' features are enabled.
                    at += unsafe {
                        if left >= $queries {
                            run_tile::<E, $queries>(tile, queries, positions, at, dim, padded, scratch, out)
                        } else if left >= 4 {
                            run_tile::<E, 4>(tile, queries, positions, at, dim, padded, scratch, out)
                        } else {
                            run_tile::<E, 1>(tile, queries, positions, at, dim, padded, scratch, out)
                        }
                    };
                }
            }

            /// Runs queries of several sequences, in whole tiles if each has whole ones.
            #[inline(always)]
            unsafe fn attend_together<E: KvElement>(
                tile: &AttentionTile<'_, E>,
                of: &Together<'_>,
                queries: &[f32],
                positions: &[usize],
                scratch: &mut Vec<f32>,
                out: &mut [f32],
            ) {
                let each = positions.len() / of.tables.len();
                // SAFETY: this function is inlined where the lanes' features are enabled.
                unsafe {
                    if each.is_multiple_of($queries) {
                        together::attention::<$lanes, E, $queries>(
                            tile, of, queries, positions, scratch, out,
                        );
                    } else if each.is_multiple_of(4) {
                        together::attention::<$lanes, E, 4>(
                            tile, of, queries, positions, scratch, out,
                        );
                    } else {
                        together::attention::<$lanes, E, 1>(
                            tile, of, queries, positions, scratch, out,
                        );
                    }
                }
            }

            #[inline(always)]
            #[expect(clippy::too_many_arguments, reason = "a loop body cut out for its const generic")]
            unsafe fn run_tile<E: KvElement, const Q: usize>(
                tile: &AttentionTile<'_, E>,
                queries: &[f32],
                positions: &[usize],
                at: usize,
                dim: usize,
                padded: usize,
                scratch: &mut Vec<f32>,
                out: &mut [f32],
            ) -> usize {
                let queries = &queries[at * dim..(at + Q) * dim];
                let positions: [usize; Q] = std::array::from_fn(|i| positions[at + i]);
                let out = &mut out[at * padded..(at + Q) * padded];
                // SAFETY: guaranteed by the caller.
                unsafe {
                    attention::attention::<$lanes, E, Q>(tile, queries, &positions, scratch, out);
                }
                Q
            }

            /// Splits `(r, len)` × `(n, len)` into register tiles.
            #[inline(always)]
            #[allow(unreachable_patterns, reason = "the widest tile of some ISAs is a narrow one")]
            unsafe fn head<E: Element>(rows: &[E], len: usize, xs: &[f32], out: &mut [f32]) {
                let (r, n) = (rows.len() / len, xs.len() / len);
                assert!(rows.len() == r * len && xs.len() == n * len && out.len() == r * n);
                let mut row = 0;
                while row < r {
                    let height = if r - row >= $rows { $rows } else { 1 };
                    let mut x = 0;
                    while x < n {
                        // SAFETY: features as above; `head_tile` checks its ranges.
                        x += unsafe {
                            match (height, n - x) {
                                ($rows, $xs..) => {
                                    head_tile::<E, $rows, $xs>(rows, len, xs, row, x, r, out)
                                }
                                ($rows, 4..) => {
                                    head_tile::<E, $rows, 4>(rows, len, xs, row, x, r, out)
                                }
                                ($rows, 2..) => {
                                    head_tile::<E, $rows, 2>(rows, len, xs, row, x, r, out)
                                }
                                ($rows, _) => {
                                    head_tile::<E, $rows, 1>(rows, len, xs, row, x, r, out)
                                }
                                _ => head_tile::<E, 1, 1>(rows, len, xs, row, x, r, out),
                            }
                        };
                    }
                    row += height;
                }
            }

            #[inline(always)]
            unsafe fn head_some<E: Element>(rows: &[&[E]], x: &[f32], out: &mut [f32]) {
                const ROWS: usize = $rows;
                assert!(rows.len() == out.len() && rows.iter().all(|row| row.len() == x.len()));
                let (some, few) = rows.as_chunks::<ROWS>();
                let (out_some, out_few) = out.as_chunks_mut::<ROWS>();
                for (rows, out) in some.iter().zip(out_some) {
                    // SAFETY: features as above; the rows are as long as `x`.
                    [*out] = unsafe { ops::dot_tile::<$lanes, E, ROWS, 1>(rows.map(<[E]>::as_ptr), [x.as_ptr()], x.len()) };
                }
                for (row, out) in few.iter().zip(out_few) {
                    // SAFETY: as above.
                    [[*out]] = unsafe { ops::dot_tile::<$lanes, E, 1, 1>([row.as_ptr()], [x.as_ptr()], x.len()) };
                }
            }

            #[inline(always)]
            unsafe fn head_tile<E: Element, const H: usize, const X: usize>(
                rows: &[E],
                len: usize,
                xs: &[f32],
                row: usize,
                x: usize,
                stride: usize,
                out: &mut [f32],
            ) -> usize {
                let rows: [*const E; H] =
                    std::array::from_fn(|h| rows[(row + h) * len..(row + h + 1) * len].as_ptr());
                let xs: [*const f32; X] =
                    std::array::from_fn(|i| xs[(x + i) * len..(x + i + 1) * len].as_ptr());
                // SAFETY: each pointer comes from a slice of `len` elements.
                let tile = unsafe { ops::dot_tile::<$lanes, E, H, X>(rows, xs, len) };
                for (i, logits) in tile.iter().enumerate() {
                    out[(x + i) * stride + row..][..H].copy_from_slice(logits);
                }
                X
            }
        }
    };
    (@fn $features:literal $name:ident($($arg:ident: $type:ty),*) $body:block) => {
        #[target_feature(enable = $features)]
        unsafe fn $name($($arg: $type),*) {
            // SAFETY: this function's features are the lanes'.
            unsafe { $body }
        }
    };
    (@attention $features:literal $name:ident, $element:ty) => {
        #[target_feature(enable = $features)]
        unsafe fn $name(
            tile: &AttentionTile<'_, $element>,
            queries: &[f32],
            positions: &[usize],
            scratch: &mut Vec<f32>,
            out: &mut [f32],
        ) {
            // SAFETY: this function's features are the lanes'.
            unsafe { attend(tile, queries, positions, scratch, out) }
        }
    };
    (@together $features:literal $name:ident, $element:ty) => {
        #[target_feature(enable = $features)]
        unsafe fn $name(
            tile: &AttentionTile<'_, $element>,
            of: &Together<'_>,
            queries: &[f32],
            positions: &[usize],
            scratch: &mut Vec<f32>,
            out: &mut [f32],
        ) {
            // SAFETY: this function's features are the lanes'.
            unsafe { attend_together(tile, of, queries, positions, scratch, out) }
        }
    };
    (@head $features:literal $name:ident, $some:ident, $element:ty) => {
        #[target_feature(enable = $features)]
        unsafe fn $some(rows: &[&[$element]], x: &[f32], out: &mut [f32]) {
            // SAFETY: this function's features are the lanes'.
            unsafe { head_some(rows, x, out) }
        }

        #[target_feature(enable = $features)]
        unsafe fn $name(rows: &[$element], len: usize, xs: &[f32], out: &mut [f32]) {
            // SAFETY: this function's features are the lanes'.
            unsafe { head(rows, len, xs, out) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
instantiate!(scalar, super::super::scalar::ScalarLanes, "sse2", 4, 2, 2);
#[cfg(not(target_arch = "x86_64"))]
instantiate!(scalar, super::super::scalar::ScalarLanes, "neon", 4, 2, 2);
#[cfg(target_arch = "aarch64")]
instantiate!(neon, super::super::neon::NeonLanes, "neon,dotprod", 4, 2, 2);
#[cfg(target_arch = "x86_64")]
instantiate!(avx2, super::super::avx2::Avx2Lanes, "avx2,fma,f16c", 4, 2, 2);
#[cfg(target_arch = "x86_64")]
instantiate!(
    avx512,
    super::super::avx512::Avx512Lanes,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
    8,
    4,
    6
);
