//! Chat templates: from messages to a prompt, by the model's own Jinja template.
//!
//! `minijinja` is set up like transformers' `apply_chat_template`: `trim_blocks` and `lstrip_blocks`,
//! Python string methods, `raise_exception`, a `tojson` that does not escape HTML. There is no clock
//! (`strftime_now` is undefined): the same messages give the same prompt. A template comes with a model
//! file and is not trusted: its instructions are limited to [`FUEL`].

use minijinja::{
    Environment, Error, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::{Deserialize, Serialize};

/// Most instructions of one rendering; real templates need about 50 per message.
const FUEL: u64 = 2_000_000;
/// Deepest nesting of macros and blocks.
const RECURSION: usize = 64;
const NAME: &str = "chat_template";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role that the template supports.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// A template cannot be parsed or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template has a syntax error.
    #[error("chat template does not parse: {0}")]
    Syntax(#[source] Error),
    /// The template raised an error for the messages, or exceeded its limits.
    #[error("chat template refuses the messages: {0}")]
    Render(#[source] Error),
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl ChatTemplate {
    /// Parses a template. `bos_token` and `eos_token` are the texts of its variables.
    pub fn parse(
        source: String,
        bos_token: Option<String>,
        eos_token: Option<String>,
    ) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(TemplateError::Syntax)?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source.clone()).map_err(TemplateError::Syntax)?;
        Ok(Self { environment, source, bos_token, eos_token })
    }

    /// Renders a conversation. With `add_generation_prompt` the text ends where the assistant's answer
    /// begins. Encode the result without adding special tokens: the template writes them.
    ///
    /// # Errors
    /// If the template raises an exception, fails or exceeds its limits.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(TemplateError::Render)?;
        template
            .render(context! {
                messages => Value::from(Serde(messages)),
                add_generation_prompt,
                bos_token => self.bos_token.as_deref(),
                eos_token => self.eos_token.as_deref(),
                tools => (),
                documents => (),
            })
            .map_err(TemplateError::Render)
    }

    /// Returns the template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the text of the BOS token, if the model names one.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos_token.as_deref()
    }

    /// Returns the text of the EOS token, if the model names one.
    pub fn eos_token(&self) -> Option<&str> {
        self.eos_token.as_deref()
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    kwargs.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        None => {
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, PythonSpacing))
        }
        Some(width) => {
            let indent = b" ".repeat(width.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
        }
    };
    let failed = |error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error);
    written.map_err(failed)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error))
}

/// `", "` and `": "` between elements, as Python writes JSON on one line.
struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
