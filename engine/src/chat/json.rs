//! The filter `tojson`, as Python's `json.dumps` writes.

use minijinja::{
    Environment, Error, Value,
    value::{Kwargs, Rest, ValueKind},
};

use super::{
    globals::Range,
    limits::{check_length, take, take_items, visit},
    text::{error, float, float_text, integer, type_name},
};

/// Longest indent of a level.
const INDENT_MAX: usize = 64;

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", to_json);
}

/// Options of `json.dumps`.
struct Writer {
    is_ascii: bool,
    indent: Option<String>,
    /// Between items, and between a key and its value.
    separators: (String, String),
    sorts_keys: bool,
    out: String,
}

/// `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
fn to_json(value: Value, values: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let option = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = named.get(name)?;
        Ok(values.get(index).cloned().or(named).filter(|value| !value.is_none()))
    };
    let indent = match option(1, "indent")? {
        None => None,
        Some(indent) => match (integer(&indent), indent.as_str()) {
            (Some(width), _) if width <= INDENT_MAX as i128 => {
                Some(" ".repeat(usize::try_from(width).unwrap_or(0)))
            }
            (None, Some(text)) if text.len() <= INDENT_MAX => Some(text.to_owned()),
            _ => return Err(error(format!("tojson: indent is no number up to {INDENT_MAX}"))),
        },
    };
    let separators = match option(2, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(given) => {
            let texts: Vec<Value> = given.try_iter()?.collect();
            match texts.as_slice() {
                [item, key] => match (item.as_str(), key.as_str()) {
                    (Some(item), Some(key)) => (item.to_owned(), key.to_owned()),
                    _ => return Err(error("tojson: separators are no strings")),
                },
                _ => return Err(error("tojson: separators are not two")),
            }
        }
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let mut writer = Writer {
        is_ascii: is_true(option(0, "ensure_ascii")?),
        indent,
        separators,
        sorts_keys: is_true(option(3, "sort_keys")?),
        out: String::new(),
    };
    named.assert_all_used()?;
    if values.len() > 4 {
        return Err(error("tojson: too many arguments"));
    }
    writer.value(&value, 0)?;
    take(writer.out.len())?;
    Ok(writer.out)
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        visit(depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::String => self.text(value.as_str().unwrap_or_default())?,
            ValueKind::Bool | ValueKind::Number => self.out += &scalar(value),
            ValueKind::Seq if !value.as_object().is_some_and(|object| object.is::<Range>()) => {
                take_items(value.len().unwrap_or(0))?;
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(("[", "]"), items.len(), depth, |writer, index| {
                    writer.value(&items[index], depth + 1)
                })?;
            }
            ValueKind::Map => {
                take_items(value.len().unwrap_or(0))?;
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    pairs.push((key, item));
                }
                if self.sorts_keys {
                    super::filters::sort_by(&mut pairs, |(key, _)| Ok(key.clone()), false)?;
                }
                self.items(("{", "}"), pairs.len(), depth, |writer, index| {
                    let (key, item) = &pairs[index];
                    match key.kind() {
                        ValueKind::String => writer.text(key.as_str().unwrap_or_default())?,
                        ValueKind::None => writer.text("null")?,
                        ValueKind::Bool | ValueKind::Number => writer.text(&scalar(key))?,
                        _ => {
                            let kind = type_name(key);
                            let problem =
                                format!("keys must be str, int, float, bool or None, not {kind}");
                            return Err(error(problem));
                        }
                    }
                    let separator = writer.separators.1.clone();
                    writer.out += &separator;
                    writer.value(item, depth + 1)
                })?;
            }
            _ => {
                let kind = type_name(value);
                return Err(error(format!("Object of type {kind} is not JSON serializable")));
            }
        }
        Ok(())
    }

    fn items(
        &mut self,
        brackets: (&str, &str),
        count: usize,
        depth: usize,
        mut write: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out += brackets.0;
        for index in 0..count {
            if index > 0 {
                let separator = self.separators.0.clone();
                self.out += &separator;
            }
            self.line(depth + 1);
            write(self, index)?;
            check_length(self.out.len())?;
        }
        if count > 0 {
            self.line(depth);
        }
        self.out += brackets.1;
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            let indent = indent.repeat(depth);
            self.out.push('\n');
            self.out += &indent;
        }
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        take(text.len())?;
        self.out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\x08' => self.out.push_str("\\b"),
                '\x0c' => self.out.push_str("\\f"),
                '\0'..='\x1f' => self.out += &format!("\\u{:04x}", u32::from(letter)),
                letter if self.is_ascii && (!letter.is_ascii() || letter == '\x7f') => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        self.out += &format!("\\u{unit:04x}");
                    }
                }
                letter => self.out.push(letter),
            }
        }
        self.out.push('"');
        Ok(())
    }
}

/// A number or a truth value.
fn scalar(value: &Value) -> String {
    if value.kind() == ValueKind::Bool {
        return if value.is_true() { "true" } else { "false" }.to_owned();
    }
    match (integer(value), float(value).unwrap_or(f64::NAN)) {
        (Some(integer), _) => integer.to_string(),
        (None, float) if float.is_nan() => "NaN".to_owned(),
        (None, f64::INFINITY) => "Infinity".to_owned(),
        (None, f64::NEG_INFINITY) => "-Infinity".to_owned(),
        (None, float) => float_text(float),
    }
}
