//! Structured output: what an answer must match, as the tokens that may come next.
//!
//! A [`Grammar`] describes the answers, and can be checked without a model. A [`Compiler`] has the tokens of one model and makes a
//! [`Constraint`] of a grammar: the state of one answer.

mod checked;
mod compiler;
mod constraint;
mod grammar;
mod schema;

pub use compiler::{Compiler, Word};
pub use constraint::Constraint;
pub use grammar::{Grammar, GrammarError, with_bounded_white_space};
