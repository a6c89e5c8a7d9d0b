//! Pages that a process on this machine serves: its health and metrics.

use std::{
    collections::HashMap,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

const READ_LIMIT: Duration = Duration::from_millis(500);

/// Returns the answer to a GET, with its head; `None` if none comes.
pub fn get(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(READ_LIMIT)).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    Some(page)
}

/// Returns the values without labels on the metrics page of a process, by name; nothing if it does not
/// answer.
pub fn metrics(address: &str) -> HashMap<String, u64> {
    let page = get(address, "/metrics").unwrap_or_default();
    let pairs = page.lines().filter_map(|line| line.split_once(' '));
    pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect()
}
