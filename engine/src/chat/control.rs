//! From a conversation to tokens, so that what users write never becomes a control token.
//!
//! The texts of messages, tools and arguments go through the template with a mark inside each name of a control token. The
//! rendered text is encoded in pieces between the marks: the template's own control tokens are whole, those of users are cut
//! after their first character and become ordinary tokens.

use std::borrow::Cow;

use serde_json::Value;

use super::{ChatTemplate, Content, Message, TemplateError, TemplateOptions, ToolCall};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Marks: code points that Unicode reserves for the inner use of programs
/// (<https://www.unicode.org/faq/private_use.html#nonchar1>).
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// A conversation cannot become tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConversationError {
    /// The template refuses it.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The text cannot be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A conversation as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The text that they stand for.
    pub text: String,
}

/// Renders and encodes a conversation. Names of control tokens in its texts become ordinary tokens, unless
/// `allow_control_tokens` is set.
///
/// # Errors
/// [`ConversationError`]
pub fn encode(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    (messages, options): (&[Message], &TemplateOptions),
    add_generation_prompt: bool,
    allow_control_tokens: bool,
) -> Result<Encoded, ConversationError> {
    let names = tokenizer.control_names();
    let mut marker = Marker { names, mark: None };
    if !allow_control_tokens {
        marker.choose_mark(messages, options);
    }
    if marker.mark.is_none() {
        let text = template.render_with(messages, add_generation_prompt, options)?;
        return Ok(Encoded { tokens: tokenizer.encode(&text, false)?, text });
    }
    let messages: Vec<Message> = messages.iter().map(|message| marker.message(message)).collect();
    let arguments = options.arguments.iter();
    let options = TemplateOptions {
        tools: options.tools.iter().map(|tool| marker.value(tool)).collect(),
        arguments: arguments.map(|(name, value)| (name.clone(), marker.value(value))).collect(),
    };
    let marked = template.render_with(&messages, add_generation_prompt, &options)?;
    let (mut tokens, mut text) = (Vec::new(), String::with_capacity(marked.len()));
    for piece in marked.split(|letter| Some(letter) == marker.mark) {
        tokens.extend(tokenizer.encode(piece, false)?);
        text.push_str(piece);
    }
    Ok(Encoded { tokens, text })
}

/// Puts marks into names of control tokens.
struct Marker<'a> {
    names: &'a [String],
    /// The mark; `None` if no text has such a name.
    mark: Option<char>,
}

impl Marker<'_> {
    /// Chooses a mark that occurs in no text, if any text has the name of a control token.
    fn choose_mark(&mut self, messages: &[Message], options: &TemplateOptions) {
        let mut texts: Vec<Cow<'_, str>> = Vec::new();
        for message in messages {
            match &message.content {
                Content::Text(text) => texts.push(text.into()),
                Content::Parts(parts) => texts.extend(parts.iter().map(Cow::from)),
            }
            texts.push(message.role.as_str().into());
            let others = [&message.name, &message.tool_call_id, &message.reasoning_content];
            texts.extend(others.into_iter().flatten().map(Cow::from));
            for call in &message.tool_calls {
                texts.extend([call.id.as_str().into(), call.name.as_str().into()]);
                texts.push(call.arguments.to_string().into());
            }
        }
        texts.extend(options.tools.iter().map(|tool| tool.to_string().into()));
        texts.extend(options.arguments.values().map(|value| value.to_string().into()));
        if texts.iter().any(|text| self.has_name(text)) {
            let is_free = |mark: &char| !texts.iter().any(|text| text.contains(*mark));
            // A text with all of them loses one.
            self.mark = MARKS.into_iter().find(is_free).or(Some(*MARKS.end()));
        }
    }

    fn has_name(&self, text: &str) -> bool {
        // Most names begin with the same character, which most texts lack.
        let mut missing = None;
        self.names.iter().any(|name| {
            let first = name.chars().next();
            if first.is_some_and(|first| missing != Some(first) && !text.contains(first)) {
                missing = first;
            }
            first != missing && text.contains(name.as_str())
        })
    }

    /// Returns a text with a mark after the first character of each name. A name of one character is replaced.
    fn text(&self, text: &str) -> String {
        let Some(mark) = self.mark.filter(|_| self.has_name(text)) else { return text.to_owned() };
        let mut cuts = vec![false; text.len() + 1];
        let mut single = vec![false; text.len() + 1];
        for name in self.names {
            let first = name.chars().next().map_or(0, char::len_utf8);
            let mut from = 0;
            while let Some(found) = text.get(from..).and_then(|rest| rest.find(name.as_str())) {
                let at = from + found;
                if first == name.len() {
                    single[at] = true;
                } else {
                    cuts[at + first] = true;
                }
                from = at + first.max(1);
            }
        }
        let mut marked = String::with_capacity(text.len() + 16);
        for (at, letter) in text.char_indices() {
            if cuts[at] {
                marked.push(mark);
            }
            marked.push(if single[at] { char::REPLACEMENT_CHARACTER } else { letter });
        }
        marked
    }

    fn message(&self, message: &Message) -> Message {
        let text = |text: &Option<String>| text.as_ref().map(|text| self.text(text));
        Message {
            role: self.text(&message.role),
            content: match &message.content {
                Content::Text(text) => Content::Text(self.text(text)),
                Content::Parts(parts) => {
                    Content::Parts(parts.iter().map(|part| self.text(part)).collect())
                }
            },
            name: text(&message.name),
            tool_call_id: text(&message.tool_call_id),
            reasoning_content: text(&message.reasoning_content),
            tool_calls: message.tool_calls.iter().map(|call| self.call(call)).collect(),
        }
    }

    fn call(&self, call: &ToolCall) -> ToolCall {
        ToolCall {
            id: self.text(&call.id),
            name: self.text(&call.name),
            arguments: self.value(&call.arguments),
        }
    }

    fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(text).into(),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => {
                let fields = fields.iter();
                Value::Object(fields.map(|(name, v)| (self.text(name), self.value(v))).collect())
            }
            other => other.clone(),
        }
    }
}
