//! How a model writes calls of tools: the syntax that its chat template shows, and the grammar of an answer's calls.
//!
//! Two are in use. Hermes and Qwen 3 write a JSON object, Qwen 3 Coder and Qwen 3.5 write parameters between tags:
//!
//! ```text
//! <tool_call>                                          <tool_call>
//! {"name": "weather", "arguments": {"city": "Bonn"}}   <function=weather>
//! </tool_call>                                         <parameter=city>
//!                                                      Bonn
//!                                                      </parameter>
//!                                                      </function>
//!                                                      </tool_call>
//! ```
//!
//! A model with a template that has no tools gets instructions in the first syntax, as text ([`Calls::describe`]).

use std::fmt::Write as _;

use serde_json::{Map, Value, json};
use tritmill_grammar::Grammar;

use super::{ChatTemplate, Content, Message};

/// The text that every call begins with.
pub(super) const BEGIN: &str = "<tool_call>";
/// The text that every call ends with.
pub(super) const END: &str = "</tool_call>";

/// How calls are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallSyntax {
    /// A JSON object with `name` and `arguments`.
    Json,
    /// A tag for the function and one for each parameter.
    Tags,
}

/// A function that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
}

/// The calls that an answer may make.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    /// How they are written.
    pub syntax: CallSyntax,
    /// The functions that may be called.
    pub functions: Vec<Function>,
    /// Whether an answer makes one call at most.
    pub one_call: bool,
}

/// What a parameter between tags holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    /// A text as it is.
    Text,
    /// A JSON value.
    Json,
    /// A JSON value of another type, or else a text as it is.
    Either,
}

impl CallSyntax {
    /// Returns the syntax that a template shows to the model; `None` if it has no tools.
    pub fn of_template(template: &ChatTemplate) -> Option<Self> {
        if !template.mentions("tools") {
            return None;
        }
        Some(if template.mentions("<function=") { Self::Tags } else { Self::Json })
    }
}

impl Calls {
    /// Returns the grammar of an answer that is calls. After the text that begins the first one, if `has_begun`.
    pub fn grammar(&self, has_begun: bool) -> Grammar {
        let first = if has_begun { "call_rest" } else { "call" };
        let more = if self.one_call { "" } else { " (\"\\n\" call)*" };
        let [begin, end] = [BEGIN, END].map(quoted);
        let mut lark = format!("start: {first}{more}\ncall: {begin} call_rest\n");
        match self.syntax {
            CallSyntax::Json => self.json_rules(&mut lark, &end),
            CallSyntax::Tags => self.tag_rules(&mut lark, &end),
        }
        Grammar::Lark(lark)
    }

    /// Returns the grammar of an answer that is calls, or else a text that matches `text`: a JSON object or value. Calls alone, for
    /// other grammars.
    pub fn or_text(&self, text: &Grammar) -> Grammar {
        let schema = match text {
            Grammar::JsonObject => json!({ "type": "object" }),
            Grammar::JsonSchema(schema) => serde_json::from_str(schema).unwrap_or_default(),
            _ => return self.grammar(false),
        };
        match self.grammar(false) {
            Grammar::Lark(lark) => {
                let rules = lark.replacen("start: ", "calls: ", 1);
                Grammar::Lark(format!("start: calls | %json {}\n{rules}", bounded(schema)))
            }
            other => other,
        }
    }

    /// Writes the rules of calls as JSON objects.
    fn json_rules(&self, lark: &mut String, end: &str) {
        let bodies: Vec<String> = (0..self.functions.len()).map(|i| format!("body_{i}")).collect();
        let open = quoted("\n{\"name\": ");
        let close = quoted("}\n");
        let _ = writeln!(lark, "call_rest: {open} ({}) {close} {end}", bodies.join(" | "));
        for (index, Function { name, parameters }) in self.functions.iter().enumerate() {
            let name = quoted(&format!("{}, \"arguments\": ", Value::from(name.as_str())));
            let schema = bounded(parameters.clone());
            let _ = writeln!(lark, "body_{index}: {name} %json {schema}");
        }
    }

