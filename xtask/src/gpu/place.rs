//! Where a chain runs: the device, the programs that use it, the sizes of what they run, and the files of reports.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::programs::Programs;
use crate::{bench_setup::SHAPE_DEFAULT, process};

/// Extensions of a chain's files: the report, what programs print, and the measurements as JSON.
pub const FILES: [&str; 3] = ["md", "log", "jsonl"];
/// Longest part of a program's messages in a report.
const MESSAGE_BYTES: u64 = 1500;

/// A device, the programs that use it, and the sizes of what they run.
pub struct Place {
    pub device: String,
    pub programs: Programs,
    /// A model of a few kilobytes and workloads of a few rows, for the emulated driver.
    pub is_rehearsal: bool,
    /// Folder of reports.
    pub results: PathBuf,
    report: File,
    log: File,
    figures: File,
}

impl Place {
    /// Opens the files of a chain's reports.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn new(
        device: &str,
        programs: Programs,
        is_rehearsal: bool,
        results: &Path,
        chain: &str,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(results)
            .with_context(|| format!("cannot write to {}", results.display()))?;
        let file = |name: &str| {
            let path = results.join(format!("{chain}.{name}"));
            let file =
                File::options().create(true).truncate(true).read(true).write(true).open(&path);
            file.with_context(|| format!("cannot write {}", path.display()))
        };
        let [report, log, figures] = FILES.map(file);
        let (report, log, figures) = (report?, log?, figures?);
        let (device, results) = (device.to_owned(), results.to_owned());
        Ok(Self { device, programs, is_rehearsal, results, report, log, figures })
    }

    /// Adds text to the report, and prints it.
    pub fn write(&self, text: &str) -> anyhow::Result<()> {
        println!("{text}");
        (&self.report).write_all(text.as_bytes()).context("cannot write the report")
    }

    /// Returns the folder of the model to measure: the 2B shape with random weights. In a rehearsal, that of a tiny one.
    pub fn model_folder(&self) -> PathBuf {
        match self.is_rehearsal {
            true => tiny_model(),
            false => process::root().join("target/bench").join(SHAPE_DEFAULT),
        }
    }

    /// Starts to make the model to measure in the background; `None` if it is there.
    pub fn make_model(&self) -> anyhow::Result<Option<Child>> {
        let folder = self.model_folder();
        if folder.exists() {
            return Ok(None);
        }
        // The folder gets its name when it is complete.
        let steps = r#""$0" model synth --shape "$1" --out "$2.part" && mv "$2.part" "$2""#;
        let mut synth = Command::new("sh");
        synth
            .args(["-c", steps])
            .arg(self.programs.tritmill_path())
            .arg(SHAPE_DEFAULT)
            .arg(&folder);
        let log = || self.log.try_clone().context("cannot write the log");
        Ok(Some(synth.stdout(log()?).stderr(log()?).spawn().context("cannot start")?))
    }

    /// Waits for the model to measure.
    fn model(&self) -> anyhow::Result<PathBuf> {
        let folder = self.model_folder();
        while !folder.exists() {
            ensure!(!self.programs.is_over(), "the model was not made in time");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(folder)
    }

    /// Returns the sizes of a workload: of a measurement, or of its rehearsal.
    pub fn sizes<T>(&self, measured: T, rehearsed: T) -> T {
        if self.is_rehearsal { rehearsed } else { measured }
    }

    /// Returns `tritmill WORDS… --device … --model …` on the model to measure, started by another program if `starter` is not
    /// empty.
    pub fn command(&self, starter: &[&str], words: &str) -> anyhow::Result<Command> {
        Ok(self.on_model(starter, words, &self.model()?))
    }

    /// The same on another model.
    pub fn on_model(&self, starter: &[&str], words: &str, model: &Path) -> Command {
        let mut command = self.programs.under(starter, self.programs.tritmill_path());
        command.args(words.split(' ')).args(["--device", &self.device, "--model"]).arg(model);
        command
    }

    /// Runs `tritmill WORDS… --device … --model … --json` on the model to measure and returns what it prints.
    pub fn measure(&self, words: &str) -> anyhow::Result<Value> {
        self.json(self.command(&[], words)?.arg("--json"))
    }

    /// Runs a command and returns the JSON that it prints. Its exit status does not matter: `doctor` fails where a check
    /// does.
    pub fn json(&self, command: &mut Command) -> anyhow::Result<Value> {
        let (output, messages) = self.output(command)?;
        let value: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{}\n\n```\n{messages}\n```\n", output.status))?;
        writeln!(&self.figures, "{value}").context("cannot write the figures")?;
        Ok(value)
    }

    /// Runs a command, with what it prints in the log; returns its output and the end of its messages.
    pub fn output(&self, command: &mut Command) -> anyhow::Result<(Output, String)> {
        let mut log = &self.log;
        writeln!(log, "\n$ {command:?}")?;
        let begin = log.seek(SeekFrom::End(0))?;
        command.stdin(Stdio::null()).stderr(self.log.try_clone().context("cannot write the log")?);
        let output = command.output().context("cannot start")?;
        let end = log.seek(SeekFrom::End(0))?;
        log.seek(SeekFrom::Start(begin.max(end.saturating_sub(MESSAGE_BYTES))))?;
        let mut messages = Vec::new();
        log.read_to_end(&mut messages)?;
        log.write_all(&output.stdout)?;
        Ok((output, String::from_utf8_lossy(&messages).into_owned()))
    }
}

