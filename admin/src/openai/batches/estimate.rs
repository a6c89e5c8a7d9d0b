//! What a batch would need: lines, tokens, money and time, by the first lines of its file.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use axum::Json;
use serde::Serialize;
use serde_json::{Map, Value};
use tritmill_client::{LINE_BYTES_MAX, RawLine, parse_request};
use tritmill_queue::{
    Charge, QueueName, StoreError, Usage,
    billing::Tier,
    store::{Page, charges::price_of},
};
use utoipa::ToSchema;

use super::{CostView, input_file, request::NewBatch};
use crate::{
    ApiError, App, Call, JsonBody, JsonResult,
    extract::blocking,
    openai::schemas::BatchRequest,
    store::{
        Batch, BatchState,
        batches::BatchFilter,
        files::{FILE_CHUNK_BYTES, StoredFile},
    },
};

/// Bytes of a file that are read.
const SAMPLE_BYTES: usize = FILE_CHUNK_BYTES;
/// Unfinished batches of a state that are looked at.
const BATCHES_MAX: u32 = 1000;

/// What a batch would need. Counts are exact if all lines were read, else those of the lines that were read, scaled to the
/// size of the file.
#[derive(Serialize, ToSchema)]
#[schema(as = BatchEstimate)]
pub(crate) struct EstimateView {
    lines: u64,
    /// Lines that were read.
    sampled_lines: u64,
    /// Of the lines that were read: those that are no valid request.
    invalid_lines: u64,
    /// Tokens of the prompts, by their length.
    input_tokens: u64,
    /// Tokens of the answers: their `max_tokens`, or 256 where a line has none, although such an answer may be longer.
    max_output_tokens: u64,
    /// What these tokens cost, by currency; empty without prices.
    max_cost: Vec<CostView>,
    /// Seconds until it would be finished, by the measured rate of the models' workers, after the batches that are there. Null
    /// if no rate is known.
    seconds: Option<u64>,
}

/// Tokens of a model.
#[derive(Debug, Clone, Copy, Default)]
struct Tokens {
    prompt: u64,
    generated: u64,
}

/// What the lines of a file ask for.
#[derive(Debug, Default)]
struct Asked {
    lines: u64,
    sampled: u64,
    invalid: u64,
    by_model: BTreeMap<(String, Tier), Tokens>,
}

impl Asked {
    /// Returns the tokens of all lines.
    fn tokens(&self) -> u64 {
        self.by_model.values().map(|tokens| tokens.prompt + tokens.generated).sum()
    }

    /// Scales the counts of the lines that were read to the size of a file.
    fn scaled(mut self, read: usize, size: u64) -> Self {
        if read as u64 >= size || read == 0 {
            return self;
        }
        let factor = size as f64 / read as f64;
        let scale = |count: u64| (count as f64 * factor).round() as u64;
        self.lines = scale(self.lines);
        for tokens in self.by_model.values_mut() {
            *tokens = Tokens { prompt: scale(tokens.prompt), generated: scale(tokens.generated) };
        }
        self
    }
}

/// Reads the first lines of a file.
async fn read(app: &App, file: &StoredFile, tier: Tier) -> Result<Asked, StoreError> {
    let mut bytes = Vec::new();
    let mut number = 0;
    // More than one chunk only if no line ends in it.
    let read = loop {
        let Some(chunk) = app.files.chunk(file.id, number).await? else { break bytes.len() };
        bytes.extend_from_slice(&chunk);
        number += 1;
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        match end {
            _ if bytes.len() as u64 >= file.size_bytes => break bytes.len(),
            Some(end) if bytes.len() >= SAMPLE_BYTES => break end,
            _ if bytes.len() > LINE_BYTES_MAX + SAMPLE_BYTES => break bytes.len(),
            _ => {}
        }
    };
    // Checking the schema of a line can take long.
    let size_bytes = file.size_bytes;
    Ok(blocking(move || asked_in(&bytes[..read], tier).scaled(read, size_bytes)).await)
}

