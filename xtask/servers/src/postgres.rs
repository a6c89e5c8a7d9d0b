//! A Postgres for one test.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use tempfile::TempDir;

use crate::{
    Port, Signal,
    process::{Server, User, need, tied, tied_by},
};

/// Longest time in which the children of a killed server end.
const CHILDREN_END_WITHIN: Duration = Duration::from_secs(10);

/// A Postgres with its own folder and port; user `postgres`, no password, database `postgres`.
pub struct Postgres {
    server: Option<Server>,
    folder: TempDir,
    port: Port,
    options: Vec<String>,
    /// Shared memory segments of servers that were killed. The system has few of them and frees none.
    segments: Vec<String>,
}

impl Postgres {
    /// Starts an empty server that leaves durability to the system's cache: fast, and a kill of the
    /// server alone loses nothing.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(&["fsync=off", "full_page_writes=off"])
    }

    /// Starts an empty server with these settings (`name=value`).
    pub fn start_with(settings: &[&str]) -> anyhow::Result<Self> {
        let user = User::unprivileged();
        let folder = tempfile::Builder::new().prefix("tritmill-postgres-").tempdir()?;
        hand_over(folder.path(), user.as_ref())?;
        copy_template(&folder.path().join("data"), user.as_ref())?;
        let options = settings.iter().map(|&setting| setting.to_owned()).collect();
        Self::start_in(folder, options)
    }

    fn start_in(folder: TempDir, options: Vec<String>) -> anyhow::Result<Self> {
        let (port, segments) = (Port::claim()?, Vec::new());
        let mut postgres = Self { server: None, folder, port, options, segments };
        postgres.restart()?;
        Ok(postgres)
    }

    /// Starts a standby that follows this server until it is promoted (`pg_promote`).
    pub fn start_standby(&self) -> anyhow::Result<Self> {
        let user = User::unprivileged();
        let folder = tempfile::Builder::new().prefix("tritmill-postgres-").tempdir()?;
        hand_over(folder.path(), user.as_ref())?;
        let mut copy = tied(&need("pg_basebackup", "postgresql")?, user.as_ref());
        copy.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &self.port().to_string()])
            .args(["--checkpoint", "fast", "--write-recovery-conf", "-D"])
            .arg(folder.path().join("data"))
            .current_dir(folder.path());
        let output = copy.output().context("cannot run pg_basebackup")?;
        if !output.status.success() {
            bail!("pg_basebackup: {}", String::from_utf8_lossy(&output.stderr));
        }
        Self::start_in(folder, self.options.clone())
    }

    /// Starts the server again with the same port and folder.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.kill();
        let (port, folder) = (self.port.number(), self.folder.path());
        let data = folder.join("data");
        // Left by a server that was killed.
        let _ = fs::remove_file(data.join("postmaster.pid"));
        let is_ready = need("pg_isready", "postgresql")?;
        let ready = || {
            Command::new(&is_ready)
                .args(["-q", "-h", "127.0.0.1", "-p", &port.to_string()])
                .status()
                .is_ok_and(|status| status.success())
        };
        let program = need("postgres", "postgresql")?;
        let started = Instant::now();
        loop {
            // It frees its shared memory when this process is killed.
            let mut command = tied_by("QUIT", &program, User::unprivileged().as_ref());
            command.arg("-D").arg(&data);
            command.args(["-p", &port.to_string(), "-h", "127.0.0.1", "-k", ""]);
            for setting in &self.options {
                command.args(["-c", setting]);
            }
            command.current_dir(folder);
            match Server::start(command, folder.join("log"), ready) {
                // The children of a server that was killed end a moment later.
                Err(error)
                    if error.to_string().contains("pre-existing shared memory block")
                        && started.elapsed() < CHILDREN_END_WITHIN =>
                {
                    thread::sleep(Duration::from_millis(50));
                }
                server => {
                    self.server = Some(server.context("postgres")?);
                    // No child of an earlier server uses them any more.
                    self.free_segments();
                    return Ok(());
                }
            }
        }
    }

    /// Kills the server; it cannot write anything more.
    pub fn kill(&mut self) {
        if self.server.is_some() {
            self.segments.extend(self.segment());
        }
        // Its child processes notice the parent's end, after a moment.
        self.server = None;
    }

    /// Returns the shared memory segment that the server has written into its lock file.
    fn segment(&self) -> Option<String> {
        let lock = fs::read_to_string(self.folder.path().join("data/postmaster.pid")).ok()?;
        lock.lines().nth(6)?.split_whitespace().nth(1).map(str::to_owned)
    }

    fn free_segments(&mut self) {
        let running = self.server.is_some().then(|| self.segment()).flatten();
        for segment in self.segments.drain(..).filter(|segment| Some(segment) != running.as_ref()) {
            // Fails for a segment that another server has freed.
            let remove =
                Command::new("ipcrm").args(["-m", &segment]).stderr(Stdio::null()).status();
            drop(remove);
        }
    }

    /// Sends the main process a signal.
    ///
    /// # Errors
    /// If the server does not run.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.server.as_ref().context("postgres does not run")?.signal(signal)
    }

    /// Returns what the server has logged.
    pub fn log(&self) -> anyhow::Result<String> {
        fs::read_to_string(self.folder.path().join("log")).context("the log of Postgres")
    }

    /// Returns the server's port on the loopback address.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port())
    }

    /// Creates a further, empty database; returns its URL for clients.
    pub fn create_database(&self, name: &str) -> anyhow::Result<String> {
        let mut create = Command::new(need("createdb", "postgresql")?);
        create.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &self.port().to_string(), name]);
        let output = create.output().context("cannot run createdb")?;
        if !output.status.success() {
            bail!("createdb: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(format!("postgres://postgres@127.0.0.1:{}/{name}", self.port()))
    }

    /// Returns the process id, if the server runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Server::pid)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
        self.free_segments();
    }
}

