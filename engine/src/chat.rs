//! Chat templates: from messages to a prompt, by the model's own Jinja template.
//!
//! A template renders as transformers' `apply_chat_template` renders it, to the byte: `minijinja` runs it, after
//! [`translate`] turned the operators of Python, and what else minijinja does in its own way, into calls of functions.
//! Filters, tests, methods and texts of values are those of Jinja 3.1 and Python ([`filters`], [`globals`],
//! [`string_methods`], [`mod@text`], …).
//!
//! There is no clock (`strftime_now` is undefined) and no chance (`random` takes the first item): the same messages
//! give the same prompt. A template comes with a model file and is not trusted: it changes no value that it gets, as in
//! Jinja's immutable sandbox, its instructions are limited to [`FUEL`], and their cost by [`limits`]. A template that does
//! not parse refuses conversations and nothing else.

mod answer;
mod calls;
mod control;
mod conversation;
mod expressions;
mod filters;
mod format;
mod globals;
mod json;
mod limits;
mod list_filters;
mod methods;
mod operators;
mod string_methods;
mod text;
mod text_filters;
mod thinking;
mod tokens;
mod translate;

use std::collections::BTreeMap;

pub use answer::{AnswerLayout, AnswerParser, Piece};
pub use calls::{CallSyntax, Calls, Function};
pub use control::{ConversationError, Encoded, encode};
pub use conversation::{Content, Message, TemplateOptions, ToolCall};
pub use thinking::{calls_after_thinking, text_after_thinking};

use self::translate::Reads;

use minijinja::{
    AutoEscape, Environment, Error, State, Value, context, syntax::SyntaxConfig, value::Serde,
};

/// Most instructions of one rendering; real templates need about 50 per message.
const FUEL: u64 = 4_000_000;
/// Deepest nesting of macros and blocks.
const RECURSION: usize = 64;
const NAME: &str = "chat_template";

/// The texts of a model's special tokens by their names, such as `bos_token`: variables of its template.
pub type SpecialTokens = BTreeMap<String, String>;

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
        self.render_with(messages, add_generation_prompt, &TemplateOptions::default())
    }

    /// Renders a conversation as [`render`](Self::render) does, with tools and further variables.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        options: &TemplateOptions,
    ) -> Result<String, TemplateError> {
        let Parsed { environment, reads } = self.parsed.as_ref().map_err(Clone::clone)?;
        let refused = |error: Error| TemplateError::Render(error.to_string());
        let template = environment.get_template(NAME).map_err(refused)?;
        let messages = messages.iter().map(|message| message.for_template(*reads));
        let mut arguments = options.arguments.clone();
        arguments.entry("documents").or_insert(serde_json::Value::Null);
        for (name, text) in &self.special_tokens {
            arguments.entry(name.clone()).or_insert_with(|| text.as_str().into());
        }
        let tools = Some(&options.tools).filter(|tools| !tools.is_empty());
        let values = context! {
            messages => messages.collect::<Value>(),
            add_generation_prompt,
            tools => Value::from(Serde(&tools)),
            ..Value::from(Serde(&arguments)),
        };
        limits::begin();
        let rendered = template.render(values).map_err(refused)?;
        limits::check().map_err(refused)?;
        Ok(rendered)
    }

    /// Returns whether the template has this word, such as the name of a variable.
    pub fn mentions(&self, word: &str) -> bool {
        self.source.contains(word)
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

/// Counts what is written, before it is.
fn count_written(state: &mut State<'_, '_>, length: usize) -> Result<(), Error> {
    let Written(written) = state.get_or_insert_extension(Written(0));
    *written = written.saturating_add(length);
    limits::check_length(*written)
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
        count_written(state, text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
    environment.add_function("__texts", count_written);
    operators::add_to(&mut environment);
    globals::add_to(&mut environment);
    filters::add_to(&mut environment);
    list_filters::add_to(&mut environment);
    text_filters::add_to(&mut environment);
    json::add_to(&mut environment);
    let (translated, reads) =
        translate::translate(source).map_err(|error| TemplateError::Syntax(error.to_string()))?;
    environment.add_template_owned(NAME, translated).map_err(invalid)?;
    Ok(Parsed { environment, reads })
}
