//! The text of values, as Python's `str` and `repr` write them.

use std::{collections::HashSet, fmt::Write as _};

use minijinja::{Error, ErrorKind, Value, value::ValueKind};
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory as _};

use super::{
    filters::Group,
    globals::Range,
    limits::{check_length, take, take_items, visit},
};

/// Returns an error like Python's `TypeError` and `ValueError`.
pub(super) fn error(problem: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Length of a text with `count` parts replaced.
pub(super) fn replaced_length(text: &str, old: &str, new: &str, count: Option<usize>) -> usize {
    let found = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
    let found = found.min(count.unwrap_or(usize::MAX));
    text.len().saturating_add(found.saturating_mul(new.len()))
}

/// Returns the name of a value's type in Python.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Bytes => "bytes",
        ValueKind::Seq if value.is_tuple() => "tuple",
        ValueKind::Seq => "list",
        ValueKind::Map => "dict",
        ValueKind::Iterable => "generator",
        _ => "object",
    }
}

/// Returns an integer or a truth value.
pub(super) fn integer(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// Returns a number as a float.
#[allow(clippy::cast_precision_loss, reason = "as Python does")]
pub(super) fn float(value: &Value) -> Option<f64> {
    match integer(value) {
        Some(integer) => Some(integer as f64),
        None if value.is_number() => f64::try_from(value.clone()).ok(),
        None => None,
    }
}

/// Returns an integer as a value.
pub(super) fn of_integer(value: i128) -> Value {
    i64::try_from(value).map_or_else(|_| Value::from(value), Value::from)
}

/// Python's `str(value)`. Where it costs too much the rendering is refused, and it does not matter what is returned.
pub(super) fn to_text(value: &Value) -> String {
    match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) if take(text.len()).is_ok() => text.to_owned(),
        (ValueKind::String | ValueKind::Undefined, _) => String::new(),
        _ => repr(value),
    }
}

/// Python's `repr(value)`, with the same bounds.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    let _ = write(&mut out, value, 0);
    out
}

fn write(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    visit(depth)?;
    check_length(out.len())?;
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => match (integer(value), float(value)) {
            (Some(integer), _) => out.push_str(&integer.to_string()),
            (None, Some(float)) => out.push_str(&float_text(float)),
            (None, None) => {}
        },
        ValueKind::String if value.is_safe() => {
            out.push_str("Markup(");
            quote(out, value.as_str().unwrap_or_default())?;
            out.push(')');
        }
        ValueKind::String => quote(out, value.as_str().unwrap_or_default())?,
        ValueKind::Bytes => quote_bytes(out, value.as_bytes().unwrap_or_default())?,
        ValueKind::Seq if value.is_tuple() || value.downcast_object_ref::<Group>().is_some() => {
            out.push('(');
            list(out, items(), depth)?;
            out.push_str(if value.len() == Some(1) { ",)" } else { ")" });
        }
        ValueKind::Seq if value.downcast_object_ref::<Range>().is_none() => {
            out.push('[');
            list(out, items(), depth)?;
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in items().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write(out, &key, depth + 1)?;
                out.push_str(": ");
                write(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Iterable => {
            let view = value.downcast_object_ref::<super::methods::View>();
            out.push_str(view.map_or("[", |view| view.name()));
            out.push_str(if view.is_some() { "([" } else { "" });
            list(out, items(), depth)?;
            out.push_str(if view.is_some() { "])" } else { "]" });
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn list(out: &mut String, items: impl Iterator<Item = Value>, depth: usize) -> Result<(), Error> {
    for (index, item) in items.enumerate() {
        out.push_str(if index == 0 { "" } else { ", " });
        write(out, &item, depth + 1)?;
    }
    Ok(())
}

/// Writes a string as Python quotes it.
fn quote(out: &mut String, text: &str) -> Result<(), Error> {
    take(text.len())?;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter == quote => {
                out.push('\\');
                out.push(letter);
            }
            letter if is_printable(letter) => out.push(letter),
            letter => out.push_str(&escape(letter)),
        }
    }
    out.push(quote);
    Ok(())
}

/// Python's escape of a character.
fn escape(letter: char) -> String {
    match u32::from(letter) {
        code @ 0..=0xff => format!("\\x{code:02x}"),
        code @ 0x100..=0xffff => format!("\\u{code:04x}"),
        code => format!("\\U{code:08x}"),
    }
}

/// Python's `ascii(value)`.
pub(super) fn ascii(value: &Value) -> String {
    let escaped =
        |letter: char| if letter.is_ascii() { letter.to_string() } else { escape(letter) };
    repr(value).chars().map(escaped).collect()
}

fn quote_bytes(out: &mut String, bytes: &[u8]) -> Result<(), Error> {
    take(bytes.len())?;
    let quote = if bytes.contains(&b'\'') && !bytes.contains(&b'"') { '"' } else { '\'' };
    out.push('b');
    out.push(quote);
    for &byte in bytes {
        match byte {
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            byte if char::from(byte) == quote => {
                out.push('\\');
                out.push(quote);
            }
            0x20..0x7f => out.push(char::from(byte)),
            byte => {
                let _ = write!(out, "\\x{byte:02x}");
            }
        }
    }
    out.push(quote);
    Ok(())
}

/// Whether Python prints a character as it is.
pub(super) fn is_printable(letter: char) -> bool {
    letter == ' '
        || !matches!(
            letter.general_category_group(),
            GeneralCategoryGroup::Other | GeneralCategoryGroup::Separator
        )
}

/// Whether Python's `str.strip` removes a character.
pub(super) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\x1c'..='\x1f').contains(&letter)
}

/// Returns whether `strip` and `trim` remove a character: one of `letters`, or white space where there are none.
pub(super) fn removed(letters: Option<&str>) -> Result<impl Fn(char) -> bool + use<>, Error> {
    take_items(letters.map_or(0, str::len))?;
    let letters: Option<HashSet<char>> = letters.map(|letters| letters.chars().collect());
    Ok(move |letter: char| match &letters {
        Some(letters) => letters.contains(&letter),
        None => is_space(letter),
    })
}

/// Whether Python counts a character as a digit or a number.
pub(super) fn is_decimal(letter: char) -> bool {
    letter.general_category() == GeneralCategory::DecimalNumber
}

/// Python's `str(float)`: the shortest text that reads as the same number.
pub(super) fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(-4..16) => format!("{value:?}").replace("e0", ""),
        Ok(exponent) => format!("{digits}{}", exponent_text(exponent)),
        Err(_) => scientific,
    }
}

/// An exponent as Python writes it: with its sign and at least two digits.
pub(super) fn exponent_text(exponent: i32) -> String {
    format!("e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
