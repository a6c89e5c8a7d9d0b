//! Reads the JSON body of a request, within bounds.

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use serde_json::{Map, Value};
use tokio::time::timeout;
use tritmill_client::LINE_BYTES_MAX;

use crate::error::ApiError;

/// How long a body may take to arrive.
const ARRIVES_WITHIN: Duration = Duration::from_secs(30);
/// How much of a refused body is read, and for how long, before its caller is hung up on.
const DISCARD_BYTES_MAX: usize = 32 << 20;
const DISCARD_WITHIN: Duration = Duration::from_secs(5);

/// An object. Its depth is bounded by the parser's own limit.
///
/// # Errors
/// What is wrong with it.
pub(crate) async fn object(body: Body) -> Result<Map<String, Value>, ApiError> {
    let mut body = body.into_data_stream();
    let bytes = match timeout(ARRIVES_WITHIN, whole(&mut body)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(error)) => {
            discard(body).await;
            return Err(error);
        }
        Err(_) => return Err(ApiError::slow()),
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::invalid("invalid_type", "the body must be a JSON object")),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            let message = format!("the body is not JSON: see line {line}, column {column}");
            Err(ApiError::invalid("invalid_json", message))
        }
    }
}

async fn whole(body: &mut BodyDataStream) -> Result<Vec<u8>, ApiError> {
    let mut whole = Vec::new();
    while let Some(piece) = body.next().await {
        let broken = |_| ApiError::invalid("incomplete_body", "the body broke off");
        let piece = piece.map_err(broken)?;
        if whole.len() + piece.len() > LINE_BYTES_MAX {
            return Err(ApiError::too_large("body", LINE_BYTES_MAX as u64));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole)
}

/// Reads on without a purpose, for a while: a caller that still sends would not see its answer, for
/// the system resets a connection that is closed with bytes unread.
pub(crate) async fn discard<E>(mut body: impl Stream<Item = Result<Bytes, E>> + Unpin) {
    let reading = async {
        let mut left = DISCARD_BYTES_MAX;
        while let Some(piece) = body.next().await {
            match piece.map(|piece| left.checked_sub(piece.len())) {
                Ok(Some(rest)) => left = rest,
                Ok(None) | Err(_) => return,
            }
        }
    };
    // In time or not: the answer is the same.
    let _ = timeout(DISCARD_WITHIN, reading).await;
}
