//! [`LineTemplate`]: what makes a line of a batch from the line of an earlier batch and its answer.
//!
//! A template is a batch line. Its strings may have `{{ previous.content }}` (the text of the earlier answer),
//! `{{ previous.custom_id }}` and `{{ previous.body.FIELD }}`, where FIELD is a path such as `messages.0.content`. A string that is
//! one field and nothing else becomes the value of that field with its type; in a longer string, a value that is not a string is
//! written as JSON. `{{ '{{' }}` stands for the braces themselves. Names of fields are not templates.
//!
//! A template that can never make a line is refused when it is parsed. What only a line can tell, such as a field that its request
//! does not have, is the error of that line.

mod text;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tritmill_client::{
    Endpoint, FieldError, Fields, LINE_BYTES_MAX, RawLine, json_line, parse_request,
};

use self::text::{Field, Piece, find, parse};
use crate::store::batches::MIXED;

/// Most bytes of a template: each step of its batch reads and writes it.
const TEMPLATE_BYTES_MAX: usize = 64 << 10;

/// A template of lines. It is stored as one text, so that every store keeps the order of its fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LineTemplate(Stored);

/// Its fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    custom_id: Option<String>,
    url: String,
    body: Map<String, Value>,
}

/// Why a template is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TemplateError {
    /// Code for programs.
    pub code: String,
    /// The field that is wrong.
    pub param: String,
    /// Message for people, with the field.
    pub message: String,
}

impl TemplateError {
    fn new(code: &str, param: impl Into<String>, problem: &str) -> Self {
        let param = param.into();
        let message = format!("{param} {problem}");
        Self { code: code.to_owned(), param, message }
    }
}

impl From<FieldError> for TemplateError {
    fn from(error: FieldError) -> Self {
        Self::new(error.code, error.path, &error.problem)
    }
}

impl TryFrom<String> for LineTemplate {
    type Error = serde_json::Error;

    fn try_from(text: String) -> Result<Self, serde_json::Error> {
        serde_json::from_str(&text).map(Self)
    }
}

impl From<LineTemplate> for String {
    fn from(template: LineTemplate) -> Self {
        template.to_json().to_string()
    }
}

/// A line of an earlier batch that has an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Previous<'a> {
    /// Its name.
    pub custom_id: &'a str,
    /// The text of its answer; `None` for an answer without text, such as vectors.
    pub content: Option<&'a str>,
    /// The body of its request.
    pub body: &'a Value,
}

/// Why a line is not made. It becomes the error of that line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LineError {
    /// HTTP status of its response.
    pub status: u16,
    /// Code for programs.
    pub code: &'static str,
    /// Message for people.
    pub message: String,
    /// The field that is missing.
    pub param: Option<String>,
}

