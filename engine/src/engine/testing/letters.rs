//! The vocabulary of the tests.

use super::{SPECIAL, TokenText};

/// A vocabulary of letters, parts of `ä` and `€`, a space, a few words, and special tokens.
pub struct Letters(Vec<Vec<u8>>);

impl Letters {
    pub fn new() -> Self {
        let mut tokens: Vec<Vec<u8>> = (b'a'..=b'z').map(|letter| vec![letter]).collect();
        tokens.extend([vec![0xc3], vec![0xa4], vec![0xe2, 0x82], vec![0xac], vec![b' ']]);
        tokens.extend(["the", "ab", "ba", "."].map(|text| text.as_bytes().to_vec()));
        tokens.resize(SPECIAL as usize, vec![b'-']);
        tokens.push(b"<special>".to_vec());
        tokens.push(b"<eos>".to_vec());
        Self(tokens)
    }
}

impl TokenText for Letters {
    fn bytes(&self, token: u32) -> &[u8] {
        &self.0[token as usize]
    }

    fn is_special(&self, token: u32) -> bool {
        token >= SPECIAL
    }
}
