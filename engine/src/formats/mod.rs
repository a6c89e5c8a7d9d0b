//! Lossless packings of ternary matrices in memory.
//!
//! A `PackedMatrix` holds a matrix in one of the [`Format`]s. One module per format defines the layout,
//! which all instruction sets share.

pub(crate) mod i2_s;
pub(crate) mod layout;
pub(crate) mod memory;
mod packed;
pub(crate) mod tl1;
pub(crate) mod tl2;

#[doc(hidden)]
pub use layout::TILE_ROWS;
pub use packed::PackError;
#[doc(hidden)]
pub use packed::PackedMatrix;

use half::f16;

use crate::names::names;

/// A ternary matrix as read from a model file: trits, and one scale or scales of groups.
#[derive(Debug, Clone)]
pub struct TernaryMatrix {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// −1, 0 or 1, row-major. // (rows, cols)
    pub trits: Vec<i8>,
    /// The factor or divisor of the integer sums; `Multiply(1.0)` if groups have scales.
    pub scale: Scale,
    /// Scales of groups of inputs, if the model has them.
    pub groups: Option<GroupScales>,
}

/// The scales of groups of consecutive inputs, for each output.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupScales {
    /// Inputs of a group: 64 or 128. Divides the number of inputs.
    pub size: usize,
    /// Finite and not negative; 0 exactly where all trits of a group are. // (rows, cols / size)
    pub scales: Vec<f16>,
}

impl TernaryMatrix {
    /// Reorders the rows: row `i` becomes the old row `source(i)`.
    pub(crate) fn reorder_rows(&mut self, source: impl Fn(usize) -> usize) {
        let row = |index| &self.trits[source(index) * self.cols..][..self.cols];
        let rows: Vec<&[i8]> = (0..self.rows).map(row).collect();
        self.trits = rows.concat();
        if let Some(groups) = &mut self.groups {
            let count = self.cols / groups.size;
            let row = |index| &groups.scales[source(index) * count..][..count];
            let rows: Vec<&[f16]> = (0..self.rows).map(row).collect();
            groups.scales = rows.concat();
        }
    }
}

impl TernaryMatrix {
    /// Returns the matrix of the rows of others with as many columns, one after another; `None` without any. Groups have the smallest
    /// size of all.
    pub(crate) fn stacked(mut parts: Vec<Self>) -> Option<Self> {
        let sizes = parts.iter().filter_map(|part| Some(part.groups.as_ref()?.size));
        let size = sizes.min();
        parts.iter_mut().for_each(|part| part.divide_groups(size));
        let mut parts = parts.into_iter();
        let mut whole = parts.next()?;
        for part in parts {
            whole.rows += part.rows;
            whole.trits.extend(part.trits);
            if let (Some(groups), Some(more)) = (&mut whole.groups, part.groups) {
                groups.scales.extend(more.scales);
            }
        }
        Some(whole)
    }

    /// Divides groups of twice the size; those without trits other than 0 have the scale 0.
    pub(crate) fn divide_groups(&mut self, size: Option<usize>) {
        let Some(groups) = self.groups.as_mut().filter(|groups| Some(groups.size) != size) else {
            return;
        };
        let half = groups.size / 2;
        let scales = groups.scales.iter().flat_map(|scale| [*scale; 2]);
        let scales = scales.zip(self.trits.chunks_exact(half)).map(|(scale, trits)| {
            if trits.iter().all(|trit| *trit == 0) { f16::ZERO } else { scale }
        });
        *groups = GroupScales { size: half, scales: scales.collect() };
    }

    /// Reorders runs of `width` columns: run `i` becomes the old run `source(i)`. False, and nothing changes, if groups with scales
    /// are not whole parts of a run.
    pub(crate) fn reorder_columns(
        &mut self,
        width: usize,
        source: impl Fn(usize) -> usize,
    ) -> bool {
        if self.groups.as_ref().is_some_and(|groups| !width.is_multiple_of(groups.size)) {
            return false;
        }
        fn reordered<T: Copy>(row: &[T], width: usize, source: &impl Fn(usize) -> usize) -> Vec<T> {
            let runs = 0..row.len() / width;
            runs.flat_map(|run| &row[source(run) * width..][..width]).copied().collect()
        }
        let rows = self.trits.chunks_exact(self.cols);
        self.trits = rows.flat_map(|row| reordered(row, width, &source)).collect();
        if let Some(groups) = &mut self.groups {
            let rows = groups.scales.chunks_exact(self.cols / groups.size);
            let width = width / groups.size;
            groups.scales = rows.flat_map(|row| reordered(row, width, &source)).collect();
        }
        true
    }
}

/// Computes the output of a linear from the integer sum `a` and the activation scale `s`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// `y = (a / s) * scale`: `autobitlinear`, online models, GGUF.
    Multiply(f32),
    /// `y = a / (s * scale)`: `bitlinear`.
    Divide(f32),
}

/// A packing of ternary weights. All formats are lossless, so they give the same results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 2 bits a weight.
    I2S,
    /// Pairs of weights in 4-bit indices.
    Tl1,
    /// Triples of weights in a 4-bit magnitude index and a sign: 1.67 bits a weight.
    Tl2,
}

names!(Format, "format", I2S = "i2_s", Tl1 = "tl1", Tl2 = "tl2");
