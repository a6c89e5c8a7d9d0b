//! A folder with an input file, and `batch run` on it.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
pub use tritmill_servers::Random;

/// Returns a chat request that greedy decoding answers in exactly `tokens` tokens.
pub fn chat(custom_id: &str, tokens: u64) -> Value {
    json!({
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{ "role": "user", "content": format!("what is {custom_id}?") }],
            "max_tokens": tokens,
            "ignore_eos": true,
        },
    })
}

/// Returns a malformed line of one of many kinds; a function of the number and the generator's
/// state.
pub fn malformed(number: u64, random: &mut Random) -> Vec<u8> {
    let mut request = chat(&format!("bad-{number}"), 2);
    let whole = request.to_string().into_bytes();
    match random.below(12) {
        0 => whole[..1 + random.below(whole.len() - 1)].to_vec(),
        1 => b"{\"custom_id\": \"\xC3\x28\"}".to_vec(),
        2 => b"[".repeat(1 + random.below(5000)),
        3 => b"\x00\x01\x02 nonsense".to_vec(),
        4 => {
            request["custom_id"] = json!(random.below(100));
            request.to_string().into_bytes()
        }
        5 => {
            request["url"] = json!("/v1/moderations");
            request.to_string().into_bytes()
        }
        6 => {
            request["body"]["temperature"] = json!("warm");
            request.to_string().into_bytes()
        }
        7 => {
            request["body"]["messages"] = json!([{ "role": "user", "content": random.below(9) }]);
            request.to_string().into_bytes()
        }
        8 => {
            request["body"]["max_tokens"] = json!(-1 - random.below(5) as i64);
            request.to_string().into_bytes()
        }
        9 => {
            // Of two lines with the same custom_id, the later one is the error.
            let (name, n) = if number > 501 { ("good-501", 1) } else { ("bad", 0) };
            request["custom_id"] = json!(name);
            request["body"]["n"] = json!(n);
            request.to_string().into_bytes()
        }
        10 => b"{\"custom_id\": 1e999}".to_vec(),
        _ => {
            request["body"]["unheard_of"] = json!({ "deep": [[[[]]]] });
            request.to_string().into_bytes()
        }
    }
}

/// Parses the lines of a file as JSON.
pub fn lines_of(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns an output line without `created`, which may differ between runs.
pub fn without_created(line: &Value) -> Value {
    let mut line = line.clone();
    if let Some(body) = line["response"]["body"].as_object_mut() {
        body.remove("created");
    }
    line
}

/// A temporary folder for one test.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn input(&self) -> PathBuf {
        self.folder().join("in.jsonl")
    }

    pub fn output(&self) -> PathBuf {
        self.folder().join("out.jsonl")
    }

    pub fn store(&self) -> PathBuf {
        self.folder().join("out.jsonl.tritmill")
    }

    pub fn write_input(&self, lines: &[Value]) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(self.input(), text).unwrap();
    }

    /// Runs `batch run` with the input file as standard input.
    pub fn run_piped(&self, arguments: &[&str]) -> Run {
        let input = fs::File::open(self.input()).unwrap();
        self.start_from("-".as_ref(), input.into(), "bitnet-tiny", arguments).wait()
    }

    /// Returns the number of complete lines in the output.
    pub fn output_lines(&self) -> usize {
        let bytes = fs::read(self.output()).unwrap_or_default();
        bytes.iter().filter(|byte| **byte == b'\n').count()
    }

    pub fn answers_by_id(&self) -> HashMap<String, Value> {
        let lines = lines_of(&self.output());
        lines.into_iter().map(|l| (l["custom_id"].as_str().unwrap().to_owned(), l)).collect()
    }

    pub fn run(&self, arguments: &[&str]) -> Run {
        self.run_model("bitnet-tiny", arguments)
    }

    pub fn run_model(&self, model: &str, arguments: &[&str]) -> Run {
        self.start(model, arguments).wait()
    }

    pub fn spawn(&self, arguments: &[&str]) -> Running {
        self.start("bitnet-tiny", arguments)
    }

    fn start(&self, model: &str, arguments: &[&str]) -> Running {
        self.start_from(&self.input(), Stdio::null(), model, arguments)
    }

    fn start_from(&self, input: &Path, stdin: Stdio, model: &str, arguments: &[&str]) -> Running {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/tests/golden");
        let child = Command::new(env!("CARGO_BIN_EXE_tritmill"))
            .args(["batch", "run"])
            .arg(input)
            .arg("-o")
            .arg(self.output())
            .arg("--model")
            .arg(golden.join(model))
            .args(arguments)
            // The user's environment may name other servers.
            .env_remove("REDIS_URL")
            .env_remove("DATABASE_URL")
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Running(child)
    }
}

/// A running process.
pub struct Running(Child);

impl Running {
    /// Kills the process once `ready`; false if it exited before.
    pub fn kill_when(&mut self, ready: impl Fn() -> bool) -> bool {
        let waited = self.wait_until(ready);
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        waited
    }

    /// Sends SIGINT, as Ctrl-C does, once `ready`.
    pub fn interrupt_when(&mut self, ready: impl Fn() -> bool) {
        assert!(self.wait_until(ready), "the run ended before it could be interrupted");
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    }

    fn wait_until(&mut self, ready: impl Fn() -> bool) -> bool {
        while !ready() {
            if self.0.try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Waits until the process exits.
    pub fn wait(self) -> Run {
        let output = self.0.wait_with_output().unwrap();
        Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Exit code and output of a run.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// Returns the last line of standard output, as JSON.
    pub fn summary(&self) -> Value {
        let last = self.stdout.lines().last().unwrap_or_else(|| panic!("{}", self.stderr));
        serde_json::from_str(last).unwrap()
    }
}
