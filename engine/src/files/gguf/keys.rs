//! Typed access to the metadata of a GGUF file.

use super::container::{Array, Gguf, Value};
use crate::files::error::{ModelError, shorten};

/// The metadata under a prefix; errors name the whole key.
pub(crate) struct Keys<'a> {
    pub gguf: &'a Gguf<'a>,
    pub prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.gguf.metadata.get(self.name(key).as_str()).copied()
    }

    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn shown(&self, key: &str) -> String {
        self.get(key).map_or_else(|| "absent".to_owned(), |value| value.to_string())
    }

    pub fn bad(&self, key: &str, expected: &'static str) -> ModelError {
        ModelError::BadKey { key: self.name(key), value: self.shown(key), expected }
    }

    pub fn unsupported(&self, key: &str, why: &'static str) -> ModelError {
        ModelError::UnsupportedKey { key: shorten(self.name(key)), value: self.shown(key), why }
    }

    pub fn array(&self, key: &str) -> Result<Option<Array<'a>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(_) => Err(self.bad(key, "a list")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.bad(key, "text")),
        }
    }

    pub fn required_text(&self, key: &str) -> Result<&'a str, ModelError> {
        self.text(key)?.ok_or_else(|| ModelError::MissingKey { key: self.name(key) })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.bad(key, "true or false")),
        }
    }

    pub fn whole(&self, key: &str) -> Result<Option<u64>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(number)),
            Some(Value::Signed(number)) if number >= 0 => Ok(Some(number as u64)),
            Some(_) => Err(self.bad(key, "a whole number")),
        }
    }

    /// Reads a positive number of at most `limit`, which fits a u32.
    pub fn size(&self, key: &str, limit: u64) -> Result<Option<usize>, ModelError> {
        match self.whole(key)? {
            None => Ok(None),
            Some(number) if (1..=limit).contains(&number) => Ok(Some(number as usize)),
            Some(_) => Err(self.bad(key, "a positive whole number within bounds")),
        }
    }

    pub fn required_size(&self, key: &str, limit: u64) -> Result<usize, ModelError> {
        self.size(key, limit)?.ok_or_else(|| ModelError::MissingKey { key: self.name(key) })
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(number)),
            Some(_) => Err(self.bad(key, "a number")),
        }
    }

    pub fn positive(&self, key: &str, limit: f32) -> Result<Option<f32>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => {
                let number = number as f32;
                if number > 0.0 && number <= limit {
                    Ok(Some(number))
                } else {
                    Err(self.bad(key, "a positive number within bounds"))
                }
            }
            Some(_) => Err(self.bad(key, "a number")),
        }
    }

    /// Reads a token id inside the vocabulary.
    pub fn token(&self, key: &str, vocab_size: u64) -> Result<Option<u32>, ModelError> {
        match self.whole(key)? {
            None => Ok(None),
            Some(id) if id < vocab_size && id <= u64::from(u32::MAX) => Ok(Some(id as u32)),
            Some(_) => Err(self.bad(key, "a token id inside the vocabulary")),
        }
    }
}
