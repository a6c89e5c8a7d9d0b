//! Blocks of content: texts, calls of tools and their results, and what the model thought.

use serde_json::Value;
use tritmill_queue::{Content, Message, Role, ToolCall};

use super::{content_of, required};
use crate::fields::{FieldError, Fields, shorten};

/// Appends a message, and the results of tools before it.
///
/// # Errors
/// The field that cannot be used.
pub(super) fn message(
    mut fields: Fields,
    conversation: &mut Vec<Message>,
) -> Result<(), FieldError> {
    let role = match required(&mut fields, "role")?.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        other => {
            let problem = format!("must be 'user' or 'assistant', got '{}'", shorten(other));
            return Err(FieldError::new(fields.path("role"), "invalid_value", problem));
        }
    };
    let (mut texts, mut has_results) = (Vec::new(), false);
    let mut message = Message::new(role, "");
    for mut block in blocks(&mut fields, "content")?
        .ok_or_else(|| FieldError::new(fields.path("content"), "missing_field", "is missing"))?
    {
        match (required(&mut block, "type")?.as_str(), role) {
            ("text", _) => {
                texts.push(text(block)?);
                continue;
            }
            ("tool_result", Role::User) => {
                if !texts.is_empty() {
                    let content = content_of(std::mem::take(&mut texts));
                    conversation.push(Message { content, ..Message::new(role, "") });
                }
                conversation.push(result(&mut block)?);
                has_results = true;
            }
            ("tool_use", Role::Assistant) => message.tool_calls.push(call(&mut block)?),
            ("thinking", Role::Assistant) => {
                let thought = required(&mut block, "thinking")?;
                block.text("signature")?;
                message.reasoning.get_or_insert_default().push_str(&thought);
            }
            (other, _) => {
                let role = role.as_str();
                let problem =
                    format!("is not supported in a message of the {role}: '{}'", shorten(other));
                return Err(FieldError::new(block.path("type"), "unsupported_value", problem));
            }
        }
        block.finish()?;
    }
    fields.finish()?;
    if !texts.is_empty() || !has_results {
        message.content = content_of(texts);
        conversation.push(message);
    }
    Ok(())
}

/// Takes a string, or the texts of blocks; `None` if there is neither.
///
/// # Errors
/// The field, or the block, that is neither.
pub(super) fn content(fields: &mut Fields, name: &str) -> Result<Option<Content>, FieldError> {
    let Some(blocks) = blocks(fields, name)? else { return Ok(None) };
    let mut texts = Vec::with_capacity(blocks.len());
    for mut block in blocks {
        match required(&mut block, "type")?.as_str() {
            "text" => texts.push(text(block)?),
            other => {
                let problem = format!("is supported as 'text' only, got '{}'", shorten(other));
                return Err(FieldError::new(block.path("type"), "unsupported_value", problem));
            }
        }
    }
    Ok(Some(content_of(texts)))
}

/// Takes a list of blocks; a string is one block of text.
fn blocks(fields: &mut Fields, name: &str) -> Result<Option<Vec<Fields>>, FieldError> {
    let path = fields.path(name);
    let items = match fields.take(name) {
        None => return Ok(None),
        Some(text @ Value::String(_)) => vec![serde_json::json!({ "type": "text", "text": text })],
        Some(Value::Array(items)) => items,
        Some(other) => {
            return Err(FieldError::wrong_type(path, "a string or an array of blocks", &other));
        }
    };
    let each = |(index, item)| {
        let path = format!("{path}[{index}]");
        match item {
            Value::Object(map) => {
                let mut block = Fields::new(map, format!("{path}."));
                // Prompts that begin in the same way are always computed once.
                block.take("cache_control");
                Ok(block)
            }
            other => Err(FieldError::wrong_type(path, "an object", &other)),
        }
    };
    items.into_iter().enumerate().map(each).collect::<Result<_, _>>().map(Some)
}

fn text(mut block: Fields) -> Result<String, FieldError> {
    let text = required(&mut block, "text")?;
    // What clients send back of an answer.
    block.take("citations");
    block.finish()?;
    Ok(text)
}

fn call(block: &mut Fields) -> Result<ToolCall, FieldError> {
    let (id, name) = (required(block, "id")?, required(block, "name")?);
    block.take("caller");
    let arguments = match block.take("input") {
        Some(Value::Object(input)) => Value::Object(input).to_string(),
        Some(other) => {
            return Err(FieldError::wrong_type(block.path("input"), "an object", &other));
        }
        None => return Err(FieldError::new(block.path("input"), "missing_field", "is missing")),
    };
    Ok(ToolCall { id, name, arguments })
}

/// Takes the result of a tool. Chat templates know no failed results: their text says it.
fn result(block: &mut Fields) -> Result<Message, FieldError> {
    let call = required(block, "tool_use_id")?;
    block.boolean("is_error")?;
    let content = content(block, "content")?.unwrap_or_else(|| content_of(Vec::new()));
    Ok(Message { content, tool_call_id: Some(call), ..Message::new(Role::Tool, "") })
}
