//! Parses the body of a request to `/v1/responses`: OpenAI's newer form of a chat request.
//!
//! The parameters are those of chat completions by other names; they are renamed and parsed as these are, so that both mean the
//! same. What the answer repeats of the request is kept with the job.

pub mod answer;

use serde_json::{Map, Value, json};
use tritmill_queue::{Content, Conversation, Message, Prompt, Role, ToolCall};

use crate::{
    body::{Body, Endpoint, parse_body},
    fields::{FieldError, Fields, shorten},
    messages,
};

/// Parameters that a response repeats: as they were sent, or with these defaults.
pub const REPEATED: [&str; 20] = [
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
];

/// Names in chat completions of parameters with other names here.
const RENAMED: [(&str, &str); 4] = [
    ("text.verbosity", "verbosity"),
    ("max_output_tokens", "max_completion_tokens"),
    ("reasoning.effort", "reasoning_effort"),
    ("text.format", "response_format"),
];

/// Parameters with the same name and meaning in chat completions.
const SAME: [&str; 26] = [
    "model",
    "temperature",
    "top_p",
    "top_logprobs",
    "parallel_tool_calls",
    "metadata",
    "service_tier",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "seed",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "chat_template_kwargs",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// A parsed request.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseRequest {
    /// The job's content. Its conversation begins with the instructions, if there are any.
    pub body: Body,
    /// The response that this one continues.
    pub previous: Option<String>,
    /// Whether the caller comes back for the answer.
    pub background: bool,
    /// Whether the response can be read later.
    pub store: bool,
}

/// Parses a body. The caller takes `stream` and `stream_options` out first.
///
/// # Errors
/// The first field that cannot be used.
pub fn parse_response(map: Map<String, Value>) -> Result<ResponseRequest, FieldError> {
    let mut repeated: Map<String, Value> = Map::new();
    for name in REPEATED {
        if let Some(value) = map.get(name).filter(|value| !value.is_null()) {
            repeated.insert(name.to_owned(), value.clone());
        }
    }
    let mut fields = Fields::new(map, "");
    let background = fields.boolean("background")?.unwrap_or(false);
    let store = fields.boolean("store")?.unwrap_or(true);
    if background && !store {
        let problem = "must be true with background: the answer is read later";
        return Err(FieldError::new("store", "invalid_value", problem));
    }
    let previous = fields.text("previous_response_id")?;
    let mut conversation = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        conversation.push(Message::new(Role::System, text));
    }
    let input = input(&mut fields)?;
    let mut chat = Map::new();
    for name in SAME {
        if let Some(value) = fields.take(name) {
            chat.insert(name.to_owned(), value);
        }
    }
    renamed(&mut fields, &mut chat)?;
    tools(&mut fields, &mut chat)?;
    refuse_others(&mut fields)?;
    fields.finish()?;
    // The messages are parsed already; a chat request needs one.
    chat.insert("messages".to_owned(), json!([{ "role": "user", "content": "" }]));
    let mut body = parse_body(Endpoint::Chat, chat).map_err(own_name)?;
    conversation.extend(input);
    if let Prompt::Messages(Conversation { messages, .. }) = &mut body.prompt {
        *messages = conversation;
    }
    if let Some(tier) = repeated.get_mut("service_tier") {
        *tier = body.tier.unwrap_or_default().as_str().into();
    }
    let body = Body { repeated, ..body };
    Ok(ResponseRequest { body, previous, background, store })
}

/// Parses the body of a line of a batch.
///
/// # Errors
/// The first field that cannot be used, or that a line cannot have.
pub(crate) fn parse_line(map: Map<String, Value>) -> Result<Body, FieldError> {
    if map.get("stream").is_some_and(|stream| *stream != Value::Bool(false)) {
        return Err(FieldError::new("stream", "unsupported_value", "must be false in a batch"));
    }
    let map = map.into_iter().filter(|(name, _)| name != "stream").collect();
    let ResponseRequest { body, previous, background, store: _ } = parse_response(map)?;
    if background {
        let problem = "must be false in a batch: its lines wait for their answers";
        return Err(FieldError::new("background", "unsupported_value", problem));
    }
    if previous.is_some() {
        let problem = "is not supported in a batch: a line has the whole conversation";
        return Err(FieldError::new("previous_response_id", "unsupported_value", problem));
    }
    Ok(body)
}

