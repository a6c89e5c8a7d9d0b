//! Parses the body of a request: prompt and sampling parameters, by OpenAI's names and by vLLM's for
//! what OpenAI lacks. An unsupported parameter that would change the answer is refused by its name;
//! one that would not (`user`, `metadata`, `store`, …) is checked and has no effect. `service_tier` decides the priority.

use serde_json::{Map, Value};
use tritmill_queue::{
    Billing, Conversation, Grammar, Job, JobId, Priority, Prompt, QueueName, Sampling, Task,
    Tenant, Tier, VectorFormat,
    job::{ATTEMPTS_DEFAULT, estimated_tokens},
    sampling::RESULT_TOKENS_LIMIT,
};

use crate::{
    anthropic::{Purpose, parse_message},
    canonical::derived_seed,
    fields::{FieldError, Fields, brief, whole},
    messages::messages,
    responses, structured,
    tools::{Tools, tools},
};

/// The endpoint of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/messages`: Anthropic's
    Messages,
    /// `/v1/responses`
    Responses,
    /// A line with a body only: `{"prompt": …}`.
    Plain,
}

impl Endpoint {
    /// The endpoints of batches.
    pub const OF_BATCHES: [Self; 5] =
        [Self::Chat, Self::Completions, Self::Embeddings, Self::Messages, Self::Responses];

    /// Returns the endpoint of batches with this path.
    pub fn of_batch(path: &str) -> Option<Self> {
        Self::OF_BATCHES.into_iter().find(|endpoint| endpoint.as_str() == path)
    }

    /// Returns the paths of batches for a message: `'/v1/…', '/v1/…' or '/v1/…'`.
    pub fn batch_paths() -> String {
        let [others @ .., last] = Self::OF_BATCHES.map(Self::as_str);
        format!("'{}' or '{last}'", others.join("', '"))
    }

    /// Returns its path, as in the `url` of a batch line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
            Self::Plain => "plain",
        }
    }

    /// Returns the form of its answers: `chat`, `completion`, `embedding`, `message` or `response`.
    pub const fn shape(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions | Self::Plain => "completion",
            Self::Embeddings => "embedding",
            Self::Messages => "message",
            Self::Responses => "response",
        }
    }
}

/// Default of `max_tokens` of `/v1/completions`, OpenAI's: a text that is continued has no end of its own.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;
/// Most prompts of a request.
const PROMPTS_MAX: usize = 1024;
/// Most texts of a request for vectors: OpenAI's limit.
const EMBEDDED_TEXTS_MAX: usize = 2048;

/// A parsed body.
#[derive(Debug, Clone, PartialEq)]
pub struct Body {
    /// `name` or `name@format`, if given.
    pub model: Option<String>,
    /// What it asks for.
    pub task: Task,
    /// Input of the model.
    pub prompt: Prompt,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Seed, if given.
    pub seed: Option<u64>,
    /// The caller's pairs of names and texts.
    pub metadata: Map<String, Value>,
    /// The tier, if one is given: it decides the priority and the price.
    pub tier: Option<Tier>,
    /// What the answer repeats of the request besides the metadata, by name.
    pub repeated: Map<String, Value>,
}

impl Body {
    /// Returns the estimated number of tokens of its prompt, and the most that may be generated.
    pub fn estimated_tokens(&self) -> (u32, u32) {
        estimated_tokens(&self.prompt, self.task, &self.sampling)
    }

    /// Returns the job that answers it. Without a seed, one is derived from its id.
    pub fn job(self, id: JobId, queue: QueueName) -> Job {
        let mut echo = self.repeated;
        if !self.metadata.is_empty() {
            echo.insert("metadata".to_owned(), Value::Object(self.metadata));
        }
        Job {
            id,
            tenant: Tenant::default(),
            queue,
            priority: self.tier.map_or_else(Priority::default, Tier::priority),
            prompt: self.prompt,
            sampling: self.sampling,
            seed: self.seed.unwrap_or_else(|| derived_seed(&[id.as_bytes()])),
            attempts_max: ATTEMPTS_DEFAULT,
            run_at: None,
            expires_at: None,
            stream: false,
            traceparent: None,
            task: self.task,
            echo,
            custom_id: None,
            line_key: None,
            billing: Billing { tier: self.tier.unwrap_or_default(), key: None },
            line_shape: None,
        }
    }
}

