//! JSON as Python writes it: with `NaN` and `Infinity`, which JSON does not have.

use std::borrow::Cow;

/// Returns the text with null for numbers that JSON does not have. Its lines stay those of the file.
pub(crate) fn without_literals(bytes: &[u8]) -> Cow<'_, [u8]> {
    const LITERALS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let (mut text, mut copied) = (Vec::new(), 0);
    let (mut index, mut in_string) = (0, false);
    while index < bytes.len() {
        match bytes[index] {
            b'\\' if in_string => index += 1,
            b'"' => in_string = !in_string,
            b'-' | b'I' | b'N' if !in_string => {
                let found = LITERALS.iter().find(|name| bytes[index..].starts_with(name));
                if let Some(name) = found {
                    text.extend_from_slice(&bytes[copied..index]);
                    text.extend_from_slice(b"null");
                    index += name.len();
                    copied = index;
                    continue;
                }
            }
            _ => {}
        }
        index += 1;
    }
    if copied == 0 {
        return Cow::Borrowed(bytes);
    }
    text.extend_from_slice(&bytes[copied..]);
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_outside_of_strings_become_null() {
        let check = |text: &str, expected: &str| {
            assert_eq!(without_literals(text.as_bytes()), expected.as_bytes(), "{text}");
        };
        check("{\"a\": [0.0, Infinity], \"b\": -Infinity}", "{\"a\": [0.0, null], \"b\": null}");
        check("{\"NaN\": \"a\\\"Infinity\", \"b\": -1}", "{\"NaN\": \"a\\\"Infinity\", \"b\": -1}");
    }
}
