//! A ternary linear on the device.

use super::{
    device::{Address, Device, DeviceError},
    layout,
    shape::Arena,
};
use crate::formats::{Scale, TernaryMatrix};

/// The scales of a matrix's groups of inputs.
#[derive(Debug, Clone, Copy)]
pub struct DeviceGroups {
    pub scales: Address, // (tiles, groups, 16) of f16
    /// Inputs of a group: 64 or 128. Until the upload, of the smallest that the file may have: there is room for their scales.
    pub size: usize,
}

/// A ternary linear.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLinear {
    pub weights: Address,
    pub scale: Scale,
    pub rows: usize,
    pub cols: usize,
    /// Address of the linear's own norm, or 0.
    pub norm: Address,
    /// Address of the bias, or 0.
    pub bias: Address,
    pub groups: Option<DeviceGroups>,
}

impl DeviceLinear {
    /// Assigns addresses to a matrix of `(rows, cols)` and to the scales of its groups, if it has them.
    pub fn place(
        (rows, cols): (usize, usize),
        group_min: Option<usize>,
        arena: &mut Arena,
    ) -> Self {
        let weights = arena.take(layout::ternary_bytes(rows, cols));
        let groups = group_min.map(|size| {
            let scales = arena.take(layout::scale_bytes(rows, cols / size));
            DeviceGroups { scales, size }
        });
        Self { weights, scale: Scale::Multiply(1.0), rows, cols, norm: 0, bias: 0, groups }
    }

    /// Uploads a decoded matrix.
    pub fn fill(
        &mut self,
        matrix: &TernaryMatrix,
        device: &mut dyn Device,
    ) -> Result<(), DeviceError> {
        self.scale = matrix.scale;
        let packed = layout::pack_ternary(matrix.rows, matrix.cols, &matrix.trits);
        device.write(self.weights, &packed)?;
        let (Some(to), Some(groups)) = (&mut self.groups, &matrix.groups) else { return Ok(()) };
        assert!(groups.size >= to.size, "groups of {} in the room of {}", groups.size, to.size);
        to.size = groups.size;
        let packed = layout::pack_scales(matrix.cols / groups.size, &groups.scales);
        device.write(to.scales, bytemuck::cast_slice(&packed))
    }

    /// Returns the bytes that a product reads.
    pub fn size_bytes(&self) -> usize {
        let scales = |groups: DeviceGroups| layout::scale_bytes(self.rows, self.cols / groups.size);
        layout::ternary_bytes(self.rows, self.cols) + self.groups.map_or(0, scales)
    }
}

/// Uploads floats.
pub fn write_floats(
    device: &mut dyn Device,
    to: Address,
    values: &[f32],
) -> Result<(), DeviceError> {
    device.write(to, bytemuck::cast_slice(values))
}
