//! Checks of grammars without a model, remembered: the lines of a batch mostly have the same one.

use std::{collections::HashMap, sync::LazyLock};

use llguidance::{Matcher, ParserFactory, toktrie::ApproximateTokEnv};
use parking_lot::Mutex;

use crate::{Grammar, GrammarError, compiler::limited};

/// Most results that are remembered.
const RESULTS_MAX: usize = 256;

type Results = HashMap<Grammar, Result<(), GrammarError>>;

/// Compiles a grammar for the tokens of single bytes.
pub fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    static RESULTS: LazyLock<Mutex<Results>> = LazyLock::new(Mutex::default);
    if let Some(result) = RESULTS.lock().get(grammar) {
        return result.clone();
    }
    let result = compile(grammar);
    let mut results = RESULTS.lock();
    if results.len() >= RESULTS_MAX {
        results.clear();
    }
    results.insert(grammar.clone(), result.clone());
    result
}

fn compile(grammar: &Grammar) -> Result<(), GrammarError> {
    static FACTORY: LazyLock<Result<ParserFactory, GrammarError>> = LazyLock::new(|| {
        let factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env());
        factory.map(limited).map_err(|error| GrammarError::of_library(&error))
    });
    let factory = FACTORY.as_ref().map_err(Clone::clone)?;
    let mut matcher = Matcher::new(factory.create_parser(grammar.translated()?));
    matcher.compute_mask().map(drop).map_err(|error| grammar.error(&error))
}
