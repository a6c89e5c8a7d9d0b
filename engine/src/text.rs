//! Turns tokens into text: UTF-8 that never breaks a character, and stop strings.
//!
//! The text equals [`String::from_utf8_lossy`] of all token bytes together: a character split between tokens
//! is held back until it is complete. A part of the text that can still become a stop string is held back
//! until it cannot. An answer to an empty prompt begins a text, and so loses the space that some tokenizers put there
//! when they encode; an answer that continues a prompt keeps it.

/// Bytes of most tokens, with a part of a character before them.
const PENDING_BYTES: usize = 64;

/// Bytes of tokens, for the engine.
pub trait TokenText: Send + Sync {
    /// Bytes of a token; not always whole characters. Empty for unknown tokens.
    fn bytes(&self, token: u32) -> &[u8];

    /// Returns whether the token is a special token, which is not part of the text.
    fn is_special(&self, token: u32) -> bool;

    /// Returns whether a text loses the space that it begins with, because encoding put it there.
    fn strips_leading_space(&self) -> bool {
        false
    }
}

/// The text of one choice, assembled token by token.
#[derive(Debug, Clone, Default)]
pub struct TextAssembler {
    stops: Vec<String>,
    /// Whether the first byte is left out if it is a space.
    strips_space: bool,
    /// Bytes of an incomplete character: at most three.
    pending: Vec<u8>,
    text: String,
    /// Bytes of `text` that were returned.
    returned: usize,
    /// Bytes of `text` that need no further search for the end of a stop string.
    searched: usize,
    /// The stop string that ended the text.
    stopped_by: Option<usize>,
}

