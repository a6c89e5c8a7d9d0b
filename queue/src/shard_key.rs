//! The shard key of a job: a hash of the begin of its prompt.

use crate::job::Prompt;

/// Bytes of a prompt that decide about its shard.
const SHARD_BYTES: usize = 256;

/// FNV-1a over the first [`SHARD_BYTES`] bytes, folded to 16 bits. The values are stored, so they must not
/// change. <https://datatracker.ietf.org/doc/draft-eastlake-fnv/>
struct ShardHash {
    hash: u32,
    left: usize,
}

impl Default for ShardHash {
    fn default() -> Self {
        Self { hash: 0x811c_9dc5, left: SHARD_BYTES }
    }
}

impl ShardHash {
    fn add(&mut self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.left)];
        self.left -= bytes.len();
        for byte in bytes {
            self.hash = (self.hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    }

    fn finish(self) -> u16 {
        ((self.hash >> 16) ^ (self.hash & 0xffff)) as u16
    }
}

/// Returns the key of a prompt.
pub(crate) fn of(prompt: &Prompt) -> u16 {
    let mut hash = ShardHash::default();
    match prompt {
        Prompt::Text(text) | Prompt::Question(text) => hash.add(text.as_bytes()),
        Prompt::Messages(messages) => {
            messages.iter().for_each(|message| hash.add(message.content.as_bytes()));
        }
        Prompt::Tokens(tokens) => tokens.iter().for_each(|token| hash.add(&token.to_le_bytes())),
    }
    hash.finish()
}
