//! Filters of Jinja on values and lists.
//!
//! See also [`list_filters`](super::list_filters) and [`text_filters`](super::text_filters).

use std::cmp::Ordering;

use minijinja::{
    Environment, Error, Value,
    value::{Kwargs, Rest, Tuple, ValueKind},
};

use super::{
    limits::{check_name, keep, take, take_items, take_text},
    operators::{equal, order},
    text::{error, float, integer, of_integer, to_text, type_name},
};

/// What minijinja has and Jinja has not.
const FOREIGN: [&str; 5] = ["bool", "chain", "lines", "split", "zip"];

/// Adds the filters, and removes those that Jinja does not have.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    for name in FOREIGN {
        environment.remove_filter(name);
    }
    environment.add_filter("string", |value: Value| {
        if value.is_safe() { value } else { Value::from(to_text(&value)) }
    });
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    for name in ["escape", "e"] {
        environment.add_filter(name, |value: Value| Value::from_safe_string(escape(&value)));
    }
    environment.add_filter("forceescape", |value: Value| {
        Value::from_safe_string(escape_text(&to_text(&value)))
    });
    environment.add_filter("safe", |value: Value| Value::from_safe_string(to_text(&value)));
    // Items of a mapping are no attributes.
    environment.add_filter("attr", |value: Value, name: Value| {
        check_name(&name)?;
        match value.kind() {
            ValueKind::Map => Ok(Value::UNDEFINED),
            _ => value.get_attr(name.as_str().unwrap_or_default()),
        }
    });
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    environment.add_filter("abs", |value: Value| match (integer(&value), float(&value)) {
        (Some(value), _) => Ok(of_integer(value.saturating_abs())),
        (None, Some(value)) => Ok(Value::from(value.abs())),
        (None, None) => Err(error(format!("bad operand type for abs(): '{}'", type_name(&value)))),
    });
    environment.add_filter("first", |value: Value| end(&value, false));
    environment.add_filter("last", |value: Value| end(&value, true));
    environment.add_filter("list", list);
    environment.add_filter("join", join);
    environment.add_filter("int", int);
    environment.add_filter("float", to_float);
    environment.add_filter("round", round);
    environment.add_filter("sum", sum);
    environment.add_filter("sort", sort);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("groupby", groupby);
    environment.add_filter("items", items);
    environment.add_filter("max", |value: Value, rest: Rest<Value>, named: Kwargs| {
        extreme(&value, &rest, &named, Ordering::Greater)
    });
    environment.add_filter("min", |value: Value, rest: Rest<Value>, named: Kwargs| {
        extreme(&value, &rest, &named, Ordering::Less)
    });
    environment.add_filter("unique", unique);
    // Jinja's choice is random; the same messages must give the same prompt.
    environment.add_filter("random", |value: Value| -> Result<Value, Error> {
        Ok(iterate(&value)?.into_iter().next().unwrap_or(Value::UNDEFINED))
    });
}

/// Returns an option of a filter, by its place or its name.
pub(super) fn option(
    values: &[Value],
    named: &Kwargs,
    index: usize,
    name: &str,
) -> Result<Option<Value>, Error> {
    let named: Option<Value> = if named.has(name) { Some(named.get(name)?) } else { None };
    Ok(values.get(index).cloned().or(named))
}

/// Returns whether an option is given and true.
pub(super) fn flag(
    values: &[Value],
    named: &Kwargs,
    index: usize,
    name: &str,
) -> Result<bool, Error> {
    Ok(option(values, named, index, name)?.is_some_and(|value| value.is_true()))
}

/// Returns the items of a value.
pub(super) fn iterate(value: &Value) -> Result<Vec<Value>, Error> {
    if value.is_undefined() {
        return Ok(Vec::new());
    }
    if value.is_none() {
        return Err(error("'NoneType' object is not iterable"));
    }
    take_items(value.len().unwrap_or(0))?;
    Ok(value.try_iter()?.collect())
}

/// Returns the first or the last item of a value that is not undefined; those of a string are its characters.
fn end(value: &Value, is_last: bool) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(error("the value is undefined"));
    }
    if let (ValueKind::String, Some(text)) = (value.kind(), value.as_str()) {
        let letter = if is_last { text.chars().next_back() } else { text.chars().next() };
        return Ok(letter.map_or(Value::UNDEFINED, Value::from));
    }
    let mut items = iterate(value)?.into_iter();
    let item = if is_last { items.next_back() } else { items.next() };
    Ok(item.unwrap_or(Value::UNDEFINED))
}

