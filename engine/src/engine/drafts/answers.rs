//! Earlier answers, to find what followed the same tokens there.

use std::collections::HashMap;

use super::{Found, MATCH_MAX, match_length};
use crate::kv::BlockHash;

/// Tokens that a search starts from.
pub const KEY: usize = 3;
/// Tokens of a generation of answers. There are two: the older one is dropped when the newer one is full.
const TOKENS_MAX: usize = 1 << 13;
/// Tenants with answers; those of the one that has not been used for longest are dropped for a new one.
const TENANTS_MAX: usize = 64;
/// Ends an answer. No vocabulary has this token.
const END: u32 = u32::MAX;

/// Answers by tenant: by the root of the hash chains, which depends on the salt. Nothing is found across tenants, so
/// that times do not tell what others have sent.
#[derive(Debug, Clone, Default)]
pub struct Answers {
    tenants: HashMap<BlockHash, Tenant>,
    clock: u64,
}

#[derive(Debug, Clone, Default)]
struct Tenant {
    newer: Generation,
    older: Generation,
    used: u64,
}

#[derive(Debug, Clone, Default)]
struct Generation {
    /// Answers, each with [`END`].
    tokens: Vec<u32>,
    /// The place after the last occurrence of these tokens.
    places: HashMap<[u32; KEY], u32>,
}

impl Answers {
    /// Keeps the tokens of an answer.
    pub fn keep(&mut self, root: &BlockHash, answer: &[u32]) {
        if answer.len() <= KEY {
            return;
        }
        self.clock += 1;
        if !self.tenants.contains_key(root) && self.tenants.len() >= TENANTS_MAX {
            let longest = self.tenants.iter().min_by_key(|(_, tenant)| tenant.used);
            if let Some(root) = longest.map(|(root, _)| *root) {
                self.tenants.remove(&root);
            }
        }
        let tenant = self.tenants.entry(*root).or_default();
        tenant.used = self.clock;
        if tenant.newer.tokens.len() + answer.len() > TOKENS_MAX {
            tenant.older = std::mem::take(&mut tenant.newer);
        }
        tenant.newer.add(&answer[..answer.len().min(TOKENS_MAX)]);
    }

    /// Returns what followed the newest of these tokens in an earlier answer.
    pub fn following(&self, root: &BlockHash, tokens: &[u32]) -> Option<Found<'_>> {
        let tenant = self.tenants.get(root)?;
        tenant.newer.following(tokens).or_else(|| tenant.older.following(tokens))
    }
}

impl Generation {
    fn add(&mut self, answer: &[u32]) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(answer);
        self.tokens.push(END);
        for (at, key) in self.tokens[start..].windows(KEY + 1).enumerate() {
            let key = [key[0], key[1], key[2]];
            self.places.insert(key, (start + at + KEY) as u32);
        }
    }

    fn following(&self, tokens: &[u32]) -> Option<Found<'_>> {
        let key = tokens.last_chunk::<KEY>()?;
        let place = *self.places.get(key)? as usize;
        let matched = match_length(&self.tokens[..place], tokens).min(MATCH_MAX);
        let rest = &self.tokens[place..];
        let end = rest.iter().position(|token| *token == END).unwrap_or(rest.len());
        (end > 0).then_some(Found { following: &rest[..end], matched, repeats: false })
    }
}
