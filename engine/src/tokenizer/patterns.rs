//! Regular expressions of a `tokenizer.json` that the library (`fancy-regex`) would panic at, or take endless memory for.
//!
//! A back-reference to a group that a later round of a repetition has begun again ends before it begins, which panics; so does a match with
//! `\K` inside a look-ahead. A named one may be a number, for which the parser makes a set of as many bits. Repetitions multiply the
//! smallest length of a match, and the program. Comments and patterns with free spaces could hide these from this reader. Pre-tokenizers
//! of models have none of it.

/// Longest pattern, in bytes.
const PATTERN_BYTES_MAX: usize = 4096;
/// Largest product of all counts in a pattern.
const REPEATS_MAX: u64 = 1 << 16;

/// Returns why a regular expression is refused, if it is.
pub(super) fn refusal(pattern: &str) -> Option<&'static str> {
    if pattern.len() > PATTERN_BYTES_MAX {
        return Some("it has more than 4096 bytes");
    }
    let mut repeats = 1u64;
    let mut rest = pattern;
    while let Some(next) = rest.find(['\\', '(', '{']) {
        rest = &rest[next..];
        let taken = match rest.as_bytes()[0] {
            b'\\' => match escape_len(rest) {
                Some(len) => len,
                None => return Some("back-references, calls of groups and \\K are not supported"),
            },
            b'(' if !is_known_group(rest) => {
                return Some("conditions, comments and spaces for layout are not supported");
            }
            b'(' => 1,
            _ => {
                repeats = repeats.saturating_mul(largest_count(rest));
                1
            }
        };
        rest = &rest[taken..];
    }
    (repeats > REPEATS_MAX).then_some("its counts multiply to more than 65536")
}

/// Returns the bytes of the escape at the begin of a text; `None` for one that is refused.
fn escape_len(text: &str) -> Option<usize> {
    let Some(escaped) = text.chars().nth(1) else { return Some(text.len()) };
    if escaped.is_ascii_digit() || matches!(escaped, 'K' | 'k' | 'g') {
        return None;
    }
    let len = 1 + escaped.len_utf8();
    let has_braces = matches!(escaped, 'b' | 'B' | 'p' | 'P' | 'u' | 'U' | 'x');
    match text[len..].find('}').filter(|_| has_braces && text[len..].starts_with('{')) {
        Some(end) => Some(len + end + 1),
        None => Some(len),
    }
}

/// Returns whether a group is a plain one, looks around, has a name, or sets flags that change no layout.
fn is_known_group(text: &str) -> bool {
    let Some(kind) = text.strip_prefix("(?") else { return true };
    if ["=", "!", ":", ">", "<", "'", "P<"].iter().any(|known| kind.starts_with(known)) {
        return true;
    }
    let flags = kind.split([':', ')']).next().unwrap_or_default();
    !flags.is_empty() && flags.chars().all(|flag| "imsuU-".contains(flag))
}

/// Returns the larger count in the braces that a text begins with; 1 if they have no count.
fn largest_count(text: &str) -> u64 {
    let inner = text[1..].split_once('}').map_or("", |(inner, _)| inner);
    if !inner.bytes().all(|byte| byte.is_ascii_digit() || byte == b',') {
        return 1;
    }
    let counts = inner.split(',').filter(|count| !count.is_empty());
    counts.map(|count| count.parse().unwrap_or(u64::MAX)).max().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{LLAMA3_REGEX, QWEN2_REGEX, QWEN35_REGEX};

    #[test]
    fn patterns_of_models_are_accepted() {
        let o200k = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*";
        let deepseek = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}]?";
        let bloom = r" ?[^(\s|[.,!?…。，、।۔،])]+";
        for pattern in [
            LLAMA3_REGEX,
            QWEN2_REGEX,
            QWEN35_REGEX,
            o200k,
            deepseek,
            bloom,
            "",
            r"\A |[ ▁]+\z",
            "(?<=<0x[0-9A-F])[0-9A-F](?=>)",
            r"[\x{4E00}-\x{99999}]{2,}",
            r"(?P<name>a)(?<other>b)(?'third'c)(?>d)(?-i:e)(?i)(?!f)(?<!g)",
        ] {
            assert_eq!(refusal(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn patterns_that_would_panic_or_take_endless_memory_are_refused() {
        for (pattern, why) in [
            (r"(?:(a\1|b)c)+", "back-references"),
            (r"(?=a\K)", "back-references"),
            (r"[a]\k<99999999999>", "back-references"),
            (r"\\\g<1>", "back-references"),
            ("(?P=99999999999)", "conditions"),
            ("(?(99999999999)a|b)", "conditions"),
            ("((?#c)?P=99999999999)", "conditions"),
            ("(?i-x)a", "conditions"),
            ("(?", "conditions"),
            ("(?:(?:a{4294967296}){4294967296})", "counts"),
            (r"(\w{300}){300}", "counts"),
            ("a{1,99999999999999999999999}", "counts"),
            (&"a".repeat(4097), "4096 bytes"),
        ] {
            let found = refusal(pattern).unwrap_or("accepted");
            assert!(found.contains(why), "{pattern}: {found}");
        }
    }
}
