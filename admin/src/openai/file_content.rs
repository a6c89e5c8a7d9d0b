//! The content of a file: whole or one range of it, compressed if the caller takes that, or nothing if the caller
//! has it. Content never changes, so the id of the file names it in `ETag`.
//!
//! A response reads one chunk after the other from the store. If the file is deleted meanwhile, the response breaks
//! off, and the caller sees that it is not complete.

use std::{
    io::{self, Write as _},
    mem,
    ops::Range,
};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use tritmill_queue::StoreError;

use crate::{
    ApiError, App,
    file_contents::FileContents,
    store::{
        FileId,
        files::{FILE_CHUNK_BYTES, StoredFile},
    },
};

/// Size from which content is compressed.
const COMPRESSED_BYTES_MIN: u64 = 1024;

/// The content of a file ended too early.
#[derive(Debug, thiserror::Error)]
enum ContentError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the file was deleted")]
    Deleted,
    #[error("the content cannot be compressed")]
    Compress(#[source] io::Error),
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asked {
    /// All of it.
    Whole,
    /// These bytes, which exist.
    Part(Range<u64>),
    /// Bytes that do not exist.
    Beyond,
}

/// Responds with the content of a file as the headers of the request ask for it.
pub(crate) fn respond(app: &App, file: &StoredFile, asked: &HeaderMap) -> Response {
    let [plain, gzip] = ["", "-gzip"].map(|suffix| format!("\"{}{suffix}\"", file.id));
    let is_gzip = file.size_bytes >= COMPRESSED_BYTES_MIN
        && !asked.contains_key(header::RANGE)
        && accepts_gzip(asked);
    let tag = if is_gzip { &gzip } else { &plain };
    let mut response = if names(asked, &plain) || names(asked, &gzip) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        match range(asked, &plain, file.size_bytes) {
            Asked::Whole if is_gzip => compressed(app, file),
            Asked::Whole => part(app, file, 0..file.size_bytes),
            Asked::Part(range) => {
                let (first, last, size) = (range.start, range.end - 1, file.size_bytes);
                let mut response = part(app, file, range);
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                set(&mut response, header::CONTENT_RANGE, &format!("bytes {first}-{last}/{size}"));
                response
            }
            Asked::Beyond => return beyond(file.size_bytes),
        }
    };
    set(&mut response, header::ETAG, tag);
    set(&mut response, header::ACCEPT_RANGES, "bytes");
    set(&mut response, header::VARY, "accept-encoding");
    response
}

fn set(response: &mut Response, name: HeaderName, value: &str) {
    let value = HeaderValue::from_str(value).expect("ids and digits are visible ASCII");
    response.headers_mut().insert(name, value);
}

/// Refuses a range that begins behind the end.
fn beyond(size: u64) -> Response {
    let message = format!("the range begins behind the end of the file, which has {size} bytes");
    let mut response = ApiError::invalid_range(message).into_response();
    set(&mut response, header::CONTENT_RANGE, &format!("bytes */{size}"));
    response
}

/// Returns the text of a header.
fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Returns whether the caller has the content with this tag, as `If-None-Match` says.
fn names(headers: &HeaderMap, tag: &str) -> bool {
    let given = text(headers, header::IF_NONE_MATCH).unwrap_or_default();
    let mut tags = given.split(',').map(str::trim);
    tags.any(|given| given == "*" || given.strip_prefix("W/").unwrap_or(given) == tag)
}

/// Returns whether `Accept-Encoding` takes gzip.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let given = text(headers, header::ACCEPT_ENCODING).unwrap_or_default();
    let weight = |name: &str| {
        given.split(',').find_map(|item| {
            let (coding, parameters) = item.split_once(';').unwrap_or((item, ""));
            let quality = parameters.trim().strip_prefix("q=").map_or(Ok(1.0), str::parse::<f32>);
            coding.trim().eq_ignore_ascii_case(name).then(|| quality.unwrap_or(0.0))
        })
    };
    weight("gzip").or_else(|| weight("*")).is_some_and(|quality| quality > 0.0)
}

/// Returns what `Range` asks for. Several ranges, other units and malformed ones are ignored, and so is a range of
/// content with another tag than `If-Range` names.
fn range(headers: &HeaderMap, tag: &str, size: u64) -> Asked {
    let is_same = text(headers, header::IF_RANGE).is_none_or(|given| given.trim() == tag);
    let given = text(headers, header::RANGE).filter(|_| is_same);
    let spec = given.and_then(|range| range.trim().strip_prefix("bytes="));
    let Some((first, last)) = spec.and_then(|spec| spec.trim().split_once('-')) else {
        return Asked::Whole;
    };
    let bounds = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => first..last.saturating_add(1).min(size),
        (Ok(first), Err(_)) if last.is_empty() => first..size,
        (Err(_), Ok(length)) if first.is_empty() => size.saturating_sub(length)..size,
        _ => return Asked::Whole,
    };
    if bounds.is_empty() { Asked::Beyond } else { Asked::Part(bounds) }
}

