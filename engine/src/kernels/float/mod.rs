//! Floating-point kernels: one generic definition in [`ops`] and [`attention`], instantiated for
//! every ISA. Results are equal to the bit on all of them (see [`lanes`]).

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kv;
mod lanes;
mod ops;
mod outputs;
mod scalar;
#[cfg(test)]
mod tests;

use half::{bf16, f16};

pub use attention::{AttentionTile, Stored};
pub use kv::KvElement;
pub use lanes::LANES;
pub use outputs::{Columns, Sums};

use super::{
    Isa,
    screen::{Bounds, Products},
};
use crate::config::Activation;

type AttentionFn<E> = unsafe fn(&AttentionTile<'_, E>, &[f32], &[usize], &mut Vec<f32>, &mut [f32]);
type HeadFn<E> = unsafe fn(&[E], usize, &[f32], &mut [f32]);

/// The kernels of one ISA. Obtained from [`FloatKernels::of`], which proves that the machine has it.
#[derive(Clone, Copy)]
pub struct FloatKernels {
    rms_norm: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    quantize: unsafe fn(&[f32], &mut [i8]) -> f32,
    rescale: unsafe fn(&Sums<'_>, &mut Columns<'_>),
    add_rescaled: unsafe fn(&Sums<'_>, &mut Columns<'_>),
    gate: unsafe fn(Activation, &Sums<'_>, &Sums<'_>, &mut Columns<'_>),
    narrow: unsafe fn(&[f32], &mut [f16]),
    int8_scale: unsafe fn(&[f32]) -> f32,
    narrow_int8: unsafe fn(&[f32], f32, &mut [i8]),
    estimate: unsafe fn(&Products<'_>, &mut [f32]),
    leave_out: unsafe fn(&Bounds<'_>, f32, &[f32], &mut Vec<usize>),
    attention_f16: AttentionFn<f16>,
    attention_f32: AttentionFn<f32>,
    attention_i8: AttentionFn<i8>,
    head_f32: HeadFn<f32>,
    head_f16: HeadFn<f16>,
    head_bf16: HeadFn<bf16>,
    head_i8: HeadFn<i8>,
}

/// Stored numbers that head rows may have.
pub trait HeadElement: lanes::Element {
    #[doc(hidden)]
    fn head(kernels: &FloatKernels) -> HeadFn<Self>;
}

macro_rules! head_element {
    ($type:ty, $field:ident) => {
        impl HeadElement for $type {
            fn head(kernels: &FloatKernels) -> HeadFn<Self> {
                kernels.$field
            }
        }
    };
}
head_element!(f32, head_f32);
head_element!(f16, head_f16);
head_element!(bf16, head_bf16);
head_element!(i8, head_i8);

impl FloatKernels {
    /// The kernels of an ISA, if this machine has it.
    pub fn of(isa: Isa) -> Option<&'static Self> {
        if !isa.is_available() {
            return None;
        }
        Some(match isa {
            Isa::Scalar => &scalar_kernels::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2_kernels::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => &avx512_kernels::TABLE,
            #[cfg(not(target_arch = "x86_64"))]
            _ => return None,
        })
    }

    /// `out = weight ⊙ (x · 1/√(mean(x²) + eps))`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        // SAFETY: `of` checked the ISA, here and in every method below.
        unsafe { (self.rms_norm)(x, weight, eps, out) }
    }

    /// Writes estimates of logits to `out`.
    ///
    /// # Panics
    /// If `out` has not as many places as there are products.
    pub fn estimate(&self, of: &Products<'_>, out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.estimate)(of, out) }
    }

    /// Adds the places of those estimates to `others` that are not certainly below a threshold.
    ///
    /// # Panics
    /// If there are fewer bounds than estimates.
    pub fn leave_out(
        &self,
        bounds: &Bounds<'_>,
        threshold: f32,
        estimates: &[f32],
        others: &mut Vec<usize>,
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.leave_out)(bounds, threshold, estimates, others) }
    }

    /// Per-token int8 quantization; returns the scale `s = 127 / max(1e-5, max|x|)`.
    pub fn quantize(&self, x: &[f32], q: &mut [i8]) -> f32 {
        // SAFETY: see `rms_norm`.
        unsafe { (self.quantize)(x, q) }
    }

    /// Outputs of a linear: `out = values`.
    ///
    /// # Panics
    /// If rows or columns of sums and `out` are not as many (as below).
    pub fn rescale(&self, sums: &Sums<'_>, mut out: Columns<'_>) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.rescale)(sums, &mut out) }
    }

    /// Outputs of a linear onto the residual stream: `out += values`.
    pub fn add_rescaled(&self, sums: &Sums<'_>, mut out: Columns<'_>) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.add_rescaled)(sums, &mut out) }
    }

    /// Outputs of two linears: `out = act(gate) ⊙ up`.
    pub fn gate(
        &self,
        activation: Activation,
        gate: &Sums<'_>,
        up: &Sums<'_>,
        mut out: Columns<'_>,
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { (self.gate)(activation, gate, up, &mut out) }
    }

    /// Attention of `positions.len()` queries `(n, head_dim)` into `(n, padded_head_dim)`.
    pub fn attention<E: KvElement>(
        &self,
        tile: &AttentionTile<'_, E>,
        queries: &[f32],
        positions: &[usize],
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        // SAFETY: see `rms_norm`.
        unsafe { E::attention(self)(tile, queries, positions, scratch, out) }
    }

    /// Logits of head rows `(r, len)` for hidden rows `(n, len)` into `(n, r)`.
    pub fn head<E: HeadElement>(&self, rows: &[E], len: usize, xs: &[f32], out: &mut [f32]) {
        // SAFETY: see `rms_norm`.
        unsafe { E::head(self)(rows, len, xs, out) }
    }
}

