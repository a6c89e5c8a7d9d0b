//! Operands of the ternary products, and the implementations that compute them.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::sync::LazyLock;

use half::f16;

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::prefetch::is_amd;
use crate::formats::Format;

/// Implementations of the ternary product. An [`Isa`] has one or, for AVX2, two and, for AVX-512, three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// The reference.
    Scalar,
    /// NEON with dot products.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with VNNI.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 with F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with VNNI as well.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX-512 with VNNI and GFNI, with loops for processors that multiply and compute bits in the same two ports: Intel's.
    #[cfg(target_arch = "x86_64")]
    Avx512Gfni,
    /// AVX-512 with VNNI and GFNI, and AMX-INT8.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Path {
    /// Returns the fastest path of an ISA on this machine, looked up once.
    pub(super) fn for_isa(isa: Isa) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            static AVX2: LazyLock<Option<Path>> = LazyLock::new(|| {
                [Path::AvxVnni, Path::Avx2].into_iter().find(|path| path.is_available())
            });
            static AMX: LazyLock<bool> = LazyLock::new(|| Isa::Amx.is_available());
            static AVX512: LazyLock<Option<Path>> = LazyLock::new(|| {
                let gfni = (!is_amd()).then_some(Path::Avx512Gfni);
                let paths = gfni.into_iter().chain([Path::Avx512Vnni, Path::Avx512]);
                paths.into_iter().find(|path| path.is_available())
            });
            match isa {
                Isa::Scalar => Some(Self::Scalar),
                Isa::Neon => None,
                Isa::Avx2 => *AVX2,
                Isa::Avx512 => *AVX512,
                Isa::Amx => AMX.then_some(Self::Amx),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            static NEON: LazyLock<bool> = LazyLock::new(|| Path::Neon.is_available());
            match isa {
                Isa::Scalar => Some(Self::Scalar),
                Isa::Neon => NEON.then_some(Self::Neon),
                Isa::Avx2 | Isa::Avx512 | Isa::Amx => None,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        (isa == Isa::Scalar).then_some(Self::Scalar)
    }

    /// Returns whether this machine can run the path.
    pub(super) fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Isa::Neon.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Isa::Avx2.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Isa::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Isa::Avx512.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Gfni => Self::Avx512Vnni.is_available() && is_x86_feature_detected!("gfni"),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Isa::Amx.is_available(),
        }
    }
}

/// One product with checked shapes.
pub(super) struct Product<'a> {
    pub format: Format,
    pub tiles: &'a [u8],   // (tile, tile_bytes)
    pub tile_bytes: usize, // a multiple of 64
    pub blocks: usize,     // of a tile
    pub x: &'a [i8],       // (row, x_stride), the first blocks * BLOCK_COLS of each in use
    pub x_stride: usize,   // a multiple of 4
    pub sums: &'a [i32],   // (row,)
    pub y: &'a mut [i32],  // (row, tile, TILE_ROWS)
}

/// One product with scales of groups and checked shapes.
pub(super) struct GroupProduct<'a> {
    pub format: Format,
    pub tiles: &'a [u8],        // (tile, tile_bytes)
    pub tile_bytes: usize,      // a multiple of 64
    pub groups: usize,          // of a row
    pub group_blocks: usize,    // blocks of a group of a tile
    pub tile_scales: &'a [f16], // (tile, groups, TILE_ROWS)
    pub digits: usize,          // 1, or 2: high and low
    pub digit_bytes: usize,     // group_blocks * BLOCK_COLS
    pub x: &'a [i8],            // (row, x_stride), the first groups * digits * digit_bytes in use
    pub x_stride: usize,        // a multiple of 64
    pub sums: &'a [i32],        // (row, groups)
    pub row_scales: &'a [f32],  // (row, groups)
    pub y: &'a mut [f32],       // (row, tile, TILE_ROWS)
}
