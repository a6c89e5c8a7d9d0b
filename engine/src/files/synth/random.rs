//! Random bytes of synthetic models. The generator must stay [`SplitMix`]: with another one, the same seed would give
//! another model.

/// Maps a random byte to a packed byte of four trits: the 81 combinations share the 256 values as
/// evenly as possible.
pub(super) fn four_trits() -> [u8; 256] {
    std::array::from_fn(|byte| {
        let mut rest = byte * 81 / 256;
        (0..4).fold(0, |packed, plane| {
            let digit = (rest % 3) as u8;
            rest /= 3;
            packed | digit << (2 * plane)
        })
    })
}

/// The SplitMix64 generator (Steele, Lea, Flood 2014).
pub(super) struct SplitMix(pub u64);

/// SplitMix64's output function.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl SplitMix {
    pub fn next(&mut self) -> [u8; 8] {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0).to_le_bytes()
    }

    pub fn bytes(&mut self, out: &mut [u8], map: impl Fn(u8) -> u8) {
        for chunk in out.chunks_mut(8) {
            chunk.iter_mut().zip(self.next()).for_each(|(out, byte)| *out = map(byte));
        }
    }

    /// bf16 values from sums of four bytes, scaled to mean 0 and deviation 1.
    pub fn bf16s(&mut self, out: &mut [u8], map: impl Fn(f32) -> f32) {
        for chunk in out.chunks_mut(4) {
            let bytes = self.next();
            for (value, four) in chunk.chunks_mut(2).zip(bytes.as_chunks::<4>().0) {
                let sum: u16 = four.iter().map(|&byte| u16::from(byte)).sum();
                let bell = (f32::from(sum) - 510.0) / 147.8;
                value.copy_from_slice(&half::bf16::from_f32(map(bell)).to_le_bytes());
            }
        }
    }
}