impl LineTemplate {
    /// Parses a template for a batch with an endpoint, or `mixed`. In errors the names of its fields begin with `prefix`.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn parse(template: Value, endpoint: &str, prefix: &str) -> Result<Self, TemplateError> {
        let Value::Object(map) = template else {
            let param = prefix.trim_end_matches('.');
            return Err(TemplateError::new("invalid_type", param, "must be an object"));
        };
        let mut fields = Fields::new(map, prefix);
        let missing = |name: &str| {
            TemplateError::new("missing_field", format!("{prefix}{name}"), "is missing")
        };
        let custom_id = fields.text("custom_id")?;
        let method = fields.text("method")?;
        let url = fields.text("url")?.ok_or_else(|| missing("url"))?;
        let body = match fields.take("body") {
            Some(Value::Object(body)) => body,
            Some(other) => {
                let path = fields.path("body");
                return Err(FieldError::wrong_type(path, "an object", &other).into());
            }
            None => return Err(missing("body")),
        };
        if method.is_some_and(|method| method != "POST") {
            let path = fields.path("method");
            return Err(TemplateError::new("invalid_value", path, "must be 'POST'"));
        }
        fields.finish()?;
        let known = Endpoint::of_batch(&url).is_some();
        if !known || (endpoint != MIXED && url != endpoint) {
            let expected = match endpoint {
                MIXED => Endpoint::batch_paths(),
                other => format!("'{other}', as the batch's endpoint"),
            };
            let problem = format!("must be {expected}");
            return Err(TemplateError::new("invalid_url", format!("{prefix}url"), &problem));
        }
        if !body.contains_key("model") {
            return Err(missing("body.model"));
        }
        let template = Self(Stored { custom_id, url, body });
        if template.to_json().to_string().len() > TEMPLATE_BYTES_MAX {
            let problem = format!("has more than {TEMPLATE_BYTES_MAX} bytes");
            let param = prefix.trim_end_matches('.');
            return Err(TemplateError::new("template_too_long", param, &problem));
        }
        template.compile(prefix)?.check(prefix)?;
        Ok(template)
    }

    /// Returns its fields as they were written.
    pub fn to_json(&self) -> Value {
        let Stored { custom_id, url, body } = &self.0;
        let mut fields = Map::new();
        fields.extend(custom_id.clone().map(|name| ("custom_id".to_owned(), Value::String(name))));
        fields.insert("url".to_owned(), Value::String(url.clone()));
        fields.insert("body".to_owned(), Value::Object(body.clone()));
        Value::Object(fields)
    }

    /// Checks that the answers of an earlier batch with an endpoint may have what it reads.
    ///
    /// # Errors
    /// If they have no text.
    pub fn check_earlier(&self, endpoint: &str, prefix: &str) -> Result<(), TemplateError> {
        let maker = self.compile(prefix)?;
        let has_text = endpoint != Endpoint::Embeddings.as_str();
        if has_text || !maker.reads(|field| *field == Field::Content) {
            return Ok(());
        }
        let problem = "reads previous.content, and the answers of the earlier batch are vectors";
        Err(TemplateError::new("invalid_template", prefix.trim_end_matches('.'), problem))
    }

    /// The endpoint of its lines.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// Prepares it to make lines.
    ///
    /// # Errors
    /// Names the first text that cannot be read.
    pub(crate) fn compile(&self, prefix: &str) -> Result<LineMaker, TemplateError> {
        let Stored { custom_id, url, body } = &self.0;
        let invalid = |param: &str, problem: String| {
            TemplateError::new("invalid_template", format!("{prefix}{param}"), &problem)
        };
        let name = custom_id.as_deref().unwrap_or("{{ previous.custom_id }}");
        let name = parse(name).map_err(|problem| invalid("custom_id", problem))?;
        if !name.iter().any(|piece| matches!(piece, Piece::Field(_))) {
            let problem = "must read a field, such as {{ previous.custom_id }}: lines must have different names";
            return Err(invalid("custom_id", problem.to_owned()));
        }
        let of = |(name, value): (&String, &Value)| {
            Ok((name.clone(), Part::of(value, &format!("body.{name}"), &invalid)?))
        };
        let body = body.iter().map(of).collect::<Result<_, TemplateError>>()?;
        Ok(LineMaker { name, url: url.clone(), body })
    }
}

/// A value of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// A value without fields.
    Fixed(Value),
    /// A text with fields.
    Text(Vec<Piece>),
    /// The value of a field.
    Field(Field),
    List(Vec<Part>),
    Object(Vec<(String, Part)>),
}

