//! A known answer at load: linears of the first and the last layer on rows of whole numbers, whose
//! outputs the host computes from the trits. A device that computes wrongly does not start.

use super::{
    args::{LINEAR_STORE, Step},
    buffers::{AttentionMode, Bucket},
    device::Part,
    error::CudaLoadError,
    forward::Input,
    step::CudaBackend,
};
use crate::{
    config::Linear,
    files::Model,
    formats::{Scale, TernaryMatrix},
};

/// Rows of the test steps: alone, few, and more than any kernel for few takes.
const ROWS: [usize; 3] = [1, 5, 70];

/// Integers in −127..=127 without a period. With 127 as the largest, quantization keeps them as they are.
fn wave(i: usize) -> i32 {
    (i.wrapping_mul(i).wrapping_mul(40503) >> 7) as u16 as i32 % 255 - 127
}

/// Runs the tests.
pub fn run(backend: &mut CudaBackend, model: &Model) -> Result<(), CudaLoadError> {
    // Norms would change the rows.
    if backend.shape.linear_eps.is_some() {
        return Ok(());
    }
    let last = backend.shape.layers - 1;
    for layer in [0, last] {
        for linear in Linear::ALL {
            let ternary = model.ternary(layer, linear)?;
            for rows in ROWS {
                test(backend, &ternary, (layer, linear), rows)?;
            }
        }
    }
    Ok(())
}

fn test(
    backend: &mut CudaBackend,
    ternary: &TernaryMatrix,
    (layer, linear): (usize, Linear),
    rows: usize,
) -> Result<(), CudaLoadError> {
    let (limits, shape) = (backend.limits, backend.shape);
    let fits = rows * ternary.cols <= limits.rows * shape.hidden
        && rows * ternary.rows <= limits.rows * shape.intermediate;
    if rows > limits.rows || !fits {
        return Ok(());
    }
    let bucket = Bucket {
        rows,
        whole: 0,
        screened: 0,
        reach: shape.reach(1),
        attention: AttentionMode::Split,
        digits: 2,
    };
    let x: Vec<f32> = (0..rows)
        .flat_map(|row| (0..ternary.cols).map(move |i| (row, i)))
        .map(|(row, i)| if i == 0 { 127.0 } else { wave(i + row * 7919) as f32 })
        .collect();
    let step = Step { rows: rows as u32, tasks: 0, whole: 0, screened: 0 };
    let (from, to) = (backend.buffers.residual, backend.buffers.gate);
    let launches = {
        let pass = backend.pass_of(&bucket);
        let weights = pass.weights.layers[layer].linear(linear);
        let mut launches = Vec::new();
        let input = Input { x: from, norm: 0 };
        pass.linear(input, &[(weights, to)], LINEAR_STORE, &mut launches);
        launches
    };
    let at = backend.buffers.inputs(&bucket, &shape).step;
    let mut got = vec![0f32; rows * ternary.rows];
    backend.device.write(at, bytemuck::bytes_of(&step))?;
    backend.device.write(from, bytemuck::cast_slice(&x))?;
    launches.iter().try_for_each(|launch| backend.device.launch(launch))?;
    backend.device.read(&mut [Part { from: to, to: bytemuck::cast_slice_mut(&mut got) }])?;
    for (x, got) in x.chunks_exact(ternary.cols).zip(got.chunks_exact(ternary.rows)) {
        for (trits, got) in ternary.trits.chunks_exact(ternary.cols).zip(got) {
            let sum: i32 = trits.iter().zip(x).map(|(trit, x)| i32::from(*trit) * *x as i32).sum();
            let want = match ternary.scale {
                Scale::Multiply(scale) => sum as f32 * scale,
                Scale::Divide(scale) => sum as f32 / scale,
            };
            if want.to_bits() != got.to_bits() {
                return Err(CudaLoadError::SelfTest { linear, rows });
            }
        }
    }
    Ok(())
}
