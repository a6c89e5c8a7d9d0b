//! Each kernel beside its roofline.

use std::fmt::Write as _;

use super::place::{Place, list, number};

/// Measures the kernels that run by default.
pub fn run(place: &Place) -> anyhow::Result<String> {
    measured(place, "standard")
}

/// Measures experimental kernels.
pub fn experimental(place: &Place) -> anyhow::Result<String> {
    measured(place, "experimental")
}

fn measured(place: &Place, kernels: &str) -> anyhow::Result<String> {
    let words = place.sizes("bench kernels", "bench kernels --quick --batch 1 --prompt 12");
    let found = place.measure(&format!("{words} --gpu-kernels {kernels}"))?;
    let mut text = String::new();
    writeln!(
        text,
        "Memory read at {:.0} GB/s, copied at {:.0} GB/s (both ways); int8 products by mma.sync {:.0} T/s; \
         f32 {:.1} T/s; a launch {:.2} µs.\n",
        number(&found, "read_bytes_per_s") / 1e9,
        number(&found, "copy_bytes_per_s") / 1e9,
        number(&found, "int8_operations_per_s") / 1e12,
        number(&found, "f32_operations_per_s") / 1e12,
        number(&found, "launch_s") * 1e6,
    )?;
    writeln!(
        text,
        "| step | kernel | launches | µs each | MB | GB/s | T int8/s | bound by | share of its roofline |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )?;
    for step in list(&found, "steps")? {
        let (phase, rows) = (step["phase"].as_str().unwrap_or_default(), &step["rows"]);
        let mut sum = 0.0;
        for kernel in list(step, "kernels")? {
            let word = |name: &str| kernel[name].as_str().unwrap_or_default().to_owned();
            let (launches, seconds) = (number(kernel, "launches"), number(kernel, "launch_s"));
            sum += launches * seconds;
            writeln!(
                text,
                "| {phase} {rows} | `{}` {} | {launches} | {:.2} | {:.2} | {:.0} | {:.1} | {} | {:.0} % |",
                word("kernel"),
                word("of"),
                seconds * 1e6,
                number(kernel, "bytes") / 1e6,
                number(kernel, "bytes") / seconds / 1e9,
                number(kernel, "int8_operations") / seconds / 1e12,
                word("bound"),
                100.0 * number(kernel, "share"),
            )?;
        }
        let whole = number(step, "step_s") * 1e6;
        writeln!(
            text,
            "| {phase} {rows} | all, by themselves {:.0} µs | | {whole:.0} | | | | | |",
            sum * 1e6
        )?;
    }
    Ok(text)
}
