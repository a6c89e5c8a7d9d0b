//! Keys of the begin of a prompt: prompts that begin alike go to the same shard of a queue, and follow each other,
//! so that a worker computes what they share once.

use crate::job::Prompt;

/// Lengths of the begins with a hash of their own, in bytes.
const LEVELS: [usize; 4] = [256, 1024, 4096, 16384];

/// FNV-1a over the bytes of a prompt, folded to 16 bits at each of the [`LEVELS`].
/// <https://datatracker.ietf.org/doc/draft-eastlake-fnv/>
struct PrefixHash {
    hash: u32,
    length: usize,
    /// Hashes of the levels that were reached.
    levels: Vec<u16>,
}

impl PrefixHash {
    /// Returns the hash of a prompt up to this level.
    fn from_prompt(prompt: &Prompt, level: usize) -> Self {
        let mut hash =
            Self { hash: 0x811c_9dc5, length: 0, levels: Vec::with_capacity(LEVELS.len()) };
        let most = LEVELS[level];
        hash.add_prompt(prompt, most);
        hash
    }

    fn add_prompt(&mut self, prompt: &Prompt, most: usize) {
        match prompt {
            Prompt::Text(text) | Prompt::Question(text) => self.add(text.as_bytes(), most),
            Prompt::Messages(conversation) => {
                conversation.texts().for_each(|text| self.add(text.as_bytes(), most));
            }
            Prompt::Tokens(tokens) => {
                tokens.iter().for_each(|token| self.add(&token.to_le_bytes(), most));
            }
            Prompt::Several(parts) => parts.iter().for_each(|part| self.add_prompt(part, most)),
        }
    }

    fn add(&mut self, bytes: &[u8], most: usize) {
        for byte in &bytes[..bytes.len().min(most - self.length)] {
            self.hash = (self.hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
            self.length += 1;
            if LEVELS.get(self.levels.len()) == Some(&self.length) {
                self.levels.push(self.folded());
            }
        }
    }

    fn folded(&self) -> u16 {
        ((self.hash >> 16) ^ (self.hash & 0xffff)) as u16
    }
}

/// Returns the number that decides about the shard of a job: a hash of the first 256 bytes of its prompt. The values
/// are stored, so they must not change.
pub(crate) fn shard(prompt: &Prompt) -> u16 {
    PrefixHash::from_prompt(prompt, 0).folded()
}

/// Returns a number that is equal for prompts that begin alike: prompts in its order are grouped by their first 256
/// bytes, within a group by their first 1,024, and so on up to 16,384. It is 0 for prompts below 256 bytes, which stay
/// in the order of their arrival, and never negative.
pub(crate) fn order(prompt: &Prompt) -> i64 {
    let hash = PrefixHash::from_prompt(prompt, LEVELS.len() - 1);
    if hash.levels.is_empty() {
        return 0;
    }
    let level = |index| hash.levels.get(index).copied().unwrap_or_else(|| hash.folded());
    let key = (0..LEVELS.len()).fold(0, |key, index| key << 16 | u64::from(level(index)));
    (key >> 1) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(parts: &[(&str, usize)]) -> Prompt {
        Prompt::Text(parts.iter().map(|(part, count)| part.repeat(*count)).collect())
    }

    #[test]
    fn short_prompts_have_no_order() {
        for length in [0, 1, 255] {
            assert_eq!(order(&text(&[("a", length)])), 0);
        }
        assert_ne!(order(&text(&[("a", 256)])), 0);
    }

    #[test]
    fn prompts_are_grouped_by_longer_and_longer_begins() {
        let mut prompts = Vec::new();
        for first in ["a", "b", "c"] {
            for second in ["x", "y", "z"] {
                for third in ["1", "2"] {
                    prompts.push(text(&[(first, 300), (second, 1000), (third, 9)]));
                }
            }
        }
        prompts.sort_by_key(order);
        let begins = |length: usize| {
            let mut begins: Vec<String> = prompts
                .iter()
                .map(|prompt| match prompt {
                    Prompt::Text(text) => text[..length].to_owned(),
                    _ => unreachable!("texts"),
                })
                .collect();
            begins.dedup();
            begins.len()
        };
        assert_eq!((begins(300), begins(1300)), (3, 9), "each begin is in one group");
    }

    #[test]
    fn shard_depends_on_the_first_256_bytes() {
        let long = text(&[("a", 256), ("b", 9)]);
        assert_eq!(shard(&long), shard(&text(&[("a", 256)])));
        assert_ne!(shard(&long), shard(&text(&[("a", 255), ("b", 1)])));
        // A stored value.
        assert_eq!(shard(&Prompt::Text("once upon a time".to_owned())), 33_455);
    }
}