/// Copies the folder that `initdb` makes: a copy is fast, while `initdb` takes seconds.
fn copy_template(to: &Path, user: Option<&User>) -> anyhow::Result<()> {
    let template = template(user)?;
    let status = Command::new("cp").arg("-a").arg(&template).arg(to).status();
    if !status.context("cannot run cp")?.success() {
        bail!("cannot copy {}", template.display());
    }
    Ok(())
}

/// Returns the folder made by `initdb`; it is made once for each version and user.
fn template(user: Option<&User>) -> anyhow::Result<PathBuf> {
    let initdb = need("initdb", "postgresql")?;
    let output = Command::new(&initdb).arg("--version").output().context("cannot run initdb")?;
    let version: String = String::from_utf8_lossy(&output.stdout)
        .chars()
        .filter(|c| c.is_ascii_digit() || *c == '.')
        .collect();
    let uid = user.map_or_else(|| "own".to_owned(), |user| user.uid.to_string());
    let done = std::env::temp_dir().join(format!("tritmill-initdb-{version}-{uid}"));
    if done.is_dir() {
        return Ok(done);
    }
    // Made under another name and renamed, so that a concurrent test never sees it half made.
    let making = tempfile::Builder::new().prefix("tritmill-initdb-").tempdir()?;
    hand_over(making.path(), user)?;
    let data = making.path().join("data");
    let mut command = tied(&initdb, user);
    command
        .args(["--username", "postgres", "--auth", "trust", "--encoding", "UTF8"])
        .args(["--locale", "C", "--no-sync", "--pgdata"])
        .arg(&data)
        .current_dir(making.path())
        .stdout(Stdio::null());
    let output = command.stderr(Stdio::piped()).output().context("cannot run initdb")?;
    if !output.status.success() {
        bail!("initdb: {}", String::from_utf8_lossy(&output.stderr));
    }
    // Fails if a concurrent test made the same folder first.
    let _ = fs::rename(&data, &done);
    if !done.is_dir() {
        bail!("cannot make {}", done.display());
    }
    Ok(done)
}

/// Makes a folder readable for all and gives it to `user`.
fn hand_over(folder: &Path, user: Option<&User>) -> anyhow::Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    if let Some(User { uid, gid }) = user {
        chown(folder, Some(*uid), Some(*gid)).context("cannot change the owner of a folder")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the system has a shared memory segment that is in use or was not freed.
    fn has(segment: &str) -> bool {
        let list = Command::new("ipcs").arg("-m").output().expect("a part of every system");
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        list.lines().any(|line| line.split_whitespace().nth(1) == Some(segment))
    }

    #[test]
    fn killed_servers_leave_no_shared_memory() {
        let mut server = Postgres::start().expect("it starts");
        let first = server.segment().expect("it runs");
        assert!(has(&first));
        server.kill();
        server.restart().expect("it starts again");
        let second = server.segment().expect("it runs");
        assert!(first == second || !has(&first), "{first}");
        drop(server);
        let started = Instant::now();
        // Its children detach from it a moment later.
        while has(&second) {
            assert!(started.elapsed() < CHILDREN_END_WITHIN, "{second}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