/// Parses a body. A caller that can stream takes `stream` and `stream_options` out first.
///
/// # Errors
/// The first field that cannot be used.
pub fn parse_body(endpoint: Endpoint, map: Map<String, Value>) -> Result<Body, FieldError> {
    match endpoint {
        Endpoint::Messages => return parse_message(map, Purpose::Answer),
        Endpoint::Responses => return responses::parse_line(map),
        _ => {}
    }
    let mut fields = Fields::new(map, "");
    let metadata = without_effect(&mut fields)?;
    let tier = tier(&mut fields)?;
    let model = fields.text("model")?;
    if fields.boolean("stream")? == Some(true) {
        let problem = match endpoint {
            Endpoint::Embeddings => "must be false: vectors come at once",
            _ => "must be false in a batch",
        };
        return Err(FieldError::new("stream", "unsupported_value", problem));
    }
    match endpoint {
        Endpoint::Embeddings => embeddings(fields, Named { model, metadata, tier }),
        _ => generation(endpoint, fields, Named { model, metadata, tier }),
    }
}

/// Parses the rest of a request for text.
fn generation(
    endpoint: Endpoint,
    mut fields: Fields,
    Named { model, metadata, tier }: Named,
) -> Result<Body, FieldError> {
    let is_chat = endpoint == Endpoint::Chat;
    let prompt = match is_chat {
        true => Prompt::Messages(conversation(&mut fields)?),
        false => prompt(endpoint, &mut fields)?,
    };
    let limit_name = match fields.has("max_completion_tokens") {
        true => "max_completion_tokens",
        false => "max_tokens",
    };
    let mut sampling = sampling(&mut fields)?;
    if endpoint == Endpoint::Completions {
        sampling.max_tokens.get_or_insert(COMPLETION_TOKENS_DEFAULT);
    }
    match is_chat {
        true => chat_only(&mut fields, &mut sampling)?,
        false => completions_only(&mut fields, &mut sampling)?,
    }
    let seed = fields.bits("seed")?;
    fields.finish()?;
    sampling.validate().map_err(|error| {
        let problem = format!("must be {}, got {}", error.expected, error.found);
        let field = match (is_chat, error.field) {
            (true, "logprobs") => "top_logprobs",
            (_, "max_tokens") => limit_name,
            (_, field) => field,
        };
        FieldError::new(field, "invalid_value", problem)
    })?;
    check_choices(&prompt, &sampling)?;
    check_tools(&prompt, &sampling)?;
    Ok(Body {
        model,
        task: Task::Generate,
        prompt,
        sampling,
        seed,
        metadata,
        tier,
        repeated: Map::new(),
    })
}

/// Parses the rest of a request for vectors.
fn embeddings(
    mut fields: Fields,
    Named { model, metadata, tier }: Named,
) -> Result<Body, FieldError> {
    let prompt = prompt(Endpoint::Embeddings, &mut fields)?;
    let format = match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => VectorFormat::Float,
        Some("base64") => VectorFormat::Base64,
        Some(other) => {
            let found = crate::fields::shorten(other);
            let problem = format!("must be 'float' or 'base64', got '{found}'");
            return Err(FieldError::new("encoding_format", "invalid_value", problem));
        }
    };
    if fields.take("dimensions").is_some() {
        let problem = "is not supported: vectors have the dimensions of the model";
        return Err(FieldError::new("dimensions", "unsupported_value", problem));
    }
    fields.finish()?;
    let (task, sampling) = (Task::Embed { format }, Sampling::default());
    // Nothing is drawn.
    let seed = Some(0);
    Ok(Body { model, task, prompt, sampling, seed, metadata, tier, repeated: Map::new() })
}

/// What a request says besides what it asks for.
struct Named {
    model: Option<String>,
    metadata: Map<String, Value>,
    tier: Option<Tier>,
}

/// Takes the tier; `None` for `auto`.
fn tier(fields: &mut Fields) -> Result<Option<Tier>, FieldError> {
    const TIERS: [&str; 5] = ["auto", "default", "flex", "priority", "scale"];
    const NAME: &str = "service_tier";
    let Some(word) = fields.text(NAME)? else { return Ok(None) };
    match word.as_str() {
        "auto" => Ok(None),
        "default" | "scale" => Ok(Some(Tier::Default)),
        "flex" => Ok(Some(Tier::Flex)),
        "priority" => Ok(Some(Tier::Priority)),
        _ => Err(not_among(NAME, &TIERS, &word)),
    }
}

fn not_among(name: &str, words: &[&str], found: &str) -> FieldError {
    let found = crate::fields::shorten(found);
    let problem = format!("must be one of {}, got '{found}'", words.join(", "));
    FieldError::new(name, "invalid_value", problem)
}

