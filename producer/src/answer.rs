//! Output lines. Everything in them except `created` is a function of the input line and the model:
//! ids are hashes, keys have a fixed order, and nothing depends on when or with which other jobs a job
//! ran.

use serde_json::{Value, json};
use tritmill_queue::{
    Charge, Choice, Completion, Embedded, ErrorKind, JobError, LengthLimit, Outcome, Timestamp,
    TokenLogprob, Vector, VectorFormat, store::AnsweredLine,
};

use crate::{
    anthropic::answer as messages,
    body::Endpoint,
    canonical::{Purpose, hash, short_hex},
    json_line::json_line,
    request::Refusal,
    responses::answer as responses,
};

/// Log probability of minus infinity, which JSON cannot write; the same value as OpenAI's.
const LOGPROB_FLOOR: f32 = -9999.0;
/// The shape of the answers of `/v1/messages`.
const MESSAGE: &str = Endpoint::Messages.shape();
/// The shape of the answers of `/v1/responses`.
const RESPONSE: &str = Endpoint::Responses.shape();

/// Returns the output line of a finished job, without a line end.
pub fn line(answer: &AnsweredLine) -> String {
    let request_id = request_id(&answer.key);
    let response = match &answer.outcome {
        Some(Outcome::Completed(completion)) => json!({
            "status_code": 200,
            "request_id": request_id,
            "body": line_body(answer, completion),
        }),
        Some(Outcome::Error(error)) => failed(answer, &request_id, error),
        Some(Outcome::Expired) => {
            failed(answer, &request_id, &ended("expired", "the deadline passed"))
        }
        None => failed(answer, &request_id, &ended("cancelled", "the job was cancelled")),
    };
    json_line(&json!({
        "id": line_id(&answer.key),
        "custom_id": answer.custom_id,
        "response": response,
        "error": null,
    }))
}

/// Returns the output line of a refused line, without a line end.
pub fn refusal_line(key: &[u8], custom_id: Option<&str>, refusal: &Refusal) -> String {
    let (response, error) = match refusal.status {
        None => {
            let error = json!({
                "code": refusal.code,
                "message": refusal.message,
                "param": refusal.param,
                "line": refusal.line,
            });
            (Value::Null, error)
        }
        Some(status) => {
            let request_id = request_id(key);
            let body = match refusal.of_messages {
                true => {
                    let kind = messages::error_kind(status);
                    messages::error(kind, &refusal.message, Some(&request_id))
                }
                false => json!({ "error": {
                    "message": refusal.message,
                    "type": "invalid_request_error",
                    "param": refusal.param,
                    "code": refusal.code,
                    "line": refusal.line,
                } }),
            };
            let response = json!({ "status_code": status, "request_id": request_id, "body": body });
            (response, Value::Null)
        }
    };
    json_line(&json!({
        "id": line_id(key),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }))
}

fn line_id(key: &[u8]) -> String {
    format!("batch_req_{}", short_hex(key))
}

fn request_id(key: &[u8]) -> String {
    format!("req_{}", short_hex(&hash(Purpose::RequestId, &[key])))
}

fn ended(code: &str, message: &str) -> JobError {
    JobError::new(ErrorKind::Engine, code, message)
}

/// Returns the HTTP status and the type of a job's error.
pub const fn status(error: &JobError) -> (u16, &'static str) {
    match error.kind {
        ErrorKind::InvalidRequest => (400, "invalid_request_error"),
        ErrorKind::Engine | ErrorKind::LeaseLost => (500, "server_error"),
    }
}

/// Returns the output line of a request without an answer (`batch_expired`, `batch_cancelled`),
/// without a line end.
pub fn unanswered_line(key: &[u8], custom_id: &str, code: &str, message: &str) -> String {
    json_line(&json!({
        "id": line_id(key),
        "custom_id": custom_id,
        "response": null,
        "error": { "code": code, "message": message },
    }))
}

/// Returns the response of a failed job.
fn failed(answer: &AnsweredLine, request_id: &str, error: &JobError) -> Value {
    let (line, (status, kind)) = (answer.number, status(error));
    let field = error.param.as_ref().map_or(String::new(), |param| format!("body.{param}: "));
    let message = format!("line {line}: {field}{}", error.message);
    let body = match answer.shape.as_str() {
        MESSAGE => messages::error(messages::error_kind(status), &message, Some(request_id)),
        _ => json!({
            "error": {
                "message": message,
                "type": kind,
                "param": error.param,
                "code": error.code,
                "line": line,
            },
        }),
    };
    json!({ "status_code": status, "request_id": request_id, "body": body })
}

