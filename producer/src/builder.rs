//! [`JobBuilder`]: builds and checks a job.

use std::time::Duration;

use serde_json::{Map, Value};
use tritmill_queue::{
    Billing, Conversation, Grammar, Job, JobId, Message, Priority, Prompt, QueueName, Role,
    Sampling, SamplingError, Task, Tenant, Timestamp, TraceParent, TraceParentError, VectorFormat,
};

use crate::{
    body::Body,
    canonical::{canonical, derived_seed},
    client::{Client, ClientError},
};

/// The first invalid field of a job.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A sampling parameter is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The prompt is empty.
    #[error("prompt must not be empty")]
    EmptyPrompt,
    /// The model has no name.
    #[error("model must not be empty")]
    NoModel,
    /// The trace is not a W3C `traceparent`.
    #[error(transparent)]
    TraceParent(#[from] TraceParentError),
    /// The job has no attempts.
    #[error("attempts_max must be at least 1")]
    NoAttempts,
}

/// Builds a [`Job`] from typed values. Everything but model and prompt has a default.
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
    idempotency_key: Option<String>,
}

/// Setters that assign their argument to a field.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $kind:ty => $($field:ident).+;)*) => {
        impl JobBuilder {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $name: $kind) -> Self {
                    self.$($field).+ = $name.into();
                    self
                }
            )*
        }
    };
}

setters! {
    /// Sets the priority; the default is normal.
    priority: Priority => job.priority;
    /// Sets to which account the job is charged: the tier of its price, and an API key. Set the priority as well.
    billing: Billing => job.billing;
    /// Sets the tenant that owns the job; tenants share a queue fairly.
    tenant: Tenant => job.tenant;
    /// Sets how many attempts may end in an error or a lost lease before the job has failed.
    attempts_max: u32 => job.attempts_max;
    /// Sets the time before which the job does not run.
    run_at: Timestamp => job.run_at;
    /// Sets the deadline, on the store's clock ([`Client::now`]): after it the job expires.
    expires_at: Timestamp => job.expires_at;
    /// Sets the caller's name for the job.
    custom_id: String => job.custom_id;
    /// Sets what the job asks for: an answer, or the tokens or the text of its prompt.
    task: Task => job.task;
    /// Sets parameters of a request that its answer repeats, by name.
    echo: Map<String, Value> => job.echo;
    /// Sets the seed of the sampler. The default is derived from the job's id and kept with it, so
    /// that every attempt generates the same tokens.
    seed: u64 => seed;
    /// Sets the key under which [`submit`](Self::submit) accepts the job once.
    idempotency_key: String => idempotency_key;
    /// Sets all sampling parameters.
    sampling: Sampling => job.sampling;
    /// Sets the maximum number of generated tokens; without it, an answer may fill the model's context.
    max_tokens: u32 => job.sampling.max_tokens;
    /// Sets the minimum number of generated tokens before the text may end.
    min_tokens: u32 => job.sampling.min_tokens;
    /// Sets the temperature; 0 is greedy.
    temperature: f32 => job.sampling.temperature;
    /// Keeps this many of the most probable tokens; 0 keeps all.
    top_k: u32 => job.sampling.top_k;
    /// Keeps the smallest set of tokens with this probability; 1 keeps all.
    top_p: f32 => job.sampling.top_p;
    /// Keeps tokens with at least this share of the highest probability; 0 keeps all.
    min_p: f32 => job.sampling.min_p;
    /// Divides positive and multiplies negative logits of tokens in prompt and text; 1 is off.
    repetition_penalty: f32 => job.sampling.repetition_penalty;
    /// Is subtracted once from the logit of a generated token.
    presence_penalty: f32 => job.sampling.presence_penalty;
    /// Is subtracted from a token's logit for each time it was generated.
    frequency_penalty: f32 => job.sampling.frequency_penalty;
    /// Adds to the logits of tokens, by their ids.
    logit_bias: Vec<(u32, f32)> => job.sampling.logit_bias;
    /// Ends the text before the first of these strings.
    stop: Vec<String> => job.sampling.stop;
    /// Ends the text before the first of these tokens.
    stop_tokens: Vec<u32> => job.sampling.stop_tokens;
    /// Continues after end-of-text tokens.
    ignore_eos: bool => job.sampling.ignore_eos;
    /// Sets the number of independent choices.
    n: u32 => job.sampling.n;
    /// Returns log probabilities, with this many alternatives per position.
    logprobs: u32 => job.sampling.logprobs;
    /// Lets every answer match a JSON schema, a regular expression, one of several texts or a grammar.
    grammar: Grammar => job.sampling.grammar;
}

