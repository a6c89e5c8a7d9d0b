//! Tokens that the configuration adds to a `tokenizer.json`, as transformers adds them when it loads a folder.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{AddedToken, TokenizerConfig, TokenizerError, description::TokenizerJson};

/// Returns the `added_tokens` of a tokenizer with those of its configuration; `None` if there are no others.
///
/// - A token of `added_tokens_decoder` replaces one with the same text: its flags are those of the configuration.
/// - A special token is one token: if it was not added yet, it gets its id of the vocabulary, or the next one.
///
/// # Errors
/// [`TokenizerError::AddedTokenId`] if the same text has two ids.
pub(super) fn merged(
    json: &TokenizerJson,
    config: &TokenizerConfig,
) -> Result<Option<Vec<Value>>, TokenizerError> {
    let mut tokens: BTreeMap<u32, AddedToken> =
        json.added_tokens.iter().map(|token| (token.id, token.token.clone())).collect();
    let mut is_changed = false;
    let mut ids: BTreeMap<String, u32> =
        tokens.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
    for (&id, token) in &config.added_tokens {
        if ids.get(&token.content).is_some_and(|other| *other != id) {
            let token = crate::files::shorten(&token.content);
            return Err(TokenizerError::AddedTokenId { token, id });
        }
        let is_same = tokens.get(&id).is_some_and(|old| {
            old.is_normalized() == token.is_normalized()
                && AddedToken { normalized: token.normalized, ..old.clone() } == *token
        });
        if !is_same {
            ids.insert(token.content.clone(), id);
            tokens.insert(id, token.clone());
            is_changed = true;
        }
    }
    let named = config.special_tokens.values().chain(&config.extra_special_tokens);
    let missing: Vec<&String> = named.filter(|text| !ids.contains_key(*text)).collect();
    if !missing.is_empty() {
        let vocab: std::collections::HashMap<&str, u32> = json.model.vocab.tokens().collect();
        let highest = vocab.values().chain(tokens.keys()).max().copied();
        let mut next = highest.map_or(0, |id| id.saturating_add(1));
        for text in missing {
            if text.is_empty() || tokens.values().any(|token| token.content == **text) {
                continue;
            }
            let id = vocab.get(text.as_str()).copied().unwrap_or_else(|| {
                next = next.saturating_add(1);
                next - 1
            });
            tokens.insert(id, AddedToken::special(text.clone()));
            is_changed = true;
        }
    }
    let entries = || tokens.iter().map(|(id, token)| token.to_json(*id)).collect();
    Ok(is_changed.then(entries))
}
