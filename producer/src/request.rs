//! Parses a batch line into a job or a refusal.
//!
//! There are two kinds of refusal, as in OpenAI's batches: a line that is not a request (not JSON, no
//! `custom_id`, unknown `url`) gets a top-level `error`; a request with a bad body gets a `response`
//! with status 400.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tritmill_queue::{Job, JobId, Prompt, QueueName, store::IngestedLine};

use crate::{
    body::{Body, Endpoint, parse_body},
    canonical::{Purpose, canonical, derived_seed, hash},
    fields::{FieldError, brief, shorten},
    lines::{LINE_BYTES_MAX, RawLine},
};

/// Longest `custom_id` in bytes.
pub const CUSTOM_ID_BYTES_MAX: usize = 512;

/// The error of a line that did not become a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// HTTP status of the response; `None` for a line that is not a request.
    pub status: Option<u16>,
    /// Error code for programs.
    pub code: String,
    /// Error message for people, with line number and field.
    pub message: String,
    /// Name of the bad field.
    pub param: Option<String>,
    /// Line in the input, from 1.
    pub line: u64,
    /// Whether it is a request to `/v1/messages`, which has errors of another shape.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub of_messages: bool,
}

/// A line parsed into a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Line in the input, from 1.
    pub number: u64,
    /// The caller's name for it.
    pub custom_id: String,
    /// Hash of the request: the same key means the same answer.
    pub key: [u8; 32],
    /// The endpoint it is for.
    pub endpoint: Endpoint,
    /// The parsed body, with a derived seed if it has none.
    pub body: Body,
}

impl Request {
    /// Returns the endpoint that answers it: a plain question is a message of the user, other plain prompts are continued.
    pub(crate) fn answered_by(&self) -> Endpoint {
        match (self.endpoint, &self.body.prompt) {
            (Endpoint::Plain, Prompt::Question(_)) => Endpoint::Chat,
            (Endpoint::Plain, _) => Endpoint::Completions,
            (endpoint, _) => endpoint,
        }
    }

    /// Returns the form of its answer, as [`Endpoint::shape`].
    pub fn shape(&self) -> &'static str {
        self.answered_by().shape()
    }

    /// Returns the job that answers it.
    pub fn job(self, id: JobId, queue: QueueName) -> Job {
        Job { custom_id: Some(self.custom_id), ..self.body.job(id, queue) }
    }
}

/// A line that is not a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedLine {
    /// Hash of its number and its bytes.
    pub key: [u8; 32],
    /// The caller's name for it, if it is readable.
    pub custom_id: Option<String>,
    /// The error.
    pub refusal: Refusal,
}

/// Parses one line of any bytes into a request or a refusal.
///
/// # Errors
/// The refusal, which is the line's answer.
pub fn parse_request(line: &RawLine) -> Result<Request, Box<RefusedLine>> {
    let number = line.number;
    let bytes = match &line.content {
        Ok(bytes) => bytes,
        Err(long) => {
            let problem = format!(
                "is {} bytes long, the limit is {LINE_BYTES_MAX} (at byte {} of the file)",
                long.bytes, line.offset
            );
            let refusal = not_a_request(number, None, "line_too_long", &problem);
            let key = refused_key(number, &long.hash);
            return Err(Box::new(RefusedLine { key, custom_id: None, refusal }));
        }
    };
    let mut custom_id = None;
    parse(line, bytes, &mut custom_id).map_err(|refusal| {
        let key = refused_key(number, blake3::hash(bytes).as_bytes());
        Box::new(RefusedLine { key, custom_id, refusal })
    })
}

/// Parses one line of any bytes into a job for `queue` or a refusal.
pub fn parse_line(line: &RawLine, queue: &QueueName) -> IngestedLine {
    match parse_request(line) {
        Ok(request) => {
            let (key, number) = (request.key, request.number);
            let custom_id = Some(request.custom_id.clone());
            let shape = request.shape();
            let job = request.job(JobId::generate(), queue.clone());
            IngestedLine { key, number, custom_id, shape, content: Ok(Box::new(job)) }
        }
        Err(line) => refused(*line),
    }
}

/// Returns the refusal of a line with the `custom_id` of an earlier line, for the store.
pub fn duplicate(line: &RawLine, custom_id: &str, first: u64) -> IngestedLine {
    refused(duplicate_line(line, custom_id, first))
}

/// Returns the refusal of a line with the `custom_id` of an earlier line.
pub fn duplicate_line(line: &RawLine, custom_id: &str, first: u64) -> RefusedLine {
    let problem = format!("'{}' is already the custom_id of line {first}", shorten(custom_id));
    let refusal = not_a_request(line.number, Some("custom_id"), "duplicate_custom_id", &problem);
    let hash = match &line.content {
        Ok(bytes) => *blake3::hash(bytes).as_bytes(),
        Err(long) => long.hash,
    };
    let key = refused_key(line.number, &hash);
    RefusedLine { key, custom_id: Some(custom_id.to_owned()), refusal }
}