/// Counts what lines ask for.
fn asked_in(bytes: &[u8], tier: Tier) -> Asked {
    let mut asked = Asked::default();
    let lines = bytes.split(|byte| *byte == b'\n');
    for (number, line) in (1..).zip(lines) {
        if line.trim_ascii().is_empty() {
            continue;
        }
        asked.lines += 1;
        asked.sampled += 1;
        let line = RawLine { number, offset: 0, content: Ok(line.to_vec()) };
        let Ok(request) = parse_request(&line) else {
            asked.invalid += 1;
            continue;
        };
        let model = request.body.model.clone().unwrap_or_default();
        let tier = request.body.tier.unwrap_or(tier);
        let (prompt, generated) = request.body.estimated_tokens();
        let tokens = asked.by_model.entry((model, tier)).or_default();
        tokens.prompt += u64::from(prompt);
        tokens.generated += u64::from(generated);
    }
    asked
}

/// Returns the most that the answers may cost, by currency.
async fn most(app: &App, asked: &Asked) -> Result<Vec<Charge>, ApiError> {
    let prices = app.store.prices().await?;
    let mut sums = Vec::new();
    for ((model, tier), tokens) in &asked.by_model {
        let model = model.split_once('@').map_or(model.as_str(), |(model, _)| model);
        let usage = Usage {
            prompt_tokens: tokens.prompt,
            completion_tokens: tokens.generated,
            ..Usage::default()
        };
        if let Some(price) = price_of(&prices, model, *tier) {
            price.charge(usage).add_to(&mut sums);
        }
    }
    Ok(sums)
}

/// Returns the time until all lines are answered, after those of the unfinished batches; `None` if no rate is known.
async fn time(app: &App, asked: &Asked) -> Result<Option<Duration>, ApiError> {
    let mut of_queue: HashMap<QueueName, u64> = HashMap::new();
    for ((model, _), tokens) in &asked.by_model {
        if let Some(queue) = app.models.find(model).await? {
            *of_queue.entry(queue).or_default() += tokens.prompt + tokens.generated;
        }
    }
    let mut longest = None;
    for (queue, tokens) in of_queue {
        let Some(rate) = app.store.serving(&queue).await?.drain_tokens_per_s else {
            return Ok(None);
        };
        let before = promised(app, &queue).await?;
        let seconds = Duration::try_from_secs_f64((before + tokens) as f64 / rate);
        longest = longest.max(Some(seconds.unwrap_or(Duration::MAX)));
    }
    Ok(longest)
}

/// Returns the tokens of a queue that unfinished batches with a promise still need.
async fn promised(app: &App, queue: &QueueName) -> Result<u64, StoreError> {
    let mut tokens = 0;
    for state in [BatchState::InProgress, BatchState::Validating] {
        let filter = BatchFilter { state: Some(state), ..BatchFilter::default() };
        let page = Page { after: None, limit: BATCHES_MAX, ascending: true };
        let batches = app.store.find_batches(&filter, page).await?;
        // Before its lines are checked, the queues of a batch are not known.
        let of_queue = |batch: &&Batch| {
            let mut queues = batch.queue.iter().chain(batch.queues.values()).peekable();
            queues.peek().is_none() || queues.any(|of| of == queue)
        };
        tokens += batches.iter().filter(of_queue).map(remaining).sum::<u64>();
    }
    Ok(tokens)
}

/// Returns the tokens that a batch still needs.
fn remaining(batch: &Batch) -> u64 {
    let (tokens, ended) = (batch.tokens.unwrap_or_default(), batch.completed + batch.failed);
    match batch.lines {
        _ if batch.tier() == Tier::Background => 0,
        0 => tokens,
        lines => (tokens as f64 * (1.0 - ended.min(lines) as f64 / lines as f64)) as u64,
    }
}

