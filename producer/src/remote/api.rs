//! [`Api`]: files and batches of a server, over its HTTP API.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use reqwest::{
    Body, Method, RequestBuilder, Response, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER},
    multipart::{Form, Part},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::{
    fs::File,
    io::AsyncReadExt as _,
    time::{sleep, timeout},
};

use super::answers::{BatchEstimate, LinesAdded, RemoteBatch, RemoteError};
use crate::http::{AddressPolicy, HttpClient, HttpError, check_target};

/// How long a server may send nothing.
const SILENT_MAX: Duration = Duration::from_secs(60);
/// Bytes of an answer that is not a file.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Bytes of a file that are read and sent at a time.
const PIECE_BYTES: usize = 256 << 10;
/// Files on a page of the list.
const PAGE: u32 = 1000;
/// How long a server keeps an uploaded file: longer than any batch window. If the uploader dies,
/// its file is deleted after this time.
const FILE_KEPT_S: u64 = 30 * 86_400;

/// A file or a model; other fields are not used here.
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

/// Parameters of a new batch.
#[derive(Debug, Clone)]
pub struct NewBatch<'a> {
    /// Id of the uploaded file with its lines.
    pub file: &'a str,
    /// The endpoint of all lines.
    pub endpoint: &'a str,
    /// Time limit of the batch, as `24h`.
    pub window: &'a str,
    /// `normal` or `low`.
    pub priority: &'a str,
    /// Another model for lines that have not begun at some time.
    pub escalation: Option<&'a Escalation>,
    /// Two calls with the same key create one batch.
    pub idempotency_key: &'a str,
}

/// Another model for the lines of a batch that have not begun at some time.
#[derive(Debug, Clone, Serialize)]
pub struct Escalation {
    /// The model.
    pub model: String,
    /// Time after the creation of the batch, as `20h`.
    pub after: String,
}

/// Parameters of a new open batch, to which lines are added.
#[derive(Debug, Clone)]
pub struct OpenBatch<'a> {
    /// Id of an uploaded file with its first lines, if it has any. The batch gets a copy.
    pub file: Option<&'a str>,
    /// The endpoint of all lines, or `mixed`.
    pub endpoint: &'a str,
    /// Time limit of the batch, as `24h`.
    pub window: &'a str,
    /// `normal` or `low`.
    pub priority: &'a str,
    /// Two calls with the same key create one batch.
    pub idempotency_key: &'a str,
}

/// Parameters of a new batch after another one, of which its lines are made.
#[derive(Debug, Clone)]
pub struct AfterBatch<'a> {
    /// Id of the earlier batch, which may run.
    pub earlier: &'a str,
    /// The template of the lines: `url`, `body` and perhaps `custom_id`, with `{{ previous.content }}`, `{{ previous.custom_id }}` and
    /// `{{ previous.body.FIELD }}` in their texts.
    pub lines: &'a Value,
    /// The endpoint of all lines, or `mixed`.
    pub endpoint: &'a str,
    /// Time limit from the end of the earlier batch on, as `24h`.
    pub window: &'a str,
    /// `normal` or `low`.
    pub priority: &'a str,
    /// Two calls with the same key create one batch.
    pub idempotency_key: &'a str,
}

/// Parameters of a new batch of which the server reads the lines where they lie.
#[derive(Debug, Clone)]
pub struct UrlBatch<'a> {
    /// `s3://…`, `gs://…`, `az://…` or `https://…`, below what the server's operator allows.
    pub url: &'a str,
    /// `s3://…`, `gs://…` or `az://…`, to which the server writes the answers, too, when the batch ends.
    pub output_url: Option<&'a str>,
    /// How `url` is read: `format`, `split`, `prompt_column`, `id_column` and `body`, the fields of each request; null for lines of a batch.
    pub options: &'a Value,
    /// The endpoint of all lines, or `mixed`.
    pub endpoint: &'a str,
    /// Time limit of the batch, as `24h`.
    pub window: &'a str,
    /// `normal` or `low`.
    pub priority: &'a str,
    /// Two calls with the same key create one batch.
    pub idempotency_key: &'a str,
}