/// Returns the body of a line's answer.
fn line_body(answer: &AnsweredLine, completion: &Completion) -> Value {
    let AnsweredLine { key, shape, finished_at, repeated, .. } = answer;
    match shape.as_str() {
        MESSAGE => messages::message(messages::line_usage(completion), key, completion),
        RESPONSE => responses::of_line(key, *finished_at, repeated, completion),
        _ => body_with(line_usage(completion), key, shape, *finished_at, completion),
    }
}

/// Returns the body of the answer to a single call. Its id is derived from `key`; `shape` is `chat` or `completion`.
pub fn body(key: &[u8], shape: &str, created: Timestamp, completion: &Completion) -> Value {
    body_with(usage(completion), key, shape, created, completion)
}

fn body_with(
    usage: Value,
    key: &[u8],
    shape: &str,
    created: Timestamp,
    completion: &Completion,
) -> Value {
    if let Some(embedded) = &completion.embedded {
        return vectors(usage, embedded, &completion.model);
    }
    let chat = shape == "chat";
    let object = if chat { "chat.completion" } else { "text_completion" };
    let choices: Vec<Value> = completion
        .choices
        .iter()
        .map(|choice| if chat { chat_choice(key, choice) } else { text_choice(choice) })
        .collect();
    json!({
        "id": id(key, shape),
        "object": object,
        "created": created.seconds(),
        "model": completion.model,
        "system_fingerprint": system_fingerprint(completion),
        "choices": choices,
        "usage": usage,
    })
}

/// Returns the body of an answer with vectors, which has no id in OpenAI's API.
fn vectors(mut usage: Value, embedded: &Embedded, model: &str) -> Value {
    let vector = |(index, vector): (usize, &Vector)| {
        let embedding = match embedded.format {
            VectorFormat::Float => vector.0.iter().map(|x| shortest(*x)).collect(),
            VectorFormat::Base64 => Value::String(vector.to_base64()),
        };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    };
    let data: Vec<Value> = embedded.vectors.iter().enumerate().map(vector).collect();
    if let Some(counts) = usage.as_object_mut() {
        counts.retain(|name, _| !name.starts_with("completion_"));
    }
    json!({ "object": "list", "data": data, "model": model, "usage": usage })
}

/// Returns a number with as few digits as tell it from other numbers of 32 bits.
fn shortest(x: f32) -> Value {
    json!(x.to_string().parse::<f64>().unwrap_or_else(|_| x.into()))
}

/// Returns the id of an answer.
pub fn id(key: &[u8], shape: &str) -> String {
    let prefix = if shape == "chat" { "chatcmpl" } else { "cmpl" };
    format!("{prefix}-{}", short_hex(key))
}

/// Returns the id of a call in an answer, by the indices of its choice and of the call in it.
pub fn call_id(key: &[u8], choice: u32, call: u32) -> String {
    format!("call_{}", call_hash(key, choice, call))
}

/// Returns what tells a call from others, in 24 hexadecimal digits.
pub(crate) fn call_hash(key: &[u8], choice: u32, call: u32) -> String {
    let call = hash(Purpose::CallId, &[key, &choice.to_le_bytes(), &call.to_le_bytes()]);
    short_hex(&call)[..24].to_owned()
}

/// Returns a hash of what the tokens depend on besides the request.
pub fn system_fingerprint(completion: &Completion) -> String {
    let fingerprint = hash(Purpose::Fingerprint, &[completion.fingerprint.as_bytes()]);
    format!("fp_{}", &short_hex(&fingerprint)[..12])
}

/// Returns the token counts of the answer to a single call.
pub fn usage(completion: &Completion) -> Value {
    let mut usage = line_usage(completion);
    usage["prompt_tokens_details"] = json!({ "cached_tokens": completion.usage.cached_tokens });
    let reasoning = completion.usage.reasoning_tokens;
    usage["completion_tokens_details"] = json!({ "reasoning_tokens": reasoning });
    usage
}