/// Returns the folder of a model of a few kilobytes.
pub fn tiny_model() -> PathBuf {
    process::root().join("engine/tests/golden/bitnet-tiny")
}

/// Describes the device, from what `tritmill doctor` prints.
pub fn doctor(place: &Place) -> anyhow::Result<String> {
    let doctor = place.json(place.programs.tritmill().args(["doctor", "--json"]))?;
    let cuda = &doctor["cuda"];
    let ordinal: usize = place.device.trim_start_matches("cuda:").parse().context("cuda:N")?;
    let gpu = &cuda["devices"][ordinal];
    let Some(name) = gpu["name"].as_str() else {
        bail!("{} cannot be used: {cuda}", place.device);
    };
    let (capability, driver) = (&gpu["compute_capability"], &cuda["driver"]);
    let (cpu, cores) = (&doctor["cpu"], &doctor["cores"]);
    Ok(format!(
        "{name}, compute capability {capability}, CUDA driver {driver}; {cpu}, {cores} cores\n"
    ))
}

/// Returns a table of what made the steps of a measurement faster: how often it was used, or why it was not.
pub fn features(measured: &Value) -> anyhow::Result<String> {
    let mut text = "\n| feature | uses | |\n| --- | --- | --- |\n".to_owned();
    for feature in list(measured, "gpu_features")? {
        let name = feature["name"].as_str().unwrap_or_default();
        let state = match (feature["given_up"].as_str(), feature["uses"].as_u64()) {
            (Some(why), _) => why,
            (None, Some(1..)) => "used",
            (None, _) => "allowed, not used",
        };
        writeln!(text, "| {name} | {} | {state} |", feature["uses"])?;
    }
    Ok(text)
}

/// A target: its name, what was asked for, what was measured.
pub type Target = (&'static str, String, Option<f64>);

/// Returns a table of targets and measurements.
pub fn targets_table(targets: &[Target]) -> String {
    let mut text = "\n| target | asked | measured |\n| --- | --- | --- |\n".to_owned();
    for (name, asked, measured) in targets {
        let measured = measured.map_or_else(|| "none".to_owned(), |figure| format!("{figure:.2}"));
        let _ = writeln!(text, "| {name} | {asked} | {measured} |");
    }
    text
}

/// Returns a number of a JSON object; not a number if it is missing.
pub fn number(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or(f64::NAN)
}

/// Returns a list of a JSON object.
pub fn list<'a>(of: &'a Value, name: &str) -> anyhow::Result<&'a Vec<Value>> {
    of[name].as_array().with_context(|| format!("measurements have no list `{name}`"))
}
