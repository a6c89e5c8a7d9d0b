//! The self-test at load: linears of the first and the last layer, with their own norms and biases if they have any, on rows
//! of whole numbers. The host computes the expected outputs from the trits. A model does not start on a device that
//! computes other outputs.

use bytemuck::Zeroable as _;
use half::f16;
use rayon::prelude::*;

use super::{
    args::{LINEAR_STORE, Step},
    attention_mode::AttentionMode,
    backend::CudaBackend,
    buffers::Bucket,
    device::{DeviceError, Launch, Part},
    error::CudaLoadError,
    forward::Input,
    shape::Shape,
};
use crate::{
    config::{Linear, Norm},
    files::Model,
    formats::{GroupScales, TernaryMatrix},
    kernels::{
        Digits, Isa, SCALED_INPUTS,
        float::{Columns, FloatKernels, Sums},
    },
};

/// Rows of the test steps: one, few, and more than the kernels for few rows take.
const ROWS: [usize; 3] = [1, 5, 70];

/// Integers in −127..=127 without a period. Rows contain 127, so quantization does not change them.
fn wave(i: usize) -> i32 {
    (i.wrapping_mul(i).wrapping_mul(40503) >> 7) as u16 as i32 % 255 - 127
}

/// A linear with its weights on the host.
struct HostLinear {
    ternary: TernaryMatrix,
    /// Digits of the input, if the matrix has scales of groups.
    digits: Digits,
    /// Weights and epsilon of the linear's own norm.
    norm: Option<(Vec<f32>, f32)>,
    bias: Option<Vec<f32>>,
}

impl HostLinear {
    fn from_model(
        model: &Model,
        digits: Digits,
        (layer, linear): (usize, Linear),
    ) -> Result<Self, CudaLoadError> {
        let with_eps = |eps| model.norm(Norm::Linear(layer, linear)).map(|norm| (norm, eps));
        let norm = model.config().linear_norm_eps.map(with_eps).transpose()?;
        let (ternary, bias) = (model.ternary(layer, linear)?, model.bias(layer, linear)?);
        Ok(Self { ternary, digits, norm, bias })
    }

    /// Computes the outputs of one row.
    fn outputs(&self, x: &[f32]) -> Vec<f32> {
        let mut outputs = self.products(x);
        outputs.iter_mut().zip(self.bias.iter().flatten()).for_each(|(y, bias)| *y += bias);
        outputs
    }

    /// Computes the outputs of one row before the bias.
    fn products(&self, x: &[f32]) -> Vec<f32> {
        let Self { ternary, norm, .. } = self;
        let kernels = FloatKernels::for_isa(Isa::Scalar).expect("scalar kernels exist everywhere");
        let mut normed = x.to_vec();
        if let Some((weight, eps)) = norm {
            kernels.rms_norm(x, weight, *eps, &mut normed);
        }
        if let Some(groups) = &ternary.groups {
            return self.group_products(kernels, groups, &normed);
        }
        let mut codes = vec![0i8; x.len()];
        let s = kernels.quantize(&normed, &mut codes);
        let product = |trits: &[i8]| -> i32 {
            trits.iter().zip(&codes).map(|(trit, x)| i32::from(*trit) * i32::from(*x)).sum()
        };
        let sums: Vec<i32> = ternary.trits.chunks_exact(ternary.cols).map(product).collect();
        let width = sums.len();
        let mut outputs = vec![0.0; width];
        let sums = Sums { sums: &sums, stride: width, scales: &[s], scale: ternary.scale };
        kernels.rescale(&sums, Columns::new(&mut outputs, width, 0..width));
        outputs
    }
}

impl HostLinear {
    /// The same by the definition of `kernels::group_gemm`.
    fn group_products(
        &self,
        kernels: &FloatKernels,
        groups: &GroupScales,
        normed: &[f32],
    ) -> Vec<f32> {
        let (cols, size) = (normed.len(), groups.size);
        let mut q = vec![0i8; self.digits.count() * cols];
        let mut scales = vec![0f32; cols.div_ceil(SCALED_INPUTS)];
        kernels.quantize_groups(normed, self.digits, &mut q, &mut scales);
        let value = |k: usize| q.chunks(cols).fold(0, |high, q| 256 * high + i32::from(q[k]));
        let values: Vec<i32> = (0..cols).map(value).collect();
        let output = |(trits, of_output): (&[i8], &[f16])| {
            let groups = trits.chunks_exact(size).zip(values.chunks_exact(size)).zip(of_output);
            groups.enumerate().fold(0f32, |y, (g, ((trits, values), scale))| {
                let products = trits.iter().zip(values).map(|(trit, x)| i32::from(*trit) * x);
                let scale = scale.to_f32() * scales[g * size / SCALED_INPUTS];
                (products.sum::<i32>() as f32).mul_add(scale, y)
            })
        };
        let of_outputs = groups.scales.chunks_exact(cols / size);
        self.ternary.trits.chunks_exact(cols).zip(of_outputs).map(output).collect()
    }
}

