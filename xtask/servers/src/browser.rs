//! A browser of a test's own: chromedriver, which starts Chromium when it is asked to.

use std::{os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use anyhow::Context as _;
use tempfile::TempDir;

use crate::{
    Port,
    process::{Server, find, need, tied},
};

/// A chromedriver, with the Chromium that it starts; both end when it is dropped.
pub struct Browser {
    server: Server,
    port: Port,
    chromium: PathBuf,
    _folder: TempDir,
}

impl Browser {
    /// Starts one.
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("tritmill-browser-").tempdir()?;
        let (port, log) = (Port::claim()?, folder.path().join("log"));
        let chromium = need("chromium", "chromium")?;
        let mut command = tied(&need("chromedriver", "chromium-driver")?, None);
        // Chromium is in its group, so that none is left behind.
        command
            .arg(format!("--port={}", port.number()))
            .env("TMPDIR", folder.path())
            .process_group(0);
        let is_up = || std::net::TcpStream::connect(("127.0.0.1", port.number())).is_ok();
        let server = Server::start(command, log, is_up).context("chromedriver")?;
        Ok(Self { server, port, chromium, _folder: folder })
    }

    /// Whether this machine has one.
    pub fn is_installed() -> bool {
        find("chromium").is_some() && find("chromedriver").is_some()
    }

    /// Where WebDriver is spoken.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number())
    }

    /// The browser's program.
    pub fn chromium(&self) -> &PathBuf {
        &self.chromium
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Fails only for a group that has ended.
        let group = format!("-{}", self.server.pid());
        let _ = Command::new("kill").args(["-s", "KILL", "--", &group]).status();
    }
}