fn default(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = option(&rest, &named, 0, "default_value")?.unwrap_or_else(|| Value::from(""));
    let replaces_false = flag(&rest, &named, 1, "boolean")?;
    named.assert_all_used()?;
    let is_replaced = value.is_undefined() || (replaces_false && !value.is_true());
    Ok(if is_replaced { default } else { value })
}

/// Escapes a value for HTML, if it is not safe already.
pub(super) fn escape(value: &Value) -> String {
    if value.is_safe() { to_text(value) } else { escape_text(&to_text(value)) }
}

/// Escapes a text for HTML, as markupsafe does.
pub(super) fn escape_text(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&#34;")
        .replace('\'', "&#39;")
}

fn length(value: Value) -> Result<Value, Error> {
    let length = match value.as_str() {
        Some(text) => {
            take(text.len())?;
            Some(text.chars().count())
        }
        None if value.is_undefined() => Some(0),
        None => value.len(),
    };
    let problem = || error(format!("object of type '{}' has no len()", type_name(&value)));
    length.map(Value::from).ok_or_else(problem)
}

fn list(value: Value) -> Result<Value, Error> {
    iterate(&value).map(Value::from)
}

fn join(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let separator = option(&rest, &named, 0, "d")?.unwrap_or_else(|| Value::from(""));
    let path = option(&rest, &named, 1, "attribute")?;
    named.assert_all_used()?;
    let mut items = iterate(&value)?;
    if let Some(path) = path {
        items = items.iter().map(|item| attribute(item, &path)).collect::<Result<_, _>>()?;
    }
    let parts: Vec<String> = items.iter().map(to_text).collect();
    let separator = to_text(&separator);
    let separators = parts.len().saturating_mul(separator.len());
    take_text(parts.iter().map(String::len).sum::<usize>().saturating_add(separators))?;
    Ok(Value::from(parts.join(&separator)))
}

/// Returns `value.a.b` for the path `a.b`, or an item for a number.
pub(super) fn attribute(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(text) = path.as_str() else { return super::operators::item(value, path) };
    check_name(path)?;
    let mut value = value.clone();
    for part in text.split('.') {
        let key = part.parse::<i64>().map_or_else(|_| Value::from(part), Value::from);
        value = super::operators::item(&value, &key)?;
    }
    Ok(value)
}

/// Reads a text as Python's `int` and `float` do: with white space around the number and `_` inside.
fn number_text(text: &str) -> Result<Option<String>, Error> {
    take(text.len())?;
    let text = text.trim_matches(super::text::is_space);
    let is_wrong = text.starts_with('_') || text.ends_with('_') || text.contains("__");
    Ok((!is_wrong).then(|| text.replace('_', "")))
}

fn int(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = option(&rest, &named, 0, "default")?.unwrap_or_else(|| Value::from(0));
    let base = option(&rest, &named, 1, "base")?.as_ref().and_then(integer).unwrap_or(10);
    named.assert_all_used()?;
    if value.is_undefined() {
        return Err(error("the value is undefined"));
    }
    #[allow(clippy::cast_possible_truncation, reason = "checked to be in range")]
    let whole =
        |value: f64| (value.is_finite() && value.abs() < 1e38).then(|| value.trunc() as i128);
    let parsed = match value.as_str().map(number_text).transpose()? {
        Some(None) => None,
        Some(Some(text)) => {
            let lower = text.to_ascii_lowercase();
            let (sign, digits) = match lower.strip_prefix('-') {
                Some(digits) => (-1, digits),
                None => (1, lower.strip_prefix('+').unwrap_or(&lower)),
            };
            let prefix = match base {
                16 => "0x",
                8 => "0o",
                2 => "0b",
                _ => "",
            };
            let digits = digits.strip_prefix(prefix).unwrap_or(digits);
            let radix =
                u32::try_from(base).ok().filter(|base| (2..=36).contains(base)).unwrap_or(10);
            let integer = i128::from_str_radix(digits, radix).ok();
            let integer = integer.and_then(|value| value.checked_mul(sign));
            integer.or_else(|| text.parse().ok().and_then(whole))
        }
        None => integer(&value).or_else(|| float(&value).and_then(whole)),
    };
    Ok(parsed.map_or(default, of_integer))
}

fn to_float(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = option(&rest, &named, 0, "default")?.unwrap_or_else(|| Value::from(0.0));
    named.assert_all_used()?;
    if value.is_undefined() {
        return Err(error("the value is undefined"));
    }
    let parsed = match value.as_str() {
        Some(text) => number_text(text)?.and_then(|text| text.parse().ok()),
        None => float(&value),
    };
    Ok(parsed.map_or(default, Value::from))
}

