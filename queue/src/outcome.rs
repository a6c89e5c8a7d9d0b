//! The outcome of an attempt at a job: an answer, or an error.

use serde::{Deserialize, Serialize};

/// Reason for the end of a choice's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-text token, a stop string or a stop token.
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
}

impl FinishReason {
    /// OpenAI's name of the reason.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// An alternative token at one position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// Token id.
    pub token: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural log of its probability; finite.
    pub logprob: f32,
}

/// The generated token at one position and its alternatives, most likely first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural log of its probability; finite.
    pub logprob: f32,
    /// The most likely alternatives, as many as the job requested.
    pub top: Vec<TopLogprob>,
}

/// One generated text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Index in `0..n`.
    pub index: u32,
    /// The text, without the stop string that ended it.
    pub text: String,
    /// Reason for the end of the text.
    pub finish_reason: FinishReason,
    /// Log probability of each generated token, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// Token counts of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Generated tokens, over all choices.
    pub completion_tokens: u64,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// Name of the model that answered.
    pub model: String,
    /// Numerics class of the worker: what a token depends on besides the job.
    pub fingerprint: String,
    /// The `n` choices, by index.
    pub choices: Vec<Choice>,
    /// Token counts.
    pub usage: Usage,
}

/// Kind of an error; decides whether the job is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// This model can never answer the request: no further attempt.
    InvalidRequest,
    /// The engine failed: another attempt may succeed.
    Engine,
    /// The worker lost its lease.
    LeaseLost,
}

/// An error that ended an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct JobError {
    /// Kind of the error.
    pub kind: ErrorKind,
    /// Code for programs, e.g. `context_length_exceeded`.
    pub code: String,
    /// Message for people.
    pub message: String,
    /// Name of the invalid field of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
}

impl JobError {
    /// Creates an error that is not about a field of the request.
    pub fn new(kind: ErrorKind, code: &str, message: impl Into<String>) -> Self {
        Self { kind, code: code.to_owned(), message: message.into(), param: None }
    }
}

/// Outcome of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// An answer.
    Completed(Completion),
    /// An error. The job is retried if the kind allows it and attempts are left; else it fails.
    Error(JobError),
    /// The deadline passed during the attempt.
    Expired,
}
