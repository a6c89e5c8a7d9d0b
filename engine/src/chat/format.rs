//! Python's `%` and `str.format`.
//!
//! Source: "Format Specification Mini-Language" and "printf-style String Formatting" of Python's
//! documentation.

use minijinja::{Error, Value, value::Kwargs};

use super::{
    filters::{escape, iterate},
    limits::grow,
    operators::item,
    text::{ascii, error, exponent_text, float, float_text, integer, repr, to_text, type_name},
};

/// Widest field and most digits.
const WIDTH_MAX: usize = 10_000;

/// How a value is written.
#[derive(Debug, Clone, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    is_alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Spec {
    /// Fills a text to the width. A sign or prefix of a number stays in front of `=` filling.
    fn pad(&self, prefix: &str, text: &str, default_align: char) -> String {
        let length = prefix.chars().count() + text.chars().count();
        let missing = self.width.saturating_sub(length);
        let fill = |count: usize| self.fill.unwrap_or(' ').to_string().repeat(count);
        match self.align.unwrap_or(default_align) {
            '<' => format!("{prefix}{text}{}", fill(missing)),
            '^' => format!("{}{prefix}{text}{}", fill(missing / 2), fill(missing - missing / 2)),
            '=' => format!("{prefix}{}{text}", fill(missing)),
            _ => format!("{}{prefix}{text}", fill(missing)),
        }
    }

    fn sign(&self, is_negative: bool) -> &'static str {
        match (is_negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        }
    }

    fn text(&self, text: &str) -> String {
        let cut: String = text.chars().take(self.precision.unwrap_or(usize::MAX)).collect();
        self.pad("", &cut, '<')
    }

    /// Writes an integer.
    fn integer(&self, value: i128) -> String {
        let magnitude = value.unsigned_abs();
        let (prefix, digits) = match self.kind {
            Some('x') => ("0x", format!("{magnitude:x}")),
            Some('X') => ("0X", format!("{magnitude:X}")),
            Some('o') => ("0o", format!("{magnitude:o}")),
            Some('b') => ("0b", format!("{magnitude:b}")),
            _ => ("", magnitude.to_string()),
        };
        let digits = match self.grouping {
            Some(sign) => grouped(&digits, sign, if prefix.is_empty() { 3 } else { 4 }),
            None => digits,
        };
        let prefix = if self.is_alternate { prefix } else { "" };
        self.pad(&format!("{}{prefix}", self.sign(value < 0)), &digits, '>')
    }

    /// Writes a float.
    fn float(&self, value: f64) -> String {
        let magnitude = value.abs();
        let kind = self.kind.unwrap_or(' ');
        let precision = self.precision.unwrap_or(6);
        let mut text = match kind.to_ascii_lowercase() {
            _ if !magnitude.is_finite() => float_text(magnitude),
            'f' => format!("{magnitude:.precision$}"),
            '%' => format!("{:.precision$}", magnitude * 100.0),
            'e' => scientific(magnitude, precision),
            'g' | 'n' => general(magnitude, precision, self.is_alternate),
            // Without a kind: like `g` with digits behind the point, or the shortest text.
            _ => match self.precision {
                None => float_text(magnitude),
                Some(precision) => {
                    let text = general(magnitude, precision, false);
                    if text.contains(['.', 'e']) { text } else { text + ".0" }
                }
            },
        };
        if let Some(sign) = self.grouping {
            let end = text.find(['.', 'e']).unwrap_or(text.len());
            text = grouped(&text[..end], sign, 3) + &text[end..];
        }
        if kind.is_ascii_uppercase() {
            text = text.to_uppercase();
        }
        if kind == '%' {
            text.push('%');
        }
        self.pad(self.sign(value.is_sign_negative() && !value.is_nan()), &text, '>')
    }
}

/// `1234567` as `1,234,567`.
fn grouped(digits: &str, sign: char, size: usize) -> String {
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(size) {
            out.push(sign);
        }
        out.push(digit);
    }
    out
}

/// `%e`.
fn scientific(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    match text.split_once('e').map(|(digits, exponent)| (digits, exponent.parse())) {
        Some((digits, Ok(exponent))) => format!("{digits}{}", exponent_text(exponent)),
        _ => text,
    }
}

