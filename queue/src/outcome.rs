//! How an attempt at a job ended: an answer, a refusal, or an error worth another attempt.

use serde::{Deserialize, Serialize};

/// Why a choice's text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-text token, a stop string or a stop token.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

impl FinishReason {
    /// OpenAI's word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// An alternative at one position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// Token id.
    pub token: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural log of its probability; finite.
    pub logprob: f32,
}

/// The generated token at one position and its alternatives, likeliest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural log of its probability; finite.
    pub logprob: f32,
    /// As many as the job asked for.
    pub top: Vec<TopLogprob>,
}

/// One generated text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// `0..n`.
    pub index: u32,
    /// The text, without the stop string that ended it.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Per generated token, when asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

/// Tokens a job took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated, over all choices.
    pub completion_tokens: u64,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// Name of the model that answered.
    pub model: String,
    /// What a token depends on besides the job: the model's numerics class.
    pub fingerprint: String,
    /// `n` choices, by index.
    pub choices: Vec<Choice>,
    /// Tokens it took.
    pub usage: Usage,
}

/// Whose fault an error is, and so what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request can never be answered by this model: no further attempt.
    InvalidRequest,
    /// The engine failed; another attempt may do better.
    Engine,
    /// A worker lost its lease.
    LeaseLost,
}

/// An error that ended an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct JobError {
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// A word for programs, e.g. `context_length_exceeded`.
    pub code: String,
    /// A sentence for people.
    pub message: String,
    /// The request's field at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Answered.
    Completed(Completion),
    /// An error. The job is retried if its kind allows and attempts are left, else failed.
    Error(JobError),
    /// The deadline passed while it ran.
    Expired,
}