/// Runs the self-test.
pub fn run(backend: &mut CudaBackend, model: &Model) -> Result<(), CudaLoadError> {
    let last = backend.shape.layers - 1;
    let digits = if backend.shape.digits == 2 { Digits::Two } else { Digits::One };
    for layer in [0, last] {
        for linear in Linear::OF_ATTENTION {
            let on_host = HostLinear::from_model(model, digits, (layer, linear))?;
            for rows in ROWS {
                test(backend, &on_host, (layer, linear), rows)?;
            }
        }
    }
    Ok(())
}

/// Returns the bucket of a test step.
pub fn bucket(shape: &Shape, rows: usize) -> Bucket {
    let (reach, attention) = (shape.reach(1), AttentionMode::Split);
    let (whole, screened, reported) = (0, 0, 0);
    Bucket {
        rows,
        whole,
        screened,
        reported,
        reach,
        attention,
        digits: 2,
        filters: false,
        changes: false,
    }
}

/// Returns the input of a test step.
pub fn rows_of(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows)
        .flat_map(|row| (0..cols).map(move |i| (row, i)))
        .map(|(row, i)| if i == 0 { 127.0 } else { wave(i + row * 7919) as f32 })
        .collect()
}

/// Runs the launches of a test step, from the residual stream to the buffer of the gate.
pub fn compute(
    backend: &mut CudaBackend,
    bucket: &Bucket,
    x: &[f32],
    launches: &[Launch],
    outputs: &mut [f32],
) -> Result<(), DeviceError> {
    let step = Step { rows: bucket.rows as u32, ..Step::zeroed() };
    let at = backend.buffers.inputs(bucket, &backend.shape).step;
    let (from, to) = (backend.buffers.residual, backend.buffers.gate);
    backend.device.write(at, bytemuck::bytes_of(&step))?;
    backend.device.write(from, bytemuck::cast_slice(x))?;
    backend.device.let_overlap(bucket.rows <= backend.tuning.overlap_rows);
    launches.iter().try_for_each(|launch| backend.device.launch(launch))?;
    backend.device.read(&mut [Part { from: to, to: bytemuck::cast_slice_mut(outputs) }])
}

fn test(
    backend: &mut CudaBackend,
    on_host: &HostLinear,
    (layer, linear): (usize, Linear),
    rows: usize,
) -> Result<(), CudaLoadError> {
    let (limits, shape, ternary) = (backend.limits, backend.shape, &on_host.ternary);
    let fits = rows * ternary.cols <= limits.rows * shape.hidden
        && rows * ternary.rows <= limits.rows * shape.intermediate;
    if rows > limits.rows || !fits {
        return Ok(());
    }
    let bucket = bucket(&shape, rows);
    let x = rows_of(rows, ternary.cols);
    let (from, to) = (backend.buffers.residual, backend.buffers.gate);
    let launches = {
        let pass = backend.pass_of(&bucket);
        let weights = pass.weights.layers[layer].linear(linear);
        let mut launches = Vec::new();
        let input = Input { x: from, norm: 0, eps: 0.0 };
        pass.linear(input, &[(weights, to)], LINEAR_STORE, &mut launches);
        launches
    };
    let mut got = vec![0f32; rows * ternary.rows];
    compute(backend, &bucket, &x, &launches, &mut got)?;
    let matches = |(x, got): (&[f32], &[f32])| {
        let want = on_host.outputs(x);
        want.iter().zip(got).all(|(want, got)| want.to_bits() == got.to_bits())
    };
    let outputs = got.par_chunks_exact(ternary.rows);
    if !x.par_chunks_exact(ternary.cols).zip(outputs).all(matches) {
        return Err(CudaLoadError::SelfTest { linear, rows });
    }
    Ok(())
}