impl JobBuilder {
    fn new(model: &str, prompt: Prompt) -> Self {
        // `name@format`, or the default format.
        let (name, format) = model.split_once('@').unwrap_or((model, "i2_s"));
        let queue = QueueName { model: name.to_owned(), format: format.to_owned() };
        // `build` sets the seed.
        let body = Body {
            model: None,
            task: Task::Generate,
            prompt,
            sampling: Sampling::default(),
            seed: Some(0),
            metadata: Map::new(),
            tier: None,
            repeated: Map::new(),
        };
        let job = body.job(JobId::generate(), queue);
        Self { job, seed: None, traceparent: None, idempotency_key: None }
    }

    /// Creates a job that continues a text. `model` is `name` or `name@format`.
    pub fn text(model: &str, text: impl Into<String>) -> Self {
        Self::new(model, Prompt::Text(text.into()))
    }

    /// Creates a job that continues tokens.
    pub fn tokens(model: &str, tokens: Vec<u32>) -> Self {
        Self::new(model, Prompt::Tokens(tokens))
    }

    /// Creates a job that answers a question, put into the model's chat template.
    pub fn question(model: &str, text: impl Into<String>) -> Self {
        Self::new(model, Prompt::Question(text.into()))
    }

    /// Creates a job that continues a conversation of roles and texts, put into the model's chat
    /// template.
    pub fn chat<T: Into<String>>(model: &str, turns: impl IntoIterator<Item = (Role, T)>) -> Self {
        let message = |(role, text): (Role, T)| Message::new(role, text);
        let messages = turns.into_iter().map(message).collect();
        Self::new(model, Prompt::Messages(Conversation::new(messages)))
    }

    /// Creates a job that embeds texts: its result has [`Completion::embedded`](tritmill_queue::Completion::embedded) with a vector for
    /// each. The model must be an embedding model.
    ///
    /// ```
    /// use tritmill_client::JobBuilder;
    ///
    /// let job = JobBuilder::embed("bitnet-embedding", ["rivers in France", "the Loire"]).build()?;
    /// assert_eq!(job.prompt.parts().len(), 2);
    /// # Ok::<(), tritmill_client::BuildError>(())
    /// ```
    pub fn embed<T: Into<String>>(model: &str, texts: impl IntoIterator<Item = T>) -> Self {
        let mut texts: Vec<Prompt> =
            texts.into_iter().map(|text| Prompt::Text(text.into())).collect();
        let prompt = if texts.len() == 1 { texts.remove(0) } else { Prompt::Several(texts) };
        Self::new(model, prompt).task(Task::Embed { format: VectorFormat::default() })
    }

    /// Sets the deadline to this long after `now`, which [`Client::now`] returns.
    #[must_use]
    pub fn expires_after(self, now: Timestamp, limit: Duration) -> Self {
        self.expires_at(now.after(limit))
    }

    /// Lets [`Client::subscribe`] read the text while it is generated.
    #[must_use]
    pub fn stream(mut self) -> Self {
        self.job.stream = true;
        self
    }

    /// Sets the trace the job belongs to: a W3C `traceparent`, checked by [`build`](Self::build).
    #[must_use]
    pub fn traceparent(mut self, traceparent: &str) -> Self {
        self.traceparent = Some(traceparent.parse());
        self
    }

