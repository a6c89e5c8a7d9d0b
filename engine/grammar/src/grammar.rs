//! Descriptions of answers.

use llguidance::api::TopLevelGrammar;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::schema;

/// Longest description in bytes.
pub const BYTES_MAX: usize = 256 << 10;
/// Most texts of a choice.
const CHOICES_MAX: usize = 4096;
/// White space between the parts of a JSON text: a space, or a line break and indentation. Bounded, so that no answer is white space
/// alone.
const JSON_WHITE_SPACE: &str = r"\n[ ]{0,16}| ";

/// What an answer must match, from its first character to its last.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON text that a schema accepts; the schema, as JSON.
    JsonSchema(String),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// One of some texts.
    Choice(Vec<String>),
    /// A text of a Lark grammar with the rule `start`, in the variant of llguidance.
    Lark(String),
}

/// A grammar cannot be used, or an answer cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

impl GrammarError {
    /// Describes an error of the library on one line.
    pub(crate) fn of_library(error: &impl std::fmt::Display) -> Self {
        const LONGEST: usize = 400;
        let text = format!("{error:#}");
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let first = lines.next().unwrap_or("unusable");
        // The parser of expressions shows the expression, with a mark, before it says what is wrong.
        let reason = lines.find_map(|line| line.strip_prefix("error: "));
        let line = match reason.filter(|_| first.ends_with(':')) {
            Some(reason) => format!("{first} {reason}"),
            None => first.to_owned(),
        };
        Self(line.chars().take(LONGEST).collect())
    }
}

impl Grammar {
    /// Returns the grammar of a JSON schema.
    pub fn of_schema(schema: &Value) -> Self {
        Self::JsonSchema(schema.to_string())
    }

    /// Returns the kind, for messages.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "grammar",
        }
    }

    /// Checks that the grammar can be used. Equal grammars are checked once.
    ///
    /// # Errors
    /// What cannot be used, as the name of a keyword of a schema.
    pub fn check(&self) -> Result<(), GrammarError> {
        crate::checked::check(self)
    }

    /// Describes an error of the library about this grammar.
    pub(crate) fn error(&self, error: &impl std::fmt::Display) -> GrammarError {
        let GrammarError(text) = GrammarError::of_library(error);
        if text == "NoExtensionBias" {
            return GrammarError("no text matches it".to_owned());
        }
        let keyword =
            text.split_once("Unimplemented keys: [\"").and_then(|(_, rest)| rest.split('"').next());
        let Some((Self::JsonSchema(schema), keyword)) = Some(self).zip(keyword) else {
            return GrammarError(text);
        };
        let schema = serde_json::from_str(schema).unwrap_or_default();
        let path = schema::path_of(&schema, keyword).unwrap_or_default();
        GrammarError(format!("{path}.{keyword} is not supported"))
    }

    /// Returns the bytes of the description.
    fn len(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }

    /// Translates the grammar for the library.
    pub(crate) fn translated(&self) -> Result<TopLevelGrammar, GrammarError> {
        if self.len() > BYTES_MAX {
            let problem = format!("has {} bytes, at most {BYTES_MAX} fit", self.len());
            return Err(GrammarError(problem));
        }
        match self {
            Self::JsonObject => Ok(of_schema(json!({ "type": "object" }))),
            Self::JsonSchema(text) => match serde_json::from_str(text) {
                Ok(value @ (Value::Object(_) | Value::Bool(_))) => {
                    Ok(of_schema(schema::prepared(value)?))
                }
                Ok(_) => Err(GrammarError("a schema is an object, true or false".to_owned())),
                Err(error) => Err(GrammarError(format!("no JSON: {error}"))),
            },
            Self::Regex(text) => Ok(TopLevelGrammar::from_regex(text)),
            Self::Choice(texts) if texts.is_empty() || texts.iter().any(String::is_empty) => {
                Err(GrammarError("needs one or more texts, and none is empty".to_owned()))
            }
            Self::Choice(texts) if texts.len() > CHOICES_MAX => {
                let problem = format!("has {} texts, at most {CHOICES_MAX} fit", texts.len());
                Err(GrammarError(problem))
            }
            Self::Choice(texts) => {
                // Lark's strings have the escapes of JSON.
                let texts: Vec<String> =
                    texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
                Ok(TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | "))))
            }
            Self::Lark(text) => Ok(TopLevelGrammar::from_lark(text.clone())),
        }
    }
}

/// Returns the grammar of a schema.
fn of_schema(schema: Value) -> TopLevelGrammar {
    TopLevelGrammar::from_json_schema(with_bounded_white_space(schema))
}

/// Returns a schema with bounded white space between the parts of its values, unless it has options of its own.
pub fn with_bounded_white_space(schema: Value) -> Value {
    const OPTIONS: &str = "x-guidance";
    match schema {
        Value::Object(mut fields) => {
            let options = json!({ "whitespace_pattern": JSON_WHITE_SPACE });
            fields.entry(OPTIONS).or_insert(options);
            Value::Object(fields)
        }
        all => all,
    }
}
