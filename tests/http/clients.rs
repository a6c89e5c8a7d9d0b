//! Unmodified clients of OpenAI's and Anthropic's APIs against a real service: the scripts of `tests/clients`, a test each. `cargo xtask test`
//! installs the clients. `docs/CLIENTS.md` lists what is called.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{rig::Admin, standalone::alone};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Where `cargo xtask test` installs what a script runs in.
#[derive(Clone, Copy)]
enum Runs {
    /// The newest `openai` package alone.
    OpenAi,
    /// The newest `anthropic` package alone.
    Anthropic,
    /// The packages of `tests/clients/requirements.txt`.
    Python,
    /// The packages of `tests/clients/package.json`.
    Node,
    /// What every machine has.
    Shell,
}

impl Runs {
    /// Returns the program and the script as it sees it; `None` if something is not installed.
    fn program(self, script: &str) -> Option<(PathBuf, PathBuf)> {
        let own = Path::new(ROOT).join("tests/clients").join(script);
        let (program, script) = match self {
            Self::OpenAi => (Path::new(ROOT).join("target/openai/bin/python"), own),
            Self::Anthropic => (Path::new(ROOT).join("target/anthropic/bin/python"), own),
            Self::Python => (Path::new(ROOT).join("target/clients/bin/python"), own),
            Self::Shell => (PathBuf::from("/bin/bash"), own),
            Self::Node => {
                // A module finds packages in the folders above its own.
                let folder = Path::new(ROOT).join("target/clients-node");
                folder.join("node_modules").exists().then_some(())?;
                for name in ["checks.mjs", script] {
                    fs::copy(own.with_file_name(name), folder.join(name)).unwrap();
                }
                (PathBuf::from("node"), folder.join(script))
            }
        };
        let is_found = program.exists() || matches!(self, Self::Node);
        is_found.then_some((program, script))
    }
}

/// Makes the model that is asked: a golden one with a template that has tools.
fn model(folder: &Path) -> String {
    let model = folder.join("model");
    let made = Command::new("python3")
        .arg(Path::new(ROOT).join("tests/clients/make_model.py"))
        .arg(Path::new(ROOT).join("engine/tests/golden/qwen3-group-tiny"))
        .arg(&model)
        .status()
        .unwrap();
    assert!(made.success());
    format!("tiny={}", model.display())
}

/// The golden embedding model, by name.
pub fn embedding_model() -> String {
    let file = "bitnet-embedding-tiny/bitnet-embedding-tiny-i2_s.gguf";
    format!("embed={ROOT}/engine/tests/golden/{file}")
}

/// Runs a script against a service; fails with the lines of the checks that fail.
fn check(runs: Runs, script: &str) {
    let Some((program, path)) = runs.program(script) else {
        return tritmill_servers::skip(&format!(
            "the clients of {script} (cargo xtask test installs them)"
        ));
    };
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let models = ["--model", &model, "--model", &embedding_model()];
    let service = Admin::run(alone(folder.path(), &[&words[..], &models].concat()));
    let output = Command::new(program)
        .arg(path)
        .arg(format!("http://{}/v1", service.listen))
        .args([service.first_key.as_deref().unwrap(), "tiny", "embed"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed: Vec<&str> = lines.lines().filter(|line| line.starts_with("FAIL")).collect();
    let passed = lines.lines().filter(|line| line.starts_with("ok ")).count();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(failed.is_empty() && output.status.success() && passed > 0, "{failed:#?}\n{said}");
}

/// Defines a test for each script.
macro_rules! scripts {
    ($($name:ident: $runs:ident $script:literal,)*) => {
        $(
            #[test]
            fn $name() {
                check(Runs::$runs, $script);
            }
        )*
    };
}

scripts! {
    openai_python: OpenAi "openai_python.py",
    openai_tools: OpenAi "openai_tools.py",
    openai_responses: OpenAi "openai_responses.py",
    openai_batches: OpenAi "openai_batches.py",
    anthropic_python: Anthropic "anthropic_python.py",
    anthropic_batches: Anthropic "anthropic_batches.py",
    openai_agents: Python "openai_agents.py",
    langchain: Python "langchain_.py",
    litellm: Python "litellm_.py",
    instructor: Python "instructor_.py",
    pydantic_ai: Python "pydantic_ai_.py",
    llama_index: Python "llama_index_.py",
    openai_node: Node "openai_node.mjs",
    vercel_ai: Node "vercel_ai.mjs",
    curl: Shell "curl.sh",
}