/// Takes the parameters that do not change an answer; returns the metadata.
fn without_effect(fields: &mut Fields) -> Result<Map<String, Value>, FieldError> {
    /// What OpenAI allows.
    const PAIRS_MAX: usize = 16;
    const NAME_MAX: usize = 64;
    const TEXT_MAX: usize = 512;
    const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];
    for name in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        fields.text(name)?;
    }
    fields.boolean("store")?;
    if let Some(word) = fields.text("verbosity")?.filter(|word| !VERBOSITIES.contains(&&**word)) {
        return Err(not_among("verbosity", &VERBOSITIES, &word));
    }
    let metadata = match fields.take("metadata") {
        None => return Ok(Map::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(FieldError::wrong_type("metadata", "an object", &other)),
    };
    if metadata.len() > PAIRS_MAX {
        let problem = format!("has {} texts, at most {PAIRS_MAX} fit", metadata.len());
        return Err(FieldError::new("metadata", "invalid_value", problem));
    }
    for (name, value) in &metadata {
        let path = format!("metadata.{}", crate::fields::shorten(name));
        let Value::String(text) = value else {
            return Err(FieldError::wrong_type(path, "a string", value));
        };
        if name.chars().count() > NAME_MAX || text.chars().count() > TEXT_MAX {
            let problem =
                format!("is longer than {NAME_MAX} characters of name and {TEXT_MAX} of text");
            return Err(FieldError::new(path, "invalid_value", problem));
        }
    }
    Ok(metadata)
}

/// Parses the messages, and what else the model's chat template gets.
fn conversation(fields: &mut Fields) -> Result<Conversation, FieldError> {
    let messages = messages(fields)?;
    let Tools { tools, choice, one_call } = tools(fields)?;
    let template_arguments = template_arguments(fields)?;
    Ok(Conversation { messages, tools, tool_choice: choice, one_call, template_arguments })
}

/// Takes vLLM's `chat_template_kwargs`, and OpenAI's `reasoning_effort`, which templates know by that name.
fn template_arguments(fields: &mut Fields) -> Result<Map<String, Value>, FieldError> {
    const NAME: &str = "chat_template_kwargs";
    const EFFORT: &str = "reasoning_effort";
    const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
    /// What a template gets from the request itself.
    const TAKEN: [&str; 4] = ["messages", "tools", "add_generation_prompt", "documents"];
    let mut arguments = match fields.take(NAME) {
        None => Map::new(),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(FieldError::wrong_type(NAME, "an object", &other)),
    };
    if let Some(name) = arguments.keys().find(|name| TAKEN.contains(&name.as_str())) {
        let problem = "cannot be given to a template";
        return Err(FieldError::new(format!("{NAME}.{name}"), "invalid_value", problem));
    }
    if let Some(effort) = fields.text(EFFORT)? {
        if !EFFORTS.contains(&effort.as_str()) {
            let problem = format!(
                "must be one of {}, got '{}'",
                EFFORTS.join(", "),
                crate::fields::shorten(&effort)
            );
            return Err(FieldError::new(EFFORT, "invalid_value", problem));
        }
        arguments.entry(EFFORT).or_insert(effort.into());
    }
    Ok(arguments)
}

/// Checks that tools and what else an answer must match go together: a call or a JSON text.
fn check_tools(prompt: &Prompt, sampling: &Sampling) -> Result<(), FieldError> {
    let Prompt::Messages(Conversation { tools, tool_choice, .. }) = prompt else { return Ok(()) };
    let is_json =
        |grammar: &Grammar| matches!(grammar, Grammar::JsonObject | Grammar::JsonSchema(_));
    let other = sampling.grammar.as_ref().filter(|grammar| !is_json(grammar));
    match other {
        Some(grammar) if !tools.is_empty() && !tool_choice.is_required() => {
            let problem = format!("cannot be combined with a {}", grammar.kind());
            Err(FieldError::new("tools", "unsupported_value", problem))
        }
        _ => Ok(()),
    }
}

