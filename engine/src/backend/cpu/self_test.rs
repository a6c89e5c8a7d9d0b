//! A known answer at load: the chosen kernels against the scalar ones on the first and last tile of
//! every shape of the real weights. A machine that computes wrongly does not start.

use crate::config::Linear;
use crate::formats::{PackedMatrix, TILE_ROWS};
use crate::kernels::{self, Activations, Isa, float::FloatKernels};

use super::weights::Weights;

/// Rows of the test step: odd, so that no row tile divides it.
const ROWS: usize = 5;

/// A kernel that disagrees with its scalar definition.
#[derive(Debug, thiserror::Error)]
#[error(
    "the {isa} kernels fail their self-test on {what}: the machine or the program is broken; try TRITMILL_ISA=scalar"
)]
pub struct SelfTestError {
    isa: Isa,
    what: String,
}

/// Tests one matrix of every shape, and the float kernels on the real norm weights.
pub fn run(weights: &Weights, isa: Isa, float: &FloatKernels) -> Result<(), SelfTestError> {
    for linear in Linear::ALL {
        for layer in [weights.layers.first(), weights.layers.last()].into_iter().flatten() {
            let matrix = &layer.linear(linear).matrix;
            if !matches_scalar(isa, matrix) {
                let what = format!("{linear:?} in format {}", weights.format);
                return Err(SelfTestError { isa, what });
            }
        }
    }
    let scalar = FloatKernels::of(Isa::Scalar).expect("scalar kernels exist everywhere");
    let x: Vec<f32> = (0..weights.final_norm.len()).map(|i| wave(i) as f32 / 9.0).collect();
    let (mut a, mut b) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    scalar.rms_norm(&x, &weights.final_norm, 1e-5, &mut a);
    float.rms_norm(&x, &weights.final_norm, 1e-5, &mut b);
    if a.iter().zip(&b).any(|(a, b)| a.to_bits() != b.to_bits()) {
        return Err(SelfTestError { isa, what: "the final norm".to_owned() });
    }
    Ok(())
}

/// Integers in −128..=127 without a period that a kernel's tile could share.
fn wave(i: usize) -> i8 {
    (i.wrapping_mul(i).wrapping_mul(40503) >> 7) as u8 as i8
}

fn matches_scalar(isa: Isa, matrix: &PackedMatrix) -> bool {
    let mut x = Activations::default();
    x.reset(matrix.format(), matrix.cols(), ROWS);
    for row in 0..ROWS {
        let q: Vec<i8> = (0..matrix.cols()).map(|i| wave(i + row * 7919)).collect();
        x.set_row(row, &q);
    }
    let last = matrix.tile_count() - 1;
    [0..1, last..last + 1].into_iter().all(|tiles| {
        let mut want = [0i32; ROWS * TILE_ROWS];
        let mut got = [0i32; ROWS * TILE_ROWS];
        kernels::gemm(Isa::Scalar, matrix, tiles.clone(), &x, &mut want);
        kernels::gemm(isa, matrix, tiles, &x, &mut got);
        want == got
    })
}
