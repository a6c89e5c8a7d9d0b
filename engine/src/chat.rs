//! Chat templates: from messages to a prompt, by the model's own Jinja template.
//!
//! A template renders as transformers' `apply_chat_template` renders it, to the byte: `minijinja` runs it, after
//! [`translate`] turned the operators of Python, and what else minijinja does in its own way, into calls of functions.
//! Filters, tests, methods and texts of values are those of Jinja 3.1 and Python ([`filters`], [`globals`],
//! [`string_methods`], [`mod@text`], …).
//!
//! There is no clock (`strftime_now` is undefined) and no chance (`random` takes the first item): the same messages
//! give the same prompt. A template comes with a model file and is not trusted: it changes no value that it gets, as in
//! Jinja's immutable sandbox, and its instructions are limited to [`FUEL`]. A template that does not parse refuses
//! conversations and nothing else.

mod expressions;
mod filters;
mod format;
mod globals;
mod json;
mod methods;
mod operators;
mod string_methods;
mod text;
mod text_filters;
mod tokens;
mod translate;

use std::collections::BTreeMap;

use self::translate::Reads;

use minijinja::{
    AutoEscape, Environment, Error, Value, context, syntax::SyntaxConfig, value::Serde,
};
use serde::{Deserialize, Serialize};

/// Most instructions of one rendering; real templates need about 50 per message.
const FUEL: u64 = 4_000_000;
/// Deepest nesting of macros and blocks.
const RECURSION: usize = 64;
const NAME: &str = "chat_template";

/// The texts of a model's special tokens by their names, such as `bos_token`: variables of its template.
pub type SpecialTokens = BTreeMap<String, String>;

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
}

impl Message {
    /// Returns a message without a name.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let content = Content::Text(content.into());
        Self { role: role.into(), content, name: None, tool_call_id: None }
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

/// A template cannot be parsed or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template has a syntax error.
    #[error("chat template does not parse: {0}")]
    Syntax(String),
    /// The template raised an error for the messages, or exceeded its limits.
    #[error("chat template refuses the messages: {0}")]
    Render(String),
}

/// A template that could be parsed.
#[derive(Debug)]
struct Parsed {
    environment: Environment<'static>,
    reads: Reads,
}

/// A chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    parsed: Result<Parsed, TemplateError>,
    source: String,
    special_tokens: SpecialTokens,
}

impl ChatTemplate {
    /// Parses a template; [`check`](Self::check) says whether it could be parsed.
    pub fn new(source: String, special_tokens: SpecialTokens) -> Self {
        let parsed = parse(&source);
        if let Err(error) = &parsed {
            tracing::warn!(%error, "conversations are refused; prompts of plain text are not");
        }
        Self { parsed, source, special_tokens }
    }

    /// Returns whether the template could be parsed.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`]
    pub fn check(&self) -> Result<(), TemplateError> {
        self.parsed.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// Renders a conversation. With `add_generation_prompt` the text ends where the assistant's answer
    /// begins. Encode the result without adding special tokens: the template writes them.
    ///
    /// # Errors
    /// If the template could not be parsed, raises an exception, fails or exceeds its limits.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let Parsed { environment, reads } = self.parsed.as_ref().map_err(Clone::clone)?;
        let refused = |error: Error| TemplateError::Render(error.to_string());
        let template = environment.get_template(NAME).map_err(refused)?;
        let messages = messages.iter().map(|message| for_template(message, *reads));
        let values = context! {
            messages => messages.collect::<Value>(),
            add_generation_prompt,
            tools => (),
            documents => (),
            ..Value::from(Serde(&self.special_tokens))
        };
        template.render(values).map_err(refused)
    }

    /// Returns the template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the texts of the special tokens.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special_tokens
    }
}

/// Bytes that a rendering has written.
struct Written(usize);

/// Returns a message as a template gets it, without the fields that it does not have.
fn for_template(message: &Message, reads: Reads) -> Value {
    let mut fields = vec![
        ("role", Value::from(message.role.as_str())),
        ("content", message.content.for_template(reads)),
    ];
    let others = [("name", &message.name), ("tool_call_id", &message.tool_call_id)];
    fields.extend(others.into_iter().filter_map(|(name, value)| {
        value.as_ref().map(|value| (name, Value::from(value.as_str())))
    }));
    Value::from_pairs(fields)
}

fn parse(source: &str) -> Result<Parsed, TemplateError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let invalid = |error: Error| TemplateError::Syntax(error.to_string());
    environment.set_syntax(syntax.map_err(invalid)?);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, state, value| {
        let is_plain = matches!(state.auto_escape(), AutoEscape::None);
        let text = if is_plain { text::to_text(value) } else { filters::escape(value) };
        let Written(written) = state.get_or_insert_extension(Written(0));
        *written += text.len();
        text::check_length(*written)?;
        out.write_str(&text).map_err(Error::from)
    });
    operators::add_to(&mut environment);
    globals::add_to(&mut environment);
    filters::add_to(&mut environment);
    text_filters::add_to(&mut environment);
    json::add_to(&mut environment);
    let (translated, reads) =
        translate::translate(source).map_err(|error| TemplateError::Syntax(error.to_string()))?;
    environment.add_template_owned(NAME, translated).map_err(invalid)?;
    Ok(Parsed { environment, reads })
}
