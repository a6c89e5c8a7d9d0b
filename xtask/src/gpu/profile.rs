//! Nsight Compute's measurements of the kernels of a layer and of the head, in decodes of 1, 64 and 256 sequences and in a prefill. The
//! whole output goes to a file beside the report.

use std::{fmt::Write as _, fs};

use anyhow::Context as _;

use super::{place::Place, programs};

const PROFILER: &str = "ncu";
/// Name of the file with the details, in the folder of results.
pub const FILE: &str = "profile.txt";

/// Kernels to profile: words of `bench engine`, a pattern of their names, launches of these before the ones that are
/// profiled (the self-test's, and those of the first layers), and the number of the latter.
struct Group {
    words: &'static str,
    kernels: &'static str,
    skip: u32,
    count: u32,
}

const GROUPS: [Group; 4] = [
    Group {
        words: "--batch 1 --prompt 128 --generate 1",
        kernels: "linear_one|gate_one|rotate_scores_f16|attend_values_f16|screen_n8|screen_select|rescore_bf16",
        skip: 188,
        count: 12,
    },
    Group {
        words: "--batch 64 --prompt 128 --generate 1",
        kernels: "linear_n64|gate_n64|rotate_scores_f16|attend_values_f16|screen_tile",
        skip: 174,
        count: 7,
    },
    Group {
        words: "--batch 32 --prompt 128 --generate 0",
        kernels: "linear_tile|gate_tile|attend8_f16",
        skip: 10,
        count: 5,
    },
    Group {
        words: "--batch 256 --prompt 128 --generate 1",
        kernels: "linear_tile64|gate_tile64|attend4_f16|screen_tile",
        skip: 159,
        count: 6,
    },
];

/// Lines of the details that the report repeats.
const METRICS: [&str; 6] = [
    "Duration",
    "Memory Throughput",
    "Compute (SM) Throughput",
    "Achieved Occupancy",
    "Registers Per Thread",
    "Grid Size",
];

pub fn run(place: &Place) -> anyhow::Result<String> {
    if !programs::is_installed(PROFILER) {
        return Ok(format!("**Skipped**: {PROFILER} is not installed."));
    }
    let (mut text, mut details) = (String::new(), String::new());
    let report = place.results.join("profile");
    for Group { words, kernels, skip, count } in &GROUPS {
        let pattern = format!("regex:^({kernels})$");
        let (skip, count) = (skip.to_string(), count.to_string());
        let mut starter = vec![PROFILER, "--force-overwrite", "--clock-control", "none"];
        starter.extend(["--set", "full", "--kernel-name", &pattern]);
        starter.extend(["--launch-skip", &skip, "--launch-count", &count]);
        let path = report.display().to_string();
        starter.extend(["--export", &path]);
        let words = format!("bench engine {words} --repetitions 1");
        let mut command = place.command(&starter, &words)?;
        command.env("TRITMILL_CUDA_DISABLE", "graphs");
        let (output, messages) = place.output(&mut command)?;
        writeln!(text, "`tritmill {words}`: {}\n\n```", output.status)?;
        let file = report.with_extension("ncu-rep");
        if !file.exists() {
            writeln!(text, "{}{messages}\n```\n", String::from_utf8_lossy(&output.stdout))?;
            continue;
        }
        for page in ["details", "source"] {
            let mut show = place.programs.under(&[], PROFILER.as_ref());
            show.arg("--import").arg(&file).args(["--page", page]);
            if page == "source" {
                show.args(["--csv", "--print-kernel-base", "function"]);
            }
            let shown = show.output().context("cannot start")?;
            let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
            if page == "details" {
                shown.lines().filter(|line| is_in_report(line)).for_each(|line| {
                    text += line;
                    text.push('\n');
                });
            }
            details += &shown;
        }
        text += "```\n\n";
        fs::remove_file(&file).context("cannot remove the profile")?;
        fs::write(place.results.join(FILE), &details).context("cannot write the details")?;
    }
    Ok(text)
}

/// Returns whether a line is a kernel's name or one of its most important measurements.
fn is_in_report(line: &str) -> bool {
    let trimmed = line.trim_start();
    let is_name = trimmed.contains("Context 1, Stream");
    is_name || METRICS.iter().any(|metric| trimmed.starts_with(metric))
}
