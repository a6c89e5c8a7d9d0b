//! Parses the body of a request to `/v1/messages`, by Anthropic's definition, and writes its answers ([`answer`]).
//!
//! The parameters are those of chat completions by other names; they are renamed and parsed as these are, so that both mean the
//! same. Messages become those of a conversation: the result of a tool is a message of its own there.

pub mod answer;
mod blocks;

use serde_json::{Map, Value, json};
use tritmill_queue::{Content, Conversation, Message, Prompt, Role, Task};

use self::blocks::{content, message};
use crate::{
    body::{Body, Endpoint, parse_body},
    fields::{FieldError, Fields, shorten},
};

/// Parameters with the same name and meaning in chat completions. Those behind `top_k` are not Anthropic's.
const SAME: [&str; 14] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
];

/// Names in chat completions of parameters with other names here, the longest first.
const RENAMED: [(&str, &str); 4] = [
    ("output_config.format.schema", "response_format.json_schema.schema"),
    ("output_config.format", "response_format"),
    ("output_config.effort", "reasoning_effort"),
    ("stop_sequences", "stop"),
];

/// Least tokens of thinking that may be set.
const BUDGET_MIN: u32 = 1024;

/// What a conversation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// An answer, which needs `max_tokens`.
    Answer,
    /// The number of its tokens.
    Count,
}

/// Parses a body. The caller takes `stream` out first.
///
/// # Errors
/// The first field that cannot be used.
pub fn parse_message(map: Map<String, Value>, purpose: Purpose) -> Result<Body, FieldError> {
    let mut fields = Fields::new(map, "");
    without_effect(&mut fields)?;
    let mut chat = Map::new();
    for name in SAME {
        if let Some(value) = fields.take(name) {
            chat.insert(name.to_owned(), value);
        }
    }
    let max_tokens = fields.count("max_tokens")?;
    if max_tokens.is_none() && purpose == Purpose::Answer {
        return Err(FieldError::new("max_tokens", "missing_field", "is missing"));
    }
    chat.insert("max_tokens".to_owned(), json!(max_tokens));
    if let Some(value) = fields.take("stop_sequences") {
        if !value.is_array() {
            return Err(FieldError::wrong_type("stop_sequences", "an array of strings", &value));
        }
        chat.insert("stop".to_owned(), value);
    }
    tools(&mut fields, &mut chat)?;
    output(&mut fields, &mut chat)?;
    thinking(&mut fields, &mut chat)?;
    let conversation = messages(&mut fields)?;
    fields.finish()?;
    // The messages are parsed already; a chat request needs one.
    chat.insert("messages".to_owned(), json!([{ "role": "user", "content": "" }]));
    let mut body = parse_body(Endpoint::Chat, chat).map_err(own_name)?;
    if let Prompt::Messages(Conversation { messages, .. }) = &mut body.prompt {
        *messages = conversation;
    }
    if purpose == Purpose::Count {
        body.task = Task::Tokenize { special: true, generation_prompt: true };
    }
    Ok(body)
}

/// Returns an error with the name that the parameter has here.
fn own_name(mut error: FieldError) -> FieldError {
    for (own, chat) in RENAMED {
        let rest = error.path.strip_prefix(chat);
        if let Some(rest) = rest.filter(|rest| rest.is_empty() || rest.starts_with(['[', '.'])) {
            error.path = format!("{own}{rest}");
            return error;
        }
    }
    error.path = error.path.replace("].function.parameters", "].input_schema");
    error.path = error.path.replace("].function.", "].");
    error
}

/// Takes the parameters that do not change an answer.
fn without_effect(fields: &mut Fields) -> Result<(), FieldError> {
    const TIERS: [&str; 2] = ["auto", "standard_only"];
    if let Some(mut metadata) = object(fields, "metadata")? {
        metadata.text("user_id")?;
        metadata.finish()?;
    }
    if let Some(tier) = fields.text("service_tier")?
        && !TIERS.contains(&tier.as_str())
    {
        let problem = format!("must be one of {}, got '{}'", TIERS.join(", "), shorten(&tier));
        return Err(FieldError::new("service_tier", "invalid_value", problem));
    }
    if let Some(management) = object(fields, "context_management")? {
        // An empty list of edits changes nothing, and `finish` lets it pass.
        management.finish()?;
    }
    // Prompts that begin in the same way are always computed once.
    fields.take("cache_control");
    if fields.boolean("stream")? == Some(true) {
        let problem = "must be false in a batch";
        return Err(FieldError::new("stream", "unsupported_value", problem));
    }
    Ok(())
}

