//! Decodes every packing of ternary tensors in model files to row-major i8 trits.
//!
//! Layouts:
//! - *planar* (transformers `integrations/bitnet.py`, `unpack_weights`): U8 `[out/4, in]`; with
//!   `R = out/4`, bits `2i..2i+1` of `byte[r, c]` hold `t[r + i·R, c] + 1`.
//! - *online* (`WeightQuant.forward`): dense `[out, in]`, `m = max(mean|W|, 1e-5)`,
//!   `t = clamp(round_half_even(W · (1/m)), −1, 1)`, all in f32.
//! - `I2_S`, `TQ1_0`, `TQ2_0`: see [`super::gguf_ternary`].
//! - a scale for each group of inputs: see [`super::grouped`].
//!
//! A decoder gets exactly the bytes that the shape needs: tensor lengths are checked when the file is
//! opened. Defects in the data (code 3, a bad scale) are errors of the decoder, with the tensor's
//! name and the byte offset in the file.

use rayon::prelude::*;

use super::{
    blocks::{TQ1_0, TQ2_0},
    dense::{DenseType, widen},
    gguf_ternary, grouped,
    stored::{Packing, Stored},
};
use crate::{
    files::error::{ModelError, Problem},
    formats::{Scale, TernaryMatrix},
};

impl Stored<'_> {
    /// Decodes the tensor; rows are decoded in parallel.
    pub fn decode(&self) -> Result<TernaryMatrix, ModelError> {
        let mut trits = vec![0i8; self.rows * self.cols];
        if let Packing::Grouped(dtype) = self.packing {
            let groups = Some(grouped::decode(self, dtype, &mut trits)?);
            let scale = Scale::Multiply(1.0);
            return Ok(TernaryMatrix { rows: self.rows, cols: self.cols, trits, scale, groups });
        }
        let scale = match self.packing {
            Packing::Planar(scale) => {
                self.planar(&mut trits)?;
                scale
            }
            Packing::Online(dtype) => Scale::Multiply(self.online(dtype, &mut trits)?),
            Packing::I2S(scale) => {
                gguf_ternary::decode_i2_s(self, &mut trits)?;
                Scale::Multiply(scale)
            }
            Packing::Tq1_0 => Scale::Multiply(gguf_ternary::decode_tq(self, TQ1_0, &mut trits)?),
            Packing::Tq2_0 => Scale::Multiply(gguf_ternary::decode_tq(self, TQ2_0, &mut trits)?),
            Packing::Grouped(_) => unreachable!("decoded above"),
        };
        let (Scale::Multiply(value) | Scale::Divide(value)) = scale;
        if !(value.is_finite() && value > 0.0) {
            return Err(self.error(0, Problem::BadScale(value)));
        }
        Ok(TernaryMatrix { rows: self.rows, cols: self.cols, trits, scale, groups: None })
    }

    fn planar(&self, trits: &mut [i8]) -> Result<(), ModelError> {
        let quarter = self.rows / 4;
        let bad = trits.par_chunks_mut(self.cols).enumerate().map(|(row, out)| {
            let shift = 2 * (row / quarter);
            let bytes = &self.bytes[(row % quarter) * self.cols..][..self.cols];
            let mut seen = 0;
            for (trit, &byte) in out.iter_mut().zip(bytes) {
                let code = (byte >> shift) & 3;
                seen |= code & (code >> 1);
                *trit = code as i8 - 1;
            }
            seen != 0
        });
        if bad.reduce(|| false, |a, b| a | b) {
            return Err(self.first_code_three());
        }
        Ok(())
    }

    /// Quantizes dense weights; returns the scale `m`.
    ///
    /// The mean is summed in f64, row by row and then over the rows, in a fixed order that does not
    /// depend on the number of threads. Except for ties it is the correctly rounded f32 mean; the
    /// reference sums f32 pairwise and may differ in the last bit.
    fn online(&self, dtype: DenseType, trits: &mut [i8]) -> Result<f32, ModelError> {
        let row_bytes = self.bytes.len() / self.rows;
        let rows = self.bytes.par_chunks_exact(row_bytes);
        let sums: Vec<f64> = rows
            .clone()
            .map_init(
                || vec![0f32; self.cols],
                |values, bytes| {
                    widen(dtype, bytes, values);
                    values.iter().map(|value| f64::from(value.abs())).sum()
                },
            )
            .collect();
        if let Some(row) = sums.iter().position(|sum| !sum.is_finite()) {
            return Err(self.error(row * row_bytes, Problem::NotFinite));
        }
        let mean = (sums.iter().sum::<f64>() / (self.rows * self.cols) as f64) as f32;
        let scale = mean.max(1e-5);
        let inverse = 1.0 / scale;
        trits.par_chunks_mut(self.cols).zip(rows).for_each_init(
            || vec![0f32; self.cols],
            |values, (out, bytes)| {
                widen(dtype, bytes, values);
                for (trit, value) in out.iter_mut().zip(values) {
                    *trit = (*value * inverse).round_ties_even().clamp(-1.0, 1.0) as i8;
                }
            },
        );
        Ok(scale)
    }
}
