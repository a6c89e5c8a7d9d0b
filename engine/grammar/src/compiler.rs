//! Grammars for the tokens of one model.

use std::collections::HashMap;

use llguidance::{
    Matcher, ParserFactory,
    toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie},
};
use parking_lot::Mutex;

use crate::{Constraint, Grammar, GrammarError};

/// Most compiled grammars that are kept.
const KEPT_MAX: usize = 64;

/// A token of a vocabulary.
#[derive(Debug, Clone, Copy)]
pub enum Word<'a> {
    /// Bytes of text; empty for a token that does not exist.
    Text(&'a [u8]),
    /// A special token, which no grammar of text allows.
    Special,
}

/// Compiles grammars for the tokens of one model, each once.
pub struct Compiler {
    factory: ParserFactory,
    /// Fresh parsers, by grammar.
    kept: Mutex<HashMap<Grammar, Matcher>>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiler").field("kept", &self.kept.lock().len()).finish_non_exhaustive()
    }
}

impl Compiler {
    /// Prepares the tokens of a vocabulary, `(vocab,)`. An answer ends with one of `end_tokens`. Takes some 0.1 s for 100,000 tokens.
    ///
    /// # Errors
    /// No end token is in the vocabulary.
    pub fn new<'a>(
        words: impl Iterator<Item = Word<'a>>,
        end_tokens: &[u32],
    ) -> Result<Self, GrammarError> {
        let words: Vec<Vec<u8>> = words
            .enumerate()
            .map(|(token, word)| match word {
                Word::Text(bytes) => bytes.to_vec(),
                // The library knows special tokens by their first byte, which no text has.
                Word::Special => {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], format!("[{token}]").as_bytes()].concat()
                }
            })
            .collect();
        let ends: Vec<u32> =
            end_tokens.iter().copied().filter(|token| (*token as usize) < words.len()).collect();
        let [first, ..] = ends[..] else {
            return Err(GrammarError("the model has no end-of-text token".to_owned()));
        };
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
        let tokens = std::sync::Arc::new(ApproximateTokEnv::new(trie));
        let tokens: llguidance::toktrie::TokEnv = tokens;
        let factory = ParserFactory::new_simple(&tokens);
        let factory = factory.map(limited).map_err(|error| GrammarError::of_library(&error))?;
        Ok(Self { factory, kept: Mutex::default() })
    }

    /// Returns the start of an answer that a grammar describes.
    ///
    /// # Errors
    /// The grammar cannot be used.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let kept = self.kept.lock().get(grammar).map(Matcher::deep_clone);
        let matcher = match kept {
            Some(matcher) => matcher,
            None => {
                let matcher = Matcher::new(self.factory.create_parser(grammar.translated()?));
                if let Some(error) = matcher.get_error() {
                    return Err(grammar.error(&error));
                }
                let mut kept = self.kept.lock();
                if kept.len() >= KEPT_MAX {
                    kept.clear();
                }
                kept.insert(grammar.clone(), matcher.deep_clone());
                matcher
            }
        };
        Constraint::begin(matcher)
    }
}

/// Bounds the work of grammars from outside, and keeps messages short and off the standard error.
pub fn limited(mut factory: ParserFactory) -> ParserFactory {
    factory.quiet().limits_mut().verbose_errors = false;
    factory
}
