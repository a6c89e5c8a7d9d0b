//! A browser for one test: chromedriver, which starts Chromium on request.

use std::{os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use anyhow::Context as _;
use tempfile::TempDir;

use crate::{
    Port,
    process::{Server, find, need, tied},
};

/// A chromedriver with the Chromium that it starts; dropping it ends both.
pub struct Browser {
    server: Server,
    port: Port,
    chromium: PathBuf,
    _folder: TempDir,
}

impl Browser {
    /// Starts chromedriver.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("tritmill-browser-").tempdir()?;
        let (port, log) = (Port::claim()?, folder.path().join("log"));
        let chromium = need("chromium", "chromium")?;
        let mut command = tied(&need("chromedriver", "chromium-driver")?, None);
        // Chromium runs in the same process group, which is killed at the end.
        command
            .arg(format!("--port={}", port.number()))
            .env("TMPDIR", folder.path())
            .process_group(0);
        let is_up = || std::net::TcpStream::connect(("127.0.0.1", port.number())).is_ok();
        let server = Server::start(command, log, is_up).context("chromedriver")?;
        Ok(Self { server, port, chromium, _folder: folder })
    }

    /// Returns whether this machine has both programs.
    pub fn is_installed() -> bool {
        find("chromium").is_some() && find("chromedriver").is_some()
    }

    /// Returns the URL of the WebDriver interface.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number())
    }

    /// Returns the path of the browser's program.
    pub fn chromium(&self) -> &PathBuf {
        &self.chromium
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Fails only for a group that has exited.
        let group = format!("-{}", self.server.pid());
        let _ = Command::new("kill").args(["-s", "KILL", "--", &group]).status();
    }
}
