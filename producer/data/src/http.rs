//! Files of web servers: followed through redirects, continued when the connection breaks.

use std::{
    io::{self, Read},
    path::Path,
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use reqwest::{
    Body, Method, Response, StatusCode, Url,
    header::{
        CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderMap, HeaderValue, IF_RANGE, LAST_MODIFIED,
        LOCATION, RANGE,
    },
};
use tokio::{runtime::Handle, time::timeout};
use tritmill_client::http::{HttpClient, HttpError};

use crate::{Address, DataError, connector, error::BROKEN};

/// Longest wait for the head of an answer, and for the next bytes of it.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Longest wait for the answer to an upload.
const STORED_WITHIN: Duration = Duration::from_secs(24 * 3600);
/// Redirects that are followed.
const REDIRECTS_MAX: usize = 5;
/// Tries to continue without a new byte.
const TRIES_MAX: u32 = 4;
/// Time before the first of them; it doubles.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Whether redirects are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redirects {
    /// To any address: the caller may use all that this process may.
    Follow,
    /// They are errors.
    Refuse,
}

/// A file that is being read.
pub(crate) struct WebFile {
    runtime: Handle,
    client: HttpClient,
    url: Url,
    redirects: Redirects,
    answer: Response,
    piece: Bytes,
    read: u64,
    length: Option<u64>,
    /// A strong `ETag`, or the time of the last change: the rest can be asked for.
    version: Option<String>,
}

impl WebFile {
    /// Asks for a file.
    ///
    /// # Errors
    /// [`DataError`] if the server does not answer with it.
    pub fn open(runtime: &Handle, url: &Url, redirects: Redirects) -> Result<Self, DataError> {
        let client = connector::client()?;
        let answer = runtime.block_on(get(&client, url, redirects, HeaderMap::new()))?;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Err(DataError::NotFound { address: shown(url) }),
            status => return Err(refused(url, status)),
        }
        let headers = answer.headers();
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let etag = text(ETAG).filter(|tag| !tag.starts_with("W/"));
        let version = etag.or_else(|| text(LAST_MODIFIED)).map(str::to_owned);
        let length = text(CONTENT_LENGTH).and_then(|length| length.parse().ok());
        let (runtime, url, piece) = (runtime.clone(), url.clone(), Bytes::new());
        Ok(Self { runtime, client, url, redirects, answer, piece, read: 0, length, version })
    }

    /// Returns what changes when the content does, if the server says it.
    pub fn version(&self) -> Option<String> {
        let version = self.version.as_ref()?;
        Some(format!("{version} {}", self.length.unwrap_or_default()))
    }

    /// Waits for the next bytes; `None` at the end of the file.
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let mut tries = 0;
        loop {
            let next = async { timeout(ANSWER_WITHIN, self.answer.chunk()).await };
            let broken = match self.runtime.block_on(next) {
                Ok(Ok(Some(piece))) => return Ok(Some(piece)),
                Ok(Ok(None)) if self.length.is_none_or(|length| self.read >= length) => {
                    return Ok(None);
                }
                Ok(Ok(None)) => "the connection ended".to_owned(),
                Ok(Err(error)) => HttpError::from(error).to_string(),
                Err(_) => HttpError::Timeout(ANSWER_WITHIN).to_string(),
            };
            let ended = |cause: String| {
                let problem = format!("{cause} after {} bytes", self.read);
                io::Error::new(BROKEN, problem)
            };
            let Some(version) = self.version.clone().filter(|_| tries < TRIES_MAX) else {
                return Err(ended(broken));
            };
            thread::sleep(RETRY_AFTER * (1 << tries));
            tries += 1;
            let mut headers = HeaderMap::new();
            let text = |text: String| HeaderValue::try_from(text).map_err(io::Error::other);
            headers.insert(RANGE, text(format!("bytes={}-", self.read))?);
            headers.insert(IF_RANGE, text(version)?);
            let rest = get(&self.client, &self.url, self.redirects, headers);
            match self.runtime.block_on(rest) {
                Ok(answer) if answer.status() == StatusCode::PARTIAL_CONTENT => {
                    self.answer = answer;
                }
                Ok(answer) if answer.status() == StatusCode::OK => {
                    return Err(ended("it changed, or the server sends no parts of it".to_owned()));
                }
                // Tried again.
                Ok(_) | Err(_) => {}
            }
        }
    }
}

impl Read for WebFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.next()? {
                None => return Ok(0),
                Some(piece) => {
                    self.read += piece.len() as u64;
                    self.piece = piece;
                }
            }
        }
        let count = buffer.len().min(self.piece.len());
        buffer[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}

fn shown(url: &Url) -> String {
    Address::Http(url.clone()).to_string()
}

fn refused(url: &Url, status: StatusCode) -> DataError {
    DataError::Status { address: shown(url), status: status.as_u16() }
}

/// Sends a request for a file, and follows redirects, if they may be followed.
async fn get(
    client: &HttpClient,
    url: &Url,
    redirects: Redirects,
    headers: HeaderMap,
) -> Result<Response, DataError> {
    let mut target = url.clone();
    for _ in 0..=REDIRECTS_MAX {
        let failed = |source| DataError::Http { address: shown(url), source };
        let request = client.request(Method::GET, target.as_str()).map_err(failed)?;
        let request = request.headers(headers.clone());
        let answer = client.send(request, ANSWER_WITHIN).await.map_err(failed)?;
        let to = answer.headers().get(LOCATION).filter(|_| answer.status().is_redirection());
        let Some(to) = to else { return Ok(answer) };
        if redirects == Redirects::Refuse {
            let (address, status) = (shown(url), answer.status().as_u16());
            return Err(DataError::Redirect { address, status });
        }
        let next = to.to_str().ok().and_then(|to| target.join(to).ok());
        target = next.ok_or_else(|| refused(url, answer.status()))?;
    }
    Err(refused(url, StatusCode::LOOP_DETECTED))
}

/// Uploads a file by `PUT`, as presigned URLs of object stores take it.
///
/// # Errors
/// [`DataError`] if the server does not take it.
pub(crate) fn put(runtime: &Handle, url: &Url, file: &Path) -> Result<(), DataError> {
    let unread = |source| DataError::Read { name: file.display().to_string(), source };
    let failed = |source| DataError::Http { address: shown(url), source };
    let client = connector::client()?;
    let bytes = std::fs::metadata(file).map_err(unread)?.len();
    let mut from = std::fs::File::open(file).map_err(unread)?;
    let pieces = futures_util::stream::repeat_with(move || {
        let mut piece = vec![0; 1 << 18];
        from.read(&mut piece).map(|read| {
            piece.truncate(read);
            Bytes::from(piece)
        })
    });
    let pieces = pieces.try_take_while(|piece| std::future::ready(Ok(!piece.is_empty())));
    let request = client.request(Method::PUT, url.as_str()).map_err(failed)?;
    let request = request
        .header(CONTENT_LENGTH, bytes)
        .header(CONTENT_TYPE, "application/octet-stream")
        .body(Body::wrap_stream(pieces));
    let answer = runtime.block_on(client.send(request, STORED_WITHIN)).map_err(failed)?;
    match answer.status() {
        status if status.is_success() => Ok(()),
        status => Err(refused(url, status)),
    }
}
