//! A batch line becomes a job or a refusal.
//!
//! Two kinds of refusal, as OpenAI's batches have them: a line that is no request (not JSON, no
//! `custom_id`, unknown `url`) gets a top-level `error`; a request whose body cannot be served gets
//! a `response` with status 400.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tritmill_queue::{
    Job, JobId, Priority, QueueName, Tenant, job::ATTEMPTS_DEFAULT, store::IngestedLine,
};

use crate::{
    body::{Endpoint, parse_body},
    canonical::{Purpose, canonical, hash},
    fields::{FieldError, brief, shorten},
    lines::{LINE_BYTES_MAX, RawLine},
};

/// Longest `custom_id` in bytes.
pub const CUSTOM_ID_BYTES_MAX: usize = 512;

/// Why a line did not become a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Status of the response; `None` for a line that is no request.
    pub status: Option<u16>,
    /// A word for programs.
    pub code: String,
    /// A sentence for people, with line number and field.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// Line in the input, from 1.
    pub line: u64,
}

/// Reads one line into a job for `queue`, or a refusal. Never fails, whatever the bytes.
pub fn parse_line(line: &RawLine, queue: &QueueName) -> IngestedLine {
    let number = line.number;
    let bytes = match &line.content {
        Ok(bytes) => bytes,
        Err(long) => {
            let problem = format!("is {} bytes long, the limit is {LINE_BYTES_MAX}", long.bytes);
            let key = refused_key(number, &long.hash);
            return refused(number, key, None, no_request(number, None, "line_too_long", &problem));
        }
    };
    let mut custom_id = None;
    match parse(number, bytes, queue, &mut custom_id) {
        Ok(parsed) => parsed,
        Err(refusal) => {
            let key = refused_key(number, blake3::hash(bytes).as_bytes());
            refused(number, key, custom_id, refusal)
        }
    }
}

/// The refusal of a line whose `custom_id` an earlier line bears.
pub fn duplicate(line: &RawLine, custom_id: &str, first: u64) -> IngestedLine {
    let problem = format!("'{}' is already the custom_id of line {first}", shorten(custom_id));
    let refusal = no_request(line.number, Some("custom_id"), "duplicate_custom_id", &problem);
    let hash = match &line.content {
        Ok(bytes) => *blake3::hash(bytes).as_bytes(),
        Err(long) => long.hash,
    };
    refused(line.number, refused_key(line.number, &hash), Some(custom_id.to_owned()), refusal)
}

/// A refused line is found again by its place and its bytes.
fn refused_key(number: u64, content: &[u8; 32]) -> [u8; 32] {
    hash(Purpose::RefusedKey, &[&number.to_le_bytes(), content])
}

fn refused(
    number: u64,
    key: [u8; 32],
    custom_id: Option<String>,
    refusal: Refusal,
) -> IngestedLine {
    let content = Err(serde_json::json!(refusal).to_string());
    IngestedLine { key, number, custom_id, shape: "refusal", content }
}

/// The line cannot be read as a request.
fn no_request(line: u64, param: Option<&str>, code: &str, problem: &str) -> Refusal {
    let message = match param {
        Some(param) => format!("line {line}: {param} {problem}"),
        None => format!("line {line} {problem}"),
    };
    Refusal { status: None, code: code.to_owned(), message, param: param.map(str::to_owned), line }
}

/// The request's body cannot be served.
fn bad_body(line: u64, error: &FieldError) -> Refusal {
    Refusal {
        status: Some(400),
        code: error.code.to_owned(),
        message: format!("line {line}: body.{} {}", error.path, error.problem),
        param: Some(error.path.clone()),
        line,
    }
}

fn parse(
    number: u64,
    bytes: &[u8],
    queue: &QueueName,
    known_id: &mut Option<String>,
) -> Result<IngestedLine, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let problem = format!("is not UTF-8 at byte {}", error.valid_up_to());
        no_request(number, None, "invalid_utf8", &problem)
    })?;
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let problem = format!("is not JSON: {}", json_problem(&error));
        no_request(number, None, "invalid_json", &problem)
    })?;
    let Value::Object(mut map) = value else {
        let problem = format!("must be a JSON object, got {}", brief(&value));
        return Err(no_request(number, None, "invalid_type", &problem));
    };
    let plain = map.contains_key("prompt") && !map.contains_key("body");
    let custom_id = custom_id(number, &mut map, plain)?;
    *known_id = Some(custom_id.clone());
    let (endpoint, body) = match plain {
        true => (Endpoint::Plain, map),
        false => envelope(number, map)?,
    };
    let spelling = canonical(&Value::Object(body.clone()));
    let parts = [custom_id.as_bytes(), endpoint_name(endpoint).as_bytes(), spelling.as_bytes()];
    let body = parse_body(endpoint, body).map_err(|error| bad_body(number, &error))?;
    let job = Job {
        id: JobId::generate(),
        tenant: Tenant::default(),
        queue: queue.clone(),
        priority: Priority::default(),
        prompt: body.prompt,
        sampling: body.sampling,
        seed: body.seed.unwrap_or_else(|| derived_seed(&parts)),
        attempts_max: ATTEMPTS_DEFAULT,
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
    };
    let shape = if endpoint == Endpoint::Chat { "chat" } else { "completion" };
    let key = hash(Purpose::Key, &parts);
    Ok(IngestedLine { key, number, custom_id: Some(custom_id), shape, content: Ok(Box::new(job)) })
}

/// `serde_json`'s complaint, with the column alone: the text is always one line.
fn json_problem(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let cause = text.split(" at line ").next().unwrap_or(&text);
    format!("{} at column {}", shorten(cause), error.column())
}

fn derived_seed(parts: &[&[u8]]) -> u64 {
    let hash = hash(Purpose::Seed, parts);
    u64::from_le_bytes([hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7]])
}

const fn endpoint_name(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat => "/v1/chat/completions",
        Endpoint::Completions => "/v1/completions",
        Endpoint::Plain => "plain",
    }
}

/// The caller's name for the line; a plain line without one is `line-N`.
fn custom_id(number: u64, map: &mut Map<String, Value>, plain: bool) -> Result<String, Refusal> {
    let refuse = |code, problem: &str| Err(no_request(number, Some("custom_id"), code, problem));
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

/// Checks `method` and `url` and takes the body out.
fn envelope(
    number: u64,
    mut map: Map<String, Value>,
) -> Result<(Endpoint, Map<String, Value>), Refusal> {
    let refuse = |field, code, problem: &str| Err(no_request(number, Some(field), code, problem));
    match map.swap_remove("method") {
        Some(Value::String(method)) if method == "POST" => {}
        None => return refuse("method", "missing_field", "is missing"),
        Some(other) => {
            let problem = format!("must be 'POST', got {}", brief(&other));
            return refuse("method", "invalid_method", &problem);
        }
    }
    let endpoint = match map.swap_remove("url") {
        Some(Value::String(url)) if url == endpoint_name(Endpoint::Chat) => Endpoint::Chat,
        Some(Value::String(url)) if url == endpoint_name(Endpoint::Completions) => {
            Endpoint::Completions
        }
        None => return refuse("url", "missing_field", "is missing"),
        Some(other) => {
            let problem = format!(
                "must be '/v1/chat/completions' or '/v1/completions', got {}",
                brief(&other)
            );
            return refuse("url", "invalid_url", &problem);
        }
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
