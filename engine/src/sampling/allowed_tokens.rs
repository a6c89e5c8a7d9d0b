//! What may be drawn: a bit for each token.

/// Bits of a word.
const WORD: usize = u32::BITS as usize;

/// A set of tokens that may be drawn. Tokens past its end may be drawn, too.
#[derive(Debug, Clone, PartialEq)]
pub struct AllowedTokens {
    /// Bit `token % 32` of word `token / 32` is 1 if the token may be drawn. // (vocab / 32, rounded up)
    words: Vec<u32>,
    refused: usize,
    /// The allowed tokens of a mask, in ascending order, if there are at most [`FEW_MAX`].
    few: Option<Vec<u32>>,
}

/// Most tokens for which logits are computed one by one, instead of those of the whole vocabulary.
const FEW_MAX: usize = 1024;

impl AllowedTokens {
    /// Allows all tokens of a vocabulary but these.
    pub fn all_but(vocab_size: usize, tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut words = vec![u32::MAX; vocab_size.div_ceil(WORD)];
        let mut refused = 0;
        for token in tokens.into_iter().filter(|token| (*token as usize) < vocab_size) {
            let (word, bit) = place(token);
            refused += usize::from(words[word] & bit != 0);
            words[word] &= !bit;
        }
        Self { words, refused, few: None }
    }

    /// Allows the tokens of a mask, one bit for each as here, and no others of a vocabulary.
    pub fn of_mask(mask: &[u32], vocab_size: usize) -> Self {
        let mut words = vec![0; vocab_size.div_ceil(WORD)];
        words.iter_mut().zip(mask).for_each(|(word, of_mask)| *word = *of_mask);
        let past_end = words.len() * WORD - vocab_size;
        // Bits past the end count for nothing.
        if let Some(last) = words.last_mut().filter(|_| past_end > 0) {
            *last |= u32::MAX << (WORD - past_end);
        }
        let refused = words.iter().map(|word| word.count_zeros() as usize).sum::<usize>();
        let few = (vocab_size - refused <= FEW_MAX).then(|| allowed_of(&words, vocab_size));
        Self { words, refused, few }
    }

    /// Returns the set without some tokens; `None` if nothing of the vocabulary is left.
    pub fn without(&self, vocab_size: usize, tokens: &[u32]) -> Option<Self> {
        let mut fewer = self.clone();
        for token in tokens.iter().filter(|token| (**token as usize) < vocab_size) {
            let (word, bit) = place(*token);
            fewer.refused += usize::from(fewer.words[word] & bit != 0);
            fewer.words[word] &= !bit;
        }
        if let Some(few) = &mut fewer.few {
            few.retain(|token| !tokens.contains(token));
        }
        (fewer.refused < vocab_size).then_some(fewer)
    }

    /// Returns whether a token may be drawn.
    pub fn contains(&self, token: u32) -> bool {
        let (word, bit) = place(token);
        self.words.get(word).is_none_or(|word| word & bit != 0)
    }

    /// Returns the tokens that may be drawn, in ascending order, if they are few.
    pub fn few(&self) -> Option<&[u32]> {
        self.few.as_deref()
    }

    /// Returns the bits, 32 tokens a word.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Returns the number of tokens that must not be drawn.
    pub fn refused_count(&self) -> usize {
        self.refused
    }

    /// Returns the tokens that must not be drawn, in ascending order.
    pub fn refused(&self) -> impl Iterator<Item = u32> {
        self.words.iter().zip(0u32..).filter(|(word, _)| **word != u32::MAX).flat_map(
            |(word, index)| {
                let refused = move |bit: &u32| word & (1 << bit) == 0;
                (0..u32::BITS).filter(refused).map(move |bit| index * u32::BITS + bit)
            },
        )
    }
}

/// Returns the tokens of a vocabulary with a bit, in ascending order.
fn allowed_of(words: &[u32], vocab_size: usize) -> Vec<u32> {
    let of_word = |(index, word): (u32, &u32)| {
        let word = *word;
        (0..u32::BITS)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| index * u32::BITS + bit)
    };
    let tokens = (0..).zip(words).filter(|(_, word)| **word != 0).flat_map(of_word);
    tokens.take_while(|token| (*token as usize) < vocab_size).collect()
}

/// Returns a token's word and bit.
fn place(token: u32) -> (usize, u32) {
    (token as usize / WORD, 1 << (token % u32::BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_tokens_are_those_given_within_the_vocabulary() {
        let allowed = AllowedTokens::all_but(70, [64, 3, 31, 32, 3, 69, 70, u32::MAX]);
        assert_eq!(allowed.refused().collect::<Vec<_>>(), [3, 31, 32, 64, 69]);
        assert_eq!(allowed.refused_count(), 5);
        for token in 0..200 {
            assert_eq!(allowed.contains(token), ![3, 31, 32, 64, 69].contains(&token), "{token}");
        }
    }

    #[test]
    fn masks_allow_what_they_name_within_the_vocabulary() {
        let allowed = AllowedTokens::of_mask(&[0b1001, u32::MAX], 34);
        let refused: Vec<u32> = (0..32).filter(|token| ![0, 3].contains(token)).collect();
        assert_eq!(allowed.refused().collect::<Vec<_>>(), refused);
        assert_eq!(allowed.refused_count(), 30);
        assert!(allowed.contains(3) && allowed.contains(33) && !allowed.contains(1));
        assert_eq!(allowed.few(), Some(&[0, 3, 32, 33][..]));
        assert_eq!(AllowedTokens::of_mask(&[u32::MAX; 40], 1100).few(), None);
        let short = AllowedTokens::of_mask(&[1], 70);
        assert_eq!(short.refused_count(), 69);
        let without = allowed.without(34, &[3, 3, 99]).expect("others are left");
        assert!(!without.contains(3) && without.refused_count() == 31);
        assert_eq!(without.few(), Some(&[0, 32, 33][..]));
        assert_eq!(short.without(70, &[0]), None);
    }

    #[test]
    fn nothing_is_refused_of_an_empty_list() {
        let allowed = AllowedTokens::all_but(33, []);
        assert_eq!((allowed.refused_count(), allowed.refused().count()), (0, 0));
        assert!(allowed.contains(32) && allowed.contains(u32::MAX));
    }
}
