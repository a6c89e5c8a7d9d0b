//! A test at load of kernels with products of warpgroups (`kernels/cuda/experimental/wgmma.cuh`), on the weights of the first layer. The
//! kernels that [`self_test`] has compared with the host compute the expected outputs. A device that computes other
//! ones, or refuses the launches, goes on without these kernels.
//!
//! [`self_test`]: super::super::self_test

use super::super::{
    args::LINEAR_STORE,
    backend::CudaBackend,
    device::DeviceError,
    features::Feature,
    forward::{Input, Many, TILE64, WGMMA, WGMMA64},
    self_test,
};
use crate::config::Linear;

/// Most rows of a test step: more than a block of either kernel takes, and a part of one more.
const ROWS_MAX: usize = 150;

/// Linears of a launch that is tested: one, or gate and up together.
#[derive(Debug, Clone, Copy)]
enum Of {
    One(Linear),
    Gate,
}

/// Decides whether later steps use the kernels.
pub fn choose(backend: &mut CudaBackend) -> Result<(), DeviceError> {
    let kernels = [&WGMMA, &WGMMA64];
    let exist = kernels.iter().all(|many| backend.device.shared_bytes(many.linear) > 0);
    // Linears with scales of groups have other kernels.
    if !exist || backend.shape.group_scales {
        backend
            .device
            .features_mut()
            .turn_off(Feature::Warpgroups, "off: no kernels for this model");
        return Ok(());
    }
    backend.state.has_warpgroups = match failing(backend) {
        Ok(None) => true,
        Ok(Some((kernel, of))) => {
            let why = format!("wrong sums of {kernel}, {of:?}");
            backend.device.features_mut().give_up(Feature::Warpgroups, why);
            false
        }
        Err(error @ (DeviceError::Sticky { .. } | DeviceError::Lost { .. })) => return Err(error),
        Err(error) => {
            backend.device.features_mut().give_up(Feature::Warpgroups, error);
            false
        }
    };
    Ok(())
}

/// Returns the first kernel with other outputs than those expected.
fn failing(backend: &mut CudaBackend) -> Result<Option<(&'static str, Of)>, DeviceError> {
    let joined = backend.shape.joins_gate().then_some(Of::Gate);
    for of in Linear::OF_ATTENTION.into_iter().map(Of::One).chain(joined) {
        let expected = outputs(backend, &TILE64, of)?;
        for many in [&WGMMA, &WGMMA64] {
            let got = outputs(backend, many, of)?;
            if bytemuck::cast_slice::<_, u32>(&got) != bytemuck::cast_slice::<_, u32>(&expected) {
                return Ok(Some((many.linear, of)));
            }
        }
    }
    Ok(None)
}

/// Computes the outputs of some rows by the given kernels.
fn outputs(
    backend: &mut CudaBackend,
    many: &'static Many,
    of: Of,
) -> Result<Vec<f32>, DeviceError> {
    let (shape, limits, to) = (backend.shape, backend.limits, backend.buffers.gate);
    let linear = match of {
        Of::One(linear) => linear,
        Of::Gate => Linear::Gate,
    };
    let layer = &backend.weights.layers[0];
    let (cols, width) = (layer.linear(linear).cols, layer.linear(linear).rows);
    let room = (limits.rows * shape.hidden / cols).min(limits.rows * shape.intermediate / width);
    let bucket = self_test::bucket(&shape, ROWS_MAX.min(limits.rows).min(room));
    let mut launches = Vec::new();
    let mut pass = backend.pass_of(&bucket);
    pass.many = Some(many);
    pass.tuning.few_rows = 0;
    let input = Input { x: pass.buffers.residual, norm: 0, eps: 0.0 };
    match of {
        Of::One(linear) => {
            let to = [(layer.linear(linear), to)];
            pass.linear(input, &to, LINEAR_STORE, &mut launches);
        }
        Of::Gate => {
            let linears = [Linear::Gate, Linear::Up].map(|linear| layer.linear(linear));
            pass.gate(input, linears, &mut launches);
        }
    }
    let mut outputs = vec![f32::NAN; bucket.rows * width];
    // What no kernel writes differs from every expected output.
    backend.device.write(to, bytemuck::cast_slice(&outputs))?;
    let x = self_test::rows_of(bucket.rows, cols);
    self_test::compute(backend, &bucket, &x, &launches, &mut outputs)?;
    Ok(outputs)
}
