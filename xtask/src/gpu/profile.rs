//! Nsight Compute's measurements of seven kernels.

use super::{place::Place, programs};

const PROFILER: &str = "ncu";
/// Kernels of a decode of one sequence, of decodes of 32 and 64, and of prefills.
const KERNELS: [&str; 7] = [
    "linear_one",
    "attend_short_f16",
    "attend_values_f16",
    "linear_n64",
    "screen_n64",
    "linear_tile",
    "attend8_f16",
];
const WORDS: &str = "bench engine --gpu-kernels experimental --batch 1,32,64 --prompt 128 --generate 1 --repetitions 1";
/// Metrics of a launch: time, and the shares of the device's rates.
const METRICS: [&str; 5] = [
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
];

pub fn run(place: &Place) -> anyhow::Result<String> {
    if !programs::is_installed(PROFILER) {
        return Ok(format!("**Skipped**: {PROFILER} is not installed."));
    }
    let metrics = METRICS.join(",");
    let mut text = String::new();
    for kernel in KERNELS {
        let starter = format!(
            "{PROFILER} --clock-control none --kernel-name {kernel} --launch-skip 8 --launch-count 1 \
             --graph-profiling node --metrics {metrics}"
        );
        let starter: Vec<&str> = starter.split(' ').collect();
        let (output, _) = place.output(&mut place.command(&starter, WORDS)?)?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let is_metric = |line: &&str| METRICS.iter().any(|metric| line.trim().starts_with(metric));
        let lines: Vec<&str> = printed.lines().filter(is_metric).map(str::trim).collect();
        let found = if lines.is_empty() { &*printed } else { &lines.join("\n") };
        text += &format!("`{kernel}`, {}\n\n```\n{found}\n```\n\n", output.status);
    }
    Ok(text)
}
