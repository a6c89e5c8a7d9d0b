//! A conversation of a job, as the model's chat template and the engine get it.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use tritmill_engine::chat::{
    self, AnswerLayout, CallSyntax, Calls, ChatTemplate, Function, TemplateOptions,
};
use tritmill_queue::{Content, Conversation, Grammar, Message, Tool, ToolCall};

/// A conversation for a template.
#[derive(Debug, Clone, PartialEq)]
pub struct TemplateInput {
    /// The messages.
    pub messages: Vec<chat::Message>,
    /// Tools and further variables.
    pub options: TemplateOptions,
}

impl TemplateInput {
    /// Prepares a conversation for a template. One that has no tools gets them as text.
    pub fn new(template: &ChatTemplate, conversation: &Conversation) -> Self {
        let messages = conversation.messages.iter().map(template_message).collect::<Vec<_>>();
        let tools: Vec<Value> = conversation
            .tools
            .iter()
            .map(|Tool { function, .. }| json!({ "type": "function", "function": function }))
            .collect();
        let arguments = arguments(template, &conversation.template_arguments);
        if CallSyntax::of_template(template).is_some() {
            return Self { messages, options: TemplateOptions { tools, arguments } };
        }
        // A template may know the role of tools without their list.
        let messages = match template.mentions("tool") {
            true => messages,
            false => messages.iter().map(Calls::as_text).collect(),
        };
        let messages = Calls::describe(&tools, messages);
        Self { messages, options: TemplateOptions { tools: Vec::new(), arguments } }
    }
}

/// Returns the variables of a template. A template that only knows whether to think is told so by an effort of `none`.
fn arguments(template: &ChatTemplate, given: &Map<String, Value>) -> Map<String, Value> {
    const SWITCH: &str = "enable_thinking";
    let mut arguments = given.clone();
    let is_none = arguments.get("reasoning_effort").is_some_and(|effort| effort == "none");
    if is_none && template.mentions(SWITCH) {
        arguments.entry(SWITCH).or_insert(Value::Bool(false));
    }
    arguments
}

/// Returns how the answers to a prompt are divided.
pub(crate) fn layout(
    template: &ChatTemplate,
    conversation: Option<&Conversation>,
    prompt: &str,
) -> AnswerLayout {
    let may_think = template.mentions("</think>");
    let is_thinking = may_think && prompt.trim_end().ends_with("<think>");
    let calls = conversation.filter(|conversation| !conversation.tools.is_empty());
    let calls = calls.map(|Conversation { tools, tool_choice, one_call, .. }| {
        let allowed = tools.iter().filter(|tool| tool_choice.allows(&tool.name));
        let function =
            |tool: &Tool| Function { name: tool.name.clone(), parameters: tool.parameters() };
        let syntax = CallSyntax::of_template(template).unwrap_or(CallSyntax::Json);
        let functions = allowed.map(function).collect();
        Arc::new(Calls { syntax, functions, one_call: *one_call })
    });
    let asks = conversation.is_some_and(|c| asks_to_think(&c.template_arguments));
    let decides_to_think =
        may_think && !is_thinking && asks && !prompt.trim_end().ends_with("</think>");
    AnswerLayout { may_think, is_thinking, decides_to_think, calls }
}

/// Returns whether a request asks the model to think. Others get answers that a grammar describes at once: models that think cost much more.
fn asks_to_think(arguments: &Map<String, Value>) -> bool {
    let effort = arguments.get("reasoning_effort").and_then(Value::as_str);
    effort.is_some_and(|effort| effort != "none")
        || arguments.get("enable_thinking") == Some(&Value::Bool(true))
}

/// Returns the grammar of an answer, and the texts after which it applies; `None` if any text may come.
pub(crate) fn grammar(
    layout: &AnswerLayout,
    conversation: Option<&Conversation>,
    text: Option<&Grammar>,
) -> Option<(Grammar, Vec<&'static str>)> {
    let text_of = |text: &Grammar| match layout.decides_to_think {
        true => chat::text_after_thinking(text),
        false => text.clone(),
    };
    let calls_of = |calls: Grammar| match layout.decides_to_think {
        true => chat::calls_after_thinking(calls),
        false => calls,
    };
    match (&layout.calls, text) {
        (None, text) => text.map(|text| (text_of(text), layout.before_text())),
        (Some(calls), text) => {
            let is_required = conversation.is_some_and(|c| c.tool_choice.is_required());
            match text.filter(|_| !is_required) {
                Some(text) => Some((calls_of(calls.or_text(text)), layout.before_text())),
                None => {
                    let grammar = calls.grammar(!is_required);
                    let grammar = if is_required { calls_of(grammar) } else { grammar };
                    Some((grammar, layout.before_calls(is_required)))
                }
            }
        }
    }
}

/// Returns a message as chat templates get it.
fn template_message(message: &Message) -> chat::Message {
    let call = |call: &ToolCall| chat::ToolCall {
        id: call.id.clone(),
        name: call.name.clone(),
        arguments: match serde_json::from_str::<Map<String, Value>>(&call.arguments) {
            Ok(arguments) => Value::Object(arguments),
            Err(_) => Value::String(call.arguments.clone()),
        },
    };
    chat::Message {
        role: message.role.as_str().to_owned(),
        content: match &message.content {
            Content::Text(text) => chat::Content::Text(text.clone()),
            Content::Parts(texts) => chat::Content::Parts(texts.clone()),
        },
        name: message.name.clone(),
        tool_call_id: message.tool_call_id.clone(),
        reasoning_content: message.reasoning.clone(),
        tool_calls: message.tool_calls.iter().map(call).collect(),
    }
}
