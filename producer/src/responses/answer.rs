//! A response as JSON, by OpenAI's definition. Ids are derived from a key: the id of a job, or the key of a line.

use serde_json::{Map, Value, json};
use tritmill_queue::{Choice, Completion, FinishReason, Timestamp};

use super::REPEATED;
use crate::{answer, canonical::short_hex};

/// What a response says besides the answer.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'a> {
    /// What its ids are derived from; at least 16 bytes.
    pub key: &'a [u8],
    /// Its time.
    pub created: Timestamp,
    /// The model that answers.
    pub model: &'a str,
    /// What it repeats of the request, by name.
    pub repeated: &'a Map<String, Value>,
}

/// Returns the id of a response.
pub fn id(key: &[u8]) -> String {
    format!("resp_{}", short_hex(key))
}

/// Returns the id of a call.
pub fn call_id(key: &[u8], call: u32) -> String {
    answer::call_id(key, 0, call)
}

/// Returns the id of an item of the output or the input.
pub fn item_id(prefix: &str, key: &[u8], index: u32) -> String {
    format!("{prefix}_{}{index:04x}", short_hex(key))
}

/// Returns a response with its status, its answer with the token counts, and its error.
pub fn object(
    shown: &Shown<'_>,
    status: &str,
    answer: Option<(&Completion, Value)>,
    error: Option<Value>,
) -> Value {
    let Shown { key, created, model, repeated } = *shown;
    let (completion, usage) = answer.unzip();
    let choice = completion.and_then(|completion| completion.choices.first());
    let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
    let mut response = json!({
        "id": id(key),
        "object": "response",
        "created_at": created.seconds(),
        "status": status,
        "error": error,
        "incomplete_details": incomplete,
        "model": model,
        "output": choice.map_or_else(Vec::new, |choice| output(key, choice)),
        "usage": usage,
    });
    for name in REPEATED {
        let given = repeated.get(name).cloned();
        response[name] = given.unwrap_or_else(|| default_of(name));
    }
    response
}

/// Returns the body of the answer of a line.
pub(crate) fn of_line(
    key: &[u8],
    created: Timestamp,
    repeated: &Map<String, Value>,
    completion: &Completion,
) -> Value {
    let shown = Shown { key, created, model: &completion.model, repeated };
    // Without a price, counts depend on line and model alone; a price may count cached tokens apart.
    let cached = completion.charge.as_ref().map_or(0, |_| completion.usage.cached_tokens);
    let answer = Some((completion, counts(completion, cached)));
    object(&shown, status(completion), answer, None)
}

/// Returns what a response says of a parameter that was not sent.
fn default_of(name: &str) -> Value {
    match name {
        "background" => json!(false),
        "metadata" => json!({}),
        "parallel_tool_calls" | "store" => json!(true),
        "reasoning" => json!({ "effort": null, "summary": null }),
        "service_tier" => json!("default"),
        "temperature" | "top_p" => json!(1.0),
        "text" => json!({ "format": { "type": "text" } }),
        "tool_choice" => json!("auto"),
        "tools" => json!([]),
        "top_logprobs" => json!(0),
        "truncation" => json!("disabled"),
        _ => Value::Null,
    }
}

/// Returns the status of a response with an answer.
pub fn status(completion: &Completion) -> &'static str {
    let cut = |choice: &Choice| choice.finish_reason == FinishReason::Length;
    if completion.choices.iter().any(cut) { "incomplete" } else { "completed" }
}

/// Returns the token counts of a response.
pub fn usage(completion: &Completion) -> Value {
    counts(completion, completion.usage.cached_tokens)
}

fn counts(completion: &Completion, cached: u64) -> Value {
    let usage = completion.usage;
    let mut counts = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": cached, "cache_write_tokens": 0 },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    });
    answer::add_cost(&mut counts, completion);
    counts
}

/// Returns the items of an answer: reasoning, text, calls.
fn output(key: &[u8], choice: &Choice) -> Vec<Value> {
    let mut items = Vec::new();
    if let Some(text) = &choice.reasoning {
        items.push(reasoning_item(key, text, "completed"));
    }
    let cut = choice.finish_reason == FinishReason::Length;
    let status = if cut { "incomplete" } else { "completed" };
    if !choice.text.is_empty() || choice.tool_calls.is_empty() {
        let logprobs = choice.logprobs.as_ref().map(|tokens| answer::logprobs("chat", tokens, 0));
        let logprobs = logprobs.map_or_else(|| json!([]), |mut all| all["content"].take());
        items.push(message_item(key, &choice.text, logprobs, status));
    }
    for (index, call) in (0..).zip(&choice.tool_calls) {
        items.push(call_item(key, index, (&call.name, &call.arguments), status));
    }
    items
}

/// Returns an item with what the model thought.
pub fn reasoning_item(key: &[u8], text: &str, status: &str) -> Value {
    let content: Vec<Value> = match text {
        "" => Vec::new(),
        text => vec![json!({ "type": "reasoning_text", "text": text })],
    };
    json!({
        "id": item_id("rs", key, 0), "type": "reasoning", "summary": [], "content": content, "status": status,
    })
}

/// Returns an item with the text of an answer.
pub fn message_item(key: &[u8], text: &str, logprobs: Value, status: &str) -> Value {
    let content: Vec<Value> = match status {
        "in_progress" => Vec::new(),
        _ => vec![text_part(text, logprobs)],
    };
    json!({
        "id": item_id("msg", key, 0), "type": "message", "role": "assistant", "status": status, "content": content,
    })
}

/// Returns the part of an item that is its text.
pub fn text_part(text: &str, logprobs: Value) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs })
}

/// Returns an item with a call, by its index, name and arguments.
pub fn call_item(key: &[u8], index: u32, (name, arguments): (&str, &str), status: &str) -> Value {
    json!({
        "id": item_id("fc", key, index), "type": "function_call", "call_id": call_id(key, index), "name": name,
        "arguments": arguments, "status": status,
    })
}
