//! A Postgres of one's own.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};
use tempfile::TempDir;

use crate::{
    Port, Signal,
    process::{Server, User, need, tied},
};

/// A Postgres with its own folder and port; user `postgres`, no password, database `postgres`.
pub struct Postgres {
    server: Option<Server>,
    folder: TempDir,
    port: Port,
    options: Vec<String>,
}

impl Postgres {
    /// Starts an empty one that leaves durability to the system's cache: quick, and a kill of the
    /// server alone loses nothing.
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(&["fsync=off", "full_page_writes=off"])
    }

    /// Starts an empty one with these settings (`name=value`).
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn start_with(settings: &[&str]) -> anyhow::Result<Self> {
        let user = User::unprivileged();
        let folder = tempfile::Builder::new().prefix("tritmill-postgres-").tempdir()?;
        give(folder.path(), user.as_ref())?;
        copy_template(&folder.path().join("data"), user.as_ref())?;
        let options = settings.iter().map(|&setting| setting.to_owned()).collect();
        let mut postgres = Self { server: None, folder, port: Port::claim()?, options };
        postgres.restart()?;
        Ok(postgres)
    }

    /// Starts it again, at the same port and in the same folder.
    ///
    /// # Errors
    /// If it does not start.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.server = None;
        let (port, folder) = (self.port.number(), self.folder.path());
        let data = folder.join("data");
        // Of a server that was killed.
        let _ = fs::remove_file(data.join("postmaster.pid"));
        let mut command = tied(&need("postgres", "postgresql")?, User::unprivileged().as_ref());
        command.arg("-D").arg(&data).args(["-p", &port.to_string(), "-h", "127.0.0.1", "-k", ""]);
        for setting in &self.options {
            command.args(["-c", setting]);
        }
        command.current_dir(folder);
        let is_ready = need("pg_isready", "postgresql")?;
        let ready = || {
            Command::new(&is_ready)
                .args(["-q", "-h", "127.0.0.1", "-p", &port.to_string()])
                .status()
                .is_ok_and(|status| status.success())
        };
        self.server = Some(Server::start(command, folder.join("log"), ready).context("postgres")?);
        Ok(())
    }

    /// Kills it, without a chance to write anything down.
    pub fn kill(&mut self) {
        // Its children see the parent's end by themselves, but not at once.
        self.server = None;
    }

    /// Sends its main process a signal.
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.server.as_ref().context("postgres does not run")?.signal(signal)
    }

    /// Its port on the loopback address.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Where clients find it.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port())
    }

    /// Its process, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Server::pid)
    }
}

/// `initdb` takes seconds, a copy of what it made does not: made once for each version and user.
fn copy_template(to: &Path, user: Option<&User>) -> anyhow::Result<()> {
    let template = template(user)?;
    let status = Command::new("cp").arg("-a").arg(&template).arg(to).status();
    if !status.context("cannot run cp")?.success() {
        bail!("cannot copy {}", template.display());
    }
    Ok(())
}

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
    // Made aside and renamed, so that tests that start together never see half of one.
    let making = tempfile::Builder::new().prefix("tritmill-initdb-").tempdir()?;
    give(making.path(), user)?;
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
    // Fails if another test was faster, which is as good.
    let _ = fs::rename(&data, &done);
    if !done.is_dir() {
        bail!("cannot make {}", done.display());
    }
    Ok(done)
}

/// Makes a folder that both this process and `user` can use.
fn give(folder: &Path, user: Option<&User>) -> anyhow::Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    if let Some(User { uid, gid }) = user {
        chown(folder, Some(*uid), Some(*gid)).context("cannot give a folder away")?;
    }
    Ok(())
}
