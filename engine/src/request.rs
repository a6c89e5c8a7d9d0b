//! Requests, their outputs, and the events between.

use std::{sync::Arc, time::Instant};

use tritmill_grammar::{Constraint, GrammarError};

use crate::{
    backend::StepError,
    sampling::{InvalidParam, SampleError, SamplingParams},
    scheduler::Priority,
};

/// Number of a request in one engine, in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One request: for text that continues a prompt, or for the prompt's vector.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Tokens to continue; at least one, and fewer than the context holds. Tokens to embed may fill it.
    pub prompt: Vec<u32>,
    /// Whether it asks for the vector of the prompt ([`Choice::vector`]) and no text. Embedding models answer such requests alone,
    /// and other models all others.
    pub embeds: bool,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Order of service between requests.
    pub priority: Priority,
    /// Time at which the request finishes with what it has generated.
    pub deadline: Option<Instant>,
    /// Requests share cached prefixes only if their salts are equal (a tenant's name, for example).
    pub salt: Vec<u8>,
    /// What every answer must match; end-of-text tokens end it where it allows them. `None`: any text.
    pub constraint: Option<Constraint>,
    /// Tokens that an earlier attempt generated. The choice continues after them, with the same result as
    /// without the interruption. Ignored with more than one choice or with log-probabilities, which the
    /// tokens alone cannot restore.
    pub resume: Vec<u32>,
}

/// A request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for a token in the context.
    #[error(
        "prompt has {tokens} tokens, but this model's maximum context length is {context_length} tokens{with_answer}"
    )]
    PromptTooLong {
        /// Length of the prompt.
        tokens: usize,
        /// Longest sequence, in tokens.
        context_length: usize,
        /// `, with the answer`, if there is to be one.
        with_answer: &'static str,
    },
    /// The model embeds texts and generates none.
    #[error("the model is an embedding model: it generates no text")]
    Embeds,
    /// The model generates text and embeds none.
    #[error("the model generates text and is not an embedding model")]
    Generates,
    /// The prompt is larger than the whole KV cache.
    #[error("prompt has {tokens} tokens, the KV cache holds {capacity}")]
    PromptExceedsCache {
        /// Length of the prompt.
        tokens: usize,
        /// Positions in all KV blocks.
        capacity: usize,
    },
    /// A token id outside the vocabulary.
    #[error("{field} has token {token}, the vocabulary has {vocab_size}")]
    TokenOutOfRange {
        /// Field with the token: `prompt`, `logit_bias` or `stop_tokens`.
        field: &'static str,
        /// The offending id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A sampling parameter outside its range.
    #[error(transparent)]
    InvalidParam(#[from] InvalidParam),
    /// The engine is full. Try again when a request has finished.
    #[error("engine already holds {requests} requests")]
    Full {
        /// Requests in the engine.
        requests: usize,
    },
}

impl SubmitError {
    /// Returns the invalid field of the request; `None` if the engine is full.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::EmptyPrompt | Self::PromptTooLong { .. } | Self::PromptExceedsCache { .. } => {
                Some("prompt")
            }
            Self::Embeds | Self::Generates => Some("model"),
            Self::TokenOutOfRange { field, .. } => Some(field),
            Self::InvalidParam(error) => Some(error.field),
            Self::Full { .. } => None,
        }
    }
}

/// An accepted request failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A step with the request failed.
    #[error("step failed")]
    Step(#[source] Arc<StepError>),
    /// No token can be drawn from the logits.
    #[error("no token can be drawn at position {position}")]
    Sample {
        /// Position of the token, from the start of the prompt.
        position: usize,
        /// The error in the logits.
        source: SampleError,
    },
    /// The model computed a vector without a direction.
    #[error("the prompt has no vector: its length is {length}")]
    NoDirection {
        /// Zero, infinite or not a number.
        length: f64,
    },
    /// The answer cannot go on as its grammar demands.
    #[error("structured output: {0}")]
    Grammar(#[from] GrammarError),
    /// The sequence needs more than the whole KV cache.
    #[error("sequence needs {needed} KV blocks, there are {total}")]
    OutOfBlocks {
        /// Blocks that its tokens take.
        needed: usize,
        /// Blocks in the cache.
        total: usize,
    },
    /// The sequence got no new token within the stall limit.
    #[error("no new token after {stalls} steps without work or preemptions")]
    NoProgress {
        /// Steps without work, and preemptions, since the newest token.
        stalls: u32,
    },
}

/// The reason a choice finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string was generated.
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// The request was cancelled ([`Engine::cancel`](crate::Engine::cancel)).
    Cancelled,
    /// The request's deadline has passed.
    Deadline,
    /// The request failed; see its error.
    Failed,
}

/// A generated token with its log-probability under the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Bytes of the token.
    pub bytes: Vec<u8>,
    /// Its log-probability; −∞ if its probability is zero.
    pub logprob: f32,
    /// The most probable tokens at its position, in descending order; `top` is empty in these.
    pub top: Vec<TokenLogprob>,
}

/// One generated answer to a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Index of the choice, from 0.
    pub index: u32,
    /// Every generated token, including the last one that ended the choice.
    pub tokens: Vec<u32>,
    /// Text of the tokens without special tokens, cut before the stop string or stop token.
    pub text: String,
    /// The reason it finished.
    pub finish_reason: FinishReason,
    /// The stop string that ended its text.
    pub stop_string: Option<String>,
    /// Log-probabilities of each token, if requested.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The prompt's vector, of length 1, if the request asked for it: there is no text then. // (hidden,)
    pub vector: Option<Vec<f32>>,
}

/// All choices of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Output {
    /// The `n` choices, in order.
    pub choices: Vec<Choice>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of all choices.
    pub completion_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache. Depends on earlier requests.
    pub cached_tokens: usize,
}

/// An event of a request in a step. Every accepted request ends with exactly one `Finished` or `Failed`;
/// the deltas of a choice add up to its tokens and its text.
#[derive(Debug, Clone)]
pub enum Event {
    /// A choice has new tokens or text.
    Delta {
        /// The request.
        id: RequestId,
        /// Index of the choice.
        choice: u32,
        /// New text that cannot change any more; may be empty.
        text: String,
        /// New tokens; may be empty.
        tokens: Vec<u32>,
        /// Log probabilities of the new tokens, if requested.
        logprobs: Vec<TokenLogprob>,
    },
    /// All choices have finished, or the request was cancelled or reached its deadline.
    Finished {
        /// The request.
        id: RequestId,
        /// The choices.
        output: Output,
    },
    /// The request failed.
    Failed {
        /// The request.
        id: RequestId,
        /// The reason.
        error: RequestError,
        /// The choices as far as they were generated.
        output: Output,
    },
}
