//! A job: one generation request, and the states it passes through.
//!
//! ```text
//! scheduled ─┐                        ┌─► completed
//!            ▼                        ├─► failed      (attempts used up: dead letter)
//! submit ─► queued ─claim─► running ──┼─► cancelled   (also from queued)
//!            ▲                │       └─► expired     (deadline; also from queued)
//!            └── retrying ◄───┘  error with attempts left, after backoff;
//!                                lease lost or handed back: queued at once
//! ```

use std::{
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    billing::Billing,
    sampling::{ANSWER_TOKENS_ESTIMATE, Sampling},
    trace::{self, TraceParent},
    vector::VectorFormat,
};
pub use crate::{
    conversation::{Content, Conversation, Message, Role, Tool, ToolCall, ToolChoice},
    job_id::{InvalidJobId, JobId},
    queue_name::{QueueName, QueueNameError},
};

/// Default number of attempts of a job.
pub const ATTEMPTS_DEFAULT: u32 = 3;

/// Milliseconds since the Unix epoch, on the store's clock.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// Returns this machine's clock. Leases and deadlines use the clock of the store.
    pub fn by_this_machine() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }

    /// Returns this time plus `duration`, saturating.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let ms = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(ms))
    }

    /// Returns this time minus `duration`, saturating.
    #[must_use]
    pub fn before(self, duration: Duration) -> Self {
        let ms = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        Self(self.0.saturating_sub(ms))
    }

    /// Returns the duration from `earlier` to this time; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Returns the whole seconds since the Unix epoch.
    pub fn seconds(self) -> i64 {
        self.0.div_euclid(1000)
    }
}

/// Owner of jobs and their results.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tenant(pub String);

impl Default for Tenant {
    fn default() -> Self {
        Self("default".to_owned())
    }
}

/// The three priorities of a queue, weighted 16:4:1.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Interactive work.
    High,
    /// The default.
    #[default]
    Normal,
    /// Background work; still gets its share under load.
    Low,
}

impl Priority {
    /// All priorities, highest first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// Returns the share of a queue under load.
    pub const fn weight(self) -> u32 {
        match self {
            Self::High => 16,
            Self::Normal => 4,
            Self::Low => 1,
        }
    }

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

/// A name is not among the values of an enumeration.
#[derive(Debug, thiserror::Error)]
#[error("unknown {what} '{word}'")]
pub struct UnknownWord {
    /// The kind of value that was expected.
    pub what: &'static str,
    /// The name that was found.
    pub word: String,
}

impl FromStr for Priority {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|priority| priority.as_str() == word)
            .ok_or_else(|| UnknownWord { what: "priority", word: word.to_owned() })
    }
}

/// State of a job. The module's diagram shows the transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// To run at a later time; the reconciler queues it then.
    Scheduled,
    /// Ready to run; a claim starts it.
    Queued,
    /// Under a worker's lease, until finish, hand-back, cancel or the end of the lease.
    Running,
    /// An attempt failed; the reconciler queues the job after the backoff.
    Retrying,
    /// Answered.
    Completed,
    /// Failed permanently: its attempts are used up or its request is invalid. A dead letter.
    Failed,
    /// Cancelled by its tenant or an operator.
    Cancelled,
    /// Its deadline passed.
    Expired,
}

impl JobState {
    /// All states.
    pub const ALL: [Self; 8] = [
        Self::Scheduled,
        Self::Queued,
        Self::Running,
        Self::Retrying,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
        Self::Expired,
    ];

    /// Returns whether the state is terminal.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled | Self::Expired)
    }

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Retrying => "retrying",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        }
    }
}

impl FromStr for JobState {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == word)
            .ok_or_else(|| UnknownWord { what: "job state", word: word.to_owned() })
    }
}

/// Input of the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// Literal text (`/v1/completions`).
    Text(String),
    /// A user's message for the model's chat template; literal text for a model without a template
    /// (`{"prompt": …}` lines).
    Question(String),
    /// A conversation for the model's chat template (`/v1/chat/completions`).
    Messages(Conversation),
    /// Literal token ids.
    Tokens(Vec<u32>),
    /// Several texts or lists of token ids: each is answered, in their order.
    Several(Vec<Prompt>),
}

impl Prompt {
    /// Returns the prompts that are answered: those of [`Several`](Self::Several), or this one.
    pub fn parts(&self) -> &[Self] {
        match self {
            Self::Several(parts) => parts,
            one => std::slice::from_ref(one),
        }
    }
}

/// What a job asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Answers.
    #[default]
    Generate,
    /// The tokens of the prompt.
    Tokenize {
        /// Whether a text gets the special tokens around it.
        special: bool,
        /// Whether a conversation ends where an answer begins.
        generation_prompt: bool,
    },
    /// The text of the tokens of the prompt.
    Detokenize,
    /// The vector of each prompt.
    Embed {
        /// How the answer writes them.
        format: VectorFormat,
    },
}

