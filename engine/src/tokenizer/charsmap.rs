//! The character normalization of a SentencePiece model (`precompiled_charsmap`: NFKC with changes, say).
//!
//! The bytes are a little-endian u32, the size of the trie; the trie, a double array of u32 units (Darts); and
//! the replacement texts, each ended by a zero byte. A unit's bits 0 to 7 and 31 are the label of the edge to it,
//! bit 8 says that a value follows, and bits 10 to 30 are the distance to its children, shifted left by 8 if bit
//! 9 is set. The unit with a value has it in bits 0 to 30: the place of the replacement.
//!
//! At each place of a text the longest key of the trie is replaced, as SentencePiece does. The `tokenizers` crate
//! looks at whole graphemes and takes the shortest key instead, which gives other tokens for a few scripts
//! (halfwidth kana with voicing marks), and its reader panics on damaged tries; so this reader replaces it.
//! Every edge and value is checked when the map is read, and that no replacement is much longer than what it replaces.

use std::collections::VecDeque;

use tokenizers::NormalizedString;

/// Most times as long as its key that a replacement may be, as that of U+FDFA in Unicode's forms of compatibility.
pub(super) const GROWTH_MAX: usize = 11;
/// Longest replacement, in bytes.
const REPLACEMENT_BYTES_MAX: usize = 1024;

/// A problem of a map, at a byte of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("precompiled_charsmap at byte {offset}: {problem}")]
#[non_exhaustive]
pub struct CharsmapError {
    /// Offset in the map, in bytes.
    pub offset: usize,
    /// The problem.
    pub problem: &'static str,
}

/// A map from texts to their replacements.
#[derive(Debug, Clone)]
pub(crate) struct Charsmap {
    units: Vec<u32>,
    /// Replacements, each ended by a zero character.
    texts: String,
}

fn label(unit: u32) -> u32 {
    unit & ((1 << 31) | 0xff)
}

fn has_value(unit: u32) -> bool {
    (unit >> 8) & 1 == 1
}

fn offset(unit: u32) -> usize {
    ((unit >> 10) as usize) << ((unit & (1 << 9)) >> 6)
}

impl Charsmap {
    /// Reads a map and checks all of it.
    pub fn parse(bytes: &[u8]) -> Result<Self, CharsmapError> {
        let error = |offset, problem| Err(CharsmapError { offset, problem });
        let Some((size, rest)) = bytes.split_first_chunk::<4>() else {
            return error(0, "the size of the trie is missing");
        };
        let size = u32::from_le_bytes(*size) as usize;
        if size == 0 || !size.is_multiple_of(4) || size > rest.len() {
            return error(0, "the size of the trie is wrong");
        }
        let (trie, texts) = rest.split_at(size);
        let texts = match std::str::from_utf8(texts) {
            Ok(texts) if texts.is_empty() || texts.ends_with('\0') => texts.to_owned(),
            Ok(_) => return error(bytes.len(), "the last replacement has no end"),
            Err(at) => return error(4 + size + at.valid_up_to(), "a replacement is not UTF-8"),
        };
        let (words, _) = trie.as_chunks::<4>();
        let units = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let map = Self { units, texts };
        map.check()?;
        Ok(map)
    }

    /// Visits every unit that a text can reach, by the length of its shortest key, and checks the values.
    fn check(&self) -> Result<(), CharsmapError> {
        let mut reached = vec![false; self.units.len()];
        let mut open = VecDeque::from([(0usize, 0usize)]);
        while let Some((index, key_len)) = open.pop_front() {
            let unit = self.units[index];
            let children = index ^ offset(unit);
            if key_len > 0 && has_value(unit) {
                let value = self.units.get(children).map(|unit| (unit & !(1 << 31)) as usize);
                if let Some(problem) = self.value_problem(value, key_len) {
                    return Err(CharsmapError { offset: 4 + 4 * index, problem });
                }
            }
            for byte in 1..=255usize {
                let child = children ^ byte;
                if self.units.get(child).is_some_and(|&unit| label(unit) == byte as u32)
                    && !std::mem::replace(&mut reached[child], true)
                {
                    open.push_back((child, key_len + 1));
                }
            }
        }
        Ok(())
    }