/// Returns the key of a refused line: a hash of its number and its bytes.
fn refused_key(number: u64, content: &[u8; 32]) -> [u8; 32] {
    hash(Purpose::RefusedKey, &[&number.to_le_bytes(), content])
}

fn refused(line: RefusedLine) -> IngestedLine {
    let RefusedLine { key, custom_id, refusal } = line;
    let content = Err(serde_json::json!(refusal).to_string());
    IngestedLine { key, number: refusal.line, custom_id, shape: "refusal", content }
}

/// Returns the refusal of a line that is not a request.
fn not_a_request(line: u64, param: Option<&str>, code: &str, problem: &str) -> Refusal {
    let message = match param {
        Some(param) => format!("line {line}: {param} {problem}"),
        None => format!("line {line} {problem}"),
    };
    let (code, param) = (code.to_owned(), param.map(str::to_owned));
    Refusal { status: None, code, message, param, line, of_messages: false }
}

/// Returns the refusal of a request with a bad body.
fn bad_body(line: u64, endpoint: Endpoint, error: &FieldError) -> Refusal {
    Refusal {
        status: Some(400),
        code: error.code.to_owned(),
        message: format!("line {line}: body.{} {}", error.path, error.problem),
        param: Some(error.path.clone()),
        line,
        of_messages: endpoint == Endpoint::Messages,
    }
}

/// Returns the refusal of a request for a model that is missing or not served.
pub fn unserved_model(request: &Request) -> RefusedLine {
    let Request { number, custom_id, key, endpoint, body } = request;
    let (status, code, problem) = match &body.model {
        None => (400, "missing_field", "is missing".to_owned()),
        Some(model) => (404, "model_not_found", format!("is not served: '{}'", shorten(model))),
    };
    let refusal = Refusal {
        status: Some(status),
        code: code.to_owned(),
        message: format!("line {number}: body.model {problem}"),
        param: Some("model".to_owned()),
        line: *number,
        of_messages: *endpoint == Endpoint::Messages,
    };
    RefusedLine { key: *key, custom_id: Some(custom_id.clone()), refusal }
}

fn parse(line: &RawLine, bytes: &[u8], known_id: &mut Option<String>) -> Result<Request, Refusal> {
    let number = line.number;
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let at = line.offset + error.valid_up_to() as u64;
        let problem =
            format!("is not UTF-8 at byte {} (byte {at} of the file)", error.valid_up_to());
        not_a_request(number, None, "invalid_utf8", &problem)
    })?;
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let at = line.offset + (error.column() as u64).saturating_sub(1);
        let cause = format!("{} (byte {at} of the file)", json_problem(&error));
        match name_of(text) {
            // JSON, but with a value that no string, number or depth here can hold.
            Some(name) => {
                *known_id = Some(name);
                let message = format!("line {number} has a value that cannot be read: {cause}");
                let code = "invalid_json".to_owned();
                Refusal {
                    status: Some(400),
                    code,
                    message,
                    param: None,
                    line: number,
                    of_messages: false,
                }
            }
            None => not_a_request(number, None, "invalid_json", &format!("is not JSON: {cause}")),
        }
    })?;
    let Value::Object(mut map) = value else {
        let problem = format!("must be a JSON object, got {}", brief(&value));
        return Err(not_a_request(number, None, "invalid_type", &problem));
    };
    let plain = map.contains_key("prompt") && !map.contains_key("body");
    let custom_id = custom_id(number, &mut map, plain)?;
    *known_id = Some(custom_id.clone());
    if !plain {
        // What a line that is made of a row carries to its answer.
        map.swap_remove("row");
    }
    if let Some(error) = map.swap_remove("row_error") {
        return Err(row_error(number, error, map.get("url")));
    }
    let (endpoint, body) = match plain {
        true => (Endpoint::Plain, map),
        false => envelope(number, map)?,
    };
    let spelling = canonical(&Value::Object(body.clone()));
    let parts = [custom_id.as_bytes(), endpoint.as_str().as_bytes(), spelling.as_bytes()];
    let body = parse_body(endpoint, body).map_err(|error| bad_body(number, endpoint, &error))?;
    let seed = body.seed.unwrap_or_else(|| derived_seed(&parts));
    let key = hash(Purpose::Key, &parts);
    let body = Body { seed: Some(seed), ..body };
    Ok(Request { number, custom_id, key, endpoint, body })
}

