//! Earlier answers, to find what followed the same tokens there.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use super::{
    Found, MATCH_MAX,
    guide::{Answer, Guide},
    match_length,
};
use crate::kv::BlockHash;

/// Tokens that a search starts from.
const KEY: usize = 3;
/// Tokens of a generation of answers. There are two: the older one is dropped when the newer one is full.
const TOKENS_MAX: usize = 1 << 13;
/// Newest answers of a tenant that can be guides.
const GUIDES_MAX: usize = 8;
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
    /// The newest first.
    guides: VecDeque<Arc<Answer>>,
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
    /// Keeps an answer: the tokens after the first `prompt` ones. Its guide may be that of `guide`.
    pub fn keep(&mut self, root: &BlockHash, tokens: &[u32], prompt: usize, guide: &Guide) {
        let earlier = guide.answer().or_else(|| self.guide(root, &tokens[..prompt]));
        self.clock += 1;
        if !self.tenants.contains_key(root) && self.tenants.len() >= TENANTS_MAX {
            let longest = self.tenants.iter().min_by_key(|(_, tenant)| tenant.used);
            if let Some(root) = longest.map(|(root, _)| *root) {
                self.tenants.remove(&root);
            }
        }
        let tenant = self.tenants.entry(*root).or_default();
        tenant.used = self.clock;
        // The end of the prompt, too, so that the first tokens of answers are found.
        let found_in = &tokens[prompt.saturating_sub(KEY)..];
        if tenant.newer.tokens.len() + found_in.len() > TOKENS_MAX {
            tenant.older = std::mem::take(&mut tenant.newer);
        }
        tenant.newer.add(&found_in[..found_in.len().min(TOKENS_MAX)]);
        let (prompt, answer) = tokens.split_at(prompt);
        tenant.guides.truncate(GUIDES_MAX - 1);
        tenant.guides.push_front(Arc::new(Answer::new(prompt, answer, earlier.as_deref())));
    }

    /// Returns the guide for the answer to a prompt: of the tenant's newest answers the one with the most similar prompt.
    pub fn guide(&self, root: &BlockHash, prompt: &[u32]) -> Option<Arc<Answer>> {
        let guides = &self.tenants.get(root)?.guides;
        // The first of equal ones is the newest.
        let best = guides.iter().rev().max_by_key(|answer| answer.common_prompt(prompt));
        best.map(Arc::clone)
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
