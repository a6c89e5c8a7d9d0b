//! [`JobBuilder`]: a job from typed parts, checked before it goes anywhere.

use std::time::Duration;

use tritmill_queue::{
    Job, JobId, Message, Priority, Prompt, QueueName, Role, Sampling, SamplingError, Tenant,
    Timestamp, TraceParent, TraceParentError, job::ATTEMPTS_DEFAULT,
};

use crate::canonical::{Purpose, hash};

/// What is wrong with a job, by the field's name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A sampling parameter outside its range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// There is nothing to answer.
    #[error("prompt must not be empty")]
    EmptyPrompt,
    /// The model has no name.
    #[error("model must not be empty")]
    NoModel,
    /// A trace that is none.
    #[error(transparent)]
    TraceParent(#[from] TraceParentError),
    /// At least one attempt is needed.
    #[error("attempts_max must be at least 1")]
    NoAttempts,
}

/// Builds a [`Job`].
///
/// ```
/// use tritmill_client::JobBuilder;
///
/// let job = JobBuilder::question("demo", "Paid on the 3rd of March, 2024")
///     .max_tokens(16)
///     .temperature(0.0)
///     .build()?;
/// assert_eq!(job.queue.to_string(), "demo@i2_s");
/// # Ok::<(), tritmill_client::BuildError>(())
/// ```
#[derive(Debug, Clone)]
pub struct JobBuilder {
    job: Job,
    seed: Option<u64>,
    traceparent: Option<Result<TraceParent, TraceParentError>>,
}

impl JobBuilder {
    fn new(model: &str, prompt: Prompt) -> Self {
        // `name@format`; the default format where none is said.
        let (name, format) = model.split_once('@').unwrap_or((model, "i2_s"));
        let job = Job {
            id: JobId::generate(),
            tenant: Tenant::default(),
            queue: QueueName { model: name.to_owned(), format: format.to_owned() },
            priority: Priority::default(),
            prompt,
            sampling: Sampling::default(),
            seed: 0,
            attempts_max: ATTEMPTS_DEFAULT,
            run_at: None,
            expires_at: None,
            stream: false,
            traceparent: None,
            custom_id: None,
        };
        Self { job, seed: None, traceparent: None }
    }

    /// Text to continue as it stands. `model` is `name` or `name@format`.
    pub fn text(model: &str, text: impl Into<String>) -> Self {
        Self::new(model, Prompt::Text(text.into()))
    }

    /// Tokens to continue.
    pub fn tokens(model: &str, tokens: Vec<u32>) -> Self {
        Self::new(model, Prompt::Tokens(tokens))
    }

    /// A question, put into the model's chat template.
    pub fn question(model: &str, text: impl Into<String>) -> Self {
        Self::new(model, Prompt::Question(text.into()))
    }

    /// A conversation, by role and text, put into the model's chat template.
    pub fn chat<T: Into<String>>(model: &str, turns: impl IntoIterator<Item = (Role, T)>) -> Self {
        let message = |(role, text): (Role, T)| Message { role, content: text.into(), name: None };
        Self::new(model, Prompt::Messages(turns.into_iter().map(message).collect()))
    }

    /// How urgent it is.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.job.priority = priority;
        self
    }

    /// Tokens to generate at most.
    #[must_use]
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.job.sampling.max_tokens = tokens;
        self
    }

    /// 0 is greedy.
    #[must_use]
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.job.sampling.temperature = temperature;
        self
    }

    /// All sampling parameters at once.
    #[must_use]
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.job.sampling = sampling;
        self
    }

    /// Seed of the sampler; without one it is derived from the job's id and kept with it.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Claims that may end in an error or a lost lease before the job is a dead letter.
    #[must_use]
    pub fn attempts_max(mut self, attempts: u32) -> Self {
        self.job.attempts_max = attempts;
        self
    }

    /// Not before this time.
    #[must_use]
    pub fn run_at(mut self, at: Timestamp) -> Self {
        self.job.run_at = Some(at);
        self
    }

    /// Not later than this long after `now`.
    #[must_use]
    pub fn expires_after(mut self, now: Timestamp, limit: Duration) -> Self {
        self.job.expires_at = Some(now.after(limit));
        self
    }

    /// Lets [`Client::subscribe`](crate::Client::subscribe) read the text while it is generated.
    #[must_use]
    pub fn stream(mut self) -> Self {
        self.job.stream = true;
        self
    }

    /// The trace it belongs to: a W3C `traceparent`, checked by [`build`](Self::build). A submission
    /// that is repeated under its key may come with another one.
    #[must_use]
    pub fn traceparent(mut self, traceparent: &str) -> Self {
        self.traceparent = Some(traceparent.parse());
        self
    }

    /// The job, if everything about it is in range.
    ///
    /// # Errors
    /// The first field that is not.
    pub fn build(mut self) -> Result<Job, BuildError> {
        self.job.sampling.validate()?;
        if self.job.queue.model.is_empty() {
            return Err(BuildError::NoModel);
        }
        if self.job.attempts_max == 0 {
            return Err(BuildError::NoAttempts);
        }
        let empty = match &self.job.prompt {
            Prompt::Text(text) | Prompt::Question(text) => text.is_empty(),
            Prompt::Messages(messages) => messages.is_empty(),
            Prompt::Tokens(tokens) => tokens.is_empty(),
        };
        if empty {
            return Err(BuildError::EmptyPrompt);
        }
        self.job.traceparent = self.traceparent.transpose()?;
        self.job.seed = self.seed.unwrap_or_else(|| {
            let [a, b, c, d, e, f, g, h, ..] = hash(Purpose::Seed, &[self.job.id.as_bytes()]);
            u64::from_le_bytes([a, b, c, d, e, f, g, h])
        });
        Ok(self.job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_field_out_of_range_is_named() {
        let fault = |builder: JobBuilder| builder.build().expect_err("out of range").to_string();
        assert!(fault(JobBuilder::text("m", "a").temperature(3.0)).contains("temperature"));
        assert!(fault(JobBuilder::text("m", "")).contains("prompt"));
        assert!(fault(JobBuilder::text("", "a")).contains("model"));
        assert!(fault(JobBuilder::text("m", "a").attempts_max(0)).contains("attempts_max"));
        assert!(fault(JobBuilder::text("m", "a").traceparent("00-1-2-3")).contains("traceparent"));
    }

    #[test]
    fn a_trace_is_kept() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let job = JobBuilder::text("m", "a").traceparent(text).build().expect("in range");
        assert_eq!(job.traceparent.map(|parent| parent.to_string()).as_deref(), Some(text));
    }

    #[test]
    fn a_seed_is_kept_and_one_is_derived_where_none_was_given() {
        let given = JobBuilder::text("m@tl2", "a").seed(7).build().expect("in range");
        assert_eq!((given.seed, given.queue.format.as_str()), (7, "tl2"));
        let one = JobBuilder::text("m", "a").build().expect("in range");
        let two = JobBuilder::text("m", "a").build().expect("in range");
        assert_ne!(one.seed, two.seed);
    }
}