impl Part {
    fn of(
        value: &Value,
        path: &str,
        invalid: &impl Fn(&str, String) -> TemplateError,
    ) -> Result<Self, TemplateError> {
        Ok(match value {
            Value::String(text) => {
                let mut pieces = parse(text).map_err(|problem| invalid(path, problem))?;
                match pieces.as_slice() {
                    [] => Self::Fixed(value.clone()),
                    [Piece::Text(text)] => Self::Fixed(Value::String(text.clone())),
                    [Piece::Field(_)] => match pieces.remove(0) {
                        Piece::Field(field) => Self::Field(field),
                        text @ Piece::Text(_) => Self::Text(vec![text]),
                    },
                    _ => Self::Text(pieces),
                }
            }
            Value::Array(items) => {
                let of = |(index, item)| Self::of(item, &format!("{path}[{index}]"), invalid);
                Self::List(items.iter().enumerate().map(of).collect::<Result<_, _>>()?)
            }
            Value::Object(fields) => {
                let of = |(name, field): (&String, &Value)| {
                    Ok((name.clone(), Self::of(field, &format!("{path}.{name}"), invalid)?))
                };
                Self::Object(fields.iter().map(of).collect::<Result<_, TemplateError>>()?)
            }
            fixed => Self::Fixed(fixed.clone()),
        })
    }

    /// Whether a field in it matches.
    fn reads(&self, which: &impl Fn(&Field) -> bool) -> bool {
        match self {
            Self::Fixed(_) => false,
            Self::Text(pieces) => reads(pieces, which),
            Self::Field(field) => which(field),
            Self::List(items) => items.iter().any(|item| item.reads(which)),
            Self::Object(fields) => fields.iter().any(|(_, field)| field.reads(which)),
        }
    }

    /// Whether it has a value with the type of a field of the earlier request.
    fn has_foreign_type(&self) -> bool {
        match self {
            Self::Fixed(_) | Self::Text(_) => false,
            Self::Field(field) => matches!(field, Field::Body(_)),
            Self::List(items) => items.iter().any(Self::has_foreign_type),
            Self::Object(fields) => fields.iter().any(|(_, field)| field.has_foreign_type()),
        }
    }
}

fn reads(pieces: &[Piece], which: &impl Fn(&Field) -> bool) -> bool {
    pieces.iter().any(|piece| matches!(piece, Piece::Field(field) if which(field)))
}

/// Makes lines by a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LineMaker {
    name: Vec<Piece>,
    url: String,
    body: Vec<(String, Part)>,
}

impl LineMaker {
    /// Whether a field matches that it reads.
    fn reads(&self, which: impl Fn(&Field) -> bool) -> bool {
        reads(&self.name, &which) || self.body.iter().any(|(_, part)| part.reads(&which))
    }

    /// Whether it reads requests.
    pub fn reads_body(&self) -> bool {
        self.reads(|field| matches!(field, Field::Body(_)))
    }

    /// Returns the line that follows an earlier one, without a line end.
    pub fn line(&self, previous: &Previous<'_>) -> String {
        let made = Made { previous, room: LINE_BYTES_MAX }.line(self);
        made.unwrap_or_else(|error| self.failed_line(previous.custom_id, &error))
    }

    /// Returns the line of an error, which has the name of the earlier line.
    pub fn failed_line(&self, custom_id: &str, error: &LineError) -> String {
        let LineError { status, code, message, param } = error;
        let error = json!({ "status": status, "code": code, "message": message, "param": param });
        json_line(&json!({ "custom_id": custom_id, "url": self.url, "row_error": error }))
    }

    /// Refuses a body that no answer makes valid: with texts in place of its fields, its fixed fields have errors.
    fn check(&self, prefix: &str) -> Result<(), TemplateError> {
        let is_unknown = |(name, part): &(String, Part)| name != "model" && part.has_foreign_type();
        if self.body.iter().any(is_unknown) {
            return Ok(());
        }
        let body = self.body.iter().map(|(name, part)| (name.clone(), sample(part)));
        let body: Map<String, Value> = body.collect();
        let line = json!({ "custom_id": "x", "method": "POST", "url": self.url, "body": body });
        let line = RawLine { number: 1, offset: 0, content: Ok(line.to_string().into_bytes()) };
        let Err(refused) = parse_request(&line) else { return Ok(()) };
        let refusal = refused.refusal;
        let param = refusal.param.unwrap_or_default();
        let first = param.split(['.', '[']).next().unwrap_or_default();
        let is_read = |(name, part): &(String, Part)| name == first && part.reads(&|_| true);
        if param.is_empty() || self.body.iter().any(is_read) {
            return Ok(());
        }
        let message = refusal.message.strip_prefix("line 1: ").unwrap_or(&refusal.message);
        Err(TemplateError {
            code: refusal.code,
            message: format!("{prefix}{message}"),
            param: format!("{prefix}body.{param}"),
        })
    }
}