/// Takes the tools: in chat completions, their functions have an object of their own, and other names.
fn tools(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), FieldError> {
    if let Some(tools) = fields.list("tools")? {
        let tools = tools.into_iter().enumerate().map(|(index, item)| tool(index, item));
        chat.insert("tools".to_owned(), tools.collect::<Result<Value, FieldError>>()?);
    }
    let Some(mut choice) = object(fields, "tool_choice")? else { return Ok(()) };
    let kind = required(&mut choice, "type")?;
    let chosen = match kind.as_str() {
        "auto" | "none" => json!(kind),
        "any" => json!("required"),
        "tool" => {
            let name = required(&mut choice, "name")?;
            json!({ "type": "function", "function": { "name": name } })
        }
        other => {
            let problem =
                format!("must be 'auto', 'any', 'tool' or 'none', got '{}'", shorten(other));
            return Err(FieldError::new(choice.path("type"), "invalid_value", problem));
        }
    };
    if choice.boolean("disable_parallel_tool_use")? == Some(true) {
        chat.insert("parallel_tool_calls".to_owned(), json!(false));
    }
    choice.finish()?;
    chat.insert("tool_choice".to_owned(), chosen);
    Ok(())
}

fn tool(index: usize, item: Value) -> Result<Value, FieldError> {
    let path = format!("tools[{index}]");
    let Value::Object(map) = item else {
        return Err(FieldError::wrong_type(path, "an object", &item));
    };
    let mut tool = Fields::new(map, format!("{path}."));
    if let Some(kind) = tool.text("type")?.filter(|kind| kind != "custom") {
        let problem = format!("is supported as 'custom' only, got '{}'", shorten(&kind));
        return Err(FieldError::new(tool.path("type"), "unsupported_value", problem));
    }
    tool.take("cache_control");
    // Text of a call always arrives as it is generated.
    tool.boolean("eager_input_streaming")?;
    let mut function = Map::new();
    for (own, chat) in [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ] {
        if let Some(value) = tool.take(own) {
            function.insert(chat.to_owned(), value);
        } else if own == "input_schema" {
            return Err(FieldError::new(tool.path(own), "missing_field", "is missing"));
        }
    }
    tool.finish()?;
    Ok(json!({ "type": "function", "function": function }))
}

/// Takes `output_config`: what the answer must match, and how much the model thinks.
fn output(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), FieldError> {
    let Some(mut output) = object(fields, "output_config")? else { return Ok(()) };
    if let Some(effort) = output.text("effort")? {
        let effort = if effort == "max" { "xhigh" } else { effort.as_str() };
        chat.insert("reasoning_effort".to_owned(), json!(effort));
    }
    if let Some(mut format) = object(&mut output, "format")? {
        let kind = required(&mut format, "type")?;
        let schema = format.take("schema");
        format.finish()?;
        let format = match kind.as_str() {
            "json_schema" => json!({ "type": kind, "json_schema": { "schema": schema } }),
            _ => json!({ "type": kind }),
        };
        chat.insert("response_format".to_owned(), format);
    }
    output.finish()
}

/// Takes `thinking`, which templates know as a switch. Its budget is checked alone: `max_tokens` bounds an answer with all that
/// the model thinks.
fn thinking(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), FieldError> {
    const SWITCH: &str = "enable_thinking";
    let Some(mut thinking) = object(fields, "thinking")? else { return Ok(()) };
    let is_on = match required(&mut thinking, "type")?.as_str() {
        "disabled" => false,
        "adaptive" => true,
        "enabled" => {
            let path = thinking.path("budget_tokens");
            match thinking.count("budget_tokens")? {
                Some(budget) if budget >= BUDGET_MIN => true,
                Some(budget) => {
                    let problem = format!("must be at least {BUDGET_MIN}, got {budget}");
                    return Err(FieldError::new(path, "invalid_value", problem));
                }
                None => return Err(FieldError::new(path, "missing_field", "is missing")),
            }
        }
        other => {
            let problem =
                format!("must be 'enabled', 'adaptive' or 'disabled', got '{}'", shorten(other));
            return Err(FieldError::new(thinking.path("type"), "invalid_value", problem));
        }
    };
    // What was thought is shown as it is.
    thinking.text("display")?;
    thinking.finish()?;
    let arguments = chat.entry("chat_template_kwargs").or_insert_with(|| json!({}));
    if let Value::Object(arguments) = arguments {
        arguments.entry(SWITCH).or_insert(Value::Bool(is_on));
    }
    Ok(())
}

