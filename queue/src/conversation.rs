//! A conversation for a model's chat template: messages, the tools that the model may call, and arguments of the template.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Speaker of a [`Message`]. What a chat template does with a role is its own decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, in the words of newer APIs.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool.
    Tool,
}

impl Role {
    /// Returns the name that chat templates expect.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The speaker.
    pub role: Role,
    /// What the message says.
    pub content: Content,
    /// Name of the speaker, for templates that use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The call that the result of a tool answers, for templates that use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// What the model thought before it answered, for templates that use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls that a message of the model makes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

impl Message {
    /// Returns a message with a text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Content::Text(content.into()),
            name: None,
            tool_call_id: None,
            reasoning: None,
            tool_calls: Vec::new(),
        }
    }
}

/// A call of a tool, by the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Its name in the conversation; empty in a stored answer: calls are named when they are sent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// The arguments: a JSON object.
    pub arguments: String,
}

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// Name, description and parameters as the client sent them.
    pub function: Map<String, Value>,
}

impl Tool {
    /// Returns the JSON schema of the arguments; a function without parameters takes an empty object.
    pub fn parameters(&self) -> Value {
        match self.function.get("parameters") {
            Some(schema @ Value::Object(fields)) if !fields.is_empty() => schema.clone(),
            _ => {
                serde_json::json!({ "type": "object", "properties": {}, "additionalProperties": false })
            }
        }
    }
}

/// Whether the model calls tools.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// As the model decides.
    #[default]
    Auto,
    /// At least one call.
    Required,
    /// As the model decides, of the tools with these names.
    AutoOf(Vec<String>),
    /// At least one call, of the tools with these names.
    RequiredOf(Vec<String>),
}

impl ToolChoice {
    /// Returns whether the answer must be a call.
    pub const fn is_required(&self) -> bool {
        matches!(self, Self::Required | Self::RequiredOf(_))
    }

    /// Returns whether a tool may be called.
    pub fn allows(&self, name: &str) -> bool {
        match self {
            Self::Auto | Self::Required => true,
            Self::AutoOf(names) | Self::RequiredOf(names) => names.iter().any(|n| n == name),
        }
    }
}

/// A conversation. One with messages alone is stored as a list of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "Form", into = "Form")]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// Functions that the model may call.
    pub tools: Vec<Tool>,
    /// Whether it calls them.
    pub tool_choice: ToolChoice,
    /// Whether an answer makes one call at most.
    pub one_call: bool,
    /// Further variables of the chat template.
    pub template_arguments: Map<String, Value>,
}

impl Conversation {
    /// Returns a conversation without tools.
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }

    /// Returns the texts that become tokens, in about the order of most templates.
    pub fn texts(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let tools = self.tools.iter().map(|tool| Value::from(tool.function.clone()).to_string());
        let messages = self.messages.iter().flat_map(|message| {
            let calls = message.tool_calls.iter().flat_map(|call| [&call.name, &call.arguments]);
            message.content.texts().iter().chain(&message.reasoning).chain(calls)
        });
        tools.map(Cow::from).chain(messages.map(Cow::from))
    }
}

/// How a conversation is written.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form {
    Messages(Vec<Message>),
    Whole(Whole),
}

#[derive(Serialize, Deserialize)]
struct Whole {
    messages: Vec<Message>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool>,
    #[serde(default)]
    tool_choice: ToolChoice,
    #[serde(default)]
    one_call: bool,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    template_arguments: Map<String, Value>,
}

impl From<Form> for Conversation {
    fn from(form: Form) -> Self {
        match form {
            Form::Messages(messages) => Self::new(messages),
            Form::Whole(Whole { messages, tools, tool_choice, one_call, template_arguments }) => {
                Self { messages, tools, tool_choice, one_call, template_arguments }
            }
        }
    }
}

impl From<Conversation> for Form {
    fn from(conversation: Conversation) -> Self {
        let Conversation { messages, tools, tool_choice, one_call, template_arguments } =
            conversation;
        if tools.is_empty() && template_arguments.is_empty() {
            return Self::Messages(messages);
        }
        Self::Whole(Whole { messages, tools, tool_choice, one_call, template_arguments })
    }
}

/// The content of a message, as the client sent it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// One text.
    Text(String),
    /// Texts of parts.
    Parts(Vec<String>),
}

impl Content {
    /// Returns its texts.
    pub fn texts(&self) -> &[String] {
        match self {
            Self::Text(text) => std::slice::from_ref(text),
            Self::Parts(texts) => texts,
        }
    }
}
