//! `cargo xtask bench`: `tritmill bench engine` on a synthetic model, which is made once and kept
//! under `target/`.

use super::process::{self, cargo, root};

const SHAPE_DEFAULT: &str = "bitnet-2b";

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let named = arguments.first().filter(|first| !first.starts_with('-'));
    let options = if named.is_some() { &arguments[1..] } else { arguments };
    let shape = named.map_or(SHAPE_DEFAULT, String::as_str);
    let model = root().join("target").join("bench").join(shape);
    if !model.join("config.json").exists() {
        process::run(tritmill().args(["model", "synth", "--shape", shape, "--out"]).arg(&model))?;
    }
    process::run(tritmill().args(["bench", "engine", "--model"]).arg(&model).args(options))
}

fn tritmill() -> std::process::Command {
    let mut command = cargo();
    command.args(["run", "--quiet", "--release", "--package", "tritmill", "--"]);
    command
}
