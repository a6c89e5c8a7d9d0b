//! Containers of an image, each with one process, and signals to that process.

use std::{
    collections::HashMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tritmill_servers::Signal;

use super::{Buildah, Image};
use crate::process::{read, succeeds};

/// Longest wait for anything here, on a slow machine.
const LIMIT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Waits until a condition holds.
pub fn wait_until(
    what: &str,
    mut holds: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let started = Instant::now();
    while !holds()? {
        ensure!(started.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Returns the settings of an image, as a container runtime reads them.
pub fn settings(buildah: &Buildah, image: Image) -> anyhow::Result<Value> {
    let inspected = read(&mut buildah.command(&["inspect", "--type", "image", image.name]))?;
    let inspected: Value = serde_json::from_str(&inspected).context("buildah inspect")?;
    Ok(inspected["Docker"]["config"].clone())
}

/// A container; it is removed when it is dropped.
pub struct Container<'a> {
    buildah: &'a Buildah,
    id: String,
    /// The program that the image starts.
    entrypoint: Vec<String>,
    /// Variables of its processes.
    variables: Vec<String>,
    /// Folder of this machine that is mounted as `/data`.
    data: PathBuf,
}

impl<'a> Container<'a> {
    pub fn create(
        buildah: &'a Buildah,
        image: Image,
        variables: &[String],
        data: &Path,
    ) -> anyhow::Result<Self> {
        let id = read(&mut buildah.command(&["from", "--pull=never", image.name]))?;
        let entrypoint = settings(buildah, image)?["Entrypoint"].clone();
        let entrypoint = serde_json::from_value(entrypoint).context("the image's entry point")?;
        let (variables, data) = (variables.to_vec(), data.to_owned());
        Ok(Self { buildah, id, entrypoint, variables, data })
    }

    /// Returns a command inside, as the image's user.
    fn inside(&self, words: &[&str]) -> Command {
        let mut command = self.buildah.command(&["run"]);
        command.arg("--volume").arg(format!("{}:/data", self.data.display()));
        for variable in &self.variables {
            command.args(["--env", variable]);
        }
        command.args([&self.id, "--"]).args(words);
        command
    }

    /// Returns the image's program with these arguments.
    pub fn program(&self, arguments: &[&str]) -> Command {
        let program = self.entrypoint.iter().map(String::as_str);
        self.inside(&program.chain(arguments.iter().copied()).collect::<Vec<_>>())
    }

    /// Returns whether the image's health check succeeds for a process that listens on this port.
    pub fn is_healthy(&self, port: u16) -> bool {
        let port = port.to_string();
        succeeds(&mut self.inside(&[
            "bash",
            "/usr/local/bin/tritmill-healthcheck",
            "/healthz",
            &port,
        ]))
    }

    /// Starts the image's program; what it prints goes to a file.
    pub fn start(&self, name: &str, arguments: &[&str]) -> anyhow::Result<Running> {
        let log = self.data.join(format!("{name}.log"));
        let output = File::create(&log)?;
        let mut command = self.program(arguments);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().context("cannot start buildah")?;
        Ok(Running { child, log })
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // What is left is removed at the end of the task.
        let _ = read(&mut self.buildah.command(&["rm", &self.id]));
    }
}

/// A process in a container; it is killed when it is dropped.
pub struct Running {
    /// The buildah process that started it and ends with its exit code.
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Returns the id of the program's process, once it runs. A container runtime sends signals to it.
    pub fn pid(&self) -> Option<u32> {
        program_below(self.child.id(), &processes())
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        signal.send(self.pid().context("the program does not run")?)
    }

    /// Returns what the program has printed.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the exit status, if the program has ended.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until the program has ended with exit code 0.
    pub fn succeed(&mut self, what: &str) -> anyhow::Result<()> {
        let mut status = None;
        wait_until(what, || {
            status = self.ended()?;
            Ok(status.is_some())
        })?;
        let succeeded = status.is_some_and(|status| status.success());
        ensure!(succeeded, "{what}: {status:?}\n{}", self.log());
        Ok(())
    }

    /// Returns the ids of the user and group that the program runs as.
    pub fn user(&self) -> anyhow::Result<[u32; 2]> {
        let pid = self.pid().context("the program does not run")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let id = |name: &str| -> anyhow::Result<u32> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no id")?;
            Ok(line.split_whitespace().next().unwrap_or_default().parse()?)
        };
        Ok([id("Uid:")?, id("Gid:")?])
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            // Fails only for a process that has exited.
            let _ = Signal::Kill.send(pid);
        }
        // Both fail only for a process that has exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The parent and the name of a process.
type Process = (u32, String);

/// Returns the processes of this machine, by id.
fn processes() -> HashMap<u32, Process> {
    let entries = fs::read_dir("/proc").map(|entries| entries.flatten().collect::<Vec<_>>());
    let process = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, parse_process(&fs::read_to_string(entry.path().join("stat")).ok()?)?))
    };
    entries.unwrap_or_default().into_iter().filter_map(process).collect()
}

/// Parses `ID (NAME) STATE PARENT …`.
fn parse_process(stat: &str) -> Option<Process> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    Some((rest.split_whitespace().nth(1)?.parse().ok()?, name.to_owned()))
}

/// Returns the process of the program that descends from another process.
fn program_below(ancestor: u32, processes: &HashMap<u32, Process>) -> Option<u32> {
    let descends = |pid: u32| {
        let mut next = Some(pid);
        while let Some(pid) = next.filter(|pid| *pid != ancestor) {
            next = processes.get(&pid).map(|(parent, _)| *parent);
        }
        next.is_some()
    };
    let named = processes.iter().filter(|(_, (_, name))| name == "tritmill");
    named.map(|(pid, _)| *pid).find(|pid| descends(*pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_found_below_its_container() {
        let stat =
            ["1 (init) S 0 1", "7 (buildah) S 1 7", "8 (a (b) c) S 7 7", "9 (tritmill) S 8 7"];
        let pid = |line: &str| line.split(' ').next().and_then(|id| id.parse().ok());
        let process = |line: &&str| Some((pid(line)?, parse_process(line)?));
        let processes: HashMap<u32, Process> = stat.iter().filter_map(process).collect();
        assert_eq!(processes[&8], (7, "a (b) c".to_owned()));
        assert_eq!(program_below(7, &processes), Some(9));
        assert_eq!(program_below(2, &processes), None);
    }
}