/// Returns the refusal of a line that was made of a row of another format or of the line of another batch, which could not be
/// used: what found the error is its text. With a status it is the error of a request.
fn row_error(line: u64, error: Value, url: Option<&Value>) -> Refusal {
    #[derive(Deserialize)]
    struct RowError {
        code: String,
        message: String,
        param: Option<String>,
        #[serde(default)]
        status: Option<u16>,
    }
    let is_error = |status: &Option<u16>| status.is_none_or(|status| (400..600).contains(&status));
    match serde_json::from_value(error) {
        Ok(RowError { code, message, param, status }) if is_error(&status) => {
            let is_of_messages = url.and_then(Value::as_str) == Some(Endpoint::Messages.as_str());
            let of_messages = is_of_messages && status.is_some();
            Refusal { status, code, message, param, line, of_messages }
        }
        _ => {
            let problem = "must have code, message and param, and a status from 400 to 599 or none";
            not_a_request(line, Some("row_error"), "invalid_type", problem)
        }
    }
}

/// Returns the name of a line that is JSON by its grammar although its values cannot be read: with half of a surrogate pair, a
/// number out of range, or deep nesting.
fn name_of(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        custom_id: String,
    }
    let Named { custom_id } = serde_json::from_str(text).ok()?;
    let is_fine = !custom_id.is_empty()
        && custom_id.len() <= CUSTOM_ID_BYTES_MAX
        && !custom_id.chars().any(char::is_control);
    is_fine.then_some(custom_id)
}

/// Returns the message of `serde_json` with the column only: the text is always one line.
fn json_problem(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let cause = text.split(" at line ").next().unwrap_or(&text);
    format!("{} at column {}", shorten(cause), error.column())
}

/// Returns the caller's name for the line; a plain line without one is `line-N`.
fn custom_id(number: u64, map: &mut Map<String, Value>, plain: bool) -> Result<String, Refusal> {
    let refuse = |code, problem: &str| Err(not_a_request(number, Some("custom_id"), code, problem));
    match map.swap_remove("custom_id") {
        None | Some(Value::Null) if plain => Ok(format!("line-{number}")),
        None | Some(Value::Null) => refuse("missing_field", "is missing"),
        Some(Value::String(id)) if id.is_empty() => refuse("invalid_value", "is empty"),
        Some(Value::String(id)) if id.len() > CUSTOM_ID_BYTES_MAX => refuse(
            "invalid_value",
            &format!("has {} bytes, the limit is {CUSTOM_ID_BYTES_MAX}", id.len()),
        ),
        Some(Value::String(id)) if id.chars().any(char::is_control) => {
            refuse("invalid_value", "has a control character")
        }
        Some(Value::String(id)) => Ok(id),
        Some(other) => refuse("invalid_type", &format!("must be a string, got {}", brief(&other))),
    }
}

/// Checks `method` and `url` and returns the endpoint and the body.
fn envelope(
    number: u64,
    mut map: Map<String, Value>,
) -> Result<(Endpoint, Map<String, Value>), Refusal> {
    let refuse =
        |field, code, problem: &str| Err(not_a_request(number, Some(field), code, problem));
    match map.swap_remove("method") {
        Some(Value::String(method)) if method == "POST" => {}
        None => return refuse("method", "missing_field", "is missing"),
        Some(other) => {
            let problem = format!("must be 'POST', got {}", brief(&other));
            return refuse("method", "invalid_method", &problem);
        }
    }
    let endpoint = match map.swap_remove("url") {
        None => return refuse("url", "missing_field", "is missing"),
        Some(value) => match value.as_str().and_then(Endpoint::of_batch) {
            Some(endpoint) => endpoint,
            None => {
                let problem = format!("must be {}, got {}", Endpoint::batch_paths(), brief(&value));
                return refuse("url", "invalid_url", &problem);
            }
        },
    };
    let body = match map.swap_remove("body") {
        Some(Value::Object(body)) => body,
        None => return refuse("body", "missing_field", "is missing"),
        Some(other) => {
            let problem = format!("must be an object, got {}", brief(&other));
            return refuse("body", "invalid_type", &problem);
        }
    };
    match map.keys().next() {
        None => Ok((endpoint, body)),
        Some(name) => refuse(&shorten(name), "unknown_field", "is not a field of a batch line"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_that_a_line_was_made_of_does_not_change_its_request() {
        let parsed = |fields: &str| {
            let body = r#""url": "/v1/completions", "body": {"prompt": "hi"}"#;
            let line = format!(r#"{{"custom_id": "a", "method": "POST", {body}{fields}}}"#);
            let content = Ok(line.into_bytes());
            parse_request(&RawLine { number: 1, offset: 0, content })
        };
        let alone = parsed("").expect("a request");
        assert_eq!(parsed(r#", "row": {"city": "Rome"}"#), Ok(alone));
        let refused = parsed(r#", "rows": {}"#).expect_err("no field of a line");
        assert_eq!(refused.refusal.param.as_deref(), Some("rows"));
    }
}