    /// Returns what is wrong with the value of a key, if something is.
    fn value_problem(&self, value: Option<usize>, key_len: usize) -> Option<&'static str> {
        let text = value.and_then(|value| self.texts.get(value..)).filter(|text| !text.is_empty());
        let Some(text) = text else { return Some("a value is outside the replacements") };
        match replacement_end(text) {
            None => Some("a replacement is longer than 1024 bytes"),
            Some(len) if len > GROWTH_MAX * key_len => {
                Some("a replacement is more than 11 times as long as its key")
            }
            Some(_) => None,
        }
    }

    fn replacement(&self, at: usize) -> Option<&str> {
        let text = self.texts.get(at..)?;
        replacement_end(text).map(|end| &text[..end])
    }

    /// Returns the length of the longest key that `text` begins with, and its replacement.
    fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let mut children = offset(self.units[0]);
        let mut found = None;
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            let child = children ^ usize::from(byte);
            let unit = match self.units.get(child) {
                Some(&unit) if byte != 0 && label(unit) == u32::from(byte) => unit,
                _ => break,
            };
            children = child ^ offset(unit);
            if has_value(unit) && text.is_char_boundary(index + 1) {
                let value = self.units.get(children).map(|unit| (unit & !(1 << 31)) as usize);
                found = value.and_then(|value| self.replacement(value)).map(|new| (index + 1, new));
            }
        }
        found
    }

    /// Replaces every key in a text.
    pub fn normalize(&self, text: &mut NormalizedString) {
        let mut changes: Vec<(char, isize)> = Vec::with_capacity(text.get().len());
        let mut removed_first = 0;
        let mut rest = text.get();
        let mut modified = false;
        while let Some(first) = rest.chars().next() {
            let Some((len, new)) = self.longest(rest) else {
                changes.push((first, 0));
                rest = &rest[first.len_utf8()..];
                continue;
            };
            modified = true;
            let removed = rest[..len].chars().count() as isize;
            replace(&mut changes, &mut removed_first, removed, new);
            rest = &rest[len..];
        }
        if modified {
            text.transform(changes, removed_first as usize);
        }
    }
}

/// Returns the length of the replacement that a text begins with; `None` if it is too long.
fn replacement_end(text: &str) -> Option<usize> {
    text.bytes().take(REPLACEMENT_BYTES_MAX + 1).position(|byte| byte == 0)
}

/// Adds the replacement of `removed` characters, in the form of [`NormalizedString::transform`]: a character with 1
/// is an addition, one with −n replaces one character and removes the n after it.
fn replace(changes: &mut Vec<(char, isize)>, removed_first: &mut isize, removed: isize, new: &str) {
    let mut left = removed;
    for character in new.chars() {
        changes.push((character, isize::from(left <= 0)));
        left -= 1;
    }
    if left > 0 {
        match changes.last_mut() {
            Some((_, change)) => *change -= left,
            None => *removed_first += left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a map with keys of one byte, in a trie of 257 units or more.
    fn map(keys: &[(u8, &str)]) -> Vec<u8> {
        // The root's children are at 256 ^ byte, and the value of each is at 512 + 2 · byte.
        let mut units = vec![0u32; 1280];
        units[0] = 256 << 10;
        let mut texts = Vec::new();
        for &(byte, text) in keys {
            let (child, value) = (256 ^ usize::from(byte), 768 + 2 * usize::from(byte));
            units[child] = u32::from(byte) | 1 << 8 | ((child ^ value) as u32) << 10;
            units[value] = texts.len() as u32 | 1 << 31;
            texts.extend_from_slice(text.as_bytes());
            texts.push(0);
        }
        let mut bytes = (4 * units.len() as u32).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(texts);
        bytes
    }

    fn normalized(map: &Charsmap, text: &str) -> String {
        let mut text = NormalizedString::from(text);
        map.normalize(&mut text);
        text.get().to_owned()
    }

    #[test]
    fn keys_are_replaced_removed_and_lengthened() {
        let map = Charsmap::parse(&map(&[(b'a', "A"), (b'b', ""), (b'c', "see")])).expect("valid");
        for (text, expected) in
            [("xabc", "xAsee"), ("bbb", ""), ("bax", "Ax"), ("cb", "see"), ("", ""), ("äbö", "äö")]
        {
            assert_eq!(normalized(&map, text), expected, "{text}");
        }
    }

    #[test]
    fn values_and_sizes_outside_the_map_are_refused() {
        let intact = map(&[(b'a', "A")]);
        let problem = |bytes: &[u8]| Charsmap::parse(bytes).expect_err("refused").problem;
        assert_eq!(problem(&intact[..3]), "the size of the trie is missing");
        assert_eq!(problem(&intact[..intact.len() - 1]), "the last replacement has no end");
        let mut damaged = intact.clone();
        damaged[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(problem(&damaged), "the size of the trie is wrong");
        let mut damaged = intact.clone();
        let value = 4 + 4 * (768 + 2 * usize::from(b'a'));
        damaged[value] = 200;
        let error = Charsmap::parse(&damaged).expect_err("refused");
        assert_eq!(error.problem, "a value is outside the replacements");
        assert_eq!(error.offset, 4 + 4 * (256 ^ usize::from(b'a')));
    }

    #[test]
    fn replacements_much_longer_than_their_keys_are_refused() {
        let parse = |text: &str| Charsmap::parse(&map(&[(b'a', text)]));
        assert!(parse(&"b".repeat(11)).is_ok());
        let problem = |len| parse(&"b".repeat(len)).expect_err("refused").problem;
        assert_eq!(problem(12), "a replacement is more than 11 times as long as its key");
        assert_eq!(problem(1025), "a replacement is longer than 1024 bytes");
    }
}
