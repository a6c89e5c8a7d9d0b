//! The tile registers of AMX: permission, configuration, and products.

use std::{arch::asm, arch::x86_64::*, sync::LazyLock};

/// Rows and columns of sums in a register.
pub const SIDE: usize = 16;
/// Rows that are multiplied at once.
pub const ROWS_MAX: usize = 2 * SIDE;
/// Most steps of products between two stores of [`Registers::keep_awake`].
pub const AWAKE: usize = 8;

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
pub struct Registers {
    /// Configured number of rows of each set of activations.
    rows: Option<[usize; 2]>,
    /// See [`Self::keep_awake`].
    unused: Unused,
}

#[repr(align(64))]
struct Unused(#[expect(dead_code, reason = "never read")] [u8; SIDE * 64]);

impl Default for Registers {
    fn default() -> Self {
        Self { rows: None, unused: Unused([0; SIDE * 64]) }
    }
}

impl Registers {
    /// Configures and clears the registers for the rows of a shape, unless they have that configuration.
    ///
    /// # Safety
    /// [`is_available`] returns true.
    pub unsafe fn configure(&mut self, shape: Shape) {
        if self.rows == Some(shape.rows) {
            return;
        }
        let [first, second] = shape.rows.map(|rows| rows.max(1) as u8);
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
        self.rows = Some(shape.rows);
    }

    /// Stores a register, which keeps the processor's tile stores awake: after some 2,000 cycles without any,
    /// the next one takes 1,000 cycles (measured, benches/RESULTS.md).
    ///
    /// # Safety
    /// The registers are configured.
    pub unsafe fn keep_awake(&mut self) {
        // SAFETY: guaranteed by the caller; a register has 16 rows of 64 bytes at most.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}], tmm4",
                to = in(reg) &raw mut self.unused,
                stride = in(reg) 64usize,
                options(nostack, preserves_flags)
            );
        }
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

/// Selects the registers of a product.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Rows of each set of activations, at most [`SIDE`]; the second may have none.
    pub rows: [usize; 2],
    /// Whether there are two tiles.
    pub pair: bool,
}

impl Shape {
    /// Up to [`ROWS_MAX`] rows, in sets of [`SIDE`].
    pub fn of_rows(rows: usize, pair: bool) -> Self {
        Self { rows: [rows.min(SIDE), rows.saturating_sub(SIDE)], pair }
    }

    fn has_second(self) -> bool {
        self.rows[1] > 0
    }
}

/// The instructions for each shape: `$one` always, `$tiles` for a pair, `$rows` for many rows, `$both` for
/// both.
macro_rules! by_shape {
    ($shape:expr, $one:literal, $tiles:literal, $rows:literal, $both:literal, $($operands:tt)*) => {
        match ($shape.has_second(), $shape.pair) {
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

/// Loads the sums of each tile from rows of 16 numbers, one after another.
///
/// # Safety
/// The registers are configured for the shape; `rows` is valid for its rows.
pub unsafe fn load_rows(shape: Shape, rows: *const i32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        by_shape!(
            shape,
            "tileloadd tmm0, [{first} + {stride}] /* {second} */",
            "tileloadd tmm1, [{first} + {stride}]",
            "tileloadd tmm2, [{second} + {stride}]",
            "tileloadd tmm3, [{second} + {stride}]",
            first = in(reg) rows,
            second = in(reg) rows.wrapping_add(SIDE * SIDE),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores the sums to outputs `y` with rows `stride` apart.
///
/// # Safety
/// The registers are configured for the shape; `y` is valid for its outputs.
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

/// Stores the sums one register after another: each set's with the first tile, then the second. // (4, 16, 16)
///
/// # Safety
/// The registers are configured for the shape; `to` is valid for four registers.
pub unsafe fn store_registers(shape: Shape, to: *mut i32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        by_shape!(
            shape,
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilestored [{to} + {stride} + 3072], tmm3",
            to = in(reg) to,
            stride = in(reg) 64usize,
            options(nostack, preserves_flags)
        );
    }
}

/// Adds the products of `steps` times 64 activations with as many codes of each tile.
///
/// # Safety
/// The registers are configured for the shape; `x` and `codes` are valid for all steps, and `steps` is at least 1.
#[inline(always)]
pub unsafe fn multiply(
    shape: Shape,
    steps: usize,
    x: [*const i8; 2],
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
                x0 = inout(reg) x[0] => _,
                x1 = inout(reg) x[1] => _,
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
        match (shape.has_second(), shape.pair) {
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
