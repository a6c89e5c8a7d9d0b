//! Output lines become rows of flat columns.

use serde_json::{Map, Value};

/// Columns that every table of answers has, with their kinds.
pub(crate) const ALWAYS: [(&str, Kind); 8] = [
    ("custom_id", Kind::Text),
    ("content", Kind::Text),
    ("finish_reason", Kind::Text),
    ("prompt_tokens", Kind::Integer),
    ("completion_tokens", Kind::Integer),
    ("logprobs", Kind::Text),
    ("error", Kind::Text),
    ("error_code", Kind::Text),
];

/// The kind of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Boolean,
    Integer,
    Number,
    /// Texts; lists and objects are JSON.
    Text,
}

impl Kind {
    /// Returns the kind of a value; `None` for null.
    pub fn of(value: &Value) -> Option<Self> {
        Some(match value {
            Value::Null => return None,
            Value::Bool(_) => Self::Boolean,
            Value::Number(number) if number.is_i64() => Self::Integer,
            Value::Number(_) => Self::Number,
            Value::String(_) | Value::Array(_) | Value::Object(_) => Self::Text,
        })
    }

    /// Returns the kind that holds the values of both.
    pub fn with(self, other: Self) -> Self {
        match (self, other) {
            (a, b) if a == b => a,
            (Self::Integer, Self::Number) | (Self::Number, Self::Integer) => Self::Number,
            _ => Self::Text,
        }
    }
}

/// Returns a value as text: a text as it is, others as JSON. `None` for null.
pub(crate) fn text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// Returns an output line as columns. Those beyond [`ALWAYS`] are there only if the answer has them: `cached_tokens`,
/// `reasoning`, `tool_calls`, `embedding`, and `choices` for an answer with several.
pub(crate) fn flat(line: &Value) -> Map<String, Value> {
    let mut row = Map::new();
    let mut set = |name: &str, value: &Value| {
        if !value.is_null() {
            row.insert(name.to_owned(), value.clone());
        }
    };
    set("custom_id", &line["custom_id"]);
    let body = &line["response"]["body"];
    let choice = &body["choices"][0];
    let message = &choice["message"];
    set("content", if message.is_object() { &message["content"] } else { &choice["text"] });
    set("finish_reason", &choice["finish_reason"]);
    let usage = &body["usage"];
    set("prompt_tokens", &usage["prompt_tokens"]);
    set("completion_tokens", &usage["completion_tokens"]);
    set("logprobs", &choice["logprobs"]);
    let error = if line["error"].is_object() { &line["error"] } else { &body["error"] };
    set("error", &error["message"]);
    set("error_code", &error["code"]);
    set("cached_tokens", &usage["prompt_tokens_details"]["cached_tokens"]);
    set("reasoning", &message["reasoning_content"]);
    set("tool_calls", &message["tool_calls"]);
    set("embedding", &body["data"][0]["embedding"]);
    if body["choices"].as_array().is_some_and(|choices| choices.len() > 1) {
        set("choices", &body["choices"]);
    }
    row
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn chat_completion_error_and_vector_are_flat() {
        let chat = json!({ "custom_id": "a", "error": null, "response": { "body": {
            "choices": [{ "message": { "content": "hi" }, "finish_reason": "stop", "logprobs": { "content": [] } }],
            "usage": { "prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": { "cached_tokens": 1 } } } } });
        let expected = json!({ "custom_id": "a", "content": "hi", "finish_reason": "stop", "prompt_tokens": 3,
            "completion_tokens": 2, "logprobs": { "content": [] }, "cached_tokens": 1 });
        assert_eq!(Value::Object(flat(&chat)), expected);
        let text = json!({ "custom_id": "b", "response": { "body": { "choices": [{ "text": "x" }, { "text": "y" }] } } });
        assert_eq!(flat(&text)["content"], "x");
        assert_eq!(flat(&text)["choices"].as_array().map(Vec::len), Some(2));
        let refused = json!({ "custom_id": null, "response": null, "error": { "code": "c", "message": "m" } });
        assert_eq!(Value::Object(flat(&refused)), json!({ "error": "m", "error_code": "c" }));
        let failed = json!({ "response": { "body": { "error": { "code": "c", "message": "n" } } }, "error": null });
        assert_eq!(flat(&failed)["error"], "n");
        let vector = json!({ "response": { "body": { "data": [{ "embedding": [0.5] }] } } });
        assert_eq!(flat(&vector)["embedding"], json!([0.5]));
    }

    #[test]
    fn kind_of_a_column_holds_all_its_values() {
        let kind = |values: &[Value]| values.iter().filter_map(Kind::of).reduce(Kind::with);
        assert_eq!(kind(&[json!(1), Value::Null, json!(2)]), Some(Kind::Integer));
        assert_eq!(kind(&[json!(1), json!(0.5)]), Some(Kind::Number));
        assert_eq!(kind(&[json!(u64::MAX)]), Some(Kind::Number));
        assert_eq!(kind(&[json!(true), json!(1)]), Some(Kind::Text));
        assert_eq!(kind(&[json!([1]), json!({})]), Some(Kind::Text));
        assert_eq!(kind(&[Value::Null]), None);
    }
}