    /// Returns the job, without the idempotency key.
    ///
    /// # Errors
    /// The first field out of range.
    pub fn build(mut self) -> Result<Job, BuildError> {
        self.job.sampling.validate()?;
        if self.job.queue.model.is_empty() {
            return Err(BuildError::NoModel);
        }
        if self.job.attempts_max == 0 {
            return Err(BuildError::NoAttempts);
        }
        let is_empty = |prompt: &Prompt| match prompt {
            Prompt::Text(text) | Prompt::Question(text) => text.is_empty(),
            Prompt::Messages(conversation) => conversation.messages.is_empty(),
            Prompt::Tokens(tokens) => tokens.is_empty(),
            Prompt::Several(parts) => parts.is_empty(),
        };
        let parts = self.job.prompt.parts();
        if parts.is_empty() || parts.iter().any(is_empty) {
            return Err(BuildError::EmptyPrompt);
        }
        self.job.traceparent = self.traceparent.transpose()?;
        self.job.seed = self.seed.unwrap_or_else(|| derived_seed(&[self.job.id.as_bytes()]));
        Ok(self.job)
    }

    /// Builds and submits the job. With an idempotency key, a second call with equal parameters
    /// submits nothing and returns the first job's id; deadline and trace may differ.
    ///
    /// ```no_run
    /// # async fn example(client: tritmill_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use tritmill_client::JobBuilder;
    ///
    /// let job = JobBuilder::question("demo", "Due 3/3/24").idempotency_key("invoice-17".into());
    /// let id = job.submit(&client).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ClientError::Build`] for a field out of range, [`ClientError::Conflict`] if the key was used
    /// for a job with other parameters; else as [`Client::submit`].
    pub async fn submit(mut self, client: &Client) -> Result<JobId, ClientError> {
        let Some(key) = self.idempotency_key.take() else {
            return client.submit(self.build()?).await;
        };
        let request = self.request();
        let job = self.build()?;
        let ids = client.submit_once(&key, request.as_bytes(), std::slice::from_ref(&job)).await?;
        Ok(ids.first().copied().unwrap_or(job.id))
    }

    /// Returns the parameters that make two calls under one idempotency key equal.
    fn request(&self) -> String {
        let mut job = serde_json::json!(self.job);
        for field in ["id", "expires_at", "traceparent"] {
            job[field].take();
        }
        job["seed"] = serde_json::json!(self.seed);
        canonical(&job)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tritmill_queue::Tier;

    use super::*;

    #[test]
    fn first_field_out_of_range_is_named() {
        let fault = |builder: JobBuilder| builder.build().expect_err("out of range").to_string();
        assert!(fault(JobBuilder::text("m", "a").temperature(3.0)).contains("temperature"));
        assert!(fault(JobBuilder::text("m", "a").n(128).max_tokens(9000)).contains("with n 128"));
        assert!(fault(JobBuilder::text("m", "")).contains("prompt"));
        assert!(fault(JobBuilder::text("", "a")).contains("model"));
        assert!(fault(JobBuilder::text("m", "a").attempts_max(0)).contains("attempts_max"));
        assert!(fault(JobBuilder::text("m", "a").traceparent("00-1-2-3")).contains("traceparent"));
    }

    #[test]
    fn trace_is_kept() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let job = JobBuilder::text("m", "a").traceparent(text).build().expect("in range");
        assert_eq!(job.traceparent.map(|parent| parent.to_string()).as_deref(), Some(text));
    }

    #[test]
    fn seed_is_kept_or_derived_from_the_id() {
        let given = JobBuilder::text("m@tl2", "a").seed(7).build().expect("in range");
        assert_eq!((given.seed, given.queue.format.as_str()), (7, "tl2"));
        let one = JobBuilder::text("m", "a").build().expect("in range");
        let two = JobBuilder::text("m", "a").build().expect("in range");
        assert_ne!(one.seed, two.seed);
    }

