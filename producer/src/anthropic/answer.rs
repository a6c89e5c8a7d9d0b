//! Answers of `/v1/messages`, by Anthropic's definition.

use serde_json::{Map, Value, json};
use tritmill_queue::{Choice, Completion, FinishReason};

use crate::{
    answer::{add_cost, call_hash},
    canonical::short_hex,
};

/// Returns the message with an answer. Its id is derived from `key`.
pub fn message(usage: Value, key: &[u8], completion: &Completion) -> Value {
    let choice = completion.choices.first();
    let (reason, sequence) = choice.map_or(("end_turn", None), stop);
    let content = choice.map_or_else(Vec::new, |choice| content(key, choice));
    json!({
        "id": id(key),
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    })
}

/// Returns the id of a message.
pub fn id(key: &[u8]) -> String {
    format!("msg_{}", short_hex(key))
}

/// Returns the id of a call in a message, by its index.
pub fn call_id(key: &[u8], call: u32) -> String {
    format!("toolu_{}", call_hash(key, 0, call))
}

/// Returns why an answer ended, and the stop sequence that ended it.
pub fn stop(choice: &Choice) -> (&'static str, Option<&str>) {
    match (choice.finish_reason, choice.stop_string.as_deref()) {
        (FinishReason::ToolCalls, _) => ("tool_use", None),
        (FinishReason::Length, _) => ("max_tokens", None),
        (FinishReason::Stop, Some(text)) => ("stop_sequence", Some(text)),
        (FinishReason::Stop, None) => ("end_turn", None),
    }
}

/// Returns the token counts of a message. Tokens that were cached are not among those of the input.
pub fn usage(completion: &Completion) -> Value {
    let usage = completion.usage;
    counts(usage.prompt_tokens.saturating_sub(usage.cached_tokens), usage.cached_tokens, completion)
}

/// Returns the token counts of a line's answer. Without a price they depend on line and model alone; a price may count cached
/// tokens apart.
pub fn line_usage(completion: &Completion) -> Value {
    match &completion.charge {
        Some(_) => usage(completion),
        None => counts(completion.usage.prompt_tokens, 0, completion),
    }
}

fn counts(input: u64, cached: u64, completion: &Completion) -> Value {
    let mut counts = json!({
        "input_tokens": input,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion.usage.completion_tokens,
    });
    add_cost(&mut counts, completion);
    counts
}

/// Returns the blocks of an answer: what was thought, text, calls.
fn content(key: &[u8], choice: &Choice) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(thought) = &choice.reasoning {
        blocks.push(thinking_block(thought));
    }
    if !choice.text.is_empty() {
        blocks.push(text_block(&choice.text));
    }
    for (index, call) in (0..).zip(&choice.tool_calls) {
        blocks.push(call_block(&call_id(key, index), &call.name, input(&call.arguments)));
    }
    blocks
}

/// Returns the arguments of a call. Those of a call that was cut are no object: an answer in JSON has none of them then.
fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(Value::Object(input)) => Value::Object(input),
        _ => Value::Object(Map::new()),
    }
}

/// Returns a block with text.
pub fn text_block(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

/// Returns a block with what the model thought. It is not signed: it is accepted in a request as it is.
pub fn thinking_block(text: &str) -> Value {
    json!({ "type": "thinking", "thinking": text, "signature": "" })
}

/// Returns a block with a call.
pub fn call_block(id: &str, name: &str, input: Value) -> Value {
    json!({ "type": "tool_use", "id": id, "name": name, "input": input })
}

/// Returns the body of an error response.
pub fn error(kind: &str, message: &str, request_id: Option<&str>) -> Value {
    json!({
        "type": "error",
        "error": { "type": kind, "message": message },
        "request_id": request_id,
    })
}

/// Returns the type of an error by the status of its response.
pub const fn error_kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::ToolCall;

    use super::*;

    fn answered(choice: Choice) -> Value {
        let completion = Completion { choices: vec![choice], ..Completion::default() };
        message(usage(&completion), b"key", &completion)
    }

    #[test]
    fn blocks_and_reasons_are_those_of_the_choice() {
        let call = |arguments: &str| ToolCall {
            id: String::new(),
            name: "look".to_owned(),
            arguments: arguments.to_owned(),
        };
        let choice = Choice {
            reasoning: Some("so".to_owned()),
            tool_calls: vec![call(r#"{"a":1}"#), call(r#"{"a"#)],
            ..Choice::new(0, "text", FinishReason::ToolCalls)
        };
        let message = answered(choice);
        let kinds: Vec<&str> = message["content"]
            .as_array()
            .expect("blocks")
            .iter()
            .filter_map(|b| b["type"].as_str())
            .collect();
        assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
        assert_eq!(message["content"][2]["input"], json!({ "a": 1 }));
        assert_eq!(message["content"][3]["input"], json!({}), "it was cut");
        assert_ne!(message["content"][2]["id"], message["content"][3]["id"]);
        assert_eq!(message["stop_reason"], "tool_use");
        let stopped =
            Choice { stop_string: Some("x".to_owned()), ..Choice::new(0, "", FinishReason::Stop) };
        let message = answered(stopped);
        assert_eq!(
            (&message["stop_reason"], &message["stop_sequence"]),
            (&json!("stop_sequence"), &json!("x"))
        );
        assert_eq!(message["content"], json!([]));
        assert_eq!(
            answered(Choice::new(0, "a", FinishReason::Length))["stop_reason"],
            "max_tokens"
        );
        assert_eq!(answered(Choice::new(0, "a", FinishReason::Stop))["stop_reason"], "end_turn");
    }
}