/// `%g`.
fn general(value: f64, precision: usize, keeps_zeros: bool) -> String {
    let precision = precision.max(1);
    let text = format!("{value:.*e}", precision - 1);
    let exponent: i32 =
        text.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let strip = |text: &str| match text.contains('.') && !keeps_zeros {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    let digits = i32::try_from(precision).unwrap_or(i32::MAX);
    if exponent < -4 || exponent >= digits {
        let digits = text.split_once('e').map_or(text.as_str(), |(digits, _)| digits);
        return format!("{}{}", strip(digits), exponent_text(exponent));
    }
    let decimals = usize::try_from(digits - 1 - exponent).unwrap_or(0);
    strip(&format!("{value:.decimals$}"))
}

/// A character by its code, or a string of one.
fn letter(value: &Value) -> Option<String> {
    match (integer(value), value.as_str()) {
        (Some(code), _) => char::from_u32(u32::try_from(code).ok()?).map(String::from),
        (None, Some(text)) if text.chars().count() == 1 => Some(text.to_owned()),
        _ => None,
    }
}

/// A number of a field's width or precision.
fn digits(rest: &str) -> Result<(Option<usize>, &str), Error> {
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    if end == 0 {
        return Ok((None, rest));
    }
    match rest[..end].parse() {
        Ok(number) if number <= WIDTH_MAX => Ok((Some(number), &rest[end..])),
        _ => Err(error("too many digits in a format")),
    }
}

/// `template % values`.
pub(super) fn percent(template: &str, values: &Value, is_safe: bool) -> Result<Value, Error> {
    let is_mapping = values.kind() == minijinja::value::ValueKind::Map;
    let given = if values.is_tuple() { iterate(values)? } else { vec![values.clone()] };
    let (mut out, mut rest, mut used) = (String::new(), template, 0);
    let mut uses_names = false;
    let mut take = || {
        used += 1;
        given.get(used - 1).cloned().ok_or_else(|| error("not enough arguments for format string"))
    };
    while let Some(start) = rest.find('%') {
        grow(&mut out, &rest[..start])?;
        rest = &rest[start + 1..];
        let named = match rest.strip_prefix('(') {
            None => None,
            Some(after) => {
                let end = after.find(')').ok_or_else(|| error("incomplete format key"))?;
                rest = &after[end + 1..];
                if !is_mapping {
                    return Err(error("format requires a mapping"));
                }
                uses_names = true;
                let value = values.get_item(&Value::from(&after[..end]))?;
                if value.is_undefined() {
                    return Err(error(format!("the format has no value '{}'", &after[..end])));
                }
                Some(value)
            }
        };
        let mut spec = Spec::default();
        while let Some(flag) = rest.chars().next().filter(|flag| "-+ #0".contains(*flag)) {
            match flag {
                '-' => spec.align = Some('<'),
                '0' => spec.fill = Some('0'),
                '#' => spec.is_alternate = true,
                ' ' if spec.sign.is_some() => {}
                sign => spec.sign = Some(sign),
            }
            rest = &rest[1..];
        }
        let mut number = |rest: &mut &str| -> Result<Option<i128>, Error> {
            if let Some(after) = rest.strip_prefix('*') {
                *rest = after;
                return integer(&take()?).map(Some).ok_or_else(|| error("* wants int"));
            }
            let (number, after) = digits(rest)?;
            *rest = after;
            Ok(number.and_then(|number| i128::try_from(number).ok()))
        };
        if let Some(width) = number(&mut rest)? {
            spec.align = if width < 0 { Some('<') } else { spec.align };
            spec.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
        }
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            spec.precision = Some(usize::try_from(number(&mut rest)?.unwrap_or(0)).unwrap_or(0));
        }
        if spec.width > WIDTH_MAX || spec.precision.is_some_and(|digits| digits > WIDTH_MAX) {
            return Err(error("too many digits in a format"));
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let Some(kind) = rest.chars().next() else { return Err(error("incomplete format")) };
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => take()?,
        };
        grow(&mut out, &percent_field(kind, spec, &value, is_safe)?)?;
    }
    grow(&mut out, rest)?;
    // Python counts a list as a mapping here.
    let is_list = values.kind() == minijinja::value::ValueKind::Seq && !values.is_tuple();
    let are_numbered = !uses_names && !is_mapping;
    let is_one_list = is_list && used == 0;
    if are_numbered && used < given.len() && !is_one_list {
        return Err(error("not all arguments converted during string formatting"));
    }
    Ok(if is_safe { Value::from_safe_string(out) } else { Value::from(out) })
}

