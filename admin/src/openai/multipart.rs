//! Reads multipart bodies in pieces, within bounds.
//!
//! The parser keeps what it cannot make sense of yet. A body that never gets to the point is cut off
//! when it has sent more than [`UNREAD_BYTES_MAX`] since the last piece that was understood.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, BodyDataStream},
    http::{HeaderMap, header},
};
use bytes::Bytes;
use futures_util::Stream;
use multer::{Field, Multipart};
use tokio::time::timeout;

use crate::{error::ApiError, json};

/// Bytes that may come between two pieces that are understood.
const UNREAD_BYTES_MAX: usize = 1 << 20;
/// How long the next piece may take.
const PIECE_WITHIN: Duration = Duration::from_secs(30);
/// Bytes of a value that is no file.
const VALUE_BYTES_MAX: usize = 1024;

/// A form that arrives.
pub(crate) struct Form {
    parts: Multipart<'static>,
    bytes: Bytewise,
}

/// The bytes of a body, shared by the parser and whoever discards what the parser gave up on.
#[derive(Clone)]
struct Bytewise {
    body: Arc<Mutex<BodyDataStream>>,
    unread: Arc<AtomicUsize>,
}

impl Stream for Bytewise {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut body = self.body.lock().unwrap_or_else(PoisonError::into_inner);
        let next = std::task::ready!(Pin::new(&mut *body).poll_next(context));
        let Some(Ok(bytes)) = next else {
            return Poll::Ready(next.map(|error| error.map_err(io::Error::other)));
        };
        let before = self.unread.fetch_add(bytes.len(), Ordering::Relaxed);
        Poll::Ready(Some(match before > UNREAD_BYTES_MAX {
            true => Err(io::Error::other("too many bytes that are no part")),
            false => Ok(bytes),
        }))
    }
}

/// One of its parts.
pub(crate) struct Part {
    field: Field<'static>,
    unread: Arc<AtomicUsize>,
}

fn broken(error: &multer::Error) -> ApiError {
    // Its words quote no content.
    ApiError::invalid("invalid_multipart", format!("the form cannot be read: {error}"))
}

async fn in_time<T>(
    next: impl Future<Output = multer::Result<T>>,
    unread: &AtomicUsize,
) -> Result<T, ApiError> {
    match timeout(PIECE_WITHIN, next).await {
        Ok(Ok(piece)) => {
            unread.store(0, Ordering::Relaxed);
            Ok(piece)
        }
        Ok(Err(error)) => Err(broken(&error)),
        Err(_) => Err(ApiError::slow()),
    }
}

impl Form {
    /// The form in this body.
    ///
    /// # Errors
    /// If the headers do not say that it is one.
    pub fn of(headers: &HeaderMap, body: Body) -> Result<Self, ApiError> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let boundary =
            kind.and_then(|kind| multer::parse_boundary(kind).ok()).ok_or_else(|| {
                let message = "the body must be multipart/form-data with a boundary";
                ApiError::invalid("invalid_content_type", message)
            })?;
        let unread = Arc::new(AtomicUsize::new(0));
        let bytes = Bytewise { body: Arc::new(Mutex::new(body.into_data_stream())), unread };
        Ok(Self { parts: Multipart::new(bytes.clone(), boundary), bytes })
    }

    /// Reads on without a purpose, for a while, so that a caller that still sends gets to read why it
    /// was refused.
    pub async fn discard(self) {
        let Self { parts, bytes } = self;
        drop(parts);
        // Nobody else has it any more, nor counts.
        if let Some(body) = Arc::into_inner(bytes.body) {
            json::discard(body.into_inner().unwrap_or_else(PoisonError::into_inner)).await;
        }
    }

    /// The next part.
    ///
    /// # Errors
    /// If it cannot be read, or does not come.
    pub async fn next(&mut self) -> Result<Option<Part>, ApiError> {
        let field = in_time(self.parts.next_field(), &self.bytes.unread).await?;
        Ok(field.map(|field| Part { field, unread: Arc::clone(&self.bytes.unread) }))
    }
}

impl Part {
    /// The form's name for it.
    pub fn name(&self) -> &str {
        self.field.name().unwrap_or_default()
    }

    /// The name of its file, as far as it is one: no folders, nothing that cannot be shown.
    pub fn filename(&self) -> String {
        let given = self.field.file_name().unwrap_or_default();
        let last = given.rsplit(['/', '\\']).next().unwrap_or_default();
        let name: String = last.chars().filter(|c| !c.is_control()).take(120).collect();
        if name.is_empty() { "file.jsonl".to_owned() } else { name }
    }

    /// Its next piece.
    ///
    /// # Errors
    /// As of [`Form::next`].
    pub async fn piece(&mut self) -> Result<Option<Bytes>, ApiError> {
        in_time(self.field.chunk(), &self.unread).await
    }

    /// All of it, as a short text.
    ///
    /// # Errors
    /// As of [`Form::next`], and if it is none.
    pub async fn value(mut self) -> Result<String, ApiError> {
        let mut value = Vec::new();
        while let Some(piece) = self.piece().await? {
            value.extend_from_slice(&piece);
            if value.len() > VALUE_BYTES_MAX {
                let message = format!("the value is longer than {VALUE_BYTES_MAX} bytes");
                return Err(ApiError::invalid("invalid_value", message).at(self.name()));
            }
        }
        let refuse = |_| ApiError::invalid("invalid_value", "the value is not UTF-8");
        String::from_utf8(value).map_err(|error| refuse(error).at(self.name()))
    }
}