impl TextAssembler {
    /// Makes an empty text that is cut before the first of `stops`.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), ..Self::default() }
    }

    /// Leaves out the space that the text begins with.
    pub fn strip_leading_space(mut self) -> Self {
        self.strips_space = true;
        self
    }

    /// Appends a token's bytes. True if that completed a stop string: the text is cut before it and takes no
    /// more bytes. With `may_stop` false, stop strings that end here are ignored.
    pub fn push(&mut self, bytes: &[u8], may_stop: bool) -> bool {
        if self.stopped_by.is_some() {
            return true;
        }
        let space = self.strips_space && bytes.first() == Some(&b' ');
        self.strips_space &= bytes.is_empty();
        self.pending.extend_from_slice(&bytes[usize::from(space)..]);
        self.decode_pending();
        self.search(may_stop)
    }

    /// Ends the text: an incomplete character becomes U+FFFD. True if that completed a stop string.
    pub fn finish(&mut self, may_stop: bool) -> bool {
        if self.stopped_by.is_none() && !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
            return self.search(may_stop);
        }
        self.stopped_by.is_some()
    }

    /// Makes room for further text.
    pub fn reserve(&mut self, bytes: usize) {
        self.text.reserve(bytes);
        self.pending.reserve(PENDING_BYTES);
    }

    /// Appends the text since the last call to `to`, except for the part that can still change.
    pub fn take_certain(&mut self, to: &mut String) {
        self.take_until(self.text.len() - self.held_back(), to);
    }

    /// Appends all text since the last call to `to`. Call it only after the end.
    pub fn take_rest(&mut self, to: &mut String) {
        self.take_until(self.text.len(), to);
    }

    /// Returns the text that was returned so far.
    pub fn returned(&self) -> &str {
        &self.text[..self.returned]
    }

    /// Returns the stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.stopped_by.and_then(|index| self.stops.get(index)).map(String::as_str)
    }

    /// Converts into the whole text.
    pub fn into_text(self) -> String {
        self.text
    }

    fn take_until(&mut self, end: usize, to: &mut String) {
        to.push_str(&self.text[self.returned..end]);
        self.returned = end;
    }

    /// Moves everything except an incomplete character from `pending` to `text`.
    fn decode_pending(&mut self) {
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(invalid) = error.error_len() else { break };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
            }
        }
        let incomplete = rest.len();
        self.pending.drain(..self.pending.len() - incomplete);
    }

    /// Searches the new text for the stop string that ends first (of several that end there, the longest),
    /// and cuts the text before it.
    fn search(&mut self, may_stop: bool) -> bool {
        let first =
            self.stops.iter().enumerate().filter(|_| may_stop).filter_map(|(index, stop)| {
                let mut start = (self.searched + 1).saturating_sub(stop.len());
                while !self.text.is_char_boundary(start) {
                    start += 1;
                }
                let place = start + self.text.get(start..)?.find(stop.as_str())?;
                Some((place + stop.len(), place, index))
            });
        if let Some((_, place, index)) = first.min() {
            self.text.truncate(place);
            self.stopped_by = Some(index);
        }
        self.searched = self.text.len();
        self.stopped_by.is_some()
    }

    /// Returns the length of the longest suffix of the text that can still become a stop string.
    fn held_back(&self) -> usize {
        if self.stopped_by.is_some() {
            return 0;
        }
        let text = &self.text.as_bytes()[self.returned..];
        let longest = |stop: &String| {
            let stop = stop.as_bytes();
            let most = text.len().min(stop.len() - 1);
            let length = (1..=most).rev().find(|length| text.ends_with(&stop[..*length]));
            length.unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn certain(text: &mut TextAssembler) -> String {
        let mut delta = String::new();
        text.take_certain(&mut delta);
        delta
    }

    fn rest(text: &mut TextAssembler) -> String {
        let mut delta = String::new();
        text.take_rest(&mut delta);
        delta
    }

    /// Pushes `pieces`; returns the deltas, the whole text and whether a stop string ended it.
    fn assemble(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut text = TextAssembler::new(&stops);
        let mut deltas = Vec::new();
        let mut stopped = false;
        for piece in pieces {
            stopped = text.push(piece, true);
            deltas.push(certain(&mut text));
            if stopped {
                break;
            }
        }
        stopped |= text.finish(true);
        deltas.push(rest(&mut text));
        (deltas, text.into_text(), stopped)
    }

    #[test]
    fn split_character_is_held_back_until_complete() {
        let (deltas, text, _) = assemble(&[], &[b"a\xe2", b"\x82", b"\xac", b"b"]);
        assert_eq!(deltas, ["a", "", "€", "b", ""]);
        assert_eq!(text, "a€b");
    }

    #[test]
    fn space_before_a_text_is_left_out_once_and_only_at_the_begin() {
        let text = |pieces: &[&[u8]]| {
            let mut text = TextAssembler::new(&["x".to_owned()]).strip_leading_space();
            let mut deltas = String::new();
            for piece in pieces {
                text.push(piece, true);
                text.take_certain(&mut deltas);
            }
            assert_eq!(deltas, text.clone().into_text());
            deltas
        };
        assert_eq!(text(&[b" a", b" b"]), "a b");
        assert_eq!(text(&[b"", b"  a"]), " a", "a special token does not begin the text");
        assert_eq!(text(&[b"a", b" b"]), "a b");
        assert_eq!(text(&[b" ", b"\xe2", b"\x82", b"\xac", b" x"]), "€ ");
    }

    #[test]
    fn incomplete_character_becomes_a_replacement_at_the_end() {
        let (deltas, text, _) = assemble(&[], &[b"a\xf0\x9f", b"\x98"]);
        assert_eq!(deltas, ["a", "", "\u{fffd}"]);
        assert_eq!(text, String::from_utf8_lossy(b"a\xf0\x9f\x98"));
    }

    #[test]
    fn stop_string_across_tokens_cuts_the_text_and_is_never_returned() {
        let (deltas, text, stopped) = assemble(&["\n\nQ:"], &[b"one\n", b"\n", b"Q", b":two"]);
        assert_eq!(deltas, ["one", "", "", "", ""]);
        assert_eq!(text, "one");
        assert!(stopped);
    }

    #[test]
    fn prefix_of_a_stop_string_is_returned_if_it_does_not_complete() {
        let (deltas, text, stopped) = assemble(&["abcd"], &[b"xab", b"cab", b"ce"]);
        assert_eq!(deltas, ["x", "abc", "abce", ""]);
        assert_eq!(text, "xabcabce");
        assert!(!stopped);
    }

    #[test]
    fn stop_string_that_ended_the_text_is_known() {
        let mut text = TextAssembler::new(&["x".to_owned(), "bc".to_owned()]);
        assert!(!text.push(b"ab", true));
        assert_eq!(text.stop_string(), None);
        assert!(text.push(b"cx", true));
        assert_eq!(text.stop_string(), Some("bc"));
    }

    #[test]
    fn stop_string_that_ends_first_wins_for_any_split_into_tokens() {
        for pieces in [&[b"xabcd".as_slice()][..], &[b"xa", b"b", b"c"], &[b"xab", b"c"]] {
            assert_eq!(assemble(&["abc", "b"], pieces).1, "xa");
            assert_eq!(assemble(&["b", "ab"], pieces).1, "x");
        }
    }

    #[test]
    fn stop_string_before_min_tokens_is_ignored() {
        let mut text = TextAssembler::new(&["aa".to_owned()]);
        assert!(!text.push(b"aa", false));
        assert_eq!(certain(&mut text), "a");
        assert!(text.push(b"a", true), "the second and third letter match");
        assert_eq!(rest(&mut text), "");
        assert_eq!(text.into_text(), "a");
    }

    #[test]
    fn stop_string_of_multi_byte_characters_is_found() {
        let (_, text, stopped) = assemble(&["€€"], &["ü€".as_bytes(), b"\xe2\x82", b"\xac."]);
        assert_eq!((text.as_str(), stopped), ("ü", true));
    }

    #[test]
    fn replacement_at_the_end_can_complete_a_stop_string() {
        let (_, text, stopped) = assemble(&["a\u{fffd}"], &[b"xa\xe2"]);
        assert_eq!((text.as_str(), stopped), ("x", true));
    }

    /// The definition: character by character, cut where a stop string first ends.
    fn reference(stops: &[&str], bytes: &[u8]) -> String {
        let text = String::from_utf8_lossy(bytes);
        for (start, letter) in text.char_indices() {
            let upto = &text[..start + letter.len_utf8()];
            if let Some(stop) = stops.iter().filter(|s| upto.ends_with(**s)).max_by_key(|s| s.len())
            {
                return upto[..upto.len() - stop.len()].to_owned();
            }
        }
        text.into_owned()
    }

    proptest! {
        #[test]
        fn text_of_any_bytes_does_not_depend_on_their_split(
            pieces in prop::collection::vec(
                prop::collection::vec(
                    prop::sample::select(vec![
                        b'a', b'b', 0xc3, 0xa4, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0x98, 0x80, 0xff,
                    ]),
                    0..5,
                ),
                0..12,
            ),
            stops in prop::sample::subsequence(vec!["ab", "b", "aab", "ä", "€a", "\u{fffd}a"], 0..4),
        ) {
            let slices: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let (deltas, text, _) = assemble(&stops, &slices);
            prop_assert_eq!(&text, &reference(&stops, &pieces.concat()));
            prop_assert_eq!(deltas.concat(), text);
        }
    }
}
