//! The highest rates of a device, measured: the ceilings that kernels are compared with.

use std::time::Instant;

use super::{
    args::PeakArgs,
    device::{Address, Args, Device, DeviceError, Launch, Part},
};

/// Threads per block, and blocks per multiprocessor.
const THREADS: u32 = 256;
const BLOCKS: u32 = 8;
/// Operations of one warp in one round of `peak_mma_s8`: products of 16 × 32 by 32 × 8.
const MMA_OPERATIONS: u64 = 8 * 2 * 16 * 32 * 8;
/// Operations of one thread in one round of `peak_fma_f32`.
const FMA_OPERATIONS: u64 = 16 * 2;
/// Samples of each rate; the median is used.
const SAMPLES: usize = 3;

/// The ceilings of a device.
#[derive(Debug, Clone, Copy)]
pub struct Peaks {
    /// Bytes per second that a kernel reads from memory.
    pub read_bytes: f64,
    /// Bytes per second that a copy within the memory reads and writes, added up.
    pub copy_bytes: f64,
    /// Operations per second of the int8 product that the kernels use (`mma.sync`); newer devices have faster ones.
    pub int8: f64,
    /// Operations per second of fused multiply-adds of f32.
    pub f32: f64,
    /// Seconds per launch of an empty kernel, in a long series.
    pub launch: f64,
}

/// Lengths of measurements.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Shortest duration of a sample, in seconds.
    pub seconds: f64,
    /// Fewest launches that are recorded together.
    pub launches: usize,
    /// Bytes that memory rates are measured on.
    pub bytes: usize,
    /// Rounds of the kernels that measure computation.
    pub rounds: u32,
}

impl Timing {
    /// One launch of everything, on little data.
    pub const QUICK: Self = Self { seconds: 0.0, launches: 1, bytes: 1 << 20, rounds: 2 };
}

impl Default for Timing {
    /// More bytes than any cache holds, and samples that are much longer than a wait for the device.
    fn default() -> Self {
        Self { seconds: 0.02, launches: 32, bytes: 1 << 30, rounds: 4096 }
    }
}

impl Peaks {
    /// Measures all rates.
    pub fn measure(device: &mut dyn Device, timing: &Timing) -> Result<Self, DeviceError> {
        let from = device.allocate(timing.bytes)?;
        let to = device.allocate(timing.bytes)?;
        let zeros = vec![0; timing.bytes.min(1 << 20)];
        for start in (0..timing.bytes).step_by(zeros.len()) {
            device.write(from + start as u64, &zeros)?;
        }
        let copy = sample(device, to, timing, |device| device.copy(from, to, timing.bytes))?;
        let blocks = device.properties().multiprocessors * BLOCKS;
        let args = PeakArgs {
            from,
            to,
            count: timing.bytes as u64 / 16,
            rounds: timing.rounds,
            unused: 0,
        };
        let launch = |kernel, args| Launch {
            kernel,
            grid: [blocks, 1, 1],
            threads: THREADS,
            shared_bytes: 0,
            args: Args::from_struct(&args),
        };
        let mut time = |kernel, args| seconds_of(device, &[launch(kernel, args)], to, timing);
        let (read, mma, fma) =
            (time("peak_read", args)?, time("peak_mma_s8", args)?, time("peak_fma_f32", args)?);
        let nothing = time("peak_fma_f32", PeakArgs { rounds: 0, ..args })?;
        let warps = u64::from(blocks * THREADS / 32);
        let rounds = u64::from(timing.rounds);
        Ok(Self {
            read_bytes: timing.bytes as f64 / read,
            copy_bytes: 2.0 * timing.bytes as f64 / copy,
            int8: (warps * rounds * MMA_OPERATIONS) as f64 / mma,
            f32: (warps * 32 * rounds * FMA_OPERATIONS) as f64 / fma,
            launch: nothing,
        })
    }

    /// Returns the higher of the two memory rates.
    pub fn bytes(&self) -> f64 {
        self.read_bytes.max(self.copy_bytes)
    }
}

/// Returns the seconds per launch of a recorded series of launches.
pub fn seconds_of(
    device: &mut dyn Device,
    launches: &[Launch],
    waits_at: Address,
    timing: &Timing,
) -> Result<f64, DeviceError> {
    let times = timing.launches.div_ceil(launches.len()).max(1);
    let all: Vec<Launch> = launches.iter().copied().cycle().take(times * launches.len()).collect();
    let recording = device.record(&all)?;
    let seconds = sample(device, waits_at, timing, |device| device.replay(recording))?;
    device.forget(&[recording])?;
    Ok(seconds / all.len() as f64)
}

/// Returns the seconds of one call, measured over so many calls that the wait at the end is negligible. `waits_at`
/// is any allocated address.
fn sample(
    device: &mut dyn Device,
    waits_at: Address,
    timing: &Timing,
    mut call: impl FnMut(&mut dyn Device) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let wait =
        |device: &mut dyn Device| device.read(&mut [Part { from: waits_at, to: &mut [0; 4] }]);
    call(device)?;
    let mut calls = 1;
    let mut samples = Vec::new();
    while samples.len() < SAMPLES {
        wait(device)?;
        let start = Instant::now();
        (0..calls).try_for_each(|_| call(device))?;
        wait(device)?;
        let elapsed = start.elapsed().as_secs_f64();
        if elapsed < timing.seconds {
            calls *= 2;
        } else {
            samples.push(elapsed / f64::from(calls));
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[SAMPLES / 2])
}