impl Task {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    fn is_generate(&self) -> bool {
        *self == Self::Generate
    }
}

/// One request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its identifier.
    pub id: JobId,
    /// Its owner.
    pub tenant: Tenant,
    /// Its queue.
    pub queue: QueueName,
    /// Its priority.
    pub priority: Priority,
    /// Input of the model.
    pub prompt: Prompt,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Seed of the sampler, given by the caller or derived from the request; stored so that every
    /// attempt draws the same tokens.
    pub seed: u64,
    /// Number of claims that may end in an error or a lost lease before the job is a dead letter;
    /// at least 1.
    pub attempts_max: u32,
    /// Earliest time of a claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_at: Option<Timestamp>,
    /// Deadline, after which the job expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// Whether workers publish the text while it is generated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stream: bool,
    /// Trace context of the submitter.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "trace::read")]
    pub traceparent: Option<TraceParent>,
    /// The caller's name for its line of a batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custom_id: Option<String>,
    /// The key of its line of a batch. A column of the store has it beside the request, so jobs that were read do not.
    #[serde(skip)]
    pub line_key: Option<[u8; 32]>,
    /// To which account it is charged.
    #[serde(skip)]
    pub billing: Billing,
    /// The shape of the answer of its line, in a batch of lines for several endpoints; kept as the key is.
    #[serde(skip)]
    pub line_shape: Option<&'static str>,
    /// What it asks for.
    #[serde(default, skip_serializing_if = "Task::is_generate")]
    pub task: Task,
    /// Parameters of the request that its answer repeats, such as `metadata`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub echo: Map<String, Value>,
}

/// Rough number of prompt bytes per token; only workers know exact counts.
const BYTES_PER_TOKEN: usize = 4;

impl Job {
    /// Number of answers: `n` to each prompt.
    pub fn choice_count(&self) -> u32 {
        choice_count(&self.prompt, &self.sampling)
    }

    /// Returns its `metadata` that can be searched, as a JSON object; `None` without any. Postgres' JSON has no NUL
    /// character, so a pair with one is left out.
    pub(crate) fn searched_metadata(&self) -> Option<String> {
        let Some(Value::Object(given)) = self.echo.get("metadata") else { return None };
        let pairs = given.iter().filter_map(|(name, value)| {
            let value = value.as_str()?;
            (!name.contains('\0') && !value.contains('\0')).then(|| (name.clone(), value.into()))
        });
        let pairs: Map<String, Value> = pairs.collect();
        (!pairs.is_empty()).then(|| Value::Object(pairs).to_string())
    }

    /// Estimated number of tokens: the prompt by its length, and the most that may be generated.
    pub fn cost(&self) -> u32 {
        let (prompt, generated) = estimated_tokens(&self.prompt, self.task, &self.sampling);
        prompt.saturating_add(generated).max(1)
    }
}

/// Returns the estimated number of tokens of a prompt, by its length, and the most that may be generated.
pub fn estimated_tokens(prompt: &Prompt, task: Task, sampling: &Sampling) -> (u32, u32) {
    fn tokens(prompt: &Prompt) -> usize {
        match prompt {
            Prompt::Text(text) | Prompt::Question(text) => text.len() / BYTES_PER_TOKEN,
            Prompt::Messages(conversation) => {
                conversation.texts().map(|text| text.len() / BYTES_PER_TOKEN).sum()
            }
            Prompt::Tokens(tokens) => tokens.len(),
            Prompt::Several(parts) => parts.iter().map(tokens).sum(),
        }
    }
    let each = match task {
        Task::Generate => sampling.max_tokens.unwrap_or(ANSWER_TOKENS_ESTIMATE),
        Task::Tokenize { .. } | Task::Detokenize | Task::Embed { .. } => 0,
    };
    let generated = each.saturating_mul(choice_count(prompt, sampling));
    (u32::try_from(tokens(prompt)).unwrap_or(u32::MAX), generated)
}

fn choice_count(prompt: &Prompt, sampling: &Sampling) -> u32 {
    let prompts = u32::try_from(prompt.parts().len()).unwrap_or(u32::MAX);
    sampling.n.saturating_mul(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_and_priorities_parse_their_names() {
        for state in JobState::ALL {
            assert_eq!(state.as_str().parse::<JobState>().expect("its own word"), state);
        }
        for priority in Priority::ALL {
            assert_eq!(priority.as_str().parse::<Priority>().expect("its own word"), priority);
        }
        assert!("done".parse::<JobState>().is_err());
    }
}