fn percent_field(
    kind: char,
    mut spec: Spec,
    value: &Value,
    is_safe: bool,
) -> Result<String, Error> {
    let is_number = "diuxXoeEfFgG".contains(kind);
    match spec.fill {
        // Zeros are filled in numbers only, and not on the right.
        Some('0') if is_number && spec.align.is_none() => spec.align = Some('='),
        _ => {
            spec.fill = None;
            spec.align = Some(spec.align.unwrap_or('>'));
        }
    }
    let number =
        || error(format!("%{kind} format: a number is required, not {}", type_name(value)));
    spec.kind = Some(kind);
    Ok(match kind {
        's' if is_safe => spec.text(&escape(value)),
        's' => spec.text(&to_text(value)),
        'r' => spec.text(&repr(value)),
        'a' => spec.text(&ascii(value)),
        'c' => spec.text(&letter(value).ok_or_else(|| error("%c requires int or char"))?),
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            #[allow(clippy::cast_possible_truncation, reason = "as Python does")]
            let whole = |value: f64| value.trunc() as i128;
            let is_decimal = "diu".contains(kind);
            let integer = integer(value).or_else(|| float(value).filter(|_| is_decimal).map(whole));
            let mut text = spec.integer(integer.ok_or_else(number)?);
            if let Some(precision) = spec.precision {
                let missing =
                    precision.saturating_sub(text.trim_start_matches(['-', '+', ' ']).len());
                let sign = text.len() - text.trim_start_matches(['-', '+', ' ']).len();
                text.insert_str(sign, &"0".repeat(missing));
            }
            text
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => spec.float(float(value).ok_or_else(number)?),
        other => return Err(error(format!("unsupported format character '{other}'"))),
    })
}

/// `template.format(*values, **named)`.
pub(super) fn str_format(
    template: &str,
    values: &[Value],
    named: &Kwargs,
) -> Result<String, Error> {
    let mut fields = Fields { values, named, next: 0, has_numbers: false };
    fields.write(template, 2)
}

struct Fields<'a> {
    values: &'a [Value],
    named: &'a Kwargs,
    /// The next value without a name or number.
    next: usize,
    /// Whether a field has a number.
    has_numbers: bool,
}

impl Fields<'_> {
    fn write(&mut self, template: &str, depth: usize) -> Result<String, Error> {
        let (mut out, mut rest) = (String::new(), template);
        while let Some(start) = rest.find(['{', '}']) {
            grow(&mut out, &rest[..start])?;
            let brace = &rest[start..=start];
            rest = &rest[start + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out += brace;
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(error("Single '}' encountered in format string"));
            }
            let end = closing(rest).ok_or_else(|| error("expected '}' before end of string"))?;
            if depth == 0 {
                return Err(error("Max string recursion exceeded"));
            }
            grow(&mut out, &self.field(&rest[..end], depth)?)?;
            rest = &rest[end + 1..];
        }
        grow(&mut out, rest)?;
        Ok(out)
    }

    /// Writes what stands between braces: `name!conversion:spec`.
    fn field(&mut self, field: &str, depth: usize) -> Result<String, Error> {
        // A bracket of an index may hold these signs.
        let mut in_brackets = false;
        let end = field.find(|letter| {
            in_brackets = letter == '[' || (in_brackets && letter != ']');
            !in_brackets && (letter == '!' || letter == ':')
        });
        let (path, rest) = field.split_at(end.unwrap_or(field.len()));
        let (conversion, rest) = match rest.strip_prefix('!') {
            Some(after) => (after.chars().next(), after.get(1..).unwrap_or_default()),
            None => (None, rest),
        };
        let value = self.value(path)?;
        let spec = match rest.strip_prefix(':') {
            Some(spec) => self.write(spec, depth - 1)?,
            None if rest.is_empty() => String::new(),
            None => return Err(error("expected ':' after conversion specifier")),
        };
        let value = match conversion {
            None => value,
            Some('s') => Value::from(to_text(&value)),
            Some('r') => Value::from(repr(&value)),
            Some('a') => Value::from(ascii(&value)),
            Some(other) => return Err(error(format!("Unknown conversion specifier '{other}'"))),
        };
        format_value(&value, &spec)
    }

    /// Finds `name.attribute[index]`.
    fn value(&mut self, path: &str) -> Result<Value, Error> {
        let end = path.find(['.', '[']).unwrap_or(path.len());
        let (name, mut rest) = path.split_at(end);
        let mut value = if name.is_empty() || name.bytes().all(|byte| byte.is_ascii_digit()) {
            let index =
                if name.is_empty() { self.next } else { name.parse().unwrap_or(usize::MAX) };
            self.next += usize::from(name.is_empty());
            self.has_numbers |= !name.is_empty();
            if self.has_numbers && self.next > 0 {
                return Err(error("cannot mix automatic and manual field numbers"));
            }
            let value = self.values.get(index).cloned();
            value.ok_or_else(|| error(format!("the format has no value {index}")))?
        } else {
            let value = self.named.get::<Value>(name).ok().filter(|_| self.named.has(name));
            value.ok_or_else(|| error(format!("the format has no value '{name}'")))?
        };
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                value = item(&value, &Value::from(&after[..end]))?;
                rest = &after[end..];
            } else {
                let after = &rest[1..];
                let end = after.find(']').ok_or_else(|| error("Missing ']' in format string"))?;
                let key = &after[..end];
                let number = key.parse::<i64>().ok().filter(|number| *number >= 0);
                value = item(&value, &number.map_or_else(|| Value::from(key), Value::from))?;
                rest = &after[end + 1..];
            }
        }
        Ok(value)
    }
}

