//! A web server for one test, with the faults that the test asks for.

use std::{
    collections::HashMap,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

/// A file of a [`Web`] server.
#[derive(Debug, Clone, Default)]
pub struct WebFile {
    /// Its content.
    pub content: Vec<u8>,
    /// Its `ETag`. With one, the rest of the file can be asked for.
    pub tag: Option<&'static str>,
    /// Another status than 200, without the content.
    pub status: Option<&'static str>,
    /// Where a redirect leads.
    pub location: Option<String>,
    /// Every answer ends after this many bytes.
    pub breaks_after: Option<usize>,
    /// Every answer stands still after this many bytes, until [`Web::release`].
    pub holds_after: Option<usize>,
}

impl WebFile {
    /// A file that is sent as a whole.
    pub fn new(content: impl Into<Vec<u8>>) -> Self {
        Self { content: content.into(), ..Self::default() }
    }
}

#[derive(Default)]
struct State {
    files: HashMap<String, WebFile>,
    calls: HashMap<String, usize>,
    held: usize,
    is_released: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    released: Condvar,
}

/// A web server. Its threads end with the process.
pub struct Web {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Web {
    /// Starts a server.
    ///
    /// # Errors
    /// If no port is free.
    pub fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::<Shared>::default();
        let served = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&served);
                // The client may have gone.
                thread::spawn(move || answer(stream, &shared).ok());
            }
        });
        Ok(Self { address, shared })
    }

    /// Returns the URL of a path, which begins with `/`.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Serves a file at a path.
    pub fn put(&self, path: &str, file: WebFile) {
        self.with(|state| state.files.insert(path.to_owned(), file));
    }

    /// Returns how often a path was asked for.
    pub fn calls(&self, path: &str) -> usize {
        self.with(|state| state.calls.get(path).copied().unwrap_or_default())
    }

    /// Returns how many answers stand still.
    pub fn held(&self) -> usize {
        self.with(|state| state.held)
    }

    /// Lets the answers that stand still go on.
    pub fn release(&self) {
        self.with(|state| state.is_released = true);
        self.shared.released.notify_all();
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.shared.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn answer(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut head = BufReader::new(stream.try_clone()?).lines();
    let first = head.next().transpose()?.unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut from = 0;
    for line in head.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        if let Some(range) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse().unwrap_or_default();
        }
    }
    let file = {
        let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state.calls.entry(path.clone()).or_default() += 1;
        state.files.get(&path).cloned()
    };
    let missing = || WebFile { status: Some("404 Not Found"), ..WebFile::default() };
    let file = file.unwrap_or_else(missing);
    let rest = match file.status {
        Some(_) => &[][..],
        None => file.content.get(from..).unwrap_or_default(),
    };
    let whole = if from > 0 && file.tag.is_some() { "206 Partial Content" } else { "200 OK" };
    let rest = if whole == "200 OK" && file.status.is_none() { &file.content } else { rest };
    let status = file.status.unwrap_or(whole);
    let tag = file.tag.map_or(String::new(), |tag| format!("ETag: \"{tag}\"\r\n"));
    let location = file.location.map_or(String::new(), |to| format!("Location: {to}\r\n"));
    let length = rest.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{tag}{location}\r\n"
    )?;
    let rest = &rest[..length.min(file.breaks_after.unwrap_or(usize::MAX))];
    let (now, later) = rest.split_at(rest.len().min(file.holds_after.unwrap_or(usize::MAX)));
    stream.write_all(now)?;
    if !later.is_empty() {
        let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.held += 1;
        while !state.is_released {
            state = shared.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        stream.write_all(later)?;
    }
    Ok(())
}
