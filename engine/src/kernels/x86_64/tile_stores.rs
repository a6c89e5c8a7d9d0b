//! What a store of an AMX register costs, by the steps since the one before (benches/RESULTS.md): the reason for
//! [`Registers::keep_awake`].

use std::time::Instant;

use super::registers::{ROWS_MAX, Registers, SIDE, Shape, is_available, multiply};

/// Groups of steps in a pass, each with a store or none at its end.
const GROUPS: usize = 200;
const PASSES: usize = 40;

/// Two registers of activations, and two of codes.
#[repr(align(64))]
struct Operands([u8; 4 * SIDE * 64]);

/// Returns the time of a store after `steps` steps, in units of a product's time; `None` without AMX. A step is four
/// loads from the first cache and four products.
pub fn store_in_products(steps: usize) -> Option<f64> {
    if !is_available() || steps == 0 {
        return None;
    }
    let operands = Operands(std::array::from_fn(|i| (i * 31 % 3) as u8));
    let mut registers = Registers::default();
    let mut pass = |stores: bool| {
        let started = Instant::now();
        for _ in 0..GROUPS {
            for _ in 0..steps {
                let at = |index: usize| operands.0[index * SIDE * 64..].as_ptr();
                // SAFETY: the machine has AMX; each operand is one register, and a call has one step.
                unsafe {
                    registers.configure(Shape::of_rows(ROWS_MAX, true));
                    let x = [at(0).cast(), at(1).cast()];
                    multiply(Shape::of_rows(ROWS_MAX, true), 1, x, 64, [at(2), at(3)]);
                }
            }
            if stores {
                // SAFETY: the registers are configured.
                unsafe { registers.keep_awake() };
            }
        }
        started.elapsed().as_secs_f64() / GROUPS as f64
    };
    let [without, with] = [false, true].map(|stores| {
        let mut times: Vec<f64> = (0..PASSES).map(|_| pass(stores)).collect();
        times.sort_by(f64::total_cmp);
        times[PASSES / 2]
    });
    Some((with - without) / (without / (4 * steps) as f64))
}
