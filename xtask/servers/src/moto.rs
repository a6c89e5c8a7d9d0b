//! An S3 server for one test: moto's.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use tempfile::TempDir;

use crate::{
    Port,
    process::{Server, find, tied},
};

/// An S3 server. It takes any credentials until [`require_rights`](Self::require_rights).
pub struct Moto {
    _server: Server,
    _folder: TempDir,
    port: Port,
}

impl Moto {
    /// Returns the program, if `cargo xtask test` or the user installed it.
    pub fn program() -> Option<PathBuf> {
        let installed =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/moto/bin/moto_server");
        Some(installed).filter(|path| path.is_file()).or_else(|| find("moto_server"))
    }

    /// Starts a server with these buckets.
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn start(buckets: &[&str]) -> anyhow::Result<Self> {
        let program = Self::program().context("moto_server is not installed")?;
        let folder = tempfile::Builder::new().prefix("tritmill-moto-").tempdir()?;
        let port = Port::claim()?;
        let mut command = tied(&program, None);
        command.args(["-H", "127.0.0.1", "-p", &port.number().to_string()]);
        let number = port.number();
        let server = Server::start(command, folder.path().join("log"), || {
            call(number, "GET", "/moto-api/data.json", "").is_ok()
        });
        let moto = Self { _server: server.context("moto_server")?, _folder: folder, port };
        for bucket in buckets {
            call(number, "PUT", &format!("/{bucket}"), "")?;
        }
        Ok(moto)
    }

    /// Writes an object, named with its bucket as `BUCKET/KEY`.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn put(&self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        send(self.port.number(), "PUT", &format!("/{name}"), content).map(drop)
    }

    /// Reads an object, named with its bucket as `BUCKET/KEY`.
    ///
    /// # Errors
    /// If it is not there, or the server does not answer.
    pub fn get(&self, name: &str) -> anyhow::Result<Vec<u8>> {
        send(self.port.number(), "GET", &format!("/{name}"), b"")
    }

    /// From now on refuses every caller: there are no users with rights.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn require_rights(&self) -> anyhow::Result<()> {
        call(self.port.number(), "POST", "/moto-api/reset-auth", "0")
    }

    /// Returns the environment of a client.
    pub fn variables(&self) -> [(&'static str, String); 4] {
        [
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", self.port.number())),
            ("AWS_ACCESS_KEY_ID", "test".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }
}

fn call(port: u16, method: &str, path: &str, body: &str) -> anyhow::Result<()> {
    send(port, method, path, body.as_bytes()).map(drop)
}

/// Sends a request and waits for an answer that is a success. Returns its body.
fn send(port: u16, method: &str, path: &str, body: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\
         Content-Type: text/plain\r\nConnection: close\r\n\r\n"
    )?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let content = answer.split_off(end.map_or(answer.len(), |end| end + 4));
    let head = String::from_utf8_lossy(&answer);
    let first = head.lines().next().unwrap_or_default();
    if !first.contains(" 200 ") {
        bail!("moto answers {method} {path}: {first}");
    }
    Ok(content)
}
