//! Filters of Jinja on texts.

use minijinja::{
    Environment, Error, Value,
    value::{Kwargs, Rest, ValueKind},
};

use super::{
    filters::{escape, escape_text, flag, iterate, option},
    format::percent,
    limits::{check_length, grow, take, take_items, take_text, visit},
    string_methods::lines,
    text::{error, float, integer, is_space, removed, replaced_length, repr, to_text},
};

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("upper", |value: Value| map(&value, |text| text.to_uppercase()));
    environment.add_filter("lower", |value: Value| map(&value, |text| text.to_lowercase()));
    environment.add_filter("title", |value: Value| map(&value, title));
    environment.add_filter("capitalize", |value: Value| {
        map(&value, |text| {
            let mut letters = text.chars();
            let first: String =
                letters.next().map(|l| l.to_uppercase().collect()).unwrap_or_default();
            first + &letters.as_str().to_lowercase()
        })
    });
    environment.add_filter("trim", trim);
    environment.add_filter("replace", replace);
    environment.add_filter("center", center);
    environment.add_filter("format", format_filter);
    environment.add_filter("indent", indent);
    environment.add_filter("truncate", truncate);
    environment.add_filter("wordcount", |value: Value| {
        let text = to_text(&value);
        let is_part = |letter: char| letter == '_' || letter.is_alphanumeric();
        text.split(|letter| !is_part(letter)).filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("wordwrap", wordwrap);
    environment.add_filter("striptags", |value: Value| strip_tags(&value));
    environment.add_filter("urlencode", url_encode);
    environment.add_filter("urlize", urlize);
    environment.add_filter("xmlattr", xml_attributes);
    environment.add_filter("filesizeformat", file_size);
    environment.add_filter("pprint", |value: Value| pretty(&value, 0));
}

/// Applies a function to the text of a value; a safe one stays safe.
fn map(value: &Value, function: impl Fn(&str) -> String) -> Value {
    changed(value, function(&to_text(value)))
}

/// Returns the text that a value became; of a safe one it is safe.
fn changed(value: &Value, text: String) -> Value {
    if value.is_safe() { Value::from_safe_string(text) } else { Value::from(text) }
}

/// Jinja's own rule: a word begins after a space, a dash or an opening bracket.
fn title(text: &str) -> String {
    let mut is_start = true;
    let mut out = String::new();
    for letter in text.chars() {
        if is_start {
            out.extend(letter.to_uppercase());
        } else {
            out.extend(letter.to_lowercase());
        }
        is_start = letter.is_whitespace() || "-([{<".contains(letter);
    }
    out
}

fn trim(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let letters = option(&rest, &named, 0, "chars")?.filter(|letters| !letters.is_none());
    named.assert_all_used()?;
    let letters = letters.map(|letters| to_text(&letters));
    let is_removed = removed(letters.as_deref())?;
    Ok(map(&value, |text| text.trim_matches(&is_removed).to_owned()))
}

fn replace(
    value: Value,
    old: Value,
    new: Value,
    rest: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let count = option(&rest, &named, 0, "count")?.as_ref().and_then(integer);
    named.assert_all_used()?;
    let (old, new) = (to_text(&old), if value.is_safe() { escape(&new) } else { to_text(&new) });
    let count = count.and_then(|count| usize::try_from(count).ok());
    take_text(replaced_length(&to_text(&value), &old, &new, count))?;
    Ok(map(&value, |text| match count {
        Some(count) => text.replacen(&old, &new, count),
        None => text.replace(&old, &new),
    }))
}

fn center(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let width = option(&rest, &named, 0, "width")?.as_ref().and_then(integer).unwrap_or(80);
    named.assert_all_used()?;
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    take_text(width)?;
    Ok(map(&value, |text| {
        let missing = width.saturating_sub(text.chars().count());
        let left = missing / 2 + (missing & width & 1);
        format!("{}{text}{}", " ".repeat(left), " ".repeat(missing - left))
    }))
}

/// `'%s' | format(…)`.
fn format_filter(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let mut pairs = Vec::new();
    for name in named.args().map(str::to_owned).collect::<Vec<_>>() {
        let value: Value = named.get(&name)?;
        pairs.push((name, value));
    }
    let values = match (pairs.is_empty(), rest.is_empty()) {
        (false, false) => {
            return Err(error("can't handle positional and keyword arguments at the same time"));
        }
        (false, true) => Value::from_pairs(pairs),
        (true, _) => super::operators::sequence(rest.to_vec(), true),
    };
    percent(&to_text(&value), &values, value.is_safe())
}

fn indent(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let width = option(&rest, &named, 0, "width")?.unwrap_or_else(|| Value::from(4));
    let (is_first, is_blank) = (flag(&rest, &named, 1, "first")?, flag(&rest, &named, 2, "blank")?);
    named.assert_all_used()?;
    let indent = match width.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let width = integer(&width).unwrap_or(0).max(0);
            let width = usize::try_from(width).unwrap_or(usize::MAX);
            take_text(width)?;
            " ".repeat(width)
        }
    };
    // As Jinja: a line end is added before the text is split.
    let text = to_text(&value) + "\n";
    let lines = lines(&text, false)?;
    take_text(text.len().saturating_add(lines.len().saturating_mul(indent.len())))?;
    let indented = |(index, line): (usize, &&str)| {
        if (index == 0 && !is_first) || (line.is_empty() && !is_blank && index > 0) {
            (*line).to_owned()
        } else {
            format!("{indent}{line}")
        }
    };
    let lines: Vec<String> = lines.iter().enumerate().map(indented).collect();
    Ok(changed(&value, lines.join("\n")))
}

