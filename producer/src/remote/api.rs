//! [`Api`]: files and batches of a server, by its HTTP API.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{sleep, timeout},
};

use super::answers::{RemoteBatch, RemoteError};
use crate::http::{HttpClient, HttpError};

/// How long a server may keep silent.
const SILENT_MAX: Duration = Duration::from_secs(60);
/// Bytes of an answer that is no file.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Bytes of a file that travel together, and how many such wait for the connection.
const PIECE_BYTES: usize = 256 << 10;
const PIECES_AHEAD: usize = 4;
/// Files of a page of the list.
const PAGE: u32 = 1000;
/// How long a server keeps a file that was uploaded: longer than any window of a batch, so that one
/// whose uploader died does not stay.
const FILE_KEPT_S: u64 = 30 * 86_400;
/// Separates the parts of a form. No line of JSON has it: it begins with hyphens.
const BOUNDARY: &str = "----tritmill-part";

type AnyBody = UnsyncBoxBody<Bytes, io::Error>;

/// A file or a model, of which the name is all that matters here.
#[derive(Debug, Deserialize)]
struct Named {
    id: String,
    #[serde(default)]
    filename: String,
    #[serde(default)]
    bytes: u64,
}

#[derive(Debug, Deserialize)]
struct Listed {
    data: Vec<Named>,
    #[serde(default)]
    has_more: bool,
}

/// What is asked of a batch.
#[derive(Debug, Clone)]
pub struct NewBatch<'a> {
    /// Its lines.
    pub file: &'a str,
    /// The endpoint of all of them.
    pub endpoint: &'a str,
    /// How long it may take, as `24h`.
    pub window: &'a str,
    /// `normal` or `low`.
    pub priority: &'a str,
    /// Asking twice under one key makes one batch.
    pub idempotency_key: &'a str,
}

/// A way to a server.
#[derive(Debug, Clone)]
pub struct Api {
    client: HttpClient,
    base: String,
    authorization: HeaderValue,
}

impl Api {
    /// To the server at `http(s)://HOST[:PORT]`, with or without `/v1` behind it.
    ///
    /// # Errors
    /// [`RemoteError::Key`]; an address that is none shows with the first call.
    pub fn new(client: HttpClient, server: &str, key: &str) -> Result<Self, RemoteError> {
        let base = server.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let authorization = HeaderValue::from_str(&format!("Bearer {key}"));
        let mut authorization = authorization.map_err(|_| RemoteError::Key)?;
        authorization.set_sensitive(true);
        Ok(Self { client, base, authorization })
    }