fn round(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let digits = option(&rest, &named, 0, "precision")?.as_ref().and_then(integer).unwrap_or(0);
    let method =
        option(&rest, &named, 1, "method")?.map_or_else(|| "common".to_owned(), |m| to_text(&m));
    named.assert_all_used()?;
    let problem = || error(format!("type {} doesn't define __round__ method", type_name(&value)));
    let number = float(&value).ok_or_else(problem)?;
    let digits = i32::try_from(digits.clamp(-300, 300)).unwrap_or(0);
    let scale = 10f64.powi(digits.abs());
    let scaled = |round: fn(f64) -> f64| {
        if digits < 0 { round(number / scale) * scale } else { round(number * scale) / scale }
    };
    match method.as_str() {
        "ceil" => Ok(Value::from(scaled(f64::ceil))),
        "floor" => Ok(Value::from(scaled(f64::floor))),
        "common" => {
            if let (Some(integer), 0..) = (integer(&value), digits) {
                return Ok(of_integer(integer));
            }
            let rounded = match usize::try_from(digits) {
                // The decimal text is rounded exactly, halves to even.
                Ok(digits) => format!("{number:.digits$}").parse().unwrap_or(number),
                Err(_) => (number / scale).round_ties_even() * scale,
            };
            #[allow(clippy::cast_possible_truncation, reason = "it was an integer")]
            Ok(match integer(&value) {
                Some(_) => of_integer(rounded as i128),
                None => Value::from(rounded),
            })
        }
        _ => Err(error("method must be common, ceil or floor")),
    }
}

fn sum(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let path = option(&rest, &named, 0, "attribute")?.filter(|path| !path.is_none());
    let mut total = option(&rest, &named, 1, "start")?.unwrap_or_else(|| Value::from(0));
    named.assert_all_used()?;
    for item in iterate(&value)? {
        let item = match &path {
            Some(path) => attribute(&item, path)?,
            None => item,
        };
        total = super::operators::binary("+", &total, &item)?;
    }
    Ok(total)
}

/// A key to compare: without the difference of upper and lower case, if wanted.
fn key(value: Value, is_case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(_) if !is_case_sensitive => Value::from(to_text(&value).to_lowercase()),
        _ => value,
    }
}

/// Sorts by a key; equal ones stay in their order.
pub(super) fn sort_by<T>(
    items: &mut Vec<T>,
    mut key: impl FnMut(&T) -> Result<Value, Error>,
    is_reversed: bool,
) -> Result<(), Error> {
    let mut keyed = Vec::with_capacity(items.len());
    for item in items.drain(..) {
        keyed.push((key(&item)?, item));
    }
    items.extend(merge_sort(keyed, is_reversed)?.into_iter().map(|(_, item)| item));
    Ok(())
}

/// Sorts halves and merges them. The standard library's sort cannot stop at an error, and may panic where some values have no
/// order, as numbers and NaN.
fn merge_sort<T>(mut items: Vec<(Value, T)>, is_reversed: bool) -> Result<Vec<(Value, T)>, Error> {
    if items.len() < 2 {
        return Ok(items);
    }
    let right = items.split_off(items.len() / 2);
    let mut left = merge_sort(items, is_reversed)?.into_iter().peekable();
    let mut right = merge_sort(right, is_reversed)?.into_iter().peekable();
    let before = if is_reversed { Ordering::Greater } else { Ordering::Less };
    let mut merged = Vec::with_capacity(left.len() + right.len());
    while let (Some((a, _)), Some((b, _))) = (left.peek(), right.peek()) {
        let is_right = order(b, a)? == Some(before);
        merged.extend(if is_right { right.next() } else { left.next() });
    }
    merged.extend(left);
    merged.extend(right);
    Ok(merged)
}

fn sort(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let is_reversed = flag(&rest, &named, 0, "reverse")?;
    let is_case_sensitive = flag(&rest, &named, 1, "case_sensitive")?;
    let path = option(&rest, &named, 2, "attribute")?.filter(|path| !path.is_none());
    named.assert_all_used()?;
    let mut items = iterate(&value)?;
    let parts: Vec<Value> = match path.as_ref().map(|path| (path, path.as_str())) {
        None => Vec::new(),
        Some((_, Some(text))) => text.split(',').map(Value::from).collect(),
        Some((path, None)) => vec![path.clone()],
    };
    let keys = |item: &Value| -> Result<Value, Error> {
        if parts.is_empty() {
            return Ok(key(item.clone(), is_case_sensitive));
        }
        let keys = parts.iter().map(|part| Ok(key(attribute(item, part)?, is_case_sensitive)));
        keys.collect::<Result<Vec<Value>, Error>>().map(Value::from)
    };
    sort_by(&mut items, keys, is_reversed)?;
    Ok(Value::from(items))
}