/// Checks that the answers to several prompts fit into one result.
fn check_choices(prompt: &Prompt, sampling: &Sampling) -> Result<(), FieldError> {
    let prompts = prompt.parts().len() as u64;
    let each = u64::from(sampling.n) * (1 + u64::from(sampling.logprobs.unwrap_or(0)));
    let Some(max_tokens) = sampling.max_tokens else { return Ok(()) };
    let tokens = each * u64::from(max_tokens);
    if prompts > 1 && prompts * tokens > RESULT_TOKENS_LIMIT {
        let problem = format!(
            "has {prompts} prompts, at most {} fit with these n, max_tokens and logprobs (the limit of prompts × n × \
             max_tokens × (1 + logprobs) is {RESULT_TOKENS_LIMIT})",
            RESULT_TOKENS_LIMIT / tokens
        );
        return Err(FieldError::new("prompt", "invalid_value", problem));
    }
    Ok(())
}

/// Parses the parameters of both endpoints.
fn sampling(fields: &mut Fields) -> Result<Sampling, FieldError> {
    let default = Sampling::default();
    Ok(Sampling {
        max_tokens: max_tokens(fields)?,
        min_tokens: fields.count("min_tokens")?.unwrap_or(default.min_tokens),
        temperature: fields.number("temperature")?.unwrap_or(default.temperature),
        top_k: top_k(fields)?.unwrap_or(default.top_k),
        top_p: fields.number("top_p")?.unwrap_or(default.top_p),
        min_p: fields.number("min_p")?.unwrap_or(default.min_p),
        repetition_penalty: fields
            .number("repetition_penalty")?
            .unwrap_or(default.repetition_penalty),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(default.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(default.frequency_penalty),
        logit_bias: logit_bias(fields)?,
        stop: stop(fields)?,
        stop_tokens: token_list(fields, "stop_token_ids")?.unwrap_or_default(),
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(default.ignore_eos),
        n: fields.count("n")?.unwrap_or(default.n),
        logprobs: None,
        grammar: structured::grammar(fields)?,
    })
}

/// `max_completion_tokens` is the newer name of `max_tokens`.
fn max_tokens(fields: &mut Fields) -> Result<Option<u32>, FieldError> {
    let old = fields.count("max_tokens")?;
    let new = fields.count("max_completion_tokens")?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(FieldError::new(
            "max_completion_tokens",
            "invalid_value",
            format!("must equal max_tokens ({old}), got {new}"),
        )),
        (old, new) => Ok(new.or(old)),
    }
}

/// Parses `top_k`, where −1 also means off.
fn top_k(fields: &mut Fields) -> Result<Option<u32>, FieldError> {
    match fields.take("top_k") {
        None => Ok(None),
        Some(value) if whole(value.clone()).as_i64() == Some(-1) => Ok(Some(0)),
        Some(value) => {
            Fields::new(Map::from_iter([("top_k".to_owned(), value)]), "").count("top_k")
        }
    }
}

fn logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, FieldError> {
    let entries = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(entries)) => entries,
        Some(other) => return Err(FieldError::wrong_type("logit_bias", "an object", &other)),
    };
    let mut biases = Vec::with_capacity(entries.len().min(1024));
    for (token, bias) in &entries {
        let path = || format!("logit_bias.{}", crate::fields::shorten(token));
        let id = token
            .parse::<u32>()
            .map_err(|_| FieldError::new(path(), "invalid_value", "must be named by a token id"))?;
        let bias = bias.as_f64().ok_or_else(|| FieldError::wrong_type(path(), "a number", bias))?;
        #[expect(clippy::cast_possible_truncation, reason = "the sampler works in f32")]
        biases.push((id, bias as f32));
    }
    biases.sort_unstable_by_key(|(id, _)| *id);
    if biases.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err(FieldError::new("logit_bias", "invalid_value", "names a token twice"));
    }
    Ok(biases)
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, FieldError> {
    let items = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => return Ok(vec![text]),
        Some(Value::Array(items)) => items,
        Some(other) => {
            return Err(FieldError::wrong_type("stop", "a string or an array of strings", &other));
        }
    };
    let each = |(index, item)| match item {
        Value::String(text) => Ok(text),
        other => Err(FieldError::wrong_type(format!("stop[{index}]"), "a string", &other)),
    };
    items.into_iter().enumerate().map(each).collect()
}

fn token_list(fields: &mut Fields, name: &str) -> Result<Option<Vec<u32>>, FieldError> {
    let path = fields.path(name);
    fields.list(name)?.map(|items| tokens(&path, &items)).transpose()
}

fn tokens(path: &str, items: &[Value]) -> Result<Vec<u32>, FieldError> {
    let each = |(index, item): (usize, &Value)| {
        whole(item.clone())
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| FieldError::wrong_type(format!("{path}[{index}]"), "a token id", item))
    };
    items.iter().enumerate().map(each).collect()
}