    /// The names of all models that are served.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn models(&self) -> Result<Vec<String>, RemoteError> {
        let listed: Listed = self.ask("/v1/models").await?;
        Ok(listed.data.into_iter().map(|model| model.id).collect())
    }

    /// Uploads a file of lines under a name; its id. `sent` counts bytes.
    ///
    /// # Errors
    /// [`RemoteError`]; then the server keeps nothing.
    pub async fn upload(
        &self,
        path: &Path,
        filename: &str,
        sent: Arc<AtomicU64>,
    ) -> Result<String, RemoteError> {
        let field = |name: &str, value: &str| {
            format!(
                "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
            )
        };
        let head = [
            field("purpose", "batch"),
            field("expires_after[anchor]", "created_at"),
            field("expires_after[seconds]", &FILE_KEPT_S.to_string()),
            format!(
                "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; \
                 filename=\"{filename}\"\r\nContent-Type: application/jsonl\r\n\r\n"
            ),
        ]
        .concat();
        let tail = format!("\r\n--{BOUNDARY}--\r\n");
        let file = File::open(path).map_err(|error| RemoteError::file(path, error))?;
        let size = file.metadata().map_err(|error| RemoteError::file(path, error))?.len();
        let pieces = pieces(head.clone(), file, tail.clone(), Arc::clone(&sent));
        let frames = stream::unfold(pieces, async |mut pieces| {
            Some((pieces.recv().await?.map(Frame::data), pieces))
        });
        let kind = format!("multipart/form-data; boundary={BOUNDARY}");
        let request = Request::post(format!("{}/v1/files", self.base))
            .header(CONTENT_TYPE, kind)
            .header(CONTENT_LENGTH, size + (head.len() + tail.len()) as u64);
        let request = self.request(request, StreamBody::new(frames).boxed_unsync())?;
        // As long as it takes, if only something goes through.
        let answer = self.client.send(request, Duration::MAX);
        let stalled = async {
            let mut before = u64::MAX;
            loop {
                let now = sent.load(Ordering::Relaxed);
                if std::mem::replace(&mut before, now) == now {
                    return;
                }
                sleep(SILENT_MAX).await;
            }
        };
        let answer = tokio::select! {
            answer = answer => answer?,
            () = stalled => return Err(HttpError::Silent(SILENT_MAX).into()),
        };
        let uploaded: Named = self.read(answer, "/v1/files").await?;
        Ok(uploaded.id)
    }

    /// The id of a file that was uploaded under this name, if it is there whole.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn uploaded(
        &self,
        filename: &str,
        size_bytes: u64,
    ) -> Result<Option<String>, RemoteError> {
        let mut after = String::new();
        loop {
            let path = format!("/v1/files?purpose=batch&limit={PAGE}&after={after}");
            let listed: Listed = self.ask(&path).await?;
            let is_it = |file: &&Named| file.filename == filename && file.bytes == size_bytes;
            if let Some(found) = listed.data.iter().find(is_it) {
                return Ok(Some(found.id.clone()));
            }
            match listed.data.last() {
                Some(last) if listed.has_more => after.clone_from(&last.id),
                _ => return Ok(None),
            }
        }
    }

    /// Makes a batch, or finds the one that was made under the same key.
    ///
    /// # Errors
    /// [`RemoteError`]; the same call may be repeated.
    pub async fn create(&self, batch: &NewBatch<'_>) -> Result<RemoteBatch, RemoteError> {
        let body = json!({
            "input_file_id": batch.file,
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
            "priority": batch.priority,
        });
        let path = "/v1/batches";
        let request = Request::post(format!("{}{path}", self.base))
            .header(CONTENT_TYPE, "application/json")
            .header("idempotency-key", batch.idempotency_key);
        let request = self.request(request, full(body.to_string()))?;
        let answer = self.client.send(request, SILENT_MAX).await?;
        self.read(answer, path).await
    }

    /// Where a batch is.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn batch(&self, id: &str) -> Result<RemoteBatch, RemoteError> {
        self.ask(&format!("/v1/batches/{id}")).await
    }

    /// A file's content, as a stream of pieces of known length in all.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn content(&self, file: &str) -> Result<Content, RemoteError> {
        let path = format!("/v1/files/{file}/content");
        let request = self.request(Request::get(format!("{}{path}", self.base)), full(""))?;
        let answer = self.client.send(request, SILENT_MAX).await?;
        match answer.status() {
            StatusCode::OK => Ok(Content(answer.into_body())),
            _ => Err(self.read::<Value>(answer, &path).await.err().unwrap_or_else(|| {
                let problem = "no file came".to_owned();
                RemoteError::Stranger { url: format!("{}{path}", self.base), problem }
            })),
        }
    }

    async fn ask<T: DeserializeOwned>(&self, path: &str) -> Result<T, RemoteError> {
        let request = Request::builder().method(Method::GET).uri(format!("{}{path}", self.base));
        let request = self.request(request, full(""))?;
        let answer = self.client.send(request, SILENT_MAX).await?;
        self.read(answer, path).await
    }

    fn request(
        &self,
        request: hyper::http::request::Builder,
        body: AnyBody,
    ) -> Result<Request<AnyBody>, RemoteError> {
        let request = request.header(AUTHORIZATION, self.authorization.clone());
        request.body(body).map_err(|_| HttpError::Address(self.base.clone()).into())
    }

    /// The JSON that came, or why none did.
    async fn read<T: DeserializeOwned>(
        &self,
        answer: Response<Incoming>,
        path: &str,
    ) -> Result<T, RemoteError> {
        let stranger = |problem: String| RemoteError::Stranger {
            url: format!("{}{}", self.base, path.split('?').next().unwrap_or(path)),
            problem,
        };
        let (head, body) = answer.into_parts();
        let mut body = Content(body);
        let mut bytes = Vec::new();
        while let Some(piece) = body.next().await? {
            if bytes.len() + piece.len() > ANSWER_BYTES_MAX {
                return Err(stranger("its answer has no end".to_owned()));
            }
            bytes.extend_from_slice(&piece);
        }
        if head.status.is_success() {
            return serde_json::from_slice(&bytes)
                .map_err(|_| stranger(format!("{} without what it should have", head.status)));
        }
        let said: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let text = |field: &str| said["error"][field].as_str().map(str::to_owned);
        let Some(message) = text("message") else { return Err(stranger(head.status.to_string())) };
        let seconds = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        Err(RemoteError::Refused {
            status: head.status.as_u16(),
            code: text("code").unwrap_or_default(),
            message,
            retry_after: seconds.and_then(|s| s.parse().ok()).map(Duration::from_secs),
        })
    }
}

/// A body that comes in pieces.
pub struct Content(Incoming);

impl Content {
    /// The next piece; none at the end.
    ///
    /// # Errors
    /// [`RemoteError`] if it breaks off.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RemoteError> {
        loop {
            let next = timeout(SILENT_MAX, self.0.frame()).await;
            let Some(frame) = next.map_err(|_| HttpError::Silent(SILENT_MAX))? else {
                return Ok(None);
            };
            // Trailers are nothing to anybody here.
            if let Ok(piece) = frame.map_err(HttpError::from)?.into_data() {
                return Ok(Some(piece));
            }
        }
    }
}

fn full(text: impl Into<Bytes>) -> AnyBody {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// Head, file and tail in pieces, read on a thread of its own.
fn pieces(
    head: String,
    mut file: File,
    tail: String,
    sent: Arc<AtomicU64>,
) -> mpsc::Receiver<io::Result<Bytes>> {
    let (tell, told) = mpsc::channel(PIECES_AHEAD);
    spawn_blocking(move || {
        // Whoever listens may be gone: then there is nothing to do.
        let mut ahead = tell.blocking_send(Ok(Bytes::from(head)));
        while ahead.is_ok() {
            let mut piece = vec![0; PIECE_BYTES];
            let read = file.read(&mut piece);
            let is_over = !matches!(read, Ok(count) if count > 0);
            let piece = read.map(|count| {
                piece.truncate(count);
                sent.fetch_add(count as u64, Ordering::Relaxed);
                if count == 0 { Bytes::from(tail.clone()) } else { Bytes::from(piece) }
            });
            ahead = tell.blocking_send(piece);
            if is_over {
                return;
            }
        }
    });
    told
}
