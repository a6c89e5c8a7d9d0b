//! A Redis for one test.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, bail};
use tempfile::TempDir;

use crate::{
    Port, Signal,
    process::{Server, need, tied},
};

/// A Redis with its own folder and port.
pub struct Redis {
    server: Option<Server>,
    folder: TempDir,
    port: Port,
    options: Vec<String>,
}

impl Redis {
    /// Starts a server that keeps nothing on disk.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(&["--save", "", "--appendonly", "no"])
    }

    /// Starts a server that writes every command to a file and reads it after a restart.
    pub fn start_durable() -> anyhow::Result<Self> {
        Self::start_with(&["--save", "", "--appendonly", "yes", "--appendfsync", "always"])
    }

    /// Starts a server with these command-line options.
    pub fn start_with(options: &[&str]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("tritmill-redis-").tempdir()?;
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut redis = Self { server: None, folder, port: Port::claim()?, options };
        redis.restart()?;
        Ok(redis)
    }

    /// Starts the server again with the same port and folder.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.restart_with(&[])
    }

    /// Starts the server again, this time with these options as well.
    pub fn restart_with(&mut self, options: &[&str]) -> anyhow::Result<()> {
        self.server = None;
        let (port, folder) = (self.port.number(), self.folder.path());
        let mut command = tied(&need("redis-server", "redis-server")?, None);
        command
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"])
            .arg(folder)
            .args(["--maxmemory-policy", "noeviction", "--daemonize", "no"])
            .args(&self.options)
            .args(options);
        let server = Server::start(command, folder.join("log"), || ping(port).is_some());
        self.server = Some(server.context("redis-server")?);
        Ok(())
    }

    /// Kills the server; it cannot save anything more.
    pub fn kill(&mut self) {
        self.server = None;
    }

    /// Deletes the server's files, so that it is empty after the next restart.
    pub fn delete_data(&self) -> anyhow::Result<()> {
        let files = self.folder.path().join("appendonlydir");
        if files.is_dir() {
            std::fs::remove_dir_all(files)?;
        }
        // Written by replicas.
        let snapshot = self.folder.path().join("dump.rdb");
        if snapshot.is_file() {
            std::fs::remove_file(snapshot)?;
        }
        Ok(())
    }

    /// Sends the server a command and returns the lines of its reply that are not empty.
    ///
    /// # Errors
    /// Also if the reply is an error.
    pub fn command(&self, words: &[&str]) -> anyhow::Result<Vec<String>> {
        command(self.port(), words)
    }

    /// Sends the server a signal.
    ///
    /// # Errors
    /// If the server does not run.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.server.as_ref().context("redis does not run")?.signal(signal)
    }

    /// Returns the server's port on the loopback address.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port())
    }

    /// Returns the process id, if the server runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Server::pid)
    }
}

/// Sends a command with `redis-cli`.
pub(crate) fn command(port: u16, words: &[&str]) -> anyhow::Result<Vec<String>> {
    let output = Command::new(need("redis-cli", "redis-tools")?)
        .args(["-e", "-h", "127.0.0.1", "-p", &port.to_string()])
        .args(words)
        .output()
        .context("cannot run redis-cli")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("redis answers {:?}: {} {}", words, text.trim(), error.trim());
    }
    Ok(text.lines().map(str::to_owned).filter(|line| !line.is_empty()).collect())
}

/// Returns whether a Redis at this port answers PING, which it does once it has loaded its files.
pub(crate) fn ping(port: u16) -> Option<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    stream.write_all(b"PING\r\n").ok()?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).ok()?;
    (&answer == b"+PONG").then_some(())
}
