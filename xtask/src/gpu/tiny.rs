//! The first steps on a device, of a model of a few kilobytes. If they fail, the same steps with fewer features find out where.

use super::place::{Place, features, list, number, tiny_model};
use super::programs;

const WORDS: &str = "bench engine --batch 1,2,8 --prompt 40 --generate 8 --repetitions 1";

/// What is tried if the steps fail: words, and variables of the environment.
const NARROWER: [(&str, &[(&str, &str)]); 5] = [
    ("", &[("TRITMILL_CUDA_DISABLE", "graphs")]),
    ("", &[("TRITMILL_CUDA_DISABLE", "cubin")]),
    ("", &[("TRITMILL_CUDA_DISABLE", "cubin,graphs,pdl,wgmma,tiles,ahead")]),
    (
        "",
        &[
            ("TRITMILL_CUDA_DISABLE", "cubin,graphs,pdl,wgmma,tiles,ahead"),
            ("CUDA_LAUNCH_BLOCKING", "1"),
        ],
    ),
    ("compute-sanitizer", &[("TRITMILL_CUDA_DISABLE", "graphs,pdl,wgmma,tiles,ahead")]),
];

pub fn run(place: &Place) -> anyhow::Result<String> {
    let mut text = String::new();
    for words in ["", " --gpu-kernels experimental", " --gpu-kernels experimental --kv q8"] {
        let words = format!("{WORDS}{words}");
        let mut command = place.on_model(&[], &words, &tiny_model());
        text += &format!("`tritmill {words}`: ");
        text += &match place.json(command.arg("--json")) {
            Ok(found) => described(&found)?,
            Err(error) => format!("**failed**: {error:#}\n\n{}", narrowed(place, &words)?),
        };
    }
    Ok(text)
}

fn described(found: &serde_json::Value) -> anyhow::Result<String> {
    let rate = |row: &serde_json::Value| {
        format!("{} {}: {:.0}", row["phase"], row["batch"], number(row, "tokens_per_s"))
    };
    let rates: Vec<String> = list(found, "rows")?.iter().map(rate).collect();
    Ok(format!("{} tokens/s\n{}\n", rates.join(", "), features(found)?))
}

/// Runs the steps with fewer features, and reports which of them succeed.
fn narrowed(place: &Place, words: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    for (starter, variables) in NARROWER {
        let starter: &[&str] = if starter.is_empty() { &[] } else { &[starter] };
        if starter.first().is_some_and(|starter| !programs::is_installed(starter)) {
            continue;
        }
        let mut command = place.on_model(starter, words, &tiny_model());
        command.envs(variables.iter().copied());
        let (output, messages) = place.output(&mut command)?;
        let end =
            if output.status.success() && starter.is_empty() { String::new() } else { messages };
        text += &format!("{starter:?} {variables:?}: {}\n\n```\n{end}\n```\n\n", output.status);
    }
    Ok(text)
}