/// Returns an error with the name that the parameter has here.
fn own_name(mut error: FieldError) -> FieldError {
    for (own, chat) in RENAMED {
        if let Some(rest) = error.path.strip_prefix(chat) {
            // The schema is in an object of its own there.
            let rest = rest.replace(".json_schema.", ".");
            error.path = format!("{own}{rest}");
        }
    }
    error.path = error.path.replace("].function.", "].");
    error
}

/// Takes the parameters with other names in chat completions.
fn renamed(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), FieldError> {
    if let Some(value) = fields.take("max_output_tokens") {
        chat.insert("max_completion_tokens".to_owned(), value);
    }
    if let Some(mut reasoning) = object(fields, "reasoning")? {
        if let Some(effort) = reasoning.take("effort") {
            chat.insert("reasoning_effort".to_owned(), effort);
        }
        // Summaries are not made: the reasoning itself is in the output.
        for name in ["summary", "generate_summary"] {
            reasoning.take(name);
        }
        reasoning.finish()?;
    }
    if let Some(mut text) = object(fields, "text")? {
        if let Some(mut format) = object(&mut text, "format")? {
            chat.insert("response_format".to_owned(), response_format(&mut format)?);
        }
        if let Some(verbosity) = text.take("verbosity") {
            chat.insert("verbosity".to_owned(), verbosity);
        }
        text.finish()?;
    }
    let includes = fields.list("include")?.unwrap_or_default();
    for (index, item) in includes.iter().enumerate() {
        match item.as_str() {
            Some("message.output_text.logprobs") => {
                chat.insert("logprobs".to_owned(), Value::Bool(true));
            }
            // There is nothing to encrypt: reasoning is in the output as text.
            Some("reasoning.encrypted_content") => {}
            _ => {
                let problem = format!("is not supported: {}", shorten(&item.to_string()));
                return Err(FieldError::new(
                    format!("include[{index}]"),
                    "unsupported_value",
                    problem,
                ));
            }
        }
    }
    if chat.contains_key("top_logprobs") {
        chat.insert("logprobs".to_owned(), Value::Bool(true));
    }
    Ok(())
}

/// Returns a format with its schema in an object of its own, as chat completions have it.
fn response_format(format: &mut Fields) -> Result<Value, FieldError> {
    let Some(kind) = format.text("type")? else {
        return Err(FieldError::new(format.path("type"), "missing_field", "is missing"));
    };
    let mut schema = Map::new();
    for name in ["name", "description", "strict", "schema"] {
        if let Some(value) = format.take(name) {
            schema.insert(name.to_owned(), value);
        }
    }
    Ok(match kind.as_str() {
        "json_schema" => json!({ "type": kind, "json_schema": schema }),
        _ => json!({ "type": kind }),
    })
}

/// Takes the tools: in chat completions, their functions have an object of their own.
fn tools(fields: &mut Fields, chat: &mut Map<String, Value>) -> Result<(), FieldError> {
    let nested = |tool: Value| match tool {
        Value::Object(mut function) if !function.contains_key("function") => {
            let kind = function.shift_remove("type").unwrap_or_default();
            json!({ "type": kind, "function": function })
        }
        other => other,
    };
    if let Some(tools) = fields.list("tools")? {
        chat.insert("tools".to_owned(), tools.into_iter().map(nested).collect());
    }
    let choice = fields.take("tool_choice").map(|choice| match choice {
        Value::Object(mut map) if map.contains_key("mode") => {
            let kind = map.shift_remove("type");
            json!({ "type": kind, "allowed_tools": map })
        }
        other => other,
    });
    if let Some(choice) = choice {
        chat.insert("tool_choice".to_owned(), choice);
    }
    Ok(())
}

