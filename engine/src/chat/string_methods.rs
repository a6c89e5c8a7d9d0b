//! Methods of Python's strings.

use minijinja::{
    Error, ErrorKind, Value,
    value::{Tuple, ValueKind},
};
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory as _};

use super::{
    filters::iterate,
    limits::{ITEMS_MAX, grow, take_items, take_text},
    methods::Arguments,
    operators::key,
    text::{
        error, integer, is_decimal, is_printable, is_space, of_integer, removed, replaced_length,
        type_name,
    },
};

/// Calls a method.
pub(super) fn call(text: &str, method: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    if let Some(convert) = conversion(method) {
        arguments.check(0..=0, &[])?;
        return Ok(Value::from(convert(text)));
    }
    if let Some(holds) = condition(method) {
        arguments.check(0..=0, &[])?;
        return Ok(Value::from(holds(text)));
    }
    match method {
        "strip" | "lstrip" | "rstrip" => {
            arguments.check(0..=1, &[])?;
            let is_removed = removed(arguments.text(0, "")?.as_deref())?;
            let text = if method == "rstrip" { text } else { text.trim_start_matches(&is_removed) };
            Ok(Value::from(if method == "lstrip" {
                text
            } else {
                text.trim_end_matches(&is_removed)
            }))
        }
        "split" | "rsplit" => split(text, method == "rsplit", arguments),
        "splitlines" => {
            arguments.check(0..=1, &["keepends"])?;
            let keeps = arguments.find(0, "keepends").is_some_and(|value| value.is_true());
            Ok(lines(text, keeps)?.into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => partition(text, method == "rpartition", arguments),
        "removeprefix" | "removesuffix" => without(text, method == "removeprefix", arguments),
        "find" | "index" | "rfind" | "rindex" => {
            arguments.check(1..=3, &[])?;
            let found = find(text, method.starts_with('r'), arguments)?;
            if found.is_none() && method.ends_with("index") {
                return Err(error("substring not found"));
            }
            Ok(of_integer(found.unwrap_or(-1)))
        }
        "count" => {
            arguments.check(1..=3, &[])?;
            let part = arguments.required_text(0)?;
            let Some((range, _)) = range(text, arguments)? else { return Ok(Value::from(0)) };
            Ok(Value::from(match part.is_empty() {
                true => range.chars().count() + 1,
                false => range.matches(&*part).count(),
            }))
        }
        "startswith" | "endswith" => affix(text, method == "startswith", arguments),
        "replace" => replace(text, arguments),
        "join" => join(text, arguments),
        "ljust" | "rjust" | "center" | "zfill" => pad(text, method, arguments),
        "expandtabs" => {
            arguments.check(0..=1, &["tabsize"])?;
            let size = arguments.integer(0, "tabsize")?.unwrap_or(8).max(0);
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let tabs = text.matches('\t').count();
            take_text(text.len().saturating_add(tabs.saturating_mul(size)))?;
            Ok(Value::from(expand_tabs(text, size)))
        }
        "encode" => encode(text, arguments),
        "maketrans" => make_translation(arguments),
        "translate" => translate(text, arguments),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Cuts at the first or the last separator.
fn partition(text: &str, is_last: bool, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=1, &[])?;
    let separator = arguments.required_text(0)?;
    if separator.is_empty() {
        return Err(error("empty separator"));
    }
    let found = if is_last { text.rsplit_once(&*separator) } else { text.split_once(&*separator) };
    let parts = match (found, is_last) {
        (Some((before, after)), _) => [before, &separator, after],
        (None, false) => [text, "", ""],
        (None, true) => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// Removes a prefix or a suffix.
fn without(text: &str, is_prefix: bool, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=1, &[])?;
    let part = arguments.required_text(0)?;
    let rest = if is_prefix { text.strip_prefix(&*part) } else { text.strip_suffix(&*part) };
    Ok(Value::from(rest.unwrap_or(text)))
}

/// Replaces all or the first occurrences.
fn replace(text: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(2..=3, &["count"])?;
    let (old, new) = (arguments.required_text(0)?, arguments.required_text(1)?);
    let count = arguments.integer(2, "count")?.unwrap_or(-1);
    take_text(replaced_length(text, &old, &new, usize::try_from(count).ok()))?;
    Ok(Value::from(match usize::try_from(count) {
        Ok(count) => text.replacen(&*old, &new, count),
        Err(_) => text.replace(&*old, &new),
    }))
}

/// Joins values of text.
fn join(text: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=1, &[])?;
    let mut joined = String::new();
    for (index, part) in iterate(&arguments.values()[0])?.into_iter().enumerate() {
        let problem = || error(format!("expected str instance, {} found", type_name(&part)));
        grow(&mut joined, if index == 0 { "" } else { text })?;
        grow(&mut joined, part.as_str().ok_or_else(problem)?)?;
    }
    Ok(Value::from(joined))
}

/// Returns bytes, of UTF-8 or ASCII.
fn encode(text: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(0..=2, &["encoding", "errors"])?;
    let encoding = arguments.text(0, "encoding")?.unwrap_or_else(|| "utf-8".to_owned());
    match encoding.to_ascii_lowercase().replace(['-', '_'], "").as_str() {
        "utf8" => Ok(Value::from_bytes(text.as_bytes().to_vec())),
        "ascii" if text.is_ascii() => Ok(Value::from_bytes(text.as_bytes().to_vec())),
        _ => Err(error(format!("cannot encode as {encoding}"))),
    }
}

/// Methods without arguments that return a string.
fn conversion(method: &str) -> Option<fn(&str) -> String> {
    Some(match method {
        "upper" => |text| text.to_uppercase(),
        "lower" => |text| text.to_lowercase(),
        "casefold" => |text| text.chars().map(fold).collect(),
        "swapcase" => |text| {
            let swapped = |letter: char| match (letter.is_uppercase(), letter.is_lowercase()) {
                (true, _) => letter.to_lowercase().to_string(),
                (false, true) => letter.to_uppercase().to_string(),
                (false, false) => letter.to_string(),
            };
            text.chars().map(swapped).collect()
        },
        "title" => title,
        "capitalize" => |text| {
            let mut letters = text.chars();
            let first = letters.next().map(title_case).unwrap_or_default();
            first + &letters.as_str().to_lowercase()
        },
        _ => return None,
    })
}

/// A character without the difference of upper and lower case.
fn fold(letter: char) -> String {
    if letter == 'ı' {
        return letter.to_string();
    }
    letter.to_lowercase().to_string().to_uppercase().to_lowercase()
}

/// The first character of a word.
fn title_case(letter: char) -> String {
    match letter {
        'ŉ' => "ʼN".to_owned(),
        'Ǆ'..='ǆ' => "ǅ".to_owned(),
        'Ǉ'..='ǉ' => "ǈ".to_owned(),
        'Ǌ'..='ǌ' => "ǋ".to_owned(),
        'Ǳ'..='ǳ' => "ǲ".to_owned(),
        letter => {
            let upper: Vec<char> = letter.to_uppercase().collect();
            let rest = upper.iter().skip(1).flat_map(|letter| letter.to_lowercase());
            upper.first().copied().into_iter().chain(rest).collect()
        }
    }
}

fn is_cased(letter: char) -> bool {
    letter.is_uppercase() || letter.is_lowercase() || is_title(letter)
}

fn is_title(letter: char) -> bool {
    letter.general_category() == GeneralCategory::TitlecaseLetter
}

/// `str.title()`: the first letter of each run of letters is large.
pub(super) fn title(text: &str) -> String {
    let mut follows = false;
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if follows {
            out.extend(letter.to_lowercase());
        } else {
            out += &title_case(letter);
        }
        follows = is_cased(letter);
    }
    out
}

/// Methods without arguments that return a truth value.
fn condition(method: &str) -> Option<fn(&str) -> bool> {
    fn all(text: &str, holds: impl Fn(char) -> bool) -> bool {
        !text.is_empty() && text.chars().all(holds)
    }
    fn is_alpha(letter: char) -> bool {
        letter.general_category_group() == GeneralCategoryGroup::Letter
    }
    /// Superscripts, and digits in circles, are digits and no decimals.
    fn is_digit(letter: char) -> bool {
        is_decimal(letter)
            || matches!(letter, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⑴'..='⑼'
                | '⒈'..='⒐' | '⓪' | '⓵'..='⓽' | '⓿' | '❶'..='❾' | '➀'..='➈' | '➊'..='➒'
                | '፩'..='፱' | '᧚')
    }
    fn is_numeric(letter: char) -> bool {
        is_digit(letter)
            || letter.general_category_group() == GeneralCategoryGroup::Number
            || "〇一二三四五六七八九十百千万億兆零壱壹弐貳参參肆伍陸柒捌玖拾佰仟".contains(letter)
    }
    fn case(text: &str, wanted: fn(char) -> bool, other: fn(char) -> bool) -> bool {
        text.chars().any(wanted) && !text.chars().any(|letter| other(letter) || is_title(letter))
    }
    Some(match method {
        "isalpha" => |text| all(text, is_alpha),
        "isalnum" => |text| all(text, |letter| is_alpha(letter) || is_numeric(letter)),
        "isascii" => str::is_ascii,
        "isdecimal" => |text| all(text, is_decimal),
        "isdigit" => |text| all(text, is_digit),
        "isnumeric" => |text| all(text, is_numeric),
        "isspace" => |text| all(text, is_space),
        "isprintable" => |text| text.chars().all(is_printable),
        "isidentifier" => |text| {
            let is_first = |letter: char| letter == '_' || is_alpha(letter);
            text.starts_with(is_first)
                && text.chars().all(|letter| {
                    let mark = letter.general_category_group() == GeneralCategoryGroup::Mark;
                    is_first(letter) || is_decimal(letter) || mark
                })
        },
        "islower" => |text| case(text, char::is_lowercase, char::is_uppercase),
        "isupper" => |text| case(text, char::is_uppercase, char::is_lowercase),
        "istitle" => |text| {
            let (mut follows, mut has_title) = (false, false);
            for letter in text.chars() {
                let is_large = letter.is_uppercase() || is_title(letter);
                if is_cased(letter) && is_large == follows {
                    return false;
                }
                has_title |= is_large;
                follows = is_cased(letter);
            }
            has_title
        },
        _ => return None,
    })
}

fn split(text: &str, from_end: bool, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(0..=2, &["sep", "maxsplit"])?;
    let most = arguments.integer(1, "maxsplit")?.unwrap_or(-1);
    // One part more than a list may have is enough to refuse it.
    let most = usize::try_from(most).unwrap_or(usize::MAX).min(ITEMS_MAX);
    let mut parts: Vec<&str> = match arguments.text(0, "sep")? {
        Some(separator) if separator.is_empty() => return Err(error("empty separator")),
        Some(separator) if from_end => text.rsplitn(most + 1, &*separator).collect(),
        Some(separator) => text.splitn(most + 1, &*separator).collect(),
        None => words(text, from_end, most),
    };
    take_items(parts.len())?;
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Splits at white space; from the end, the last word is first.
fn words(text: &str, from_end: bool, most: usize) -> Vec<&str> {
    let trim = |text| -> &str {
        if from_end {
            str::trim_end_matches(text, is_space)
        } else {
            str::trim_start_matches(text, is_space)
        }
    };
    let (mut rest, mut words) = (trim(text), Vec::new());
    while !rest.is_empty() {
        if words.len() == most {
            let is_removed = |letter: char| is_space(letter);
            words.push(if from_end { rest.trim_end_matches(is_removed) } else { rest });
            return words;
        }
        let (word, after) = if from_end {
            let start = rest
                .rfind(is_space)
                .map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
            (&rest[start..], &rest[..start])
        } else {
            let end = rest.find(is_space).unwrap_or(rest.len());
            (&rest[..end], &rest[end..])
        };
        words.push(word);
        rest = trim(after);
    }
    words
}

/// Splits at line ends of Unicode.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Result<Vec<&str>, Error> {
    let is_end = |letter: char| {
        matches!(
            letter,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    take_items(text.matches(is_end).count() + 1)?;
    let (mut rest, mut lines) = (text, Vec::new());
    while !rest.is_empty() {
        let (line, end) = match rest.find(is_end) {
            None => (rest.len(), rest.len()),
            Some(at) if rest[at..].starts_with("\r\n") => (at, at + 2),
            Some(at) => (at, at + rest[at..].chars().next().map_or(0, char::len_utf8)),
        };
        lines.push(&rest[..if keeps_ends { end } else { line }]);
        rest = &rest[end..];
    }
    Ok(lines)
}

/// Returns the part of a text that the arguments after the first choose, and where it begins in characters.
/// `None` if it begins behind the end.
fn range<'a>(text: &'a str, arguments: &Arguments<'_>) -> Result<Option<(&'a str, i128)>, Error> {
    let length = i128::try_from(text.chars().count()).unwrap_or(i128::MAX);
    let bound = |given: Option<i128>, default: i128| match given {
        None => default,
        Some(given) if given < 0 => (given + length).max(0),
        Some(given) => given,
    };
    let start = bound(arguments.integer(1, "")?, 0);
    let end = bound(arguments.integer(2, "")?, length).min(length);
    if start > length || start > end {
        return Ok(None);
    }
    let at = |index: i128| {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        text.char_indices().nth(index).map_or(text.len(), |(at, _)| at)
    };
    Ok(Some((&text[at(start)..at(end)], start)))
}

/// Returns where a part is, in characters.
fn find(text: &str, is_last: bool, arguments: &Arguments<'_>) -> Result<Option<i128>, Error> {
    let part = arguments.required_text(0)?;
    let Some((range, start)) = range(text, arguments)? else { return Ok(None) };
    let found = if is_last { range.rfind(&*part) } else { range.find(&*part) };
    Ok(found.map(|at| start + i128::try_from(range[..at].chars().count()).unwrap_or(0)))
}

fn affix(text: &str, is_start: bool, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=3, &[])?;
    let wanted = &arguments.values()[0];
    let candidates: Vec<Value> = match wanted.kind() {
        ValueKind::String => vec![wanted.clone()],
        _ if wanted.is_tuple() => iterate(wanted)?,
        _ => {
            let kind = type_name(wanted);
            return Err(error(format!("first arg must be str or a tuple of str, not {kind}")));
        }
    };
    let range = range(text, arguments)?;
    let mut holds = false;
    for candidate in &candidates {
        let part = candidate.as_str().ok_or_else(|| error("tuple must only contain str"))?;
        holds |= range.is_some_and(|(range, _)| match is_start {
            true => range.starts_with(part),
            false => range.ends_with(part),
        });
    }
    Ok(Value::from(holds))
}

fn pad(text: &str, method: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=2, &[])?;
    let width = arguments.integer(0, "")?.unwrap_or(0).max(0);
    let fill = arguments.text(1, "")?.unwrap_or_else(|| " ".to_owned());
    if fill.chars().count() != 1 {
        return Err(error("The fill character must be exactly one character long"));
    }
    let length = text.chars().count();
    let missing = usize::try_from(width).unwrap_or(usize::MAX).saturating_sub(length);
    take_text(text.len().saturating_add(missing.saturating_mul(fill.len())))?;
    Ok(Value::from(match method {
        "ljust" => text.to_owned() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + text,
        "zfill" => {
            let sign = usize::from(text.starts_with(['+', '-']));
            format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..])
        }
        // Python's rule for an odd number of filled characters.
        _ => {
            let width = missing + length;
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left))
        }
    }))
}

