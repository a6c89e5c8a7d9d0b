//! Numbers of bytes in options, as `10G`.

/// Parses a number of bytes with an optional unit, a power of 1024.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim().trim_end_matches(['B', 'b']).trim_end_matches(['i']);
    let (digits, shift) = match text.char_indices().last() {
        Some((at, unit)) => match unit.to_ascii_uppercase() {
            'K' => (&text[..at], 10),
            'M' => (&text[..at], 20),
            'G' => (&text[..at], 30),
            'T' => (&text[..at], 40),
            _ => (text, 0),
        },
        None => (text, 0),
    };
    let count = digits.trim().parse::<u64>().ok();
    let bytes = count.and_then(|count| count.checked_mul(1 << shift));
    bytes.ok_or_else(|| "expected a number of bytes, such as 10G".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_bytes_may_have_a_unit() {
        for (text, expected) in [
            ("0", 0),
            ("123", 123),
            ("4K", 4096),
            ("10G", 10 << 30),
            ("1 GiB", 1 << 30),
            ("2mb", 2 << 20),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
        for wrong in ["", "G", "-1", "1.5G", "10X", "99999999999T"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