/// Refuses what would change an answer and is not supported.
fn refuse_others(fields: &mut Fields) -> Result<(), FieldError> {
    match fields.text("truncation")?.as_deref() {
        None | Some("disabled") => {}
        Some(_) => {
            let problem = "is supported as 'disabled' only: a prompt that is too long is an error";
            return Err(FieldError::new("truncation", "unsupported_value", problem));
        }
    }
    // It bounds calls of built-in tools, which are refused.
    fields.count("max_tool_calls")?;
    for name in ["conversation", "prompt"] {
        if fields.take(name).is_some() {
            return Err(FieldError::new(name, "unknown_parameter", "is not supported"));
        }
    }
    Ok(())
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

/// Takes `input`: a text, or items.
fn input(fields: &mut Fields) -> Result<Vec<Message>, FieldError> {
    let items = match fields.take("input") {
        Some(Value::String(text)) => return Ok(vec![Message::new(Role::User, text)]),
        Some(Value::Array(items)) => items,
        Some(other) => {
            return Err(FieldError::wrong_type("input", "a string or an array of items", &other));
        }
        None => return Err(FieldError::new("input", "missing_field", "is missing")),
    };
    if items.is_empty() {
        return Err(FieldError::new("input", "invalid_value", "is empty"));
    }
    let mut conversation: Vec<Message> = Vec::with_capacity(items.len());
    let mut reasoning = None;
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("input[{index}]");
        let Value::Object(map) = item else {
            return Err(FieldError::wrong_type(path, "an object", &item));
        };
        let mut item = Fields::new(map, format!("{path}."));
        match item.text("type")?.as_deref() {
            None | Some("message") => {
                for unused in ["id", "status", "phase"] {
                    item.take(unused);
                }
                let mut message = messages::of_fields(item)?;
                if message.role == Role::Assistant {
                    message.reasoning = reasoning.take().or(message.reasoning);
                }
                conversation.push(message);
            }
            Some("function_call") => {
                let call = function_call(item)?;
                // Calls follow the text of the same answer.
                match conversation.last_mut().filter(|last| last.role == Role::Assistant) {
                    Some(last) => last.tool_calls.push(call),
                    None => conversation.push(Message {
                        reasoning: reasoning.take(),
                        tool_calls: vec![call],
                        ..Message::new(Role::Assistant, "")
                    }),
                }
            }
            Some("function_call_output") => conversation.push(function_output(item)?),
            Some("reasoning") => reasoning = reasoning_text(&mut item),
            Some(other) => {
                let problem = format!("is not supported: '{}'", shorten(other));
                return Err(FieldError::new(item.path("type"), "unsupported_value", problem));
            }
        }
    }
    Ok(conversation)
}

fn function_call(mut item: Fields) -> Result<ToolCall, FieldError> {
    for unused in ["id", "status", "caller", "namespace"] {
        item.take(unused);
    }
    let mut required = |name: &str| {
        let missing = FieldError::new(item.path(name), "missing_field", "is missing");
        item.text(name)?.ok_or(missing)
    };
    let (id, name) = (required("call_id")?, required("name")?);
    let arguments = messages::arguments(&mut item)?;
    item.finish()?;
    Ok(ToolCall { id, name, arguments })
}

fn function_output(mut item: Fields) -> Result<Message, FieldError> {
    for unused in ["id", "status", "caller"] {
        item.take(unused);
    }
    let call = item.text("call_id")?;
    if call.is_none() {
        return Err(FieldError::new(item.path("call_id"), "missing_field", "is missing"));
    }
    let content = messages::content_of(&mut item, "output")?;
    let content = content
        .ok_or_else(|| FieldError::new(item.path("output"), "missing_field", "is missing"))?;
    item.finish()?;
    Ok(Message { content, tool_call_id: call, ..Message::new(Role::Tool, "") })
}

/// Returns the text of an item of reasoning, as an answer had it; its summary otherwise.
fn reasoning_text(item: &mut Fields) -> Option<String> {
    let texts = |value: Option<Value>| {
        let parts = value?.as_array()?.clone();
        let texts = parts.iter().filter_map(|part| part["text"].as_str());
        Some(texts.collect::<String>()).filter(|text| !text.is_empty())
    };
    let (content, summary) = (item.take("content"), item.take("summary"));
    texts(content).or_else(|| texts(summary))
}

