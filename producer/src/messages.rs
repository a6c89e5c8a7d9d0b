//! Parses the messages of a chat request.

use serde_json::Value;
use tritmill_queue::{Content, Message, Role, ToolCall};

use crate::fields::{FieldError, Fields, shorten};

/// Takes `messages`.
///
/// # Errors
/// The field that cannot be used.
pub fn messages(fields: &mut Fields) -> Result<Vec<Message>, FieldError> {
    let Some(items) = fields.list("messages")? else {
        return Err(FieldError::new("messages", "missing_field", "is missing"));
    };
    if items.is_empty() {
        return Err(FieldError::new("messages", "invalid_value", "is empty"));
    }
    let each = |(index, item)| message(index, item);
    items.into_iter().enumerate().map(each).collect()
}

fn message(index: usize, item: Value) -> Result<Message, FieldError> {
    let path = format!("messages[{index}]");
    let Value::Object(map) = item else {
        return Err(FieldError::wrong_type(path, "an object", &item));
    };
    of_fields(Fields::new(map, format!("{path}.")))
}

/// Parses the fields of a message.
///
/// # Errors
/// The field that cannot be used.
pub fn of_fields(mut fields: Fields) -> Result<Message, FieldError> {
    let role = role(&mut fields)?;
    let tool_calls = tool_calls(role, &mut fields)?;
    let content = match content_of(&mut fields, "content")? {
        Some(content) => content,
        // What clients send back of an answer: calls, a refusal, or nothing at all.
        None if role == Role::Assistant => {
            Content::Text(fields.text("refusal")?.unwrap_or_default())
        }
        None => return Err(FieldError::new(fields.path("content"), "missing_field", "is missing")),
    };
    let name = fields.text("name")?;
    let tool_call_id = fields.text("tool_call_id")?;
    // LiteLLM's notes for itself.
    fields.take("provider_specific_fields");
    // vLLM's two names.
    let (older, newer) = (fields.text("reasoning_content")?, fields.text("reasoning")?);
    fields.finish()?;
    Ok(Message { role, content, name, tool_call_id, reasoning: newer.or(older), tool_calls })
}

fn role(fields: &mut Fields) -> Result<Role, FieldError> {
    match fields.text("role")?.as_deref() {
        Some("system") => Ok(Role::System),
        Some("developer") => Ok(Role::Developer),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        Some("tool") => Ok(Role::Tool),
        Some(other) => {
            let problem = format!("is unknown: '{}'", shorten(other));
            Err(FieldError::new(fields.path("role"), "invalid_value", problem))
        }
        None => Err(FieldError::new(fields.path("role"), "missing_field", "is missing")),
    }
}

/// Takes a string, or the texts of parts; `None` if there is neither.
///
/// # Errors
/// The field, or the part, that is neither.
pub fn content_of(fields: &mut Fields, name: &str) -> Result<Option<Content>, FieldError> {
    let path = fields.path(name);
    let parts = match fields.take(name) {
        Some(Value::String(text)) => return Ok(Some(Content::Text(text))),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            return Err(FieldError::wrong_type(path, "a string or an array of text parts", &other));
        }
        None => return Ok(None),
    };
    let mut texts = Vec::new();
    for (index, part) in parts.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        let Value::Object(map) = part else {
            return Err(FieldError::wrong_type(path, "an object", &part));
        };
        let mut part = Fields::new(map, format!("{path}."));
        let kind = part.text("type")?;
        // The types of the Responses API mean the same.
        let name = match kind.as_deref() {
            Some("text" | "input_text" | "output_text") => "text",
            Some("refusal") => "refusal",
            _ => {
                let problem = "is supported as 'text' only";
                return Err(FieldError::new(part.path("type"), "unsupported_value", problem));
            }
        };
        match part.text(name)? {
            Some(text) => texts.push(text),
            None => return Err(FieldError::new(part.path(name), "missing_field", "is missing")),
        }
        // What the Responses API adds to parts of its answers.
        for unused in ["annotations", "logprobs"] {
            part.take(unused);
        }
        part.finish()?;
    }
    Ok(Some(Content::Parts(texts)))
}

fn tool_calls(role: Role, fields: &mut Fields) -> Result<Vec<ToolCall>, FieldError> {
    let items = fields.list("tool_calls")?.unwrap_or_default();
    let path = fields.path("tool_calls");
    if !items.is_empty() && role != Role::Assistant {
        let problem = "is for messages with the role assistant";
        return Err(FieldError::new(path, "invalid_value", problem));
    }
    let each = |(index, item)| tool_call(&format!("{path}[{index}]"), item);
    items.into_iter().enumerate().map(each).collect()
}

fn tool_call(path: &str, item: Value) -> Result<ToolCall, FieldError> {
    let Value::Object(map) = item else {
        return Err(FieldError::wrong_type(path, "an object", &item));
    };
    let mut call = Fields::new(map, format!("{path}."));
    if let Some(kind) = call.text("type")?.filter(|kind| kind != "function") {
        let problem = format!("is supported as 'function' only, got '{}'", shorten(&kind));
        return Err(FieldError::new(call.path("type"), "unsupported_value", problem));
    }
    // Streams number their calls, and some clients keep the number.
    call.take("index");
    call.take("provider_specific_fields");
    let id = call.text("id")?.unwrap_or_default();
    let function = call.path("function");
    let mut function = match call.take("function") {
        Some(Value::Object(map)) => Fields::new(map, format!("{function}.")),
        Some(other) => return Err(FieldError::wrong_type(function, "an object", &other)),
        None => return Err(FieldError::new(function, "missing_field", "is missing")),
    };
    let Some(name) = function.text("name")? else {
        return Err(FieldError::new(function.path("name"), "missing_field", "is missing"));
    };
    let arguments = arguments(&mut function)?;
    function.finish()?;
    call.finish()?;
    Ok(ToolCall { id, name, arguments })
}

/// Takes the arguments of a call: a text, or an object. A text that does not parse as a JSON object is a call that was cut.
///
/// # Errors
/// The field, if it is neither.
pub fn arguments(fields: &mut Fields) -> Result<String, FieldError> {
    match fields.take("arguments") {
        None => Ok("{}".to_owned()),
        Some(Value::String(text)) if text.trim().is_empty() => Ok("{}".to_owned()),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Object(map)) => Ok(Value::Object(map).to_string()),
        Some(other) => Err(FieldError::wrong_type(fields.path("arguments"), "a JSON text", &other)),
    }
}