/// Returns the token counts of a line's answer. Without a price they depend on line and model alone; a price may count
/// cached tokens apart.
fn line_usage(completion: &Completion) -> Value {
    let usage = completion.usage;
    let mut counts = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    });
    if completion.charge.is_some() {
        counts["prompt_tokens_details"] = json!({ "cached_tokens": usage.cached_tokens });
        add_cost(&mut counts, completion);
    }
    counts
}

/// Adds what an answer costs, if it has a price.
pub fn add_cost(usage: &mut Value, completion: &Completion) {
    if let Some(charge) = &completion.charge {
        usage["cost"] = cost(charge);
        usage["currency"] = json!(charge.currency);
    }
}

/// Returns an amount of money as a JSON number.
pub fn cost(charge: &Charge) -> Value {
    json!(charge.amount().parse::<f64>().unwrap_or_default())
}

/// Returns the log probabilities of tokens, which follow `offset` characters of the choice's text; `shape` as for [`body`].
pub fn logprobs(shape: &str, tokens: &[TokenLogprob], offset: usize) -> Value {
    if shape == "chat" { chat_logprobs(tokens) } else { text_logprobs(tokens, offset) }
}

fn chat_choice(key: &[u8], choice: &Choice) -> Value {
    let mut message = json!({ "role": "assistant", "content": choice.text, "refusal": null });
    if let Some(reasoning) = &choice.reasoning {
        message["reasoning_content"] = json!(reasoning);
    }
    if !choice.tool_calls.is_empty() {
        if choice.text.is_empty() {
            message["content"] = Value::Null;
        }
        let calls = (0..).zip(&choice.tool_calls).map(|(index, call)| {
            let function = json!({ "name": call.name, "arguments": call.arguments });
            let id = call_id(key, choice.index, index);
            json!({ "id": id, "type": "function", "function": function })
        });
        message["tool_calls"] = calls.collect();
    }
    json!({
        "index": choice.index,
        "message": message,
        "logprobs": choice.logprobs.as_ref().map(|tokens| chat_logprobs(tokens)),
        "finish_reason": choice.finish_reason.as_str(),
        "length_limit": choice.length_limit.map(LengthLimit::as_str),
    })
}

fn chat_logprobs(tokens: &[TokenLogprob]) -> Value {
    let content: Vec<Value> = tokens.iter().map(chat_logprob).collect();
    json!({ "content": content, "refusal": null })
}

fn chat_logprob(token: &TokenLogprob) -> Value {
    let top: Vec<Value> = token.top.iter().map(|top| chat_token(&top.bytes, top.logprob)).collect();
    let mut value = chat_token(&token.bytes, token.logprob);
    value["top_logprobs"] = Value::Array(top);
    value
}

fn chat_token(bytes: &[u8], logprob: f32) -> Value {
    json!({
        "token": String::from_utf8_lossy(bytes),
        "logprob": finite(logprob),
        "bytes": bytes,
    })
}

fn text_choice(choice: &Choice) -> Value {
    json!({
        "text": choice.text,
        "index": choice.index,
        "logprobs": choice.logprobs.as_ref().map(|tokens| text_logprobs(tokens, 0)),
        "finish_reason": choice.finish_reason.as_str(),
        "length_limit": choice.length_limit.map(LengthLimit::as_str),
    })
}

/// Returns the older form: parallel arrays, alternatives keyed by text.
fn text_logprobs(tokens: &[TokenLogprob], mut offset: usize) -> Value {
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(offset);
        offset += String::from_utf8_lossy(&token.bytes).chars().count();
    }
    let top: Vec<Value> = tokens
        .iter()
        .map(|token| {
            // Of tokens with the same text, the most probable one stays; the drawn one is always there.
            let mut map = serde_json::Map::new();
            let drawn = std::iter::once((&token.bytes, token.logprob));
            for (bytes, logprob) in
                token.top.iter().map(|top| (&top.bytes, top.logprob)).chain(drawn)
            {
                map.entry(token_name(bytes)).or_insert_with(|| json!(finite(logprob)));
            }
            map.into()
        })
        .collect();
    json!({
        "tokens": tokens.iter().map(|token| token_name(&token.bytes)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| finite(token.logprob)).collect::<Vec<_>>(),
        "top_logprobs": top,
        "text_offset": offsets,
    })
}

/// Returns a token's text, or `bytes:\xe2\x82` for a token that is part of a character.
fn token_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{escaped}")
        }
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LOGPROB_FLOOR }
}