/// Returns the messages of an answer, for the request that continues it.
pub fn answer_message(choice: &tritmill_queue::Choice, ids: impl Fn(u32) -> String) -> Message {
    let calls = (0..).zip(&choice.tool_calls);
    let calls = calls.map(|(index, call)| ToolCall { id: ids(index), ..call.clone() });
    Message {
        content: Content::Text(choice.text.clone()),
        reasoning: choice.reasoning.clone(),
        tool_calls: calls.collect(),
        ..Message::new(Role::Assistant, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: Value) -> Result<ResponseRequest, FieldError> {
        parse_response(body.as_object().cloned().expect("an object"))
    }

    fn conversation(body: Value) -> Conversation {
        match parsed(body).expect("a request").body.prompt {
            Prompt::Messages(conversation) => conversation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn text_and_items_become_messages() {
        let text =
            conversation(json!({ "model": "m", "input": "Hi", "instructions": "Be brief." }));
        let expected = [Message::new(Role::System, "Be brief."), Message::new(Role::User, "Hi")];
        assert_eq!(text.messages, expected);
        let items = conversation(json!({ "model": "m", "input": [
            { "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] },
            { "type": "reasoning", "id": "rs_1", "summary": [], "content": [{ "type": "reasoning_text", "text": "so" }] },
            { "type": "function_call", "call_id": "c1", "name": "look", "arguments": "{\"a\": 1}", "id": "fc_1" },
            { "type": "function_call_output", "call_id": "c1", "output": "2" },
        ] }));
        let call = ToolCall {
            id: "c1".to_owned(),
            name: "look".to_owned(),
            arguments: "{\"a\": 1}".to_owned(),
        };
        let expected = [
            Message {
                content: Content::Parts(vec!["Hi".to_owned()]),
                ..Message::new(Role::User, "")
            },
            Message {
                reasoning: Some("so".to_owned()),
                tool_calls: vec![call],
                ..Message::new(Role::Assistant, "")
            },
            Message { tool_call_id: Some("c1".to_owned()), ..Message::new(Role::Tool, "2") },
        ];
        assert_eq!(items.messages, expected);
    }

    #[test]
    fn parameters_are_those_of_chat_completions() {
        let request = parsed(json!({
            "model": "m", "input": "Hi", "max_output_tokens": 7, "temperature": 0.5, "reasoning": { "effort": "low" },
            "text": { "format": { "type": "json_schema", "name": "n", "strict": true, "schema": { "type": "object" } } },
            "tools": [{ "type": "function", "name": "look", "parameters": { "type": "object" } }],
            "tool_choice": { "type": "function", "name": "look" }, "include": ["message.output_text.logprobs"],
            "metadata": { "a": "b" }, "background": true,
        }));
        let request = request.expect("a request");
        let sampling = &request.body.sampling;
        assert_eq!((sampling.max_tokens, sampling.temperature), (Some(7), 0.5));
        assert!(
            request.body.sampling.grammar.is_some() && request.body.sampling.logprobs == Some(0)
        );
        assert!(request.background && request.store);
        assert_eq!(request.body.repeated["metadata"]["a"], "b");
        let Prompt::Messages(conversation) = request.body.prompt else { panic!("messages") };
        assert_eq!((conversation.tools.len(), conversation.template_arguments.len()), (1, 1));
        assert!(conversation.tool_choice.is_required());
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_its_own_name() {
        let with = |name: &str, value: Value| json!({ "model": "m", "input": "Hi", name: value });
        let cases = [
            (json!({ "model": "m" }), "input"),
            (json!({ "model": "m", "input": [] }), "input"),
            (
                json!({ "model": "m", "input": [{ "type": "item_reference", "id": "x" }] }),
                "input[0].type",
            ),
            (
                json!({ "model": "m", "input": [{ "role": "bot", "content": "x" }] }),
                "input[0].role",
            ),
            (with("max_output_tokens", json!("many")), "max_output_tokens"),
            (with("max_output_tokens", json!(0)), "max_output_tokens"),
            (with("max_tool_calls", json!("all")), "max_tool_calls"),
            (with("reasoning", json!({ "effort": "huge" })), "reasoning.effort"),
            (
                with("text", json!({ "format": { "type": "json_schema", "name": "n" } })),
                "text.format.schema",
            ),
            (with("text", json!({ "verbosity": "huge" })), "text.verbosity"),
            (with("tools", json!([{ "type": "web_search" }])), "tools[0].type"),
            (with("tools", json!([{ "type": "function", "name": "a b" }])), "tools[0].name"),
            (with("truncation", json!("auto")), "truncation"),
            (with("conversation", json!("c")), "conversation"),
            (with("include", json!(["file_search_call.results"])), "include[0]"),
            (json!({ "model": "m", "input": "x", "background": true, "store": false }), "store"),
            (with("nonsense", json!(1)), "nonsense"),
        ];
        for (body, path) in cases {
            let error = parsed(body.clone()).expect_err("it cannot be used");
            assert_eq!(error.path, path, "{body}: {error}");
        }
    }
}