/// Returns a response with some bytes of a file.
fn part(app: &App, file: &StoredFile, range: Range<u64>) -> Response {
    let length = range.end - range.start;
    let mut response = Body::from_stream(content(app, file.id, range)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    // Lets clients detect a download that broke off.
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    response
}

/// Returns a response with a whole file, compressed.
fn compressed(app: &App, file: &StoredFile) -> Response {
    let content = compress(content(app, file.id, 0..file.size_bytes));
    let mut response = Body::from_stream(content).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    response
}

/// Reads some bytes of a file chunk by chunk.
fn content(
    app: &App,
    id: FileId,
    range: Range<u64>,
) -> impl Stream<Item = Result<Bytes, ContentError>> + use<> {
    let start = (app.files.clone(), id, range);
    stream::try_unfold(start, async |next| {
        let (files, id, range): (FileContents, FileId, Range<u64>) = next;
        if range.is_empty() {
            return Ok(None);
        }
        let chunk_bytes = FILE_CHUNK_BYTES as u64;
        let number = u32::try_from(range.start / chunk_bytes).map_err(|_| ContentError::Deleted)?;
        let begin = u64::from(number) * chunk_bytes;
        let chunk = files.chunk(id, number).await?.ok_or(ContentError::Deleted)?;
        let end = range.end.min(begin + chunk.len() as u64);
        // Both are within a chunk, unless it is shorter than the file says.
        let within = (range.start - begin) as usize..end.saturating_sub(begin) as usize;
        let bytes = Bytes::from(chunk);
        if within.is_empty() {
            return Err(ContentError::Deleted);
        }
        Ok(Some((bytes.slice(within), (files, id, end..range.end))))
    })
}

/// Compresses content piece by piece, on threads for blocking work.
fn compress(
    content: impl Stream<Item = Result<Bytes, ContentError>> + Send + 'static,
) -> impl Stream<Item = Result<Bytes, ContentError>> {
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let start = Some((content.boxed(), encoder));
    let pieces = stream::try_unfold(start, async |state| {
        let Some((mut content, encoder)) = state else { return Ok(None) };
        match content.try_next().await? {
            Some(bytes) => {
                let (encoder, piece) = blocking(move || {
                    let mut encoder = encoder;
                    encoder.write_all(&bytes)?;
                    let piece = mem::take(encoder.get_mut());
                    Ok((encoder, piece))
                })
                .await?;
                Ok(Some((Bytes::from(piece), Some((content, encoder)))))
            }
            None => {
                let rest = blocking(move || encoder.finish()).await?;
                Ok(Some((Bytes::from(rest), None)))
            }
        }
    });
    // The encoder keeps some input until it has enough.
    pieces.try_filter(|piece| std::future::ready(!piece.is_empty()))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ContentError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(io::Error::other).flatten().map_err(ContentError::Compress)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        let pair = |(name, value): &(HeaderName, &str)| {
            (name.clone(), HeaderValue::from_str(value).expect("a header"))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn one_range_of_bytes_is_understood() {
        let check = |text: &str, expect: Asked| {
            let asked = range(&headers(&[(header::RANGE, text)]), "\"a\"", 100);
            assert_eq!(asked, expect, "{text}");
        };
        check("bytes=0-0", Asked::Part(0..1));
        check("bytes=10-19", Asked::Part(10..20));
        check("bytes=90-", Asked::Part(90..100));
        check("bytes=90-18446744073709551615", Asked::Part(90..100));
        check("bytes=-7", Asked::Part(93..100));
        check("bytes=-700", Asked::Part(0..100));
        for beyond in ["bytes=100-", "bytes=100-200", "bytes=-0"] {
            check(beyond, Asked::Beyond);
        }
        for ignored in ["bytes=5-4", "bytes=0-1,5-6", "lines=0-1", "bytes=-", "bytes=a-b", "0-1"] {
            check(ignored, Asked::Whole);
        }
        let of_other = [(header::RANGE, "bytes=0-1"), (header::IF_RANGE, "\"b\"")];
        assert_eq!(range(&headers(&of_other), "\"a\"", 100), Asked::Whole);
        assert_eq!(range(&headers(&of_other), "\"b\"", 100), Asked::Part(0..2));
        assert_eq!(range(&HeaderMap::new(), "\"a\"", 0), Asked::Whole);
    }

    #[test]
    fn gzip_is_used_where_it_is_accepted() {
        for accepted in ["gzip", "deflate, GZIP;q=0.5", "*", "br;q=1.0, *;q=0.1"] {
            assert!(accepts_gzip(&headers(&[(header::ACCEPT_ENCODING, accepted)])), "{accepted}");
        }
        for refused in ["", "identity", "gzip;q=0", "*;q=0", "gzip;q=0, *", "deflate", "gzip;q=x"] {
            assert!(!accepts_gzip(&headers(&[(header::ACCEPT_ENCODING, refused)])), "{refused}");
        }
    }

    #[tokio::test]
    async fn compressed_content_ends_whole_or_with_an_error() {
        let pieces = || (0..9_u8).map(|n| Ok(Bytes::from(vec![n; 100_000])));
        let whole: Vec<Bytes> =
            compress(stream::iter(pieces())).try_collect().await.expect("it is whole");
        let (packed, mut plain) = (whole.concat(), Vec::new());
        GzDecoder::new(packed.as_slice()).read_to_end(&mut plain).expect("gzip");
        assert!(packed.len() < 20_000 && plain.len() == 900_000 && plain.ends_with(&[8; 100_000]));
        let torn = pieces().chain([Err(ContentError::Deleted)]);
        let torn: Result<Vec<Bytes>, _> = compress(stream::iter(torn)).try_collect().await;
        assert!(matches!(torn, Err(ContentError::Deleted)));
    }
}