/// Instantiates every kernel for one ISA: lanes, target features, queries per attention tile and
/// the register tile of the head (head rows × hidden rows).
macro_rules! instantiate {
    ($module:ident, $lanes:ty, $features:literal, $queries:literal, $rows:literal, $xs:literal) => {
        mod $module {
            use super::{super::screen, attention, lanes::Element, ops, outputs, *};

            pub(super) static TABLE: FloatKernels = FloatKernels {
                rms_norm,
                quantize,
                rescale,
                add_rescaled,
                gate,
                narrow,
                int8_scale,
                narrow_int8,
                estimate,
                leave_out,
                attention_f16,
                attention_f32,
                attention_i8,
                head_f32,
                head_f16,
                head_bf16,
                head_i8,
            };

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
            instantiate!(@fn $features narrow(x: &[f32], out: &mut [f16]) {
                ops::narrow::<$lanes>(x, out)
            });
            instantiate!(@fn $features narrow_int8(x: &[f32], scale: f32, out: &mut [i8]) {
                ops::narrow_int8::<$lanes>(x, scale, out)
            });
            instantiate!(@attention $features attention_f16, f16);
            instantiate!(@attention $features attention_f32, f32);
            instantiate!(@attention $features attention_i8, i8);
            instantiate!(@head $features head_f32, f32);
            instantiate!(@head $features head_f16, f16);
            instantiate!(@head $features head_bf16, bf16);
            instantiate!(@head $features head_i8, i8);

            #[target_feature(enable = $features)]
            unsafe fn leave_out(
                bounds: &Bounds<'_>,
                threshold: f32,
                estimates: &[f32],
                others: &mut Vec<usize>,
            ) {
                screen::leave_out(bounds, threshold, estimates, others)
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
                // SAFETY: as the caller's.
                unsafe {
                    attention::attention::<$lanes, E, Q>(tile, queries, &positions, scratch, out);
                }
                Q
            }

            /// Cuts `(r, len)` × `(n, len)` into register tiles.
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
    (@head $features:literal $name:ident, $element:ty) => {
        #[target_feature(enable = $features)]
        unsafe fn $name(rows: &[$element], len: usize, xs: &[f32], out: &mut [f32]) {
            // SAFETY: this function's features are the lanes'.
            unsafe { head(rows, len, xs, out) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
instantiate!(scalar_kernels, scalar::ScalarLanes, "sse2", 4, 2, 2);
#[cfg(not(target_arch = "x86_64"))]
instantiate!(scalar_kernels, scalar::ScalarLanes, "neon", 4, 2, 2);
#[cfg(target_arch = "x86_64")]
instantiate!(avx2_kernels, avx2::Avx2Lanes, "avx2,fma,f16c", 4, 2, 2);
#[cfg(target_arch = "x86_64")]
instantiate!(
    avx512_kernels,
    avx512::Avx512Lanes,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
    8,
    4,
    6
);