fn truncate(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let number = |index, name, default| -> Result<usize, Error> {
        let value = option(&rest, &named, index, name)?.filter(|value| !value.is_none());
        Ok(value
            .as_ref()
            .and_then(integer)
            .and_then(|n| usize::try_from(n).ok())
            .unwrap_or(default))
    };
    let length = number(0, "length", 255)?;
    let cuts_words = flag(&rest, &named, 1, "killwords")?;
    let end =
        option(&rest, &named, 2, "end")?.map_or_else(|| "...".to_owned(), |end| to_text(&end));
    let leeway = number(3, "leeway", 5)?;
    named.assert_all_used()?;
    if length < end.chars().count() {
        return Err(error(format!("expected length >= {}, got {length}", end.chars().count())));
    }
    Ok(map(&value, |text| {
        if text.chars().count() <= length.saturating_add(leeway) {
            return text.to_owned();
        }
        let cut: String = text.chars().take(length - end.chars().count()).collect();
        let cut =
            if cuts_words { &cut } else { cut.rsplit_once(' ').map_or(cut.as_str(), |(a, _)| a) };
        format!("{cut}{end}")
    }))
}

fn wordwrap(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let width = option(&rest, &named, 0, "width")?.as_ref().and_then(integer).unwrap_or(79);
    let width = usize::try_from(width.max(1)).unwrap_or(usize::MAX);
    let breaks = option(&rest, &named, 1, "break_long_words")?.is_none_or(|value| value.is_true());
    let wrap = option(&rest, &named, 2, "wrapstring")?.filter(|value| !value.is_none());
    let at_hyphens =
        option(&rest, &named, 3, "break_on_hyphens")?.is_none_or(|value| value.is_true());
    named.assert_all_used()?;
    let wrap = wrap.map_or_else(|| "\n".to_owned(), |wrap| to_text(&wrap));
    let text = to_text(&value);
    // Each letter may become a line.
    take_items(text.len())?;
    take_text(text.len().saturating_mul(wrap.len()))?;
    let wrapped = lines(&text, false)?
        .into_iter()
        .map(|line| wrap_line(line, width, breaks, at_hyphens).join(&wrap));
    Ok(Value::from(wrapped.collect::<Vec<_>>().join(&wrap)))
}

/// Python's `textwrap`, without changes of white space.
fn wrap_line(line: &str, width: usize, breaks: bool, at_hyphens: bool) -> Vec<String> {
    let mut chunks = chunks(line, at_hyphens);
    chunks.reverse();
    let mut wrapped: Vec<String> = Vec::new();
    while let Some((last, _)) = chunks.last() {
        // White space at the begin of a line that is not the first is left out.
        if !wrapped.is_empty() && is_white(last) {
            chunks.pop();
            continue;
        }
        let (mut current, mut length): (Vec<&str>, usize) = (Vec::new(), 0);
        while let Some((next, count)) = chunks.pop_if(|(_, count)| length + *count <= width) {
            length += count;
            current.push(next);
        }
        if let Some(&(next, count)) = chunks.last()
            && count > width
        {
            let left = width - length;
            if breaks && left > 0 {
                let end = if at_hyphens { hyphen(next, left).unwrap_or(left) } else { left };
                let at = next.char_indices().nth(end).map_or(next.len(), |(at, _)| at);
                current.push(&next[..at]);
                chunks.pop();
                chunks.push((&next[at..], count - end));
            } else if !breaks && current.is_empty() {
                current.push(next);
                chunks.pop();
            }
        }
        if current.last().is_some_and(|chunk| is_white(chunk)) {
            current.pop();
        }
        if !current.is_empty() {
            wrapped.push(current.concat());
        }
    }
    wrapped
}

