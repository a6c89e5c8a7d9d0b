//! What goes into the engine and what comes out.

use std::{sync::Arc, time::Instant};

use crate::{
    backend::StepError,
    sampler::{InvalidParam, SampleError, SamplingParams},
    scheduler::Priority,
};

/// Number of a request inside one engine; grows with arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One generation request.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Tokens to continue; at least one, and at least one fewer than the context holds.
    pub prompt: Vec<u32>,
    /// How to continue them.
    pub sampling: SamplingParams,
    /// Who goes first.
    pub priority: Priority,
    /// When to give up and return what there is.
    pub deadline: Option<Instant>,
    /// Requests share cached prefixes only with the same salt (a tenant's name, say).
    pub salt: Vec<u8>,
    /// Tokens that an earlier attempt generated: the answer goes on behind them and ends as it would
    /// have. Ignored where they cannot stand for all that was lost: more than one choice, or
    /// log-probabilities.
    pub resume: Vec<u32>,
}

/// Why a request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// There is nothing to continue.
    #[error("prompt is empty")]
    EmptyPrompt,
    /// Not even one token could follow.
    #[error("prompt has {tokens} tokens, the context holds {context_length} with the answer")]
    PromptTooLong {
        /// Length of the prompt.
        tokens: usize,
        /// Longest sequence.
        context_length: usize,
    },
    /// The KV cache could not hold the prompt even alone.
    #[error("prompt has {tokens} tokens, the KV cache holds {capacity}")]
    PromptExceedsCache {
        /// Length of the prompt.
        tokens: usize,
        /// Positions in all KV blocks.
        capacity: usize,
    },
    /// A token id the model does not have.
    #[error("{field} has token {token}, the vocabulary has {vocab_size}")]
    TokenOutOfRange {
        /// `prompt`, `logit_bias` or `stop_tokens`.
        field: &'static str,
        /// The offending id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A sampling parameter outside its range.
    #[error(transparent)]
    InvalidParam(#[from] InvalidParam),
    /// The engine holds as many requests as it may. Try again when one has ended.
    #[error("engine already holds {requests} requests")]
    Full {
        /// Requests in the engine.
        requests: usize,
    },
}

impl SubmitError {
    /// The field of the request that is at fault, unless the engine is full.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::EmptyPrompt | Self::PromptTooLong { .. } | Self::PromptExceedsCache { .. } => {
                Some("prompt")
            }
            Self::TokenOutOfRange { field, .. } => Some(field),
            Self::InvalidParam(error) => Some(error.field),
            Self::Full { .. } => None,
        }
    }
}

/// Why an accepted request failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The step it took part in did not run.
    #[error("step failed")]
    Step(#[source] Arc<StepError>),
    /// No token can be drawn from its logits.
    #[error("no token can be drawn at position {position}")]
    Sample {
        /// Position of the token, from the start of the prompt.
        position: usize,
        /// What is wrong with the logits.
        source: SampleError,
    },
    /// It outgrew the whole KV cache.
    #[error("sequence needs {needed} KV blocks, there are {total}")]
    OutOfBlocks {
        /// Blocks its tokens take.
        needed: usize,
        /// Blocks in the cache.
        total: usize,
    },
    /// It got no new token for too long.
    #[error("no new token after {stalls} steps without work or preemptions")]
    NoProgress {
        /// Steps without work, and preemptions, since the newest token.
        stalls: u32,
    },
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
    /// [`Engine::cancel`](crate::Engine::cancel).
    Cancelled,
    /// The request's deadline.
    Deadline,
    /// The request failed; see its error.
    Failed,
}

/// A generated token with its log-probability under the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Bytes it stands for.
    pub bytes: Vec<u8>,
    /// Its log-probability; −∞ if the model gave it no chance.
    pub logprob: f32,
    /// The most probable tokens at its place, in descending order. Empty in these themselves.
    pub top: Vec<TokenLogprob>,
}

/// One answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Number of the answer, from 0.
    pub index: u32,
    /// Every generated token, including the one that ended the answer.
    pub tokens: Vec<u32>,
    /// Text of the tokens without special tokens, cut before the stop string or stop token.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// One for each token, if asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// All answers to a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// `n` answers, in order.
    pub choices: Vec<Choice>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// Tokens of the prompt that the prefix cache spared. Depends on what ran before.
    pub cached_tokens: usize,
}

/// What a step did for a request. Every accepted request ends with exactly one `Finished` or
/// `Failed`; the deltas of a choice add up to its tokens and its text.
#[derive(Debug, Clone)]
pub enum Event {
    /// A choice has grown.
    Delta {
        /// The request.
        id: RequestId,
        /// Number of the choice.
        choice: u32,
        /// New certain text; may be empty.
        text: String,
        /// New tokens; may be empty.
        tokens: Vec<u32>,
    },
    /// All choices have ended, or the request was cancelled or ran into its deadline.
    Finished {
        /// The request.
        id: RequestId,
        /// The answers.
        output: Output,
    },
    /// The request cannot be answered.
    Failed {
        /// The request.
        id: RequestId,
        /// Why.
        error: RequestError,
        /// The answers as far as they got.
        output: Output,
    },
}