/// Takes the instructions and the messages.
fn messages(fields: &mut Fields) -> Result<Vec<Message>, FieldError> {
    let mut conversation = Vec::new();
    if let Some(content) = content(fields, "system")? {
        conversation.push(Message { content, ..Message::new(Role::System, "") });
    }
    let Some(items) = fields.list("messages")? else {
        return Err(FieldError::new("messages", "missing_field", "is missing"));
    };
    let Some(last) = items.len().checked_sub(1) else {
        return Err(FieldError::new("messages", "invalid_value", "is empty"));
    };
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("messages[{index}]");
        let Value::Object(map) = item else {
            return Err(FieldError::wrong_type(path, "an object", &item));
        };
        message(Fields::new(map, format!("{path}.")), &mut conversation)?;
    }
    let is_begun = |message: &Message| message.role == Role::Assistant;
    if conversation.last().is_some_and(is_begun) {
        let problem = "must not be of the assistant at the end: begun answers are not continued";
        return Err(FieldError::new(format!("messages[{last}]"), "unsupported_value", problem));
    }
    Ok(conversation)
}

/// Takes a field with an object.
fn object(fields: &mut Fields, name: &str) -> Result<Option<Fields>, FieldError> {
    let path = fields.path(name);
    match fields.take(name) {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(Fields::new(map, format!("{path}.")))),
        Some(other) => Err(FieldError::wrong_type(path, "an object", &other)),
    }
}

/// Takes a text that must be there.
fn required(fields: &mut Fields, name: &str) -> Result<String, FieldError> {
    let missing = FieldError::new(fields.path(name), "missing_field", "is missing");
    fields.text(name)?.ok_or(missing)
}

