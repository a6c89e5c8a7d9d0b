//! The metrics page of a process on this machine.

use std::{
    collections::HashMap,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

const READ_LIMIT: Duration = Duration::from_millis(500);

/// Returns the values without labels, by name; `None` if the process does not answer.
pub fn metrics(address: &str) -> Option<HashMap<String, u64>> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(READ_LIMIT)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n").ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    let pairs = page.lines().filter_map(|line| line.split_once(' '));
    Some(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
}
