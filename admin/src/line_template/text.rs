//! Texts with fields of an earlier line between `{{` and `}}`.

use std::fmt;

use serde_json::Value;

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    /// As it is.
    Text(String),
    /// The value of a field.
    Field(Field),
}

/// What a template reads of an earlier line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Field {
    /// The text of its answer.
    Content,
    /// Its `custom_id`.
    CustomId,
    /// A field of the body of its request, by names of fields and indices of lists.
    Body(Vec<String>),
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Content => f.write_str("previous.content"),
            Self::CustomId => f.write_str("previous.custom_id"),
            Self::Body(path) => write!(f, "previous.body.{}", path.join(".")),
        }
    }
}

impl Field {
    fn parse(name: &str) -> Option<Self> {
        let parts: Vec<&str> = name.split('.').collect();
        let is_name = |part: &&str| !part.is_empty() && !part.contains(char::is_whitespace);
        if !parts.iter().all(is_name) {
            return None;
        }
        match parts.as_slice() {
            ["previous", "content"] => Some(Self::Content),
            ["previous", "custom_id"] => Some(Self::CustomId),
            ["previous", "body", path @ ..] if !path.is_empty() => {
                Some(Self::Body(path.iter().map(ToString::to_string).collect()))
            }
            _ => None,
        }
    }
}

/// Returns the value at a path in a body.
pub(super) fn find<'a>(body: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(body, |value, part| match value {
        Value::Object(fields) => fields.get(part),
        Value::Array(items) => items.get(part.parse::<usize>().ok()?),
        _ => None,
    })
}

/// Splits a text into its parts.
///
/// # Errors
/// What is wrong with it, after its name.
pub(super) fn parse(text: &str) -> Result<Vec<Piece>, String> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while let Some((before, inside)) = rest.split_once("{{") {
        push(&mut pieces, before);
        let inside = inside.trim_start();
        let quote = inside.chars().next().filter(|first| matches!(first, '\'' | '"'));
        let unclosed = || "has '{{' without '}}'".to_owned();
        if let Some(quote) = quote {
            let (literal, behind) = inside[1..].split_once(quote).ok_or_else(unclosed)?;
            rest = behind.trim_start().strip_prefix("}}").ok_or_else(unclosed)?;
            push(&mut pieces, literal);
            continue;
        }
        let (name, behind) = inside.split_once("}}").ok_or_else(unclosed)?;
        let name = name.trim();
        let field = Field::parse(name).ok_or_else(|| unknown(name))?;
        pieces.push(Piece::Field(field));
        rest = behind;
    }
    push(&mut pieces, rest);
    Ok(pieces)
}

fn unknown(name: &str) -> String {
    let short: String = name.chars().filter(|c| !c.is_control()).take(80).collect();
    format!(
        "reads '{short}', which does not exist: there are previous.content, previous.custom_id and previous.body.FIELD"
    )
}

/// Appends text to the last piece, or begins one.
fn push(pieces: &mut Vec<Piece>, text: &str) {
    match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(Piece::Text(last)) => last.push_str(text),
        _ => pieces.push(Piece::Text(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Piece {
        Piece::Text(text.to_owned())
    }

    fn body(path: &[&str]) -> Piece {
        Piece::Field(Field::Body(path.iter().map(ToString::to_string).collect()))
    }

    #[test]
    fn text_is_split_at_its_fields() {
        let check = |given: &str, expected: &[Piece]| {
            assert_eq!(parse(given).as_deref(), Ok(expected), "{given}");
        };
        check("", &[]);
        check("a }} { b", &[text("a }} { b")]);
        check("{{previous.content}}", &[Piece::Field(Field::Content)]);
        check(
            "Q{{ previous.custom_id }}: {{\tprevious.body.messages.0.content }}!",
            &[
                text("Q"),
                Piece::Field(Field::CustomId),
                text(": "),
                body(&["messages", "0", "content"]),
                text("!"),
            ],
        );
        check("a {{ '{{' }} b {{\"}}\"}}", &[text("a {{ b }}")]);
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for unclosed in
            ["{{", "a {{ previous.content", "{{ 'x }}", "{{ 'x' y }}", "{{ previous.content }"]
        {
            assert_eq!(parse(unclosed), Err("has '{{' without '}}'".to_owned()), "{unclosed}");
        }
        for unknown in [
            "previous.contnet",
            "previous",
            "content",
            "previous.body",
            "previous.body.",
            "",
            "previous.body..a",
            "previous.body.a b",
            "previous.content | upper",
            "previous.content.0",
        ] {
            let problem = parse(&format!("{{{{ {unknown} }}}}")).expect_err(unknown);
            assert!(problem.starts_with(&format!("reads '{unknown}', which")), "{problem}");
        }
    }
}