/// Returns a value with texts in place of its fields.
fn sample(part: &Part) -> Value {
    match part {
        Part::Fixed(value) => value.clone(),
        Part::Text(_) | Part::Field(_) => Value::String("x".to_owned()),
        Part::List(items) => items.iter().map(sample).collect(),
        Part::Object(fields) => {
            fields.iter().map(|(name, field)| (name.clone(), sample(field))).collect()
        }
    }
}

/// A line that is being made.
struct Made<'a> {
    previous: &'a Previous<'a>,
    /// Bytes that it may still grow by: few fields of a long answer may make a line of any length.
    room: usize,
}

impl Made<'_> {
    fn line(&mut self, maker: &LineMaker) -> Result<String, LineError> {
        let name = self.text(&maker.name)?;
        let body = self.object(&maker.body)?;
        let line = json!({ "custom_id": name, "method": "POST", "url": maker.url, "body": body });
        let line = json_line(&line);
        if line.len() > LINE_BYTES_MAX { Err(too_long()) } else { Ok(line) }
    }

    fn spend(&mut self, bytes: usize) -> Result<(), LineError> {
        self.room = self.room.checked_sub(bytes).ok_or_else(too_long)?;
        Ok(())
    }

    fn object(&mut self, fields: &[(String, Part)]) -> Result<Value, LineError> {
        let made = fields.iter().map(|(name, part)| Ok((name.clone(), self.value(part)?)));
        made.collect()
    }

    fn value(&mut self, part: &Part) -> Result<Value, LineError> {
        match part {
            Part::Fixed(value) => Ok(value.clone()),
            Part::Text(pieces) => self.text(pieces).map(Value::String),
            Part::Field(field @ Field::Body(path)) => {
                let value = find(self.previous.body, path).ok_or_else(|| missing(field))?;
                self.spend(value.to_string().len())?;
                Ok(value.clone())
            }
            Part::Field(field) => self.text_of(field).map(Value::String),
            Part::List(items) => items.iter().map(|item| self.value(item)).collect(),
            Part::Object(fields) => self.object(fields),
        }
    }

    fn text(&mut self, pieces: &[Piece]) -> Result<String, LineError> {
        let mut text = String::new();
        for piece in pieces {
            match piece {
                Piece::Text(fixed) => text.push_str(fixed),
                Piece::Field(field) => text.push_str(&self.text_of(field)?),
            }
        }
        Ok(text)
    }

    fn text_of(&mut self, field: &Field) -> Result<String, LineError> {
        let text = match field {
            Field::Content => self.previous.content.ok_or_else(|| missing(field))?.to_owned(),
            Field::CustomId => self.previous.custom_id.to_owned(),
            Field::Body(path) => match find(self.previous.body, path) {
                None | Some(Value::Null) => return Err(missing(field)),
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
            },
        };
        self.spend(text.len())?;
        Ok(text)
    }
}

fn missing(field: &Field) -> LineError {
    let message = match field {
        Field::Content => {
            "the template reads previous.content, and the earlier answer has no text".to_owned()
        }
        field => format!("the template reads {field}, which the earlier request does not have"),
    };
    let param = Some(field.to_string());
    LineError { status: 400, code: "template_missing_field", message, param }
}

fn too_long() -> LineError {
    let message = format!("the line that the template makes has more than {LINE_BYTES_MAX} bytes");
    LineError { status: 400, code: "line_too_long", message, param: None }
}

#[cfg(test)]
mod tests;
