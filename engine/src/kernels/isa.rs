//! The instruction sets with kernels of their own.

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;

#[cfg(target_arch = "x86_64")]
use super::x86_64::registers;
use crate::names::names;

/// An instruction set with its own kernels; the order of declaration is from slow to fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: the reference.
    Scalar,
    /// NEON with the dot product instructions of ARMv8.2.
    Neon,
    /// AVX2 + FMA + F16C; uses AVX-VNNI if present.
    Avx2,
    /// AVX-512 F, BW, DQ, VL; uses VNNI if present.
    Avx512,
    /// AVX-512 with VNNI, and AMX-INT8 for many rows.
    Amx,
}

names!(Isa, "ISA", Scalar = "scalar", Neon = "neon", Avx2 = "avx2", Avx512 = "avx512", Amx = "amx");

/// Most rows that AMX multiplies at a time.
#[cfg(target_arch = "x86_64")]
pub(super) const AMX_BLOCK_ROWS: usize = 256;
/// Most bytes of activations that AMX multiplies at a time: half of the second cache of the processors that have it.
#[cfg(target_arch = "x86_64")]
const AMX_BLOCK_BYTES: usize = 1 << 20;

impl Isa {
    /// Returns the number of rows `stride` bytes apart that a thread multiplies by all its tiles before it goes
    /// on to the next rows: as many as stay in its cache while AMX needs them at the rate of that cache.
    pub fn rows_per_block(self, rows: usize, stride: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Amx {
            use super::x86_64::registers::ROWS_MAX;

            let most = (AMX_BLOCK_BYTES / stride / ROWS_MAX).clamp(1, AMX_BLOCK_ROWS / ROWS_MAX);
            // Of nearly equal size, in whole registers but for the last.
            let blocks = rows.div_ceil(most * ROWS_MAX).max(1);
            return rows.div_ceil(blocks).next_multiple_of(ROWS_MAX);
        }
        let _ = stride;
        rows
    }

    /// Returns whether this machine can run the kernels of the ISA.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(not(target_arch = "aarch64"))]
            Self::Neon => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => {
                Self::Avx512.is_available()
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("gfni")
                    && registers::is_available()
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Amx => false,
        }
    }

    /// Returns the fastest ISA this machine can run.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Self::Scalar)
    }
}

/// This machine cannot run the kernels of an ISA.
#[derive(Debug, thiserror::Error)]
#[error("this machine has no {0}")]
pub struct IsaUnavailable(pub Isa);

/// Returns the forced ISA, or the fastest available one.
///
/// # Errors
/// If this machine cannot run `forced`.
pub fn select(forced: Option<Isa>) -> Result<Isa, IsaUnavailable> {
    let isa = forced.unwrap_or_else(Isa::detect);
    if isa.is_available() { Ok(isa) } else { Err(IsaUnavailable(isa)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_isa_is_detected() {
        // Set by `cargo xtask aarch64`: without the ISA, the tests of its kernels would pass and show nothing.
        if let Ok(expected) = std::env::var("TRITMILL_TEST_ISA") {
            assert_eq!(Isa::detect().name(), expected);
        }
    }
}