fn dictsort(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let is_case_sensitive = flag(&rest, &named, 0, "case_sensitive")?;
    let by = option(&rest, &named, 1, "by")?.map_or_else(|| "key".to_owned(), |by| to_text(&by));
    let is_reversed = flag(&rest, &named, 2, "reverse")?;
    named.assert_all_used()?;
    let index = match by.as_str() {
        "key" => 0,
        "value" => 1,
        _ => return Err(error("You can only sort by either \"key\" or \"value\"")),
    };
    let mut pairs = Vec::new();
    for key in iterate(&value)? {
        let item = value.get_item(&key)?;
        pairs.push([key, item]);
    }
    sort_by(&mut pairs, |pair| Ok(key(pair[index].clone(), is_case_sensitive)), is_reversed)?;
    Ok(pairs.into_iter().map(|pair| Value::from(Tuple::from(pair))).collect())
}

fn groupby(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let path = option(&rest, &named, 0, "attribute")?;
    let path = path.ok_or_else(|| error("groupby needs an attribute"))?;
    let default = option(&rest, &named, 1, "default")?;
    let is_case_sensitive = flag(&rest, &named, 2, "case_sensitive")?;
    named.assert_all_used()?;
    let group = |item: &Value| -> Result<Value, Error> {
        let value = attribute(item, &path)?;
        Ok(default.clone().filter(|_| value.is_undefined()).unwrap_or(value))
    };
    let mut items = iterate(&keep(value)?)?;
    sort_by(&mut items, |item| Ok(key(group(item)?, is_case_sensitive)), false)?;
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for item in items {
        let name = group(&item)?;
        let compared = key(name.clone(), is_case_sensitive);
        let is_same = match groups.last() {
            Some((last, ..)) => equal(last, &compared)?,
            None => false,
        };
        match groups.last_mut().filter(|_| is_same) {
            Some((.., members)) => members.push(item),
            None => groups.push((compared, name, vec![item])),
        }
    }
    Ok(groups
        .into_iter()
        .map(|(_, grouper, list)| Value::from_object(Group { grouper, list: Value::from(list) }))
        .collect())
}

/// A group of `groupby`: a tuple, and an object with `grouper` and `list`.
#[derive(Debug)]
pub(super) struct Group {
    grouper: Value,
    list: Value,
}

impl minijinja::value::Object for Group {
    fn repr(self: &std::sync::Arc<Self>) -> minijinja::value::ObjectRepr {
        minijinja::value::ObjectRepr::Seq
    }

    fn get_value(self: &std::sync::Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_str(), key.as_usize()) {
            (Some("grouper"), _) | (None, Some(0)) => Some(self.grouper.clone()),
            (Some("list"), _) | (None, Some(1)) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &std::sync::Arc<Self>) -> minijinja::value::Enumerator {
        minijinja::value::Enumerator::Seq(2)
    }
}

fn items(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => {
            let pair = |key: Value| -> Result<Value, Error> {
                let item = value.get_item(&key)?;
                Ok(Value::from(Tuple::from([key, item])))
            };
            take_items(value.len().unwrap_or(0))?;
            value.try_iter()?.map(pair).collect::<Result<Vec<Value>, Error>>().map(Value::from)
        }
        _ => Err(error("Can only get item pairs from a mapping.")),
    }
}

fn unique(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let is_case_sensitive = flag(&rest, &named, 0, "case_sensitive")?;
    let path = option(&rest, &named, 1, "attribute")?.filter(|path| !path.is_none());
    named.assert_all_used()?;
    let (mut seen, mut items): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    for item in iterate(&value)? {
        let compared = match &path {
            Some(path) => attribute(&item, path)?,
            None => item.clone(),
        };
        let compared = key(compared, is_case_sensitive);
        let mut is_new = true;
        for other in &seen {
            if equal(other, &compared)? {
                is_new = false;
                break;
            }
        }
        if is_new {
            seen.push(compared);
            items.push(item);
        }
    }
    Ok(Value::from(items))
}

fn extreme(
    value: &Value,
    rest: &[Value],
    named: &Kwargs,
    wanted: Ordering,
) -> Result<Value, Error> {
    let is_case_sensitive = flag(rest, named, 0, "case_sensitive")?;
    let path = option(rest, named, 1, "attribute")?.filter(|path| !path.is_none());
    named.assert_all_used()?;
    let mut best: Option<(Value, Value)> = None;
    for item in iterate(value)? {
        let compared = match &path {
            Some(path) => attribute(&item, path)?,
            None => item.clone(),
        };
        let compared = key(compared, is_case_sensitive);
        let is_better = match &best {
            None => true,
            Some((last, _)) => order(&compared, last)? == Some(wanted),
        };
        if is_better {
            best = Some((compared, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}
