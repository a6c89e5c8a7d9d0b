//! The tokens of an expression of Jinja 3.1.

use super::translate::SyntaxError;

/// A token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A name or keyword.
    Name(String),
    /// A string without its quotes, escapes decoded.
    Text(String),
    /// A number, as minijinja reads it.
    Number(String),
    /// An operator or a bracket.
    Sign(&'static str),
}

/// Operators and brackets; longer ones first.
const SIGNS: [&str; 27] = [
    "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=", ".", ":", "|",
    ",", "(", ")", "[", "]", "{", "}", ";", "&",
];

/// The tokens of a tag and what follows it.
pub(super) struct Tag<'a> {
    pub tokens: Vec<Token>,
    /// The line ends inside of the tag.
    pub lines: usize,
    /// The mark before the end: `-`, `+` or nothing.
    pub mark: &'static str,
    /// The text after the tag.
    pub rest: &'a str,
}

/// Reads the tokens of a tag, up to its end `close`.
pub(super) fn read<'a>(source: &'a str, close: &str) -> Result<Tag<'a>, SyntaxError> {
    let (mut rest, mut tokens, mut depth) = (source, Vec::new(), 0usize);
    let lines = |rest: &str| source[..source.len() - rest.len()].matches('\n').count();
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c']);
        if depth == 0 {
            for mark in ["-", "+", ""] {
                let end = rest.strip_prefix(mark).and_then(|rest| rest.strip_prefix(close));
                if let Some(after) = end {
                    return Ok(Tag { tokens, lines: lines(rest), mark, rest: after });
                }
            }
        }
        let (token, after) = next(rest)?;
        match &token {
            Token::Sign("(" | "[" | "{") => depth += 1,
            Token::Sign(")" | "]" | "}") => {
                depth =
                    depth.checked_sub(1).ok_or(SyntaxError::new("unexpected closing bracket"))?;
            }
            _ => {}
        }
        tokens.push(token);
        rest = after;
    }
}

/// Splits off the next token.
fn next(rest: &str) -> Result<(Token, &str), SyntaxError> {
    let Some(first) = rest.chars().next() else {
        return Err(SyntaxError::new("unexpected end of template"));
    };
    if first == '"' || first == '\'' {
        return text(rest, first);
    }
    if first.is_ascii_digit() {
        return number(rest);
    }
    if first == '_' || first.is_alphabetic() {
        let is_part = |letter: char| letter == '_' || letter.is_alphanumeric();
        let end = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
        return Ok((Token::Name(rest[..end].to_owned()), &rest[end..]));
    }
    let sign = SIGNS.into_iter().find(|sign| rest.starts_with(sign));
    match sign {
        Some(sign) => Ok((Token::Sign(sign), &rest[sign.len()..])),
        None => Err(SyntaxError::new(format!("unexpected character {first:?}"))),
    }
}

/// Splits off a string.
fn text(rest: &str, quote: char) -> Result<(Token, &str), SyntaxError> {
    let mut is_escaped = false;
    for (index, letter) in rest.char_indices().skip(1) {
        if is_escaped {
            is_escaped = false;
        } else if letter == '\\' {
            is_escaped = true;
        } else if letter == quote {
            return Ok((Token::Text(unescape(&rest[1..index])?), &rest[index + 1..]));
        }
    }
    Err(SyntaxError::new("a string has no end"))
}

/// Decodes the escapes of a string, as Python's `unicode-escape` does.
fn unescape(text: &str) -> Result<String, SyntaxError> {
    let (mut out, mut letters) = (String::with_capacity(text.len()), text.chars());
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            out.push(letter);
            continue;
        }
        let truncated = || SyntaxError::new("truncated escape in a string");
        let escape = letters.next().ok_or_else(truncated)?;
        let simple = match escape {
            '\n' => continue,
            '\\' | '\'' | '"' => escape,
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            'x' | 'u' | 'U' => {
                let length = [('x', 2), ('u', 4), ('U', 8)].into_iter().find(|(e, _)| *e == escape);
                let (_, length) = length.ok_or_else(truncated)?;
                let digits: String = letters.by_ref().take(length).collect();
                let mut code = u32::from_str_radix(&digits, 16).map_err(|_| truncated())?;
                if digits.len() < length {
                    return Err(truncated());
                }
                // A pair of surrogates is one character.
                if let (0xd800..0xdc00, Some(low)) = (code, low_surrogate(letters.as_str())) {
                    letters = letters.as_str()[6..].chars();
                    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                }
                char::from_u32(code)
                    .ok_or_else(|| SyntaxError::new("a string with half of a surrogate pair"))?
            }
            '0'..='7' => {
                let mut code = escape.to_digit(8).unwrap_or(0);
                for _ in 0..2 {
                    let Some(digit) = letters.clone().next().and_then(|d| d.to_digit(8)) else {
                        break;
                    };
                    letters.next();
                    code = code * 8 + digit;
                }
                char::from_u32(code).ok_or_else(truncated)?
            }
            'N' => return Err(SyntaxError::new("characters by name (\\N) are not supported")),
            other => {
                out.push('\\');
                other
            }
        };
        out.push(simple);
    }
    Ok(out)
}

/// Returns the second half of a surrogate pair, if `text` begins with its escape.
fn low_surrogate(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    let code = u32::from_str_radix(digits, 16).ok()?;
    (0xdc00..0xe000).contains(&code).then_some(code)
}

/// Splits off a number.
fn number(rest: &str) -> Result<(Token, &str), SyntaxError> {
    let digits = |text: &str, radix: u32| {
        let end = text.find(|letter: char| letter != '_' && !letter.is_digit(radix));
        end.unwrap_or(text.len())
    };
    let lower = rest.get(..2).map(str::to_ascii_lowercase);
    let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)];
    if let Some((_, radix)) = prefixed.into_iter().find(|(p, _)| lower.as_deref() == Some(p)) {
        let end = 2 + digits(&rest[2..], radix);
        let value = i128::from_str_radix(&rest[2..end].replace('_', ""), radix)
            .map_err(|_| SyntaxError::new("a number that is too large"))?;
        return Ok((Token::Number(value.to_string()), &rest[end..]));
    }
    let mut end = digits(rest, 10);
    let mut is_float = false;
    let fraction = |at: usize| rest[at..].strip_prefix('.').map_or(0, |after| digits(after, 10));
    if fraction(end) > 0 {
        end += 1 + fraction(end);
        is_float = true;
    }
    if let Some(exponent) = rest[end..].strip_prefix(['e', 'E']) {
        let sign = usize::from(exponent.starts_with(['+', '-']));
        let length = digits(&exponent[sign..], 10);
        if length > 0 {
            end += 1 + sign + length;
            is_float = true;
        }
    }
    let value = rest[..end].replace('_', "");
    let value = match (is_float, value.parse::<f64>(), value.parse::<i128>()) {
        (true, Ok(value), _) if value.is_infinite() => "('inf'|float)".to_owned(),
        (true, Ok(value), _) => format!("{value:?}"),
        (false, _, Ok(value)) => value.to_string(),
        _ => return Err(SyntaxError::new(format!("a number that is too large: {value}"))),
    };
    Ok((Token::Number(value), &rest[end..]))
}
