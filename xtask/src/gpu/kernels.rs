//! `cargo xtask gpu kernels`: each kernel beside its roofline.

use super::{Place, list, number};

pub fn run(place: &Place) -> anyhow::Result<()> {
    let said = place.measure(&["bench", "kernels"], &place.model()?)?;
    println!(
        "Memory read at {:.0} GB/s, copied at {:.0} GB/s (both ways); int8 products by mma.sync {:.0} T/s; \
         f32 {:.1} T/s; a launch {:.2} µs.\n",
        number(&said, "read_bytes_per_s") / 1e9,
        number(&said, "copy_bytes_per_s") / 1e9,
        number(&said, "int8_operations_per_s") / 1e12,
        number(&said, "f32_operations_per_s") / 1e12,
        number(&said, "launch_s") * 1e6,
    );
    println!(
        "| step | kernel | launches | µs each | MB | GB/s | T int8/s | bound by | share of its roofline |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for step in list(&said, "steps")? {
        let (phase, rows) = (step["phase"].as_str().unwrap_or_default(), &step["rows"]);
        let mut sum = 0.0;
        for kernel in list(step, "kernels")? {
            let text = |name: &str| kernel[name].as_str().unwrap_or_default().to_owned();
            let (launches, seconds) = (number(kernel, "launches"), number(kernel, "launch_s"));
            sum += launches * seconds;
            println!(
                "| {phase} {rows} | `{}` {} | {launches} | {:.2} | {:.2} | {:.0} | {:.1} | {} | {:.0} % |",
                text("kernel"),
                text("of"),
                seconds * 1e6,
                number(kernel, "bytes") / 1e6,
                number(kernel, "bytes") / seconds / 1e9,
                number(kernel, "int8_operations") / seconds / 1e12,
                text("bound"),
                100.0 * number(kernel, "share"),
            );
        }
        let whole = number(step, "step_s") * 1e6;
        println!(
            "| {phase} {rows} | all, by themselves {:.0} µs | | {whole:.0} | | | | | |",
            sum * 1e6
        );
    }
    println!();
    Ok(())
}