/// Returns a text as the content of a message: a list of one is the text alone.
fn content_of(mut texts: Vec<String>) -> Content {
    match texts.len() {
        0 => Content::Text(String::new()),
        1 => Content::Text(texts.remove(0)),
        _ => Content::Parts(texts),
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{ToolCall, ToolChoice};

    use super::*;

    fn parsed(change: Value) -> Result<Body, FieldError> {
        let mut body = json!({
            "model": "m", "max_tokens": 9, "messages": [{ "role": "user", "content": "Hi" }],
        });
        let Value::Object(change) = change else { panic!("an object") };
        body.as_object_mut().expect("an object").extend(change);
        parse_message(body.as_object().cloned().expect("an object"), Purpose::Answer)
    }

    fn conversation(change: Value) -> Conversation {
        match parsed(change).expect("a request").prompt {
            Prompt::Messages(conversation) => conversation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn blocks_become_messages() {
        let plain = conversation(json!({ "system": [{ "type": "text", "text": "Be brief.",
            "cache_control": { "type": "ephemeral" } }] }));
        let expected = [Message::new(Role::System, "Be brief."), Message::new(Role::User, "Hi")];
        assert_eq!(plain.messages, expected);
        let blocks = conversation(json!({ "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "so", "signature": "" },
                { "type": "text", "text": "I look." },
                { "type": "tool_use", "id": "t1", "name": "look", "input": { "a": 1 } },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "t1", "content": [{ "type": "text", "text": "7" }] },
                { "type": "tool_result", "tool_use_id": "t2", "is_error": true },
                { "type": "text", "text": "And now?" },
            ] },
        ] }));
        let call = |id: &str| ToolCall {
            id: id.to_owned(),
            name: "look".to_owned(),
            arguments: r#"{"a":1}"#.to_owned(),
        };
        let result = |id: &str, text: &str| Message {
            tool_call_id: Some(id.to_owned()),
            ..Message::new(Role::Tool, text)
        };
        let two = Content::Parts(vec!["a".to_owned(), "b".to_owned()]);
        let expected = [
            Message { content: two, ..Message::new(Role::User, "") },
            Message {
                reasoning: Some("so".to_owned()),
                tool_calls: vec![call("t1")],
                ..Message::new(Role::Assistant, "I look.")
            },
            result("t1", "7"),
            result("t2", ""),
            Message::new(Role::User, "And now?"),
        ];
        assert_eq!(blocks.messages, expected);
    }

    #[test]
    fn parameters_mean_what_they_mean_in_chat() {
        let tool =
            json!({ "name": "look", "description": "d", "input_schema": { "type": "object" } });
        let body = parsed(json!({
            "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "seed": 3,
            "tools": [tool], "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
            "metadata": { "user_id": "u" }, "service_tier": "auto",
            "thinking": { "type": "enabled", "budget_tokens": 1024 },
        }));
        let body = body.expect("a request");
        assert_eq!(body.sampling.max_tokens, Some(9));
        assert_eq!((body.sampling.top_k, body.seed), (5, Some(3)));
        assert_eq!(body.sampling.stop, ["x"]);
        assert!(body.metadata.is_empty());
        let Prompt::Messages(conversation) = body.prompt else { panic!("a conversation") };
        assert_eq!(conversation.tools[0].name, "look");
        assert!(conversation.tool_choice == ToolChoice::Required && conversation.one_call);
        assert_eq!(conversation.template_arguments["enable_thinking"], true);
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        let format = json!({ "format": { "type": "json_schema", "schema": schema } });
        assert!(
            parsed(json!({ "output_config": format }))
                .expect("a request")
                .sampling
                .grammar
                .is_some()
        );
    }

    #[test]
    fn what_cannot_be_used_is_named_as_it_was_sent() {
        let content =
            |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
        let tool = |change: Value| {
            let mut tool = json!({ "name": "a", "input_schema": { "type": "object" } });
            tool.as_object_mut()
                .expect("an object")
                .extend(change.as_object().cloned().expect("one"));
            json!({ "tools": [tool] })
        };
        let image =
            json!({ "type": "image", "source": { "type": "url", "url": "https://a.example" } });
        for (change, path) in [
            (json!({ "max_tokens": null }), "max_tokens"),
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "messages": [] }), "messages"),
            (json!({ "messages": [{ "role": "system", "content": "a" }] }), "messages[0].role"),
            (json!({ "messages": [{ "role": "user" }] }), "messages[0].content"),
            (
                json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }] }),
                "messages[1]",
            ),
            (content(image), "messages[0].content[0].type"),
            (
                content(json!({ "type": "tool_use", "id": "a", "name": "b", "input": {} })),
                "messages[0].content[0].type",
            ),
            (
                content(json!({ "type": "tool_result", "content": "a" })),
                "messages[0].content[0].tool_use_id",
            ),
            (content(json!({ "type": "text" })), "messages[0].content[0].text"),
            (tool(json!({ "type": "web_search_20250305" })), "tools[0].type"),
            (tool(json!({ "input_schema": null })), "tools[0].input_schema"),
            (
                tool(
                    json!({ "input_schema": { "type": "object", "dependentSchemas": { "a": {} } } }),
                ),
                "tools[0].input_schema",
            ),
            (tool(json!({ "name": "a b" })), "tools[0].name"),
            (json!({ "tool_choice": { "type": "all" } }), "tool_choice.type"),
            (json!({ "stop_sequences": "x" }), "stop_sequences"),
            (json!({ "stop_sequences": [3] }), "stop_sequences[0]"),
            (json!({ "temperature": 9 }), "temperature"),
            (
                json!({ "thinking": { "type": "enabled", "budget_tokens": 9 } }),
                "thinking.budget_tokens",
            ),
            (
                json!({ "output_config": { "format": { "type": "xml" } } }),
                "output_config.format.type",
            ),
            (json!({ "output_config": { "effort": "huge" } }), "output_config.effort"),
            (json!({ "n": 2 }), "n"),
            (json!({ "container": "c" }), "container"),
        ] {
            let error = parsed(change.clone()).expect_err("it cannot be used");
            assert_eq!(error.path, path, "{change}: {error}");
        }
    }
}
