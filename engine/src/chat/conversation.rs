//! Messages, and what else a chat template gets.

use minijinja::{Value, context, value::Serde};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::translate::Reads;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template supports.
    pub role: String,
    /// What the message says.
    pub content: Content,
    /// Name of the speaker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The call that a message of the role `tool` answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// What the model thought before it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The calls of tools that a message of the model makes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

impl Message {
    /// Returns a message with a text alone.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Content::Text(content.into()),
            name: None,
            tool_call_id: None,
            reasoning_content: None,
            tool_calls: Vec::new(),
        }
    }

    /// Returns the message as a template gets it, without the fields that it does not have.
    pub(super) fn for_template(&self, reads: Reads) -> Value {
        let mut fields = vec![
            ("role", Value::from(self.role.as_str())),
            ("content", self.content.for_template(reads)),
        ];
        let others = [
            ("name", &self.name),
            ("tool_call_id", &self.tool_call_id),
            ("reasoning_content", &self.reasoning_content),
        ];
        fields.extend(others.into_iter().filter_map(|(name, value)| {
            value.as_ref().map(|value| (name, Value::from(value.as_str())))
        }));
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(ToolCall::for_template);
            fields.push(("tool_calls", calls.collect()));
        }
        Value::from_pairs(fields)
    }
}

/// The content of a message: a text, or several that a client sent as parts.
///
/// A template gets what it reads. One that loops over parts gets parts (a text is one part, if the template does not ask
/// whether it is a string); any other gets one text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// One text.
    Text(String),
    /// Texts of parts.
    Parts(Vec<String>),
}

impl Content {
    fn for_template(&self, reads: Reads) -> Value {
        let part = |text: &String| context! { type => "text", text };
        match self {
            Self::Text(text) if reads.parts && !reads.texts => Value::from(vec![part(text)]),
            Self::Text(text) => Value::from(text.as_str()),
            Self::Parts(texts) if reads.parts => texts.iter().map(part).collect(),
            Self::Parts(texts) => Value::from(texts.concat()),
        }
    }
}

/// A call of a tool, by the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Its name in the conversation.
    #[serde(default)]
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// The arguments: an object, or the text of a call that was cut.
    pub arguments: serde_json::Value,
}

impl ToolCall {
    fn for_template(&self) -> Value {
        let function = context! {
            name => self.name.as_str(),
            arguments => Value::from(Serde(&self.arguments)),
        };
        context! { id => self.id.as_str(), type => "function", function }
    }
}

/// What a template gets besides messages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TemplateOptions {
    /// The tools that the model may call, in OpenAI's form: `{"type": "function", "function": …}`.
    pub tools: Vec<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    pub arguments: Map<String, serde_json::Value>,
}
