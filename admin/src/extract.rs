//! Extractors for queries and JSON bodies, with bounds and [`ApiError`]s.

use std::{panic::resume_unwind, time::Duration};

use axum::{
    body::BodyDataStream,
    extract::{FromRequest, FromRequestParts, Query, Request},
    http::request::Parts,
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::{task::spawn_blocking, time::timeout};
use tritmill_client::{FieldError, LINE_BYTES_MAX};

use crate::ApiError;

/// How much of a rejected body is still read, and for how long, before the connection is closed.
const DRAIN_BYTES_MAX: usize = 32 << 20;
const DRAIN_WITHIN: Duration = Duration::from_secs(5);

/// The query string.
pub(crate) struct QueryParams<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(query)) => Ok(Self(query)),
            Err(rejection) => Err(ApiError::invalid("invalid_query", rejection.body_text())),
        }
    }
}

/// A body that is a JSON object. The parser bounds its depth.
pub(crate) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        object(&whole(request).await?).and_then(from_map).map(Self)
    }
}

/// A body that is a JSON object, or empty: then no field is set.
pub(crate) struct OptionalBody(pub Map<String, Value>);

impl<S: Sync> FromRequest<S> for OptionalBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        match whole(request).await? {
            bytes if bytes.is_empty() => Ok(Self(Map::new())),
            bytes => object(&bytes).map(Self),
        }
    }
}

/// Reads the body of a request.
async fn whole(request: Request) -> Result<Vec<u8>, ApiError> {
    bounded(request, LINE_BYTES_MAX).await
}

/// Reads the body of a request, of which the size is bounded.
pub(crate) async fn bounded(request: Request, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    let mut body = request.into_body().into_data_stream();
    match read(&mut body, bytes_max).await {
        Ok(bytes) => Ok(bytes),
        Err(error) => {
            drain(body).await;
            Err(error)
        }
    }
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::invalid("invalid_type", "the body must be a JSON object")),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            let message = format!("invalid JSON at line {line}, column {column}");
            Err(ApiError::invalid("invalid_json", message))
        }
    }
}

/// Parses a request where it holds up no other: a schema can take a second to check.
pub(crate) async fn parsed<T: Send + 'static>(
    parse: impl FnOnce() -> Result<T, FieldError> + Send + 'static,
) -> Result<T, ApiError> {
    Ok(blocking(parse).await?)
}

/// Runs work that can take long on a thread that answers no calls.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.unwrap_or_else(|ended| resume_unwind(ended.into_panic()))
}

/// Deserializes a JSON object.
pub(crate) fn from_map<T: DeserializeOwned>(map: Map<String, Value>) -> Result<T, ApiError> {
    serde_json::from_value(Value::Object(map))
        .map_err(|error| ApiError::invalid("invalid_value", format!("invalid body: {error}")))
}

/// Deserializes the parameters of a URL.
pub(crate) fn from_query<T: DeserializeOwned>(query: Map<String, Value>) -> Result<T, ApiError> {
    let invalid = |error| ApiError::invalid("invalid_query", format!("invalid query: {error}"));
    serde_json::from_value(Value::Object(query)).map_err(invalid)
}

async fn read(body: &mut BodyDataStream, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = body.next().await {
        let broken = || ApiError::invalid("incomplete_body", "the body ended early");
        let chunk = chunk.map_err(|error| ApiError::of_body(&error).unwrap_or_else(broken))?;
        if bytes.len() + chunk.len() > bytes_max {
            return Err(ApiError::too_large("body", bytes_max as u64));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// Reads and discards the rest of a body, within bounds. The system resets a connection that is closed
/// with unread bytes, and a caller that is still sending would not see its response.
pub(crate) async fn drain<E>(mut body: impl Stream<Item = Result<Bytes, E>> + Unpin) {
    let reading = async {
        let mut left = DRAIN_BYTES_MAX;
        while let Some(chunk) = body.next().await {
            match chunk.map(|chunk| left.checked_sub(chunk.len())) {
                Ok(Some(rest)) => left = rest,
                Ok(None) | Err(_) => return,
            }
        }
    };
    // The response is the same whether or not this ends in time.
    let _ = timeout(DRAIN_WITHIN, reading).await;
}
