//! The outcome of an attempt at a job: an answer, or an error.

use serde::{Deserialize, Serialize};

use crate::{billing::Charge, job::ToolCall, vector::Embedded};

/// Reason for the end of a choice's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-text token, a stop string or a stop token.
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// The answer ended with calls of tools.
    ToolCalls,
}

impl FinishReason {
    /// OpenAI's name of the reason.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The limit that cut an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthLimit {
    /// The request's `max_tokens`.
    MaxTokens,
    /// The worker's own limit of answers without `max_tokens`.
    Worker,
    /// The end of the model's context.
    Context,
}

impl LengthLimit {
    /// Returns the name in answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MaxTokens => "max_tokens",
            Self::Worker => "worker",
            Self::Context => "context",
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
    /// What the model thought before it answered; the text is without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls of tools, in their order; the text is without them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Reason for the end of the text.
    pub finish_reason: FinishReason,
    /// The stop string that ended the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_string: Option<String>,
    /// What cut the text, if it was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length_limit: Option<LengthLimit>,
    /// Log probability of each generated token, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

impl Choice {
    /// Returns a choice with a text alone.
    pub fn new(index: u32, text: impl Into<String>, finish_reason: FinishReason) -> Self {
        Self {
            index,
            text: text.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            finish_reason,
            stop_string: None,
            length_limit: None,
            logprobs: None,
        }
    }
}

/// Token counts of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Generated tokens, over all choices.
    pub completion_tokens: u64,
    /// Tokens of the prompt that were not computed, because an earlier prompt began in the same way.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cached_tokens: u64,
    /// Generated tokens of what the model thought.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reasoning_tokens: u64,
}

impl Usage {
    /// Adds the tokens of another job.
    pub fn add(&mut self, other: Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.cached_tokens += other.cached_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Completion {
    /// Name of the model that answered.
    pub model: String,
    /// Numerics class of the worker: what a token depends on besides the job.
    pub fingerprint: String,
    /// The `n` choices, by index.
    pub choices: Vec<Choice>,
    /// Token counts.
    pub usage: Usage,
    /// The tokens that were asked for, instead of choices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenized: Option<Tokenized>,
    /// The vectors that were asked for, instead of choices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedded: Option<Embedded>,
    /// What it costs, if it has a price. The store fixes that when it records the answer: it is no part of the encoding.
    #[serde(skip)]
    pub charge: Option<Box<Charge>>,
}

/// The tokens of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokenized {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Their texts.
    pub texts: Vec<String>,
    /// Longest sequence of the model, in tokens.
    pub context_length: u64,
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

/// Size of an answer, estimated from above, that every store can read again: see
/// [`wire::decode`](crate::wire::decode).
const ANSWER_BYTES_MAX: usize = 60 << 20;
/// Encoded bytes of a token beside its text, at most.
const TOKEN_BYTES: usize = 40;

impl Outcome {
    /// Returns the outcome, or the error that takes its place because it could not be read again after it was
    /// stored: an answer that is too large, or one with a number that no JSON can hold.
    #[must_use]
    pub fn readable(self) -> Self {
        let Self::Completed(completion) = &self else { return self };
        let tokens = || completion.choices.iter().filter_map(|choice| choice.logprobs.as_ref());
        let tokens = || tokens().flatten();
        let of_choice = |choice: &Choice| {
            let calls = choice.tool_calls.iter().map(|call| call.name.len() + call.arguments.len());
            choice.text.len()
                + choice.reasoning.as_ref().map_or(0, String::len)
                + calls.sum::<usize>()
        };
        let text: usize = completion.choices.iter().map(of_choice).sum();
        // Each byte of a token is a number in a list, of two bytes at most.
        let of_token = |bytes: &[u8]| TOKEN_BYTES + 2 * bytes.len();
        let of_tokens = tokens().map(|token| {
            let top = token.top.iter().map(|top| of_token(&top.bytes)).sum::<usize>();
            of_token(&token.bytes) + top
        });
        let vectors = completion.embedded.iter().flat_map(|embedded| &embedded.vectors);
        // Four bytes of an element are less than six characters.
        let of_vectors: usize = vectors.map(|vector| 6 * vector.0.len()).sum();
        let size = text + of_tokens.sum::<usize>() + of_vectors;
        let is_finite = tokens().all(|token| {
            token.logprob.is_finite() && token.top.iter().all(|top| top.logprob.is_finite())
        });
        if size > ANSWER_BYTES_MAX {
            let message = format!("the answer has {size} bytes, the limit is {ANSWER_BYTES_MAX}");
            Self::Error(JobError::new(ErrorKind::InvalidRequest, "answer_too_large", message))
        } else if !is_finite {
            let message = "a log-probability of the answer is not a finite number";
            Self::Error(JobError::new(ErrorKind::Engine, "answer_not_finite", message))
        } else {
            self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;

    fn answer(tokens: usize, top: usize, logprob: f32) -> Outcome {
        let one = TopLogprob { token: u32::MAX, bytes: vec![255; 8], logprob };
        let token = TokenLogprob {
            token: u32::MAX,
            bytes: vec![255; 8],
            logprob: -1.5,
            top: vec![one; top],
        };
        Outcome::Completed(Completion {
            model: "m".to_owned(),
            fingerprint: "f".to_owned(),
            choices: vec![Choice {
                logprobs: Some(vec![token; tokens]),
                ..Choice::new(0, "x".repeat(tokens), FinishReason::Length)
            }],
            usage: Usage::default(),
            ..Completion::default()
        })
    }

    #[test]
    fn only_answers_that_can_be_read_again_are_stored() {
        // The largest request that is accepted: 1,048,576 log-probabilities.
        let largest = answer(1 << 16, 15, -2.5);
        assert_eq!(largest.clone().readable(), largest);
        assert_eq!(wire::decode::<Outcome>(&wire::encode(&largest)).expect("readable"), largest);
        let code = |outcome: Outcome| match outcome.readable() {
            Outcome::Error(error) => error.code,
            other => panic!("{other:?}"),
        };
        assert_eq!(code(answer(1 << 17, 15, -2.5)), "answer_too_large");
        assert_eq!(code(answer(2, 2, f32::NAN)), "answer_not_finite");
        assert_eq!(code(answer(2, 2, f32::NEG_INFINITY)), "answer_not_finite");
        assert_eq!(Outcome::Expired.readable(), Outcome::Expired);
    }
}