fn is_white(text: &str) -> bool {
    text.trim_matches(is_space).is_empty()
}

/// Returns where a long word breaks behind a hyphen within the first `left` characters.
fn hyphen(word: &str, left: usize) -> Option<usize> {
    let letters: Vec<char> = word.chars().take(left).collect();
    let at = letters.iter().rposition(|letter| *letter == '-')?;
    (at > 0 && letters[..at].iter().any(|letter| *letter != '-')).then_some(at + 1)
}

/// Splits a line into words, white space and parts of words that end with a hyphen, each with its count of characters.
fn chunks(line: &str, at_hyphens: bool) -> Vec<(&str, usize)> {
    let mut chunks: Vec<(&str, usize)> = Vec::new();
    let (mut start, mut count) = (0, 0);
    let (mut last, mut last_but_one): (Option<char>, Option<char>) = (None, None);
    for (at, letter) in line.char_indices() {
        let after_hyphen = at_hyphens
            && last == Some('-')
            && last_but_one.is_some_and(char::is_alphabetic)
            && letter.is_alphabetic();
        if last.is_some_and(|last| is_space(last) != is_space(letter)) || after_hyphen {
            chunks.push((&line[start..at], count));
            (start, count) = (at, 0);
        }
        count += 1;
        (last_but_one, last) = (last, Some(letter));
    }
    if count > 0 {
        chunks.push((&line[start..], count));
    }
    chunks
}

fn strip_tags(value: &Value) -> Result<String, Error> {
    let mut text = to_text(value);
    for (begin, end) in [("<!--", "-->"), ("<", ">")] {
        while let Some(start) = text.find(begin)
            && let Some(length) = text[start..].find(end)
        {
            take(text.len())?;
            text.replace_range(start..start + length + end.len(), "");
        }
    }
    let mut stripped = String::with_capacity(text.len());
    for word in text.split(is_space).filter(|word| !word.is_empty()) {
        stripped += if stripped.is_empty() { "" } else { " " };
        stripped += word;
    }
    for (name, letter) in [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&#34;", "\""),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ] {
        stripped = stripped.replace(name, letter);
    }
    Ok(stripped)
}

/// Python's `urllib.parse.quote`.
fn quote(text: &str, safe: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric()
            || "_.-~".contains(char::from(byte))
            || safe.contains(char::from(byte))
        {
            out.push(char::from(byte));
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

fn url_encode(value: Value) -> Result<String, Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(quote(&to_text(&value), "/"));
    }
    let is_map = value.kind() == ValueKind::Map;
    let part = |text: &Value| quote(&to_text(text), "").replace("%20", "+");
    let mut parts = Vec::new();
    for item in iterate(&value)? {
        let pair: Vec<Value> =
            if is_map { vec![item.clone(), value.get_item(&item)?] } else { iterate(&item)? };
        match pair.as_slice() {
            [key, value] => parts.push(format!("{}={}", part(key), part(value))),
            _ => return Err(error("urlencode needs pairs")),
        }
    }
    Ok(parts.join("&"))
}

