//! Child processes that end with their test.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

/// Longest start of a server: machines that run tests are busy.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Where Debian installs the programs of Postgres, which are not on `PATH`.
const POSTGRES_FOLDER: &str = "/usr/lib/postgresql";
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A signal for a process.
#[derive(Debug, Clone, Copy)]
pub enum Signal {
    /// Ends the process at once (SIGKILL).
    Kill,
    /// Asks the process to exit (SIGTERM).
    Terminate,
    /// Freezes the process (SIGSTOP).
    Stop,
    /// Lets a frozen process continue (SIGCONT).
    Continue,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "KILL",
            Self::Terminate => "TERM",
            Self::Stop => "STOP",
            Self::Continue => "CONT",
        }
    }

    /// Sends the signal.
    ///
    /// # Errors
    /// If no process has this id.
    pub fn send(self, pid: u32) -> anyhow::Result<()> {
        let status = Command::new("kill")
            .args(["-s", self.name(), &pid.to_string()])
            .stderr(Stdio::null())
            .status()
            .context("cannot run kill")?;
        if !status.success() {
            bail!("no process {pid}");
        }
        Ok(())
    }
}

/// Returns the path of a program on `PATH`, in `/usr/sbin`, or among those of the newest Postgres.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.push("/usr/sbin".into());
    let mut versions: Vec<PathBuf> = std::fs::read_dir(POSTGRES_FOLDER)
        .map(|entries| entries.flatten().map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    versions.sort();
    folders.extend(versions.into_iter().rev());
    folders.into_iter().map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Returns the program's path, or an error that names the package to install.
pub fn need(program: &str, package: &str) -> anyhow::Result<PathBuf> {
    find(program).with_context(|| {
        format!(
            "{program} is not installed (cargo xtask test installs it; or: apt install {package})"
        )
    })
}

/// An unprivileged user: Postgres refuses to run as root.
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

impl User {
    /// `postgres` if that user exists, else `nobody`; `None` if this process is not root's.
    pub fn unprivileged() -> Option<Self> {
        if id(&["-u"])? != 0 {
            return None;
        }
        let of = |name| Some(Self { uid: id(&["-u", name])?, gid: id(&["-g", name])? });
        of("postgres").or_else(|| of("nobody"))
    }
}

fn id(arguments: &[&str]) -> Option<u32> {
    let output = Command::new("id").args(arguments).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Returns a command that runs as `user`, if given, and is killed when the thread that starts it
/// ends.
pub fn tied(program: &Path, user: Option<&User>) -> Command {
    tied_by("KILL", program, user)
}

/// As [`tied`], with another signal.
pub fn tied_by(signal: &str, program: &Path, user: Option<&User>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", signal]);
    if let Some(User { uid, gid }) = user {
        command.args(["--reuid", &uid.to_string(), "--regid", &gid.to_string(), "--clear-groups"]);
    }
    command.arg("--").arg(program).stdin(Stdio::null());
    command
}

/// A running server.
pub struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts a server with its output in `log` and waits until `ready` returns true.
    pub fn start(
        mut command: Command,
        log: PathBuf,
        ready: impl Fn() -> bool,
    ) -> anyhow::Result<Self> {
        let output = File::options().create(true).append(true).open(&log)?;
        let child = command.stdout(output.try_clone()?).stderr(output).spawn();
        let mut server = Self { child: child.context("cannot start a server")?, log };
        let started = Instant::now();
        while !ready() {
            if let Some(status) = server.child.try_wait()? {
                bail!("the server exited with {status}:\n{}", server.log_text());
            }
            if started.elapsed() > START_LIMIT {
                bail!("the server is not ready after {START_LIMIT:?}:\n{}", server.log_text());
            }
            sleep(POLL_INTERVAL);
        }
        Ok(server)
    }

    fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        signal.send(self.child.id())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the server and waits until it has exited.
    pub fn kill(&mut self) {
        // Both fail only for a process that has exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