/// Which lines of a batch run again.
#[derive(Debug, Clone, Copy, Default)]
pub struct Retry<'a> {
    /// Names of lines; `None` for all that failed, expired or were cancelled.
    pub custom_ids: Option<&'a [String]>,
    /// Whether named lines that have an answer run again. Their earlier answer is deleted.
    pub force: bool,
    /// Two calls with the same key run the lines again once.
    pub idempotency_key: Option<&'a str>,
}

/// Client of a server's HTTP API.
#[derive(Debug, Clone)]
pub struct Api {
    client: HttpClient,
    base: String,
    authorization: HeaderValue,
}

impl Api {
    /// Creates a client of the server at `http(s)://HOST[:PORT]`, with or without `/v1` behind it.
    ///
    /// # Errors
    /// [`RemoteError::Key`], or [`HttpError::Url`] in a [`RemoteError::Http`].
    pub fn new(client: HttpClient, server: &str, key: &str) -> Result<Self, RemoteError> {
        check_target(server, AddressPolicy::Any)?;
        let base = server.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let authorization = HeaderValue::from_str(&format!("Bearer {key}"));
        let mut authorization = authorization.map_err(|_| RemoteError::Key)?;
        authorization.set_sensitive(true);
        Ok(Self { client, base, authorization })
    }

    /// Returns the names of all models that are served.
    pub async fn models(&self) -> Result<Vec<String>, RemoteError> {
        let listed: Listed = self.get("/v1/models").await?;
        Ok(listed.data.into_iter().map(|model| model.id).collect())
    }