/// Returns the tokens of a batch as far as they count before its lines are checked. Refuses a batch that does not fit into
/// what is left of its window, with the earliest one that fits, if the operator wants that.
pub(super) async fn check_capacity(
    app: &App,
    file: Option<&StoredFile>,
    window: Duration,
    tier: Tier,
) -> Result<Option<u64>, ApiError> {
    let Some((percent, file)) = app.limits.overbooking_percent.zip(file) else { return Ok(None) };
    if tier == Tier::Background {
        return Ok(None);
    }
    let asked = read(app, file, tier).await?;
    let tokens = Some(asked.tokens());
    let Some(needed) = time(app, &asked).await? else { return Ok(tokens) };
    let needed = needed.as_secs_f64() * 100.0 / f64::from(percent.max(1));
    if needed <= window.as_secs_f64() {
        return Ok(tokens);
    }
    let fits = earliest(needed);
    let message = format!(
        "the batch does not fit into this completion window beside the batches that are there: the earliest that fits is {fits}"
    );
    Err(ApiError::invalid("window_full", message).at("completion_window"))
}

/// Returns the shortest window in whole minutes or hours that has so many seconds.
fn earliest(seconds: f64) -> String {
    const LONGEST_H: f64 = 365.0 * 24.0;
    let minutes = (seconds / 60.0).ceil();
    let hours = (seconds / 3600.0).ceil();
    if minutes <= 120.0 {
        format!("{minutes}m")
    } else if hours <= LONGEST_H {
        format!("{hours}h")
    } else {
        "'background'".to_owned()
    }
}

/// Estimates what a batch would need, without creating it. Its body is that of `POST /v1/batches`.
#[utoipa::path(post, path = "/v1/batches/estimate", tag = "batches", request_body = BatchRequest,
    responses((status = 200, description = "What it would need", body = EstimateView)))]
pub(crate) async fn estimate(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<EstimateView> {
    let new = NewBatch::parse(body, &app, &caller.tenant)?;
    if new.after.is_some() {
        let message =
            "the lines of a batch after another one are not known before that one has ended";
        return Err(ApiError::invalid_value("after", message));
    }
    if new.input_url.is_some() {
        let message = "the lines at input_url are not known before they are read: upload a part of them, and estimate that";
        return Err(ApiError::invalid_value("input_url", message));
    }
    let input = new.input.as_deref().ok_or_else(|| ApiError::missing_field("input_file_id"))?;
    let file = input_file(&app, &caller, input).await?;
    let asked = read(&app, &file, new.tier()).await?;
    let sum = |of: fn(&Tokens) -> u64| asked.by_model.values().map(of).sum();
    let cost = most(&app, &asked).await?;
    Ok(Json(EstimateView {
        lines: asked.lines,
        sampled_lines: asked.sampled,
        invalid_lines: asked.invalid,
        input_tokens: sum(|tokens| tokens.prompt),
        max_output_tokens: sum(|tokens| tokens.generated),
        max_cost: cost.iter().map(CostView::from).collect(),
        seconds: time(&app, &asked).await?.map(|time| time.as_secs_f64().ceil() as u64),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earliest_window_is_in_whole_minutes_or_hours() {
        for (seconds, window) in
            [(1.0, "1m"), (61.0, "2m"), (7200.0, "120m"), (7201.0, "3h"), (1e9, "'background'")]
        {
            assert_eq!(earliest(seconds), window);
        }
    }

    #[test]
    fn counts_are_scaled_to_the_size_of_the_file() {
        let mut asked = Asked { lines: 10, sampled: 10, ..Asked::default() };
        let of = ("m".to_owned(), Tier::Batch);
        asked.by_model.insert(of, Tokens { prompt: 100, generated: 20 });
        let asked = asked.scaled(1000, 25_000);
        assert_eq!((asked.lines, asked.sampled, asked.tokens()), (250, 10, 3000));
    }
}
