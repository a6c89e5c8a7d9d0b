//! Checks of grammars without a model, remembered: the lines of a batch mostly have the same one.

use std::{collections::HashMap, num::NonZero, sync::LazyLock, thread};

use llguidance::{Matcher, ParserFactory, toktrie::ApproximateTokEnv};
use parking_lot::{Condvar, Mutex};

use crate::{Grammar, GrammarError, compiler::limited};

/// Most results that are remembered.
const RESULTS_MAX: usize = 256;

/// How many more checks may run now. One can take seconds and some 100 MB, and what is checked comes from outside.
static FREE: LazyLock<Mutex<usize>> =
    LazyLock::new(|| Mutex::new(thread::available_parallelism().map_or(1, NonZero::get)));
static ENDED: Condvar = Condvar::new();

/// The right to run a check.
struct Turn;

impl Turn {
    fn take() -> Self {
        let mut free = FREE.lock();
        while *free == 0 {
            ENDED.wait(&mut free);
        }
        *free -= 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *FREE.lock() += 1;
        ENDED.notify_one();
    }
}

type Results = HashMap<Grammar, Result<(), GrammarError>>;

/// Compiles a grammar for the tokens of single bytes.
pub fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    static RESULTS: LazyLock<Mutex<Results>> = LazyLock::new(Mutex::default);
    if let Some(result) = RESULTS.lock().get(grammar) {
        return result.clone();
    }
    // Another thread may have checked it meanwhile.
    let turn = Turn::take();
    if let Some(result) = RESULTS.lock().get(grammar) {
        return result.clone();
    }
    let result = compile(grammar);
    drop(turn);
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