/// Parses the parameters of `/v1/chat/completions` only.
fn chat_only(fields: &mut Fields, sampling: &mut Sampling) -> Result<(), FieldError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs")?;
    if top.is_some() && !wanted {
        return Err(FieldError::new("top_logprobs", "invalid_value", "needs logprobs to be true"));
    }
    sampling.logprobs = wanted.then_some(top.unwrap_or(0));
    // A guess of the answer, which would save time only.
    if let Some(guess) = fields.take("prediction")
        && !guess.is_object()
    {
        return Err(FieldError::wrong_type("prediction", "an object", &guess));
    }
    only(fields, [("modalities", serde_json::json!(["text"]))])
}

/// Parses the parameters of `/v1/completions` only.
fn completions_only(fields: &mut Fields, sampling: &mut Sampling) -> Result<(), FieldError> {
    sampling.logprobs = fields.count("logprobs")?;
    let accepted = [
        ("echo", Value::from(false)),
        ("suffix", Value::from("")),
        ("best_of", Value::from(sampling.n)),
    ];
    if let Some(best_of) = fields.count("best_of")? {
        fields.put("best_of", Value::from(best_of));
    }
    only(fields, accepted)
}

/// Checks parameters that may only have the value that changes nothing.
fn only<const N: usize>(
    fields: &mut Fields,
    accepted: [(&str, Value); N],
) -> Result<(), FieldError> {
    for (name, allowed) in accepted {
        if let Some(value) = fields.take(name)
            && value != allowed
        {
            let problem = format!("is supported as {allowed} only, got {}", brief(&value));
            return Err(FieldError::new(name, "unsupported_value", problem));
        }
    }
    Ok(())
}

/// Parses the prompts, or the texts to embed.
fn prompt(endpoint: Endpoint, fields: &mut Fields) -> Result<Prompt, FieldError> {
    let name = if endpoint == Endpoint::Embeddings { "input" } else { "prompt" };
    let expected = "a string or an array of token ids";
    match fields.take(name) {
        None => Err(FieldError::new(name, "missing_field", "is missing")),
        Some(Value::String(text)) if text.is_empty() => {
            Err(FieldError::new(name, "invalid_value", "is empty"))
        }
        Some(Value::String(text)) if endpoint == Endpoint::Plain => Ok(Prompt::Question(text)),
        Some(Value::String(text)) => Ok(Prompt::Text(text)),
        Some(Value::Array(items)) => match items.as_slice() {
            [] => Err(FieldError::new(name, "invalid_value", "is empty")),
            [Value::String(_) | Value::Array(_), ..] => several(endpoint, name, items),
            tokens_given => Ok(Prompt::Tokens(tokens(name, tokens_given)?)),
        },
        Some(other) => Err(FieldError::wrong_type(name, expected, &other)),
    }
}

/// Parses a list of texts and lists of token ids. One prompt in a list is that prompt.
fn several(endpoint: Endpoint, name: &str, items: Vec<Value>) -> Result<Prompt, FieldError> {
    let (most, kind) = match endpoint {
        Endpoint::Embeddings => (EMBEDDED_TEXTS_MAX, "texts"),
        _ => (PROMPTS_MAX, "prompts"),
    };
    if items.len() > most {
        let problem = format!("has {} {kind}, at most {most} fit", items.len());
        return Err(FieldError::new(name, "invalid_value", problem));
    }
    if endpoint == Endpoint::Plain && items.len() > 1 {
        let problem = "has several prompts, which need a line for /v1/completions";
        return Err(FieldError::new(name, "unsupported_value", problem));
    }
    let one = |(index, item)| {
        let path = format!("{name}[{index}]");
        match item {
            Value::String(text) if text.is_empty() => {
                Err(FieldError::new(path, "invalid_value", "is empty"))
            }
            Value::String(text) if endpoint == Endpoint::Plain => Ok(Prompt::Question(text)),
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(ids) if ids.is_empty() => {
                Err(FieldError::new(path, "invalid_value", "is empty"))
            }
            Value::Array(ids) => Ok(Prompt::Tokens(tokens(&path, &ids)?)),
            other => Err(FieldError::wrong_type(path, "a string or an array of token ids", &other)),
        }
    };
    let mut prompts =
        items.into_iter().enumerate().map(one).collect::<Result<Vec<_>, FieldError>>()?;
    Ok(if prompts.len() == 1 { prompts.remove(0) } else { Prompt::Several(prompts) })
}
