//! Reads multipart bodies in chunks, within bounds.
//!
//! The parser buffers bytes that it cannot parse yet. A body is rejected when more than
//! [`UNPARSED_BYTES_MAX`] arrived since the last parsed chunk.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use axum::{
    body::{Body, BodyDataStream},
    http::{HeaderMap, header},
};
use bytes::Bytes;
use futures_util::Stream;
use multer::{Field, Multipart};

use crate::{ApiError, Exchange, extract};

/// Most bytes between two parsed chunks.
const UNPARSED_BYTES_MAX: usize = 1 << 20;
/// Most bytes of a value other than a file.
const VALUE_BYTES_MAX: usize = 1024;

/// A form that is being received.
pub(crate) struct Form {
    parts: Multipart<'static>,
    bytes: SharedBody,
}

/// The bytes of a body, shared by the parser and [`Form::drain`].
#[derive(Clone)]
struct SharedBody {
    body: Arc<Mutex<BodyDataStream>>,
    unparsed: Arc<AtomicUsize>,
}

impl Stream for SharedBody {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut body = self.body.lock().unwrap_or_else(PoisonError::into_inner);
        let next = std::task::ready!(Pin::new(&mut *body).poll_next(context));
        let Some(Ok(bytes)) = next else {
            return Poll::Ready(next.map(|error| error.map_err(io::Error::other)));
        };
        let before = self.unparsed.fetch_add(bytes.len(), Ordering::Relaxed);
        Poll::Ready(Some(match before > UNPARSED_BYTES_MAX {
            true => Err(io::Error::other("too many bytes outside of a part")),
            false => Ok(bytes),
        }))
    }
}

/// A part of a form.
pub(crate) struct Part {
    field: Field<'static>,
    unparsed: Arc<AtomicUsize>,
}

/// Returns the next value of the parser.
fn parsed<T>(next: multer::Result<T>, unparsed: &AtomicUsize) -> Result<T, ApiError> {
    let value = next.map_err(|error| {
        // The parser's messages quote no content.
        let invalid = || ApiError::invalid("invalid_multipart", format!("invalid form: {error}"));
        ApiError::of_body(&error).unwrap_or_else(invalid)
    })?;
    unparsed.store(0, Ordering::Relaxed);
    Ok(value)
}

impl Form {
    /// A form from a request's headers and body. A large file may take long to arrive.
    pub fn new(exchange: &Exchange, headers: &HeaderMap, body: Body) -> Result<Self, ApiError> {
        exchange.expect_upload();
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let boundary =
            kind.and_then(|kind| multer::parse_boundary(kind).ok()).ok_or_else(|| {
                let message = "the body must be multipart/form-data with a boundary";
                ApiError::invalid("invalid_content_type", message)
            })?;
        let unparsed = Arc::new(AtomicUsize::new(0));
        let bytes = SharedBody { body: Arc::new(Mutex::new(body.into_data_stream())), unparsed };
        Ok(Self { parts: Multipart::new(bytes.clone(), boundary), bytes })
    }

    /// Discards the rest of the body, within bounds, so that a caller that is still sending receives the
    /// error response.
    pub async fn drain(self) {
        let Self { parts, bytes } = self;
        drop(parts);
        // Always succeeds: the parser held the other reference.
        if let Some(body) = Arc::into_inner(bytes.body) {
            extract::drain(body.into_inner().unwrap_or_else(PoisonError::into_inner)).await;
        }
    }

    /// Returns the next part.
    pub async fn next(&mut self) -> Result<Option<Part>, ApiError> {
        let field = parsed(self.parts.next_field().await, &self.bytes.unparsed)?;
        Ok(field.map(|field| Part { field, unparsed: Arc::clone(&self.bytes.unparsed) }))
    }
}

impl Part {
    /// Name of the field.
    pub fn name(&self) -> &str {
        self.field.name().unwrap_or_default()
    }

    /// Name of the file, without folders and control characters.
    pub fn filename(&self) -> String {
        let given = self.field.file_name().unwrap_or_default();
        let last = given.rsplit(['/', '\\']).next().unwrap_or_default();
        let name: String = last.chars().filter(|c| !c.is_control()).take(120).collect();
        if name.is_empty() { "file.jsonl".to_owned() } else { name }
    }

    /// Returns the next chunk of the content.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ApiError> {
        parsed(self.field.chunk().await, &self.unparsed)
    }

    /// Returns the whole content as a short text.
    pub async fn value(mut self) -> Result<String, ApiError> {
        let mut value = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            value.extend_from_slice(&chunk);
            if value.len() > VALUE_BYTES_MAX {
                let message = format!("the value is longer than {VALUE_BYTES_MAX} bytes");
                return Err(ApiError::invalid_value(self.name(), message));
            }
        }
        let invalid = |_| ApiError::invalid_value(self.name(), "the value is not UTF-8");
        String::from_utf8(value).map_err(invalid)
    }
}
