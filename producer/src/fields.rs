//! Reads the fields of an untrusted JSON object by name and type. Every error names the field.

use serde_json::{Map, Value};

/// A bad field. The path starts inside `body`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct FieldError {
    /// Path of the field, as `messages[0].content`.
    pub path: String,
    /// The problem, after the path.
    pub problem: String,
    /// Error code for programs.
    pub code: &'static str,
}

impl FieldError {
    /// Creates an error of the field at `path`.
    pub fn new(path: impl Into<String>, code: &'static str, problem: impl Into<String>) -> Self {
        Self { path: path.into(), problem: problem.into(), code }
    }

    /// Returns the field and its problem as a sentence.
    pub fn message(&self) -> String {
        format!("{} {}", self.path, self.problem)
    }

    /// Creates an error of a field with another type than `expected`.
    pub fn wrong_type(path: impl Into<String>, expected: &str, found: &Value) -> Self {
        Self::new(path, "invalid_type", format!("must be {expected}, got {}", brief(found)))
    }
}

/// Describes an untrusted value, short enough for a message.
pub fn brief(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("'{}'", shorten(text)),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// Returns whether a value is null, `[]` or `{}`.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Returns a whole number as an integer: JSON has one kind of number, and `4.0` is `4`. Others stay.
pub fn whole(value: Value) -> Value {
    /// Above it, a double may stand for another integer than was written.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() <= EXACT => {
            #[expect(clippy::cast_possible_truncation, reason = "it is whole and in range")]
            let integer = number as i64;
            Value::from(integer)
        }
        _ => value,
    }
}

/// Shortens untrusted text for a message, on one line.
pub fn shorten(text: &str) -> String {
    const LONGEST: usize = 48;
    let mut short: String = text
        .chars()
        .take(LONGEST)
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        short.push('…');
    }
    short
}

/// An object with fields that are taken out one by one; a field left at the end is unknown.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// Prefix of every path: empty, or ending in a dot.
    prefix: String,
}

impl Fields {
    /// Returns the fields of `map`; `prefix` is empty or ends in a dot.
    pub fn new(map: Map<String, Value>, prefix: impl Into<String>) -> Self {
        Self { map, prefix: prefix.into() }
    }

    /// Returns the path of a field, as errors name it.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether a field has a value; null counts as absent.
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null())
    }

    /// Takes a field's value; null counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        // Swapping changes the order of the rest, which only decides which unknown field is named.
        self.map.swap_remove(name).filter(|value| !value.is_null())
    }

    /// Puts a field back.
    pub fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.to_owned(), value);
    }

    /// Returns the fields that were not taken.
    pub fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// The field, if it has another type.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, FieldError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(FieldError::wrong_type(self.path(name), "true or false", &other)),
        }
    }

    /// Takes a string.
    ///
    /// # Errors
    /// The field, if it has another type.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, FieldError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(FieldError::wrong_type(self.path(name), "a string", &other)),
        }
    }

    /// Takes a number.
    ///
    /// # Errors
    /// The field, if it has another type.
    pub fn number(&mut self, name: &str) -> Result<Option<f32>, FieldError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            #[expect(clippy::cast_possible_truncation, reason = "the sampler works in f32")]
            Some(number) => Ok(Some(number as f32)),
            None => Err(FieldError::wrong_type(self.path(name), "a number", &value)),
        }
    }

    /// Takes an integer from 0 to 2³² − 1.
    ///
    /// # Errors
    /// The field, if it is another value.
    pub fn count(&mut self, name: &str) -> Result<Option<u32>, FieldError> {
        let Some(value) = self.take(name).map(whole) else { return Ok(None) };
        match value.as_u64().map(u32::try_from) {
            Some(Ok(count)) => Ok(Some(count)),
            _ if value.is_i64() || value.is_u64() => Err(FieldError::new(
                self.path(name),
                "invalid_value",
                format!("must be at most {} and not negative, got {value}", u32::MAX),
            )),
            _ => Err(FieldError::wrong_type(self.path(name), "an integer", &value)),
        }
    }

    /// Takes an integer of 64 bits, negative ones as their two's complement.
    ///
    /// # Errors
    /// The field, if it is another value.
    pub fn bits(&mut self, name: &str) -> Result<Option<u64>, FieldError> {
        let Some(value) = self.take(name).map(whole) else { return Ok(None) };
        match (value.as_u64(), value.as_i64()) {
            (Some(bits), _) => Ok(Some(bits)),
            (None, Some(signed)) => Ok(Some(signed.cast_unsigned())),
            (None, None) => {
                Err(FieldError::wrong_type(self.path(name), "an integer of 64 bits", &value))
            }
        }
    }

    /// Takes an array.
    ///
    /// # Errors
    /// The field, if it has another type.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, FieldError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(FieldError::wrong_type(self.path(name), "an array", &other)),
        }
    }

    /// Checks that no field with content is left: clients write fields that they have nothing for as null, `[]` or
    /// `{}`.
    ///
    /// # Errors
    /// The first field that is left.
    pub fn finish(mut self) -> Result<(), FieldError> {
        self.map.retain(|_, value| !is_empty(value));
        match self.map.keys().next() {
            None => Ok(()),
            Some(name) => Err(FieldError::new(
                self.path(&shorten(name)),
                "unknown_parameter",
                "is not supported",
            )),
        }
    }
}
