//! JSON on one line, for readers that split at every line end of Unicode.

use serde_json::Value;

/// Line ends that JSON may have in strings as they are. Python's `str.splitlines()`, with which clients read JSONL files and
/// event streams, splits there; the others (U+000A to U+001E) are always escaped in JSON.
const LINE_ENDS: [(char, &str); 3] =
    [('\u{85}', "\\u0085"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")];

/// Returns the JSON of a value on one line.
pub fn json_line(value: &Value) -> String {
    let mut text = value.to_string();
    for (letter, escape) in LINE_ENDS {
        if text.contains(letter) {
            text = text.replace(letter, escape);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn line_ends_of_unicode_are_escaped_and_read_back() {
        let value = json!({ "a\u{2028}": "b\u{85}c\u{2029}\n\u{1e}é" });
        let line = json_line(&value);
        assert_eq!(line, "{\"a\\u2028\":\"b\\u0085c\\u2029\\n\\u001eé\"}");
        assert_eq!(serde_json::from_str::<Value>(&line).expect("JSON"), value);
    }
}
