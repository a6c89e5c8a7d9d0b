//! A Sentinel for one test.

use std::{fs, time::Duration};

use anyhow::Context as _;
use tempfile::TempDir;

use crate::{
    Port,
    process::{Server, need, tied},
    redis::{command, ping},
};

/// The name under which clients ask for the master.
const SERVICE: &str = "main";

/// A Sentinel that watches one master and promotes a replica when the master is away.
pub struct Sentinel {
    _server: Server,
    port: Port,
    folder: TempDir,
}

impl Sentinel {
    /// Starts a Sentinel for the master at this port, which is away when it does not answer for
    /// `down_after`.
    pub fn start(master: u16, down_after: Duration) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("tritmill-sentinel-").tempdir()?;
        let port = Port::claim()?;
        let number = port.number();
        let settings = format!(
            "port {number}\nbind 127.0.0.1\ndir {}\nsentinel monitor {SERVICE} 127.0.0.1 {master} 1\n\
             sentinel down-after-milliseconds {SERVICE} {}\nsentinel failover-timeout {SERVICE} 3000\n",
            folder.path().display(),
            down_after.as_millis()
        );
        let file = folder.path().join("sentinel.conf");
        fs::write(&file, settings).context("cannot write the settings of a sentinel")?;
        let mut sentinel = tied(&need("redis-server", "redis-server")?, None);
        sentinel.arg(&file).arg("--sentinel");
        let server = Server::start(sentinel, folder.path().join("log"), || ping(number).is_some());
        Ok(Self { _server: server.context("redis-server --sentinel")?, port, folder })
    }

    /// Returns the port of the Sentinel.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Returns the URL for clients of the master.
    pub fn url(&self) -> String {
        format!("redis+sentinel://127.0.0.1:{}/{SERVICE}", self.port())
    }

    /// Returns the port of the present master.
    pub fn master(&self) -> anyhow::Result<u16> {
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE];
        let address = command(self.port(), &words)?;
        let port = address.get(1).and_then(|port| port.parse().ok());
        port.with_context(|| format!("a sentinel answers {address:?}"))
    }

    /// Returns how often a replica became the master.
    pub fn promotions(&self) -> anyhow::Result<usize> {
        let log = fs::read_to_string(self.folder.path().join("log"))?;
        Ok(log.lines().filter(|line| line.contains("+switch-master")).count())
    }
}
