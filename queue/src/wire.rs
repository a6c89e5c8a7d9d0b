//! Encoding of jobs and outcomes: two bytes, then MessagePack with field names.
//!
//! ```text
//! byte 0   version, 1
//! byte 1   0: MessagePack follows; 1: a zstd frame of it
//! ```
//!
//! Readers ignore unknown fields, and new fields have defaults, so that workers of two releases can
//! share a queue. A layout that breaks this gets a new version. Encoded examples of every version are
//! in `tests/data/wire` and must remain decodable.

use serde::{Serialize, de::DeserializeOwned};

/// The version that is written.
pub const VERSION: u8 = 1;
/// Values longer than this are compressed.
const COMPRESS_BYTES: usize = 4 << 10;
const COMPRESSION_LEVEL: i32 = 1;
/// Largest decompressed value: far above any job, far below a machine's memory.
const DECODED_BYTES_MAX: usize = 64 << 20;
const PLAIN: u8 = 0;
const ZSTD: u8 = 1;

/// The bytes are not a value of this program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// There are fewer bytes than the two leading ones.
    #[error("{0} bytes are too few")]
    Short(usize),
    /// The version is of a later release.
    #[error("wire version {0} is not known here (this release reads 1)")]
    Version(u8),
    /// The second byte is unknown.
    #[error("encoding {0} is not known")]
    Encoding(u8),
    /// The zstd frame is damaged or too large.
    #[error("damaged compression: {0}")]
    Compression(#[source] std::io::Error),
    /// The MessagePack does not match the type.
    #[error("{0}")]
    Value(#[source] rmp_serde::decode::Error),
}

/// Encodes a value, compressed if it is long.
///
/// # Panics Never for this crate's types: their map keys are text, and their maps have a known
/// length.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let plain = rmp_serde::to_vec_named(value).expect("this crate's types are encodable");
    let compressed = (plain.len() > COMPRESS_BYTES)
        .then(|| zstd::bulk::compress(&plain, COMPRESSION_LEVEL).ok())
        .flatten()
        .filter(|compressed| compressed.len() < plain.len());
    let (encoding, body) = compressed.map_or((PLAIN, plain), |body| (ZSTD, body));
    let mut bytes = Vec::with_capacity(body.len() + 2);
    bytes.extend([VERSION, encoding]);
    bytes.extend(body);
    bytes
}

/// Decodes a value.
///
/// # Errors
/// When the bytes are of another version or damaged.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let &[version, encoding, ref body @ ..] = bytes else {
        return Err(WireError::Short(bytes.len()));
    };
    match (version, encoding) {
        (VERSION, PLAIN) => rmp_serde::from_slice(body).map_err(WireError::Value),
        (VERSION, ZSTD) => {
            let plain = zstd::bulk::decompress(body, DECODED_BYTES_MAX);
            rmp_serde::from_slice(&plain.map_err(WireError::Compression)?).map_err(WireError::Value)
        }
        (VERSION, encoding) => Err(WireError::Encoding(encoding)),
        (version, _) => Err(WireError::Version(version)),
    }
}