fn expand_tabs(text: &str, size: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for letter in text.chars() {
        match letter {
            '\t' if size == 0 => {}
            '\t' => {
                let spaces = size - column % size;
                out += &" ".repeat(spaces);
                column += spaces;
            }
            letter => {
                out.push(letter);
                column = if letter == '\n' || letter == '\r' { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// `str.maketrans`.
fn make_translation(arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=3, &[])?;
    let code = |letter: char| Value::from(u32::from(letter));
    if let [mapping] = arguments.values() {
        take_items(mapping.len().unwrap_or(0))?;
        let mut pairs = Vec::new();
        for name in mapping.try_iter()? {
            key(&name)?;
            let value = mapping.get_item(&name)?;
            let letter = name.as_str().and_then(|text| text.chars().next());
            pairs.push((letter.map_or(name.clone(), code), value));
        }
        return Ok(Value::from_pairs(pairs));
    }
    let (from, to) = (arguments.required_text(0)?, arguments.required_text(1)?);
    if from.chars().count() != to.chars().count() {
        return Err(error("the first two maketrans arguments must have equal length"));
    }
    let removed = arguments.text(2, "")?.unwrap_or_default();
    take_items(from.len() + removed.len())?;
    let pairs = from.chars().map(code).zip(to.chars().map(code));
    Ok(Value::from_pairs(
        pairs.chain(removed.chars().map(|letter| (code(letter), Value::from(())))),
    ))
}

/// `str.translate`.
fn translate(text: &str, arguments: &Arguments<'_>) -> Result<Value, Error> {
    arguments.check(1..=1, &[])?;
    take_items(text.chars().count())?;
    let mut out = String::new();
    for letter in text.chars() {
        let new = arguments.values()[0].get_item(&Value::from(u32::from(letter)))?;
        match (new.as_str(), integer(&new)) {
            _ if new.is_undefined() => out.push(letter),
            _ if new.is_none() => {}
            (Some(text), _) => grow(&mut out, text)?,
            (None, Some(code)) => out.extend(u32::try_from(code).ok().and_then(char::from_u32)),
            _ => return Err(error("character mapping must return integer, None or str")),
        }
    }
    Ok(Value::from(out))
}
