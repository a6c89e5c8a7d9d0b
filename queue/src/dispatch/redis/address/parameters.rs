//! The query parameters of a Redis URL.

use super::{RedisUrlError, SHARDS_MAX, secret};

/// The decoded query parameters.
#[derive(Default)]
pub(super) struct Parameters {
    pub sentinel_password: Option<String>,
    pub root: Option<String>,
    pub certificate: Option<String>,
    pub key: Option<String>,
    shards: Option<String>,
}

impl Parameters {
    pub(super) fn parse(query: &str) -> Result<Self, RedisUrlError> {
        let mut found = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or(RedisUrlError::Parameter)?;
            let place = match name {
                "sentinel_password" => &mut found.sentinel_password,
                "sslrootcert" => &mut found.root,
                "sslcert" => &mut found.certificate,
                "sslkey" => &mut found.key,
                "shards" => &mut found.shards,
                _ => return Err(RedisUrlError::Parameter),
            };
            *place = secret(value)?;
        }
        Ok(found)
    }

    /// Returns the number of shards; 1 if it is not given.
    pub(super) fn shards(&self) -> Result<u16, RedisUrlError> {
        let Some(text) = &self.shards else { return Ok(1) };
        let shards = text.parse().ok().filter(|shards| (1..=SHARDS_MAX).contains(shards));
        shards.ok_or(RedisUrlError::Shards)
    }
}