fn urlize(value: Value, rest: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let limit = option(&rest, &named, 0, "trim_url_limit")?.as_ref().and_then(integer);
    let nofollow = flag(&rest, &named, 1, "nofollow")?;
    let target = option(&rest, &named, 2, "target")?.filter(|target| !target.is_none());
    let rel = option(&rest, &named, 3, "rel")?.map_or_else(String::new, |rel| to_text(&rel));
    named.assert_all_used()?;
    take_items(rel.len())?;
    let mut rels: Vec<&str> = rel.split(is_space).filter(|word| !word.is_empty()).collect();
    rels.push("noopener");
    if nofollow {
        rels.push("nofollow");
    }
    rels.sort_unstable();
    let rel = format!(" rel=\"{}\"", escape_text(&rels.join(" ")));
    let target = target.map_or_else(String::new, |t| format!(" target=\"{}\"", escape(&t)));
    let shown = |text: &str| match limit.and_then(|limit| usize::try_from(limit).ok()) {
        Some(limit) if text.chars().count() > limit => {
            text.chars().take(limit).collect::<String>() + "..."
        }
        _ => text.to_owned(),
    };
    let link = |word: &str| -> Option<String> {
        if word.starts_with("https://") || word.starts_with("http://") {
            return Some(format!("<a href=\"{word}\"{rel}{target}>{}</a>", shown(word)));
        }
        if word.starts_with("www.") && word.matches('.').count() >= 2 {
            return Some(format!("<a href=\"https://{word}\"{rel}{target}>{}</a>", shown(word)));
        }
        let (name, host) = word.split_once('@')?;
        let is_mail =
            !name.is_empty() && host.contains('.') && !host.starts_with('.') && !word.contains(':');
        is_mail.then(|| format!("<a href=\"mailto:{word}\">{word}</a>"))
    };
    let mut out = String::new();
    for word in escape(&value).split_inclusive(is_space) {
        let middle = word.trim_end_matches(is_space);
        let after = &word[middle.len()..];
        let inner = middle.trim_start_matches("&lt;").trim_start_matches(['(', '<']);
        let before = &middle[..middle.len() - inner.len()];
        let inner_end = inner.trim_end_matches("&gt;").trim_end_matches([')', '>', '.', ',', '\n']);
        let tail = &inner[inner_end.len()..];
        match link(inner_end) {
            Some(link) => grow(&mut out, &format!("{before}{link}{tail}{after}"))?,
            None => grow(&mut out, word)?,
        }
    }
    Ok(Value::from(out))
}

fn xml_attributes(value: Value, spaced: Option<Value>) -> Result<Value, Error> {
    let mut parts = Vec::new();
    for key in iterate(&value)? {
        let item = value.get_item(&key)?;
        if item.is_none() || item.is_undefined() {
            continue;
        }
        let name = to_text(&key);
        if name.contains(|letter: char| is_space(letter) || "/>=".contains(letter)) {
            return Err(error(format!("Invalid character in attribute name: {}", repr(&key))));
        }
        parts.push(format!("{}=\"{}\"", escape(&key), escape(&item)));
    }
    let space =
        if spaced.is_none_or(|spaced| spaced.is_true()) && !parts.is_empty() { " " } else { "" };
    Ok(Value::from(format!("{space}{}", parts.join(" "))))
}

fn file_size(value: Value, is_binary: Option<Value>) -> Result<String, Error> {
    let is_binary = is_binary.is_some_and(|is_binary| is_binary.is_true());
    take(value.as_str().map_or(0, str::len))?;
    let number = value.as_str().and_then(|text| text.trim().parse().ok()).or_else(|| float(&value));
    let bytes = number.ok_or_else(|| error("filesizeformat needs a number"))?;
    let base = if is_binary { 1024.0 } else { 1000.0 };
    #[allow(clippy::float_cmp, reason = "as Jinja does")]
    if bytes == 1.0 {
        return Ok("1 Byte".to_owned());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", bytes.trunc()));
    }
    let names = match is_binary {
        true => ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"],
        false => ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"],
    };
    let mut unit = base;
    for (index, name) in names.iter().enumerate() {
        unit *= base;
        if bytes < unit || index + 1 == names.len() {
            return Ok(format!("{:.1} {name}", base * bytes / unit));
        }
    }
    Ok(String::new())
}

/// Python's `pprint.pformat` of a value that fits on a line, and is nested this deeply: mappings are sorted.
fn pretty(value: &Value, depth: usize) -> Result<String, Error> {
    visit(depth)?;
    match value.kind() {
        ValueKind::Map => {
            let mut keys = iterate(value)?;
            super::filters::sort_by(&mut keys, |key| Ok(key.clone()), false)?;
            let pair = |key: &Value| -> Result<String, Error> {
                Ok(format!("{}: {}", repr(key), pretty(&value.get_item(key)?, depth + 1)?))
            };
            let pairs = keys.iter().map(pair).collect::<Result<Vec<_>, Error>>()?;
            check_length(pairs.iter().map(String::len).sum())?;
            Ok(format!("{{{}}}", pairs.join(", ")))
        }
        _ => Ok(repr(value)),
    }
}
