use proptest::prelude::*;

use super::*;
use crate::formats::Scale;

fn trits(len: usize, seed: u64) -> Vec<i8> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 33) % 3) as i8 - 1
        })
        .collect()
}

proptest! {
    #[test]
    fn unpacking_returns_the_packed_trits(
        rows in 1..70usize, cols in 1..300usize, seed: u64
    ) {
        let trits = trits(rows * cols, seed);
        for format in Format::ALL {
            let packed = PackedMatrix::pack(format, rows, cols, &trits).expect("trits");
            prop_assert_eq!(packed.unpack(), &trits[..], "{}", format);
            prop_assert_eq!((packed.rows(), packed.cols()), (rows, cols));
        }
    }
}

#[test]
fn groups_unpack_to_their_trits_and_have_their_scales_by_tile() {
    let (rows, cols) = (37, 384);
    for size in [64, 128] {
        let scale = |row: usize, group: usize| f16::from_f32((row * 10 + group) as f32);
        let scales = (0..rows).flat_map(|row| (0..cols / size).map(move |g| scale(row, g)));
        let groups = GroupScales { size, scales: scales.collect() };
        let (trits, scale_of_all) = (trits(rows * cols, 5), Scale::Multiply(1.0));
        let matrix = TernaryMatrix { rows, cols, trits, scale: scale_of_all, groups: Some(groups) };
        for format in Format::ALL {
            let packed = PackedMatrix::pack_matrix(format, &matrix).expect("trits");
            assert_eq!(packed.unpack(), matrix.trits, "{format} {size}");
            let expected = PackedMatrix::size_for(format, rows, cols, Some(size));
            assert_eq!((packed.size_bytes(), packed.group()), (expected, Some(size)));
            let scales = packed.group_scales(2..3).expect("scales");
            assert_eq!(scales[TILE_ROWS + 4], scale(36, 1));
            assert_eq!(scales[TILE_ROWS + 5], f16::ZERO, "padding");
            let mut buffers = packed.buffers();
            let copy = PackedMatrix::from_buffers(format, (rows, cols), Some(size), |len| {
                let mut bytes = AlignedBytes::zeroed(len);
                bytes.copy_from_slice(buffers.next().ok_or("too few buffers")?);
                Ok::<_, &str>(bytes)
            });
            let copy = copy.expect("as many buffers");
            assert_eq!(copy.unpack(), matrix.trits, "{format} {size}");
            assert_eq!(copy.group_scales(0..3), packed.group_scales(0..3));
            assert!(buffers.next().is_none());
        }
    }
}

#[test]
fn size_matches_the_bits_per_weight_of_the_format() {
    let trits = trits(64 * 6912, 1);
    for (format, bytes) in [(Format::I2S, 110_592), (Format::Tl1, 110_592), (Format::Tl2, 92_160)] {
        let packed = PackedMatrix::pack(format, 64, 6912, &trits).expect("trits");
        assert_eq!(packed.size_bytes(), bytes, "{format}");
        assert_eq!(packed.tile_count(), 4);
    }
}

#[test]
fn an_invalid_value_is_named_with_its_position() {
    for format in Format::ALL {
        for value in [2, -2, 127, -128] {
            let mut trits = vec![0; 3 * 5];
            trits[2 * 5 + 4] = value;
            let error = PackedMatrix::pack(format, 3, 5, &trits).expect_err("not a trit");
            assert_eq!(
                error.to_string(),
                format!("value {value} at row 2, column 4 is not a trit")
            );
        }
    }
}

#[test]
fn invalid_shapes_are_refused() {
    let check = |rows, cols, len, message: &str| {
        let error = PackedMatrix::pack(Format::I2S, rows, cols, &vec![0; len]);
        assert_eq!(error.expect_err("refused").to_string(), message);
    };
    check(0, 5, 0, "a matrix of 0 x 5 is empty");
    check(5, 0, 0, "a matrix of 5 x 0 is empty");
    check(2, 5, 9, "9 trits for a matrix of 2 x 5");
    check(usize::MAX, 2, 4, "4 trits for a matrix of 18446744073709551615 x 2");
    check(1, COLS_MAX + 1, 4, "262145 columns exceed the limit of 262144");
}
