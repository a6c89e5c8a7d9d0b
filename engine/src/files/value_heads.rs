//! The order of the value heads of hybrid models. GGUF files have them tiled: head `i * key_heads + k` of a file is head
//! `k * group + i` of the forward pass and of folders (llama.cpp `conversion/qwen.py`).

use crate::{
    config::{DeltaNet, LayerTensor, Linear},
    formats::TernaryMatrix,
};

/// A change of the order of value heads.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Order {
    /// From that of GGUF files to that of the forward pass.
    ToForward,
    /// The reverse.
    ToFile,
}

impl Order {
    /// Returns the head that comes to a place.
    fn source(self, delta: &DeltaNet, head: usize) -> usize {
        let (group, keys) = (delta.group(), delta.key_heads);
        match self {
            Self::ToForward => head % group * keys + head / group,
            Self::ToFile => head % keys * group + head / keys,
        }
    }

    /// Reorders the rows or columns of a linear that belong to value heads. False if columns of a head are not whole groups with
    /// scales; then nothing changes.
    pub fn apply(self, delta: &DeltaNet, linear: Linear, matrix: &mut TernaryMatrix) -> bool {
        let (keys, unit) = (2 * delta.keys(), delta.head_dim);
        let source = |head| self.source(delta, head);
        let row_of = |row: usize| source(row / unit) * unit + row % unit;
        match linear {
            Linear::DeltaInput => matrix.reorder_rows(|row| match row.checked_sub(keys) {
                None => row,
                Some(row) => keys + row_of(row),
            }),
            Linear::DeltaGate => matrix.reorder_rows(row_of),
            Linear::DecayRate | Linear::LearningRate => matrix.reorder_rows(source),
            Linear::DeltaOutput => return matrix.reorder_columns(unit, source),
            _ => {}
        }
        true
    }

    /// Reorders the rows of a dense tensor that belong to value heads; `width` elements each.
    pub fn apply_to(
        self,
        delta: &DeltaNet,
        (tensor, width): (LayerTensor, usize),
        values: Vec<f32>,
    ) -> Vec<f32> {
        let (first, unit) = match tensor {
            LayerTensor::Decay | LayerTensor::DecayBias => (0, 1),
            LayerTensor::Convolution => (2 * delta.keys() * width, delta.head_dim * width),
            LayerTensor::DecayRate | LayerTensor::LearningRate => (0, width),
            LayerTensor::Router => return values,
        };
        let heads = (0..delta.value_heads).map(|head| self.source(delta, head));
        let rows = heads.flat_map(|head| &values[first + head * unit..][..unit]);
        values[..first].iter().chain(rows).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_inverse_and_heads_of_a_key_head_are_apart_in_files() {
        let delta = DeltaNet {
            attention_interval: 4,
            key_heads: 2,
            value_heads: 6,
            head_dim: 16,
            dense_rates: true,
        };
        let values: Vec<f32> = (0..6).map(|head| head as f32).collect();
        let of = (LayerTensor::Decay, 6);
        let in_file = Order::ToFile.apply_to(&delta, of, values.clone());
        assert_eq!(in_file, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(Order::ToForward.apply_to(&delta, of, in_file), values);
    }
}