/// Returns where the brace closes that was opened before `rest`.
fn closing(rest: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (index, letter) in rest.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(index),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Python's `format(value, spec)`.
fn format_value(value: &Value, text: &str) -> Result<String, Error> {
    if text.is_empty() {
        return Ok(to_text(value));
    }
    let mut spec = parse(text)?;
    let kind = spec.kind;
    let unknown = || {
        error(format!("Unknown format code in '{text}' for object of type '{}'", type_name(value)))
    };
    if value.as_str().is_some() || value.is_undefined() {
        if spec.align == Some('=') && !text.contains('=') {
            spec.align = Some('<');
        }
        let fits =
            matches!(kind, None | Some('s')) && spec.sign.is_none() && spec.align != Some('=');
        return if fits { Ok(spec.text(&to_text(value))) } else { Err(unknown()) };
    }
    match (integer(value), float(value), kind) {
        (Some(_), _, Some('c')) => Ok(spec.text(&letter(value).ok_or_else(unknown)?)),
        (Some(integer), _, None | Some('d' | 'n' | 'x' | 'X' | 'o' | 'b')) => {
            Ok(spec.integer(integer))
        }
        (_, Some(float), None | Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'n' | '%')) => {
            Ok(spec.float(float))
        }
        _ => Err(unknown()),
    }
}

/// Parses `[[fill]align][sign][#][0][width][grouping][.precision][kind]`.
fn parse(text: &str) -> Result<Spec, Error> {
    let invalid = || error(format!("Invalid format specifier '{text}'"));
    let is_align = |letter: &char| "<>^=".contains(*letter);
    let mut spec = Spec::default();
    let mut letters = text.chars();
    let (first, second) = (letters.next(), letters.next());
    let mut rest = text;
    if let Some(align) = second.filter(is_align) {
        spec.fill = first;
        spec.align = Some(align);
        rest = letters.as_str();
    } else if let Some(align) = first.filter(is_align) {
        spec.align = Some(align);
        rest = &text[1..];
    }
    if let Some(sign) = rest.chars().next().filter(|letter| "+- ".contains(*letter)) {
        spec.sign = Some(sign);
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('#') {
        spec.is_alternate = true;
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('0') {
        spec.fill = spec.fill.or(Some('0'));
        spec.align = spec.align.or(Some('='));
        rest = after;
    }
    let (width, after) = digits(rest)?;
    spec.width = width.unwrap_or(0);
    rest = after;
    if let Some(grouping) = rest.chars().next().filter(|letter| ",_".contains(*letter)) {
        spec.grouping = Some(grouping);
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('.') {
        let (precision, after) = digits(after)?;
        spec.precision = Some(precision.ok_or_else(invalid)?);
        rest = after;
    }
    let mut letters = rest.chars();
    spec.kind = letters.next();
    if letters.next().is_some() { Err(invalid()) } else { Ok(spec) }
}