    /// Writes the rules of calls between tags.
    fn tag_rules(&self, lark: &mut String, end: &str) {
        let bodies: Vec<String> = (0..self.functions.len()).map(|i| format!("body_{i}")).collect();
        let [open, close] = ["\n<function=", "</function>\n"].map(quoted);
        let _ = writeln!(lark, "call_rest: {open} ({}) {close} {end}", bodies.join(" | "));
        for (index, Function { name, parameters }) in self.functions.iter().enumerate() {
            let required = parameters["required"].as_array();
            let is_required =
                |name: &str| required.is_some_and(|names| names.iter().any(|n| n == name));
            let fields = parameters["properties"].as_object();
            let mut body = format!("body_{index}: {}", quoted(&format!("{name}>\n")));
            let mut rules = String::new();
            for (number, (field, schema)) in fields.into_iter().flatten().enumerate() {
                let rule = format!("field_{index}_{number}");
                let optional = if is_required(field) { "" } else { "?" };
                let _ = write!(body, " {rule}{optional}");
                let open = quoted(&format!("<parameter={field}>\n"));
                let close = quoted("\n</parameter>\n");
                let _ = match (holds(schema), choices(schema)) {
                    (Holds::Text, Some(choices)) => {
                        writeln!(rules, "{rule}: {open} ({choices}) {close}")
                    }
                    (Holds::Text | Holds::Either, _) => {
                        writeln!(
                            rules,
                            "{rule}: {open} text_{rule}\ntext_{rule}[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/"
                        )
                    }
                    (Holds::Json, _) => {
                        let schema = bounded(with_definitions(schema, parameters));
                        writeln!(rules, "{rule}: {open} %json {schema} {close}")
                    }
                };
            }
            let _ = writeln!(lark, "{body}\n{rules}");
        }
    }

    /// Returns what a parameter of a function holds.
    pub(super) fn holds(&self, function: &str, parameter: &str) -> Holds {
        let function = self.functions.iter().find(|known| known.name == function);
        function
            .map_or(Holds::Either, |function| holds(&function.parameters["properties"][parameter]))
    }

    /// Adds a description of tools to a conversation, for a template that has none.
    pub fn describe(tools: &[Value], mut messages: Vec<Message>) -> Vec<Message> {
        if tools.is_empty() {
            return messages;
        }
        let list: Vec<String> = tools.iter().map(Value::to_string).collect();
        let text = format!(
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with \
             function signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, \
             return a json object with function name and arguments within {BEGIN}{END} XML tags:\n{BEGIN}\n\
             {{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n{END}",
            list.join("\n")
        );
        // One message of the system alone is what most templates allow.
        match messages.first_mut().filter(|m| matches!(m.role.as_str(), "system" | "developer")) {
            Some(first) => {
                let text = format!("{}\n\n{text}", all_text(&first.content));
                first.content = Content::Text(text);
            }
            None => messages.insert(0, Message::new("system", text)),
        }
        messages
    }

    /// Writes the calls of a message, or the result of a tool, as text, for a template that knows neither.
    pub fn as_text(message: &Message) -> Message {
        if message.role == "tool" {
            let result = all_text(&message.content);
            let text = format!("<tool_response>\n{result}\n</tool_response>");
            return Message::new("user", text);
        }
        let mut message = message.clone();
        if !message.tool_calls.is_empty() {
            let mut text = all_text(&message.content);
            for call in message.tool_calls.drain(..) {
                let object = json!({ "name": call.name, "arguments": call.arguments });
                let line = if text.is_empty() { "" } else { "\n" };
                let _ = write!(text, "{line}{BEGIN}\n{object}\n{END}");
            }
            message.content = Content::Text(text);
        }
        message
    }
}

fn all_text(content: &Content) -> String {
    match content {
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => parts.concat(),
    }
}

/// Returns a string of Lark, which has the escapes of JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns a schema with bounded white space between the parts of its values.
fn bounded(schema: Value) -> Value {
    tritmill_grammar::with_bounded_white_space(schema)
}

/// Returns what a parameter with this schema holds.
fn holds(schema: &Value) -> Holds {
    match &schema["type"] {
        Value::String(kind) if kind == "string" => Holds::Text,
        Value::String(_) => Holds::Json,
        Value::Array(kinds) if !kinds.iter().any(|kind| kind == "string") => Holds::Json,
        _ => match &schema["enum"] {
            Value::Array(values) if values.iter().all(Value::is_string) => Holds::Text,
            _ => Holds::Either,
        },
    }
}

/// Returns the texts that a schema lists, as alternatives of Lark.
fn choices(schema: &Value) -> Option<String> {
    let values = match (&schema["enum"], &schema["const"]) {
        (Value::Array(values), _) => values.iter().collect(),
        (_, value @ Value::String(_)) => vec![value],
        _ => return None,
    };
    let texts: Option<Vec<&str>> = values.into_iter().map(Value::as_str).collect();
    let texts = texts?.into_iter().filter(|text| !text.is_empty());
    Some(texts.map(quoted).collect::<Vec<_>>().join(" | ")).filter(|choices| !choices.is_empty())
}

/// Returns the schema of a parameter with the definitions that it may refer to.
fn with_definitions(schema: &Value, parameters: &Value) -> Value {
    let mut schema: Map<String, Value> = schema.as_object().cloned().unwrap_or_default();
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = parameters.get(name) {
            schema.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    Value::Object(schema)
}