    /// Uploads a file of lines under a name and returns its id. `sent` counts bytes.
    ///
    /// # Errors
    /// [`RemoteError`]; then the server keeps nothing.
    pub async fn upload(
        &self,
        path: &Path,
        filename: &str,
        sent: Arc<AtomicU64>,
    ) -> Result<String, RemoteError> {
        let file = File::open(path).await.map_err(|error| RemoteError::file(path, error))?;
        let size = file.metadata().await.map_err(|error| RemoteError::file(path, error))?.len();
        let part = Part::stream_with_length(counted(file, Arc::clone(&sent)), size)
            .file_name(filename.to_owned())
            .mime_str("application/jsonl")
            .map_err(HttpError::from)?;
        let form = Form::new()
            .percent_encode_noop()
            .text("purpose", "batch")
            .text("expires_after[anchor]", "created_at")
            .text("expires_after[seconds]", FILE_KEPT_S.to_string())
            .part("file", part);
        let request = self.request(Method::POST, "/v1/files")?.multipart(form);
        // No time limit, as long as bytes are sent.
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
            () = stalled => return Err(HttpError::Timeout(SILENT_MAX).into()),
        };
        let uploaded: Named = self.read(answer, "/v1/files").await?;
        Ok(uploaded.id)
    }

    /// Returns the id of a file that was uploaded completely under this name.
    pub async fn uploaded(
        &self,
        filename: &str,
        size_bytes: u64,
    ) -> Result<Option<String>, RemoteError> {
        let mut after = String::new();
        loop {
            let path = format!("/v1/files?purpose=batch&limit={PAGE}&after={after}");
            let listed: Listed = self.get(&path).await?;
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

    /// Creates a batch, or finds the one that was created with the same idempotency key.
    pub async fn create(&self, batch: &NewBatch<'_>) -> Result<RemoteBatch, RemoteError> {
        let body = json!({
            "input_file_id": batch.file,
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
            "priority": batch.priority,
            "escalation": batch.escalation,
        });
        self.create_of(&body, batch.idempotency_key).await
    }

    /// Estimates what a batch would need, without creating it.
    pub async fn estimate(&self, batch: &NewBatch<'_>) -> Result<BatchEstimate, RemoteError> {
        let body = json!({
            "input_file_id": batch.file,
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
        });
        let path = "/v1/batches/estimate";
        let request = self
            .request(Method::POST, path)?
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_string());
        self.read(self.client.send(request, SILENT_MAX).await?, path).await
    }

    /// Creates a batch to which lines are added while it runs, or finds the one that was created with the same idempotency key.
    pub async fn create_open(&self, batch: &OpenBatch<'_>) -> Result<RemoteBatch, RemoteError> {
        let body = json!({
            "open": true,
            "input_file_id": batch.file,
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
            "priority": batch.priority,
        });
        self.create_of(&body, batch.idempotency_key).await
    }

    /// Creates a batch after another one, or finds the one that was created with the same idempotency key. It begins when the earlier
    /// one has ended.
    pub async fn create_after(&self, batch: &AfterBatch<'_>) -> Result<RemoteBatch, RemoteError> {
        let body = json!({
            "after": { "batch_id": batch.earlier, "lines": batch.lines },
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
            "priority": batch.priority,
        });
        self.create_of(&body, batch.idempotency_key).await
    }

    /// Creates a batch of which the server reads the lines where they lie, or finds the one that was created with the same idempotency
    /// key.
    pub async fn create_from_url(&self, batch: &UrlBatch<'_>) -> Result<RemoteBatch, RemoteError> {
        let body = json!({
            "input_url": batch.url,
            "input_options": batch.options,
            "output_url": batch.output_url,
            "endpoint": batch.endpoint,
            "completion_window": batch.window,
            "priority": batch.priority,
        });
        self.create_of(&body, batch.idempotency_key).await
    }

    async fn create_of(
        &self,
        body: &Value,
        idempotency_key: &str,
    ) -> Result<RemoteBatch, RemoteError> {
        let path = "/v1/batches";
        let request = self
            .request(Method::POST, path)?
            .header(CONTENT_TYPE, "application/json")
            .header("idempotency-key", idempotency_key)
            .body(body.to_string());
        self.read(self.client.send(request, SILENT_MAX).await?, path).await
    }

    /// Adds lines to an open batch, all of them or none: at most 10,000, and 8 MiB. A line that the batch has already is not
    /// added again, so that a call may be repeated.
    pub async fn add_lines(
        &self,
        id: &str,
        lines: impl Into<Body>,
    ) -> Result<LinesAdded, RemoteError> {
        let path = format!("/v1/batches/{id}/lines");
        let request = self
            .request(Method::POST, &path)?
            .header(CONTENT_TYPE, "application/x-ndjson")
            .body(lines);
        self.read(self.client.send(request, SILENT_MAX).await?, &path).await
    }

    /// Seals an open batch: no more lines are added, and it ends when its lines have. Sealing again changes nothing.
    pub async fn seal(&self, id: &str) -> Result<RemoteBatch, RemoteError> {
        self.change(id, "seal", json!({}), None).await
    }

    /// Returns the state of a batch.
    pub async fn batch(&self, id: &str) -> Result<RemoteBatch, RemoteError> {
        self.get(&format!("/v1/batches/{id}")).await
    }

    /// Pauses a batch: no line starts, and its deadline does not come nearer. Running lines go to their end, or with
    /// `now` they stop, and go on from their latest checkpoint at the resume.
    pub async fn pause(&self, id: &str, now: bool) -> Result<RemoteBatch, RemoteError> {
        self.change(id, "pause", json!({ "now": now }), None).await
    }

    /// Resumes a paused batch, or opens a cancelled one again, to run its cancelled lines.
    pub async fn resume(&self, id: &str) -> Result<RemoteBatch, RemoteError> {
        self.change(id, "resume", json!({}), None).await
    }

    /// Runs lines of a batch again. A batch that has ended is opened again; its files keep the answers that it has.
    pub async fn retry(&self, id: &str, retry: Retry<'_>) -> Result<RemoteBatch, RemoteError> {
        let body = match retry.custom_ids {
            Some(names) => json!({ "custom_ids": names, "force": retry.force }),
            None => json!({}),
        };
        self.change(id, "retry", body, retry.idempotency_key).await
    }

    async fn change(
        &self,
        id: &str,
        what: &str,
        body: Value,
        idempotency_key: Option<&str>,
    ) -> Result<RemoteBatch, RemoteError> {
        let path = format!("/v1/batches/{id}/{what}");
        let mut request = self
            .request(Method::POST, &path)?
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_string());
        if let Some(key) = idempotency_key {
            request = request.header("idempotency-key", key);
        }
        self.read(self.client.send(request, SILENT_MAX).await?, &path).await
    }

    /// Opens a file's content as a stream.
    pub async fn content(&self, file: &str) -> Result<Content, RemoteError> {
        self.open(&format!("/v1/files/{file}/content")).await
    }

    /// Opens what is at a path as a stream.
    pub(super) async fn open(&self, path: &str) -> Result<Content, RemoteError> {
        let answer = self.client.send(self.request(Method::GET, path)?, SILENT_MAX).await?;
        match answer.status() {
            StatusCode::OK => Ok(Content(answer)),
            status => Err(match self.read::<Value>(answer, path).await {
                Ok(_) => self.unexpected(path, format!("{status} without content")),
                Err(error) => error,
            }),
        }
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, RemoteError> {
        let answer = self.client.send(self.request(Method::GET, path)?, SILENT_MAX).await?;
        self.read(answer, path).await
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, HttpError> {
        let request = self.client.request(method, &format!("{}{path}", self.base))?;
        Ok(request.header(AUTHORIZATION, self.authorization.clone()))
    }

    pub(super) fn unexpected(&self, path: &str, problem: String) -> RemoteError {
        let path = path.split('?').next().unwrap_or(path);
        RemoteError::Unexpected { url: format!("{}{path}", self.base), problem }
    }

    /// Reads the JSON of an answer, or the server's error.
    async fn read<T: DeserializeOwned>(
        &self,
        answer: Response,
        path: &str,
    ) -> Result<T, RemoteError> {
        let (status, headers) = (answer.status(), answer.headers().clone());
        let mut body = Content(answer);
        let mut bytes = Vec::new();
        while let Some(piece) = body.next().await? {
            if bytes.len() + piece.len() > ANSWER_BYTES_MAX {
                let problem = format!("the answer is longer than {ANSWER_BYTES_MAX} bytes");
                return Err(self.unexpected(path, problem));
            }
            bytes.extend_from_slice(&piece);
        }
        if status.is_success() {
            return serde_json::from_slice(&bytes)
                .map_err(|error| self.unexpected(path, format!("{status} with {error}")));
        }
        let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let text = |field: &str| body["error"][field].as_str().map(str::to_owned);
        let Some(message) = text("message") else {
            return Err(self.unexpected(path, status.to_string()));
        };
        let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        Err(RemoteError::Refused {
            status: status.as_u16(),
            code: text("code").unwrap_or_default(),
            message,
            retry_after: seconds.and_then(|s| s.parse().ok()).map(Duration::from_secs),
        })
    }
}

/// The body of an answer, in pieces.
#[derive(Debug)]
pub struct Content(Response);

impl Content {
    /// Returns the next piece, `None` at the end.
    ///
    /// # Errors
    /// [`RemoteError::Http`] if the connection breaks or sends nothing for a minute.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RemoteError> {
        let next = timeout(SILENT_MAX, self.0.chunk()).await;
        let next = next.map_err(|_| HttpError::Timeout(SILENT_MAX))?;
        Ok(next.map_err(HttpError::from)?)
    }
}

/// Returns a file as a request body that counts the bytes it has given.
fn counted(file: File, sent: Arc<AtomicU64>) -> Body {
    Body::wrap_stream(stream::try_unfold((file, sent), async |(mut file, sent)| {
        let mut piece = vec![0; PIECE_BYTES];
        let count = file.read(&mut piece).await?;
        piece.truncate(count);
        sent.fetch_add(count as u64, Ordering::Relaxed);
        Ok::<_, io::Error>((count > 0).then(|| (Bytes::from(piece), (file, sent))))
    }))
}
