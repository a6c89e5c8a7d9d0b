//! Blocks and dense weights to trits and scales, and their defects.

use super::*;
use crate::files::encodings::{
    blocks::{DIGITS, byte_of},
    stored::Packing,
};

fn decoded(dtype: DenseType, cols: usize, bytes: &[u8]) -> Result<(Vec<i8>, GroupScales), String> {
    let row_bytes = dtype.row_bytes(cols).expect("whole blocks");
    let rows = bytes.len() / row_bytes;
    let packing = Packing::Grouped(dtype);
    let stored = Stored { name: "w", rows, cols, packing, bytes, offset: 1000 };
    let matrix = stored.decode().map_err(|error| error.to_string())?;
    Ok((matrix.trits, matrix.groups.expect("it has groups")))
}

/// A `Q2_0` block of a scale and the same code everywhere.
fn q2_0(scale: f32, code: u8) -> Vec<u8> {
    [&f16::from_f32(scale).to_le_bytes()[..], &[code * 0b0101_0101; 16]].concat()
}

#[test]
fn pairs_of_equal_scales_merge_and_zeros_take_the_other_scale() {
    let scales = |blocks: &[Vec<u8>]| {
        decoded(DenseType::Q2_0, 128, &blocks.concat()).map(|(_, groups)| groups)
    };
    let half = f16::from_f32(0.5);
    let merged = |scales: Vec<f16>| Ok(GroupScales { size: 128, scales });
    assert_eq!(scales(&[q2_0(0.5, 2), q2_0(0.5, 0)]), merged(vec![half]));
    assert_eq!(scales(&[q2_0(0.25, 1), q2_0(0.5, 0)]), merged(vec![half]));
    assert_eq!(scales(&[q2_0(0.5, 2), q2_0(0.0, 2)]), merged(vec![half]));
    assert_eq!(scales(&[q2_0(-0.0, 0), q2_0(7.0, 1)]), merged(vec![f16::ZERO]));
    let mixed = [q2_0(0.5, 2), q2_0(0.5, 0), q2_0(0.5, 2), q2_0(0.25, 2)];
    let apart = GroupScales { size: 64, scales: vec![half, half, half, f16::from_f32(0.25)] };
    assert_eq!(scales(&mixed), Ok(apart));
}

#[test]
fn a_scale_of_zero_leaves_no_trits() {
    let (trits, _) = decoded(DenseType::Q2_0, 64, &q2_0(0.0, 2)).expect("a good block");
    assert_eq!(trits, [0; 64]);
}

#[test]
fn defects_have_their_offset() {
    let refused = |dtype, cols, bytes: &[u8]| decoded(dtype, cols, bytes).expect_err("bad");
    let mut bytes = [q2_0(0.5, 2), q2_0(0.5, 1)].concat();
    bytes[18 + 2 + 5] = 0b0011_0000;
    let error = refused(DenseType::Q2_0, 64, &bytes);
    assert_eq!(error, "tensor w at byte 1025: code 3 is not a ternary value");
    for scale in [f32::NAN, f32::INFINITY, -1.0] {
        let bytes = [q2_0(0.5, 2), q2_0(scale, 1)].concat();
        let error = refused(DenseType::Q2_0, 128, &bytes);
        assert!(error.starts_with("tensor w at byte 1018: scale"), "{error}");
    }
    let mut digits =
        [vec![byte_of(&[0; 5]); 24], vec![byte_of(&[0; 4]); 2], vec![0, 0x38]].concat();
    assert!(decoded(DenseType::Ptq1_0, 128, &digits).is_ok());
    digits[25] = byte_of(&[0, 0, 0, 0, 1]);
    let error = refused(DenseType::Ptq1_0, 128, &digits);
    assert!(error.starts_with("tensor w at byte 1025: byte"), "{error}");
}

#[test]
fn dense_weights_are_refused_where_they_are_not_ternary() {
    let f16s = |weights: &[f32]| -> Vec<u8> {
        weights.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect()
    };
    let mut weights = [0.0; 128];
    (weights[0], weights[5], weights[70]) = (0.5, -0.5, -0.0);
    let (trits, groups) = decoded(DenseType::F16, 128, &f16s(&weights)).expect("ternary");
    assert_eq!((trits[0], trits[5], trits[70], groups.size), (1, -1, 0, 128));
    weights[70] = 0.25;
    let (_, groups) = decoded(DenseType::F16, 128, &f16s(&weights)).expect("groups of 64");
    assert_eq!(groups.size, 64);
    weights[6] = 0.25;
    let error = decoded(DenseType::F16, 128, &f16s(&weights)).expect_err("not ternary");
    assert!(error.starts_with("tensor w at byte 1012: weight 0.25 is neither"), "{error}");
    let wide = 0.1f32.to_le_bytes().repeat(64);
    let error = decoded(DenseType::F32, 64, &wide).expect_err("not an f16");
    assert!(error.contains("more digits than f16"), "{error}");
}

#[test]
fn every_byte_of_digits_is_the_one_of_its_trits_or_refused() {
    let mut valid = 0;
    for (byte, digits) in DIGITS.iter().enumerate() {
        valid += usize::from(usize::from(byte_of(digits)) == byte);
    }
    assert_eq!(valid, 243);
}
