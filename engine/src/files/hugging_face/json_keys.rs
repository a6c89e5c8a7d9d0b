//! Typed access to the keys of a JSON object.

use serde_json::{Map, Value};

use crate::files::error::{ModelError, shorten};

/// Typed access to a JSON object; errors name the dotted key.
pub(super) struct Keys<'a> {
    pub map: &'a Map<String, Value>,
    pub prefix: &'a str,
}

impl<'a> Keys<'a> {
    /// Returns the value of a key; null counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn shown(&self, key: &str) -> String {
        self.map.get(key).map_or_else(|| "absent".to_owned(), shorten)
    }

    pub fn bad(&self, key: &str, expected: &'static str) -> ModelError {
        ModelError::BadKey { key: self.name(key), value: self.shown(key), expected }
    }

    pub fn unsupported(&self, key: &str, why: &'static str) -> ModelError {
        ModelError::UnsupportedKey { key: shorten(self.name(key)), value: self.shown(key), why }
    }

    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey { key: self.name(key) }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.get(key)
            .map(|value| value.as_str().ok_or_else(|| self.bad(key, "a string")))
            .transpose()
    }

    pub fn required_text(&self, key: &str) -> Result<&'a str, ModelError> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.get(key)
            .map(|value| value.as_bool().ok_or_else(|| self.bad(key, "true or false")))
            .transpose()
    }

    pub fn size(&self, key: &str, limit: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            // `limit` is at most u32::MAX.
            Some(size @ 1..) if size <= limit => Ok(Some(size as usize)),
            _ => Err(self.bad(key, "a positive whole number within bounds")),
        }
    }

    pub fn required_size(&self, key: &str, limit: u64) -> Result<usize, ModelError> {
        self.size(key, limit)?.ok_or_else(|| self.missing(key))
    }

    pub fn positive(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().map(|number| number as f32) {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.bad(key, "a positive number")),
        }
    }

    pub fn epsilon(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.positive(key)? {
            Some(eps) if eps > 0.1 => Err(self.bad(key, "a small positive number")),
            eps => Ok(eps),
        }
    }

    /// Reads one id or a list of ids, each inside the vocabulary.
    pub fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>, ModelError> {
        let list = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        let id =
            |value: &Value| value.as_u64().filter(|&id| id < vocab_size as u64).map(|id| id as u32);
        list.iter()
            .map(|value| id(value).ok_or_else(|| self.bad(key, "token ids inside the vocabulary")))
            .collect()
    }
}
