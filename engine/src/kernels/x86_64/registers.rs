//! The tile registers of AMX: permission, configuration, and products.

use std::{arch::asm, arch::x86_64::*, sync::LazyLock};

/// Rows and columns of sums in a register.
pub const SIDE: usize = 16;
/// Rows that are multiplied at once.
pub const ROWS_MAX: usize = 2 * SIDE;

/// Returns whether the processor has AMX-INT8 and the system permits its use.
pub fn is_available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| has_amx_int8() && is_permitted());
    *AVAILABLE
}

fn has_amx_int8() -> bool {
    const TILE_AND_INT8: u32 = 0b11 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
}

/// Requests the permission: Linux saves the registers only for processes that have it.
fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the call takes two numbers and only changes the permissions of the process.
        let status =
            unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        status == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The configured registers: sums in 0 to 3, two sets of activations in 4 and 5, codes in 6 and 7.
#[derive(Default)]
pub struct Registers {
    /// Configured number of activation rows, at most [`ROWS_MAX`].
    rows: Option<usize>,
}

impl Registers {
    /// Configures and clears the registers for 1 to 32 rows, unless they have that configuration.
    ///
    /// # Safety
    /// [`is_available`] returns true.
    pub unsafe fn configure(&mut self, rows: usize) {
        if self.rows == Some(rows) {
            return;
        }
        let (first, second) = (rows.min(SIDE) as u8, rows.saturating_sub(SIDE).max(1) as u8);
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        config.row_bytes[..8].fill(64);
        config.rows[..8].copy_from_slice(&[first, first, second, second, first, second, 16, 16]);
        // SAFETY: the caller has AMX; the configuration is valid for palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags))
        };
        self.rows = Some(rows);
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        if self.rows.is_some() {
            // SAFETY: the machine has configured registers. After the release the system does not save
            // them.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }
}

/// Selects the registers of a product: the second set of activations for more than [`SIDE`] rows, the
/// second register of codes for a pair of tiles.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Rows of activations, at most [`ROWS_MAX`].
    pub rows: usize,
    /// Whether there are two tiles.
    pub pair: bool,
}

/// The instructions for each shape: `$one` always, `$tiles` for a pair, `$rows` for many rows, `$both` for
/// both.
macro_rules! by_shape {
    ($shape:expr, $one:literal, $tiles:literal, $rows:literal, $both:literal, $($operands:tt)*) => {
        match ($shape.rows > SIDE, $shape.pair) {
            (false, false) => asm!($one, $($operands)*),
            (false, true) => asm!($one, $tiles, $($operands)*),
            (true, false) => asm!($one, $rows, $($operands)*),
            (true, true) => asm!($one, $tiles, $rows, $both, $($operands)*),
        }
    };
}

/// Sets the sums to zero.
///
/// # Safety
/// The registers are configured.
pub unsafe fn clear_sums() {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nomem, nostack, preserves_flags)
        );
    }
}

/// Loads the sums from outputs `y` with rows `stride` apart.
///
/// # Safety
/// The registers are configured for the shape; `y` is valid for its outputs.
pub unsafe fn load_sums(shape: Shape, y: *const i32, stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        by_shape!(
            shape,
            "tileloadd tmm0, [{first} + {stride}] /* {second} */",
            "tileloadd tmm1, [{first} + {stride} + 64]",
            "tileloadd tmm2, [{second} + {stride}]",
            "tileloadd tmm3, [{second} + {stride} + 64]",
            first = in(reg) y,
            second = in(reg) y.wrapping_add(SIDE * stride),
            stride = in(reg) 4 * stride,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores the sums to outputs `y` with rows `stride` apart.
///
/// # Safety
/// As for [`load_sums`].
pub unsafe fn store_sums(shape: Shape, y: *mut i32, stride: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        by_shape!(
            shape,
            "tilestored [{first} + {stride}], tmm0 /* {second} */",
            "tilestored [{first} + {stride} + 64], tmm1",
            "tilestored [{second} + {stride}], tmm2",
            "tilestored [{second} + {stride} + 64], tmm3",
            first = in(reg) y,
            second = in(reg) y.wrapping_add(SIDE * stride),
            stride = in(reg) 4 * stride,
            options(nostack, preserves_flags)
        );
    }
}

/// Adds the products of `steps` times 64 activations with as many codes of each tile.
///
/// # Safety
/// As for [`load_sums`]; `x` and `codes` are valid for all steps, and `steps` is at least 1.
#[inline(always)]
pub unsafe fn multiply(
    shape: Shape,
    steps: usize,
    x: *const i8,
    x_stride: usize,
    codes: [*const u8; 2],
) {
    macro_rules! steps {
        ($step:literal) => {
            asm!(
                "2:",
                $step,
                "add {x0}, 64",
                "add {x1}, 64",
                "add {c0}, 1024",
                "add {c1}, 1024",
                "dec {steps}",
                "jnz 2b",
                steps = inout(reg) steps => _,
                x0 = inout(reg) x => _,
                x1 = inout(reg) x.wrapping_add(SIDE * x_stride) => _,
                c0 = inout(reg) codes[0] => _,
                c1 = inout(reg) codes[1] => _,
                stride = in(reg) x_stride,
                line = in(reg) 64usize,
                options(nostack)
            )
        };
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (shape.rows > SIDE, shape.pair) {
            (true, true) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6
                 tileloadd tmm7, [{c1} + {line}]
                 tdpbsud tmm1, tmm4, tmm7
                 tileloadd tmm5, [{x1} + {stride}]
                 tdpbsud tmm2, tmm5, tmm6
                 tdpbsud tmm3, tmm5, tmm7"
            ),
            (true, false) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6
                 tileloadd tmm5, [{x1} + {stride}]
                 tdpbsud tmm2, tmm5, tmm6"
            ),
            (false, true) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6
                 tileloadd tmm7, [{c1} + {line}]
                 tdpbsud tmm1, tmm4, tmm7"
            ),
            (false, false) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6"
            ),
        }
    }
}
