//! Repository tasks: `cargo xtask TASK`. CI runs the same commands that people run by hand. Each task
//! is one module; most tasks only start other programs.

mod aarch64;
mod bench;
mod bench_setup;
mod chaos;
mod compare;
mod dist;
mod fuzz;
mod gpu;
mod image;
mod lines;
mod miri;
mod package;
mod page;
mod process;
mod ptx;
mod python;
mod test;

use std::process::ExitCode;

/// A task of `cargo xtask`.
struct Task {
    name: &'static str,
    arguments: &'static str,
    summary: &'static str,
    run: fn(&[String]) -> anyhow::Result<()>,
}

const TASKS: &[Task] = &[
    Task {
        name: "test",
        arguments: "[FILTER…]",
        summary: "run every test, or those that match a filter: unit, integration, documentation",
        run: test::run,
    },
    Task {
        name: "fuzz",
        arguments: "[TARGET…] [--seconds N]",
        summary: "run the parsers of untrusted bytes on mutated inputs: gguf, safetensors, batch_line",
        run: fuzz::run,
    },
    Task {
        name: "miri",
        arguments: "[FILTER…]",
        summary: "run the tests of KV bookkeeping under Miri (nightly Rust with miri and rust-src)",
        run: miri::run,
    },
    Task {
        name: "aarch64",
        arguments: "[FILTER…]",
        summary: "run the engine's tests for aarch64 under emulation, and check the workspace for it, as root on Debian",
        run: aarch64::run,
    },
    Task {
        name: "chaos",
        arguments: "[--minutes M] [--seed S] [--redis server|cluster|sentinel] [OPTIONS…, see --help]",
        summary: "inject faults into workers, producers, Redis and Postgres, then check every promise",
        run: chaos::run,
    },
    Task {
        name: "bench",
        arguments: "[SHAPE|queue|e2e] [OPTIONS…] | compare FROM [TO] [--rounds N] [--shape SHAPE]",
        summary: "measure engine steps on a synthetic model (bitnet-2b), jobs through Redis and Postgres, or two commits in turns",
        run: bench::run,
    },
    Task {
        name: "lines",
        arguments: "",
        summary: "count lines of code, tests, comments and blanks by crate",
        run: lines::run,
    },
    Task {
        name: "dist",
        arguments: "",
        summary: "build the program for release, with its debug symbols in a file beside it",
        run: dist::run,
    },
    Task {
        name: "image",
        arguments: "[--test] [--pull]",
        summary: "build the container images without a daemon, as root on Debian; with --test run a fleet from them",
        run: image::run,
    },
    Task {
        name: "package",
        arguments: "",
        summary: "pack the published crates and build a project outside the workspace against the client",
        run: package::run,
    },
    Task {
        name: "ptx",
        arguments: "",
        summary: "compile the CUDA kernels after a change; needs no GPU",
        run: ptx::run,
    },
    Task {
        name: "gpu",
        arguments: "[PART] [cuda:N]",
        summary: "on a machine with a GPU: check and measure; `pack` for one without Rust; `rehearse` without a GPU",
        run: gpu::run,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        print!("{}", list());
        return ExitCode::SUCCESS;
    };
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        eprint!("error: unknown task '{name}'\n\n{}", list());
        return ExitCode::FAILURE;
    };
    match (task.run)(rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the list of tasks that bare `cargo xtask` prints.
fn list() -> String {
    let mut text = String::from("Tasks:\n");
    for task in TASKS {
        let usage = format!("{} {}", task.name, task.arguments);
        text += &format!("  cargo xtask {usage:<34} {}\n", task.summary);
    }
    text + "\nEverything that must pass before a change lands: .ci/run\n"
}
