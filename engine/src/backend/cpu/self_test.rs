//! A self-test at load: the chosen kernels against the scalar ones, on the first and last tile of every
//! shape of the real weights, and once with so many rows that the loop for many rows runs. A model does
//! not start on a machine that computes wrong results.

use super::weights::{TernaryLinear, Weights};
use crate::kernels::{
    Digits, Isa, agrees_with_scalar, float::FloatKernels, groups_agree_with_scalar, wave,
};

/// Rows of the test step; odd, so that no row tile divides it.
const ROWS: usize = 5;
/// Rows with which the first matrix is tested, too: all instruction sets have another loop for so many.
const MANY_ROWS: usize = 67;

/// A kernel that disagrees with its scalar definition.
#[derive(Debug, thiserror::Error)]
#[error(
    "the {isa} kernels fail their self-test on {what}: the machine or the program is broken; try TRITMILL_ISA=scalar"
)]
pub struct SelfTestError {
    isa: Isa,
    what: String,
}

/// Tests one matrix of every shape, and the float kernels on the real norm weights, including the norms of
/// linears.
pub fn run(weights: &Weights, isa: Isa, float: &FloatKernels) -> Result<(), SelfTestError> {
    let layers = [weights.layers.first(), weights.layers.last()].into_iter().flatten();
    let linears = layers.flat_map(|layer| layer.all());
    for (index, (linear, TernaryLinear { matrix, .. })) in linears.enumerate() {
        let last = matrix.tile_count() - 1;
        let mut tiles = [0..1, last..last + 1].into_iter();
        let agrees = match matrix.group() {
            Some(_) => groups_agree_with_scalar,
            None => agrees_with_scalar,
        };
        let many_agree = index > 0 || agrees(isa, matrix, MANY_ROWS, 0..1);
        if !many_agree || !tiles.all(|tiles| agrees(isa, matrix, ROWS, tiles)) {
            let what = format!("{linear:?} in format {}", weights.format);
            return Err(SelfTestError { isa, what });
        }
    }
    for (what, norm) in norms(weights) {
        if !norms_match(float, norm) {
            return Err(SelfTestError { isa, what });
        }
    }
    Ok(())
}

/// Returns the final norm, and the norms that the first layer's linears and blocks have.
fn norms(weights: &Weights) -> impl Iterator<Item = (String, &[f32])> {
    let first = weights.layers.first();
    let of_linears = first.into_iter().flat_map(|layer| {
        layer.all().filter_map(|(linear, found)| Some((linear, found.norm.as_ref()?)))
    });
    let of_blocks = first.into_iter().flat_map(|layer| {
        let subs = [&layer.attention_sub_norm, &layer.feed_forward_sub_norm];
        subs.into_iter().flatten().map(|norm| ("a sub-norm".to_owned(), &norm[..]))
    });
    std::iter::once(("the final norm".to_owned(), &weights.final_norm[..]))
        .chain(of_linears.map(|(linear, norm)| (format!("the norm of {linear:?}"), &norm[..])))
        .chain(of_blocks)
}

/// Returns whether a norm and the quantization after it equal those of the scalar kernels to the bit.
fn norms_match(float: &FloatKernels, norm: &[f32]) -> bool {
    let scalar = FloatKernels::for_isa(Isa::Scalar).expect("scalar kernels exist everywhere");
    let x: Vec<f32> = (0..norm.len()).map(|i| f32::from(wave(i) as u8 as i8) / 9.0).collect();
    let run = |kernels: &FloatKernels| {
        let (mut normed, mut codes) = (vec![0.0; x.len()], vec![0i8; x.len()]);
        kernels.rms_norm(&x, norm, 1e-5, &mut normed);
        let scale = kernels.quantize(&normed, &mut codes).to_bits();
        let whole = &normed[..normed.len() / 64 * 64];
        let groups = Digits::ALL.map(|digits| {
            let mut q = vec![0i8; digits.count() * whole.len()];
            let mut scales = vec![0.0; whole.len().div_ceil(128)];
            kernels.quantize_groups(whole, digits, &mut q, &mut scales);
            (q, scales.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        });
        let normed = normed.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        (normed, codes, scale, groups)
    };
    run(scalar) == run(float)
}