    /// Returns a builder with no field at its default.
    fn with_everything() -> JobBuilder {
        JobBuilder::chat("m@tl1", [(Role::User, "a")])
            .priority(Priority::High)
            .billing(Billing { tier: Tier::Flex, key: None })
            .tenant(Tenant("t".to_owned()))
            .attempts_max(7)
            .run_at(Timestamp(1))
            .expires_after(Timestamp(1), Duration::from_millis(1))
            .custom_id("c".to_owned())
            .task(Task::Detokenize)
            .echo(Map::from_iter([("metadata".to_owned(), json!({}))]))
            .seed(8)
            .stream()
            .traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
            .idempotency_key("k".to_owned())
            .max_tokens(9)
            .min_tokens(1)
            .temperature(0.5)
            .top_k(2)
            .top_p(0.5)
            .min_p(0.5)
            .repetition_penalty(2.0)
            .presence_penalty(0.5)
            .frequency_penalty(0.5)
            .logit_bias(vec![(1, 0.5)])
            .stop(vec!["s".to_owned()])
            .stop_tokens(vec![1])
            .ignore_eos(true)
            .n(2)
            .logprobs(3)
            .grammar(Grammar::of_schema(&json!({ "type": "integer" })))
    }

    /// Returns the fields of a struct by their names, from its `Debug` text: JSON leaves out
    /// defaults.
    fn fields(value: &impl std::fmt::Debug) -> Vec<String> {
        let text = format!("{value:#?}");
        let mut fields: Vec<String> = Vec::new();
        for line in text.lines().skip(1) {
            match line.strip_prefix("    ").filter(|line| !line.starts_with([' ', '}', ')', ']'])) {
                Some(line) => fields.push(line.to_owned()),
                None => fields.last_mut().into_iter().for_each(|field| field.push_str(line)),
            }
        }
        fields
    }

    #[test]
    fn every_field_of_a_job_can_be_set() {
        let plain = JobBuilder::text("m", "a").build().expect("in range");
        let full = with_everything().build().expect("in range");
        let pairs =
            [(fields(&plain), fields(&full)), (fields(&plain.sampling), fields(&full.sampling))];
        for (plain, full) in pairs {
            assert!(plain.len() == full.len() && plain.len() > 10, "{plain:?}");
            // Only lines of batches have a key and a shape.
            let pairs = plain.iter().zip(&full).filter(|(field, _)| !field.starts_with("line_"));
            for (plain, full) in pairs {
                assert_ne!(plain, full, "a field that the builder does not set");
            }
        }
    }

    #[test]
    fn every_parameter_of_a_request_has_a_setter() {
        let everything: Value = json!({
            "messages": [{ "role": "user", "content": "a" }],
            "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_k": 2, "top_p": 0.5,
            "min_p": 0.5, "repetition_penalty": 2.0, "presence_penalty": 0.5,
            "frequency_penalty": 0.5, "logit_bias": { "1": 0.5 }, "stop": ["s"],
            "stop_token_ids": [1], "ignore_eos": true, "n": 2, "logprobs": true,
            "top_logprobs": 3, "seed": 8,
            "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": { "type": "integer" } } },
        });
        let map: Map<String, Value> = everything.as_object().cloned().unwrap_or_default();
        let body = crate::parse_body(crate::Endpoint::Chat, map).expect("a body");
        let job = with_everything().build().expect("in range");
        assert_eq!((body.sampling, body.prompt), (job.sampling, job.prompt));
        assert_eq!(body.seed, Some(job.seed));
    }

    #[test]
    fn repeated_request_is_equal_except_for_deadline_and_trace() {
        let base = || JobBuilder::text("m", "a").idempotency_key("k".to_owned());
        let later = base().expires_at(Timestamp(5)).traceparent("anything");
        assert_eq!(base().request(), later.request());
        assert_ne!(base().request(), base().seed(0).request());
        assert_ne!(base().request(), base().max_tokens(3).request());
    }
}
