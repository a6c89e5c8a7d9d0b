//! The first steps: validate the whole file before any line is submitted.
//!
//! A line that is not a request, or a request for another endpoint or model, fails the whole batch. A
//! request with an invalid body does not; it gets a line in the error file. Nor does a request for an unknown model, where
//! lines may name several.
//!
//! A file that one step can read leaves nothing in the store. Otherwise each step saves the hashes of its
//! `custom_id`s, and the next ones look theirs up.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tritmill_client::{Endpoint, Refusal, RefusedLine, Request};

use super::{Budget, Interrupted, Next, lines, save};
use crate::{
    App,
    store::{
        Batch, BatchState,
        batch_steps::{BatchClaim, BatchStart, BatchWrites, CustomIdHash, NamedLine},
        batches::MODELS_MAX,
        step_state::{BatchError, StepState, ValidationState},
    },
};

/// Most errors to report; validation stops there.
const ERRORS_MAX: usize = 100;
/// Delay of a valid batch that waits for its tenant's other batches.
const ACTIVE_FULL: Duration = Duration::from_secs(3);
/// Saved hashes deleted by one call.
const FORGET_CHUNK: u32 = 5000;

/// Reads the next lines. After the last one the batch is in progress, or failed.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    mut budget: Budget,
) -> Result<Next, Interrupted> {
    if claim.batch.steps.is_valid {
        return enter(app, claim, budget).await;
    }
    let state = claim.batch.steps.validation.take().unwrap_or_default();
    let is_open = claim.batch.is_open;
    let mut check = Validation::new(&claim.batch, app.limits.batch_lines_max, state);
    if !check_lines(app, claim, &mut check, &mut budget).await? {
        let Validation { state, added, .. } = check;
        claim.batch.steps.validation = Some(state);
        save(app, claim, BatchWrites { custom_ids: &added, ..BatchWrites::default() }).await?;
        return Ok(Next::Now);
    }
    if check.state.lines == 0 && check.state.errors.is_empty() && !is_open {
        let field = claim.batch.input_field();
        check.add_error(None, "empty_file", "the input file has no lines", Some(field));
    }
    if let Some((name, line)) = check.state.model.take() {
        claim.batch.queue = app.models.find(&name).await?;
        if claim.batch.queue.is_none() {
            let message = format!("line {line}: no worker serves model '{name}'");
            check.add_error(Some(line), "model_not_found", &message, Some("body.model"));
        }
    }
    let ValidationState { lines, refused, tokens, errors, queues, .. } = check.state;
    if check.has_models {
        let served = queues.into_iter().filter_map(|(name, queue)| Some((name, queue?)));
        claim.batch.set_queues(served);
    }
    claim.batch.errors = errors;
    if !claim.batch.errors.is_empty() {
        // No line is processed.
        claim.batch.enter(BatchState::Failed, app.store.now().await?);
        save(app, claim, BatchWrites::default()).await?;
        forget(app, claim, budget).await?;
        return Ok(Next::Finished);
    }
    // Those that were added count for themselves.
    claim.batch.lines = lines.saturating_sub(claim.batch.added);
    (claim.batch.refused, claim.batch.failed) = (refused, refused);
    claim.batch.tokens = Some(tokens);
    claim.batch.steps.is_valid = true;
    if is_open {
        // Lines that are added must not have the same names.
        save(app, claim, BatchWrites { custom_ids: &check.added, ..BatchWrites::default() })
            .await?;
    }
    enter(app, claim, budget).await
}

/// Checks the lines that the budget allows. Returns whether all of them are checked.
async fn check_lines(
    app: &App,
    claim: &BatchClaim,
    check: &mut Validation,
    budget: &mut Budget,
) -> Result<bool, Interrupted> {
    let is_continued = check.state.lines > 0;
    // The file may have been deleted or have expired meanwhile.
    if app.store.file(&claim.batch.tenant, claim.batch.input).await?.is_none() {
        let message = "the input file no longer exists";
        check.add_error(None, "file_not_found", message, Some(claim.batch.input_field()));
        return Ok(true);
    }
    let mut pages = lines::read(&app.files, &claim.batch, check.state.read);
    while let Some(page) = pages.recv().await {
        let page = page?;
        if is_continued {
            let hashes: Vec<_> = page.iter().filter_map(custom_id).map(hash).collect();
            let known = app.store.known_custom_ids(claim.batch.id, &hashes).await?;
            check.custom_ids.extend(known);
        }
        if check.has_models {
            find_models(app, check, &page).await?;
        }
        let start = check.state.read;
        for line in &page {
            check.line(line.after.line, &line.parsed);
            check.state.read = line.after;
        }
        budget.spend(page.len(), check.state.read.offset_bytes - start.offset_bytes);
        if check.is_done() {
            break;
        }
        if budget.is_spent() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Finds the queues of the models that a page names first.
async fn find_models(
    app: &App,
    check: &mut Validation,
    page: &[lines::Line],
) -> Result<(), Interrupted> {
    for line in page {
        let Ok(Request { number, body, .. }) = &line.parsed else { continue };
        let Some(name) = body.model.as_ref().filter(|it| !check.state.queues.contains_key(*it))
        else {
            continue;
        };
        if check.state.queues.len() == MODELS_MAX {
            let message = format!("line {number}: the batch has more than {MODELS_MAX} models");
            check.add_error(Some(*number), "too_many_models", &message, Some("body.model"));
            break;
        }
        let queue = app.models.find(name).await?;
        check.state.queues.insert(name.clone(), queue);
    }
    Ok(())
}

/// Makes a valid batch enter the next state when its tenant has room for one more batch in progress, or the
/// batch is overdue.
async fn enter(app: &App, claim: &mut BatchClaim, budget: Budget) -> Result<Next, Interrupted> {
    let (now, max) = (app.store.now().await?, app.limits.active_batches_max);
    let max = if now < claim.batch.expires_at { max } else { u32::MAX };
    let valid = claim.batch.clone();
    let before = &mut claim.batch.steps;
    claim.batch.steps = StepState {
        // Of a batch that was paused or opened again.
        not_storable: std::mem::take(&mut before.not_storable),
        reruns: std::mem::take(&mut before.reruns),
        is_held: before.is_held,
        changed_at: before.changed_at,
        ..StepState::default()
    };
    let began = claim.batch.at.in_progress.unwrap_or(now);
    claim.batch.enter(BatchState::InProgress, began);
    match app.store.start_batch(claim, max).await? {
        BatchStart::Started if claim.batch.is_open => Ok(Next::Now),
        BatchStart::Started => {
            forget(app, claim, budget).await?;
            Ok(Next::Now)
        }
        BatchStart::Full => {
            claim.batch = valid;
            save(app, claim, BatchWrites::default()).await?;
            Ok(Next::After(ACTIVE_FULL))
        }
        BatchStart::Fenced => Err(Interrupted::Fenced),
    }
}

/// Deletes saved hashes while there is time; the sweep deletes the others.
async fn forget(app: &App, claim: &BatchClaim, mut budget: Budget) -> Result<(), Interrupted> {
    while app.store.forget_custom_ids(claim.batch.id, FORGET_CHUNK).await? > 0 {
        budget.spend(FORGET_CHUNK as usize, 0);
        if budget.is_spent() {
            break;
        }
    }
    Ok(())
}

/// Returns the `custom_id` of a line that must be unique.
fn custom_id(line: &lines::Line) -> Option<&str> {
    match &line.parsed {
        Ok(request) => Some(&request.custom_id),
        Err(line) if line.refusal.status.is_some() => {
            Some(line.custom_id.as_deref().unwrap_or_default())
        }
        Err(_) => None,
    }
}

/// Returns half of the SHA-256 of a `custom_id`.
pub(crate) fn hash(custom_id: &str) -> CustomIdHash {
    let hash: [u8; 32] = Sha256::digest(custom_id.as_bytes()).into();
    hash[..16].try_into().expect("a hash has 32 bytes")
}

/// The validation of a step's lines.
struct Validation {
    /// The field that says where the lines are.
    input_field: &'static str,
    endpoint: String,
    /// Whether lines may be for several endpoints.
    is_mixed: bool,
    /// Whether each line names a model of its own.
    has_models: bool,
    /// Whether lines that are added later are compared with these.
    is_open: bool,
    lines_max: u64,
    state: ValidationState,
    /// Line of each `custom_id` of this step, and of those that earlier steps have seen as well.
    custom_ids: HashMap<CustomIdHash, u32>,
    /// Hashes of this step.
    added: Vec<NamedLine>,
}

impl Validation {
    fn new(batch: &Batch, lines_max: u64, state: ValidationState) -> Self {
        Self {
            input_field: batch.input_field(),
            endpoint: batch.endpoint.clone(),
            is_mixed: batch.is_mixed(),
            has_models: batch.has_models(),
            is_open: batch.is_open,
            lines_max,
            state,
            custom_ids: HashMap::new(),
            added: Vec::new(),
        }
    }

    /// Whether validation can stop.
    fn is_done(&self) -> bool {
        self.state.errors.len() >= ERRORS_MAX || self.state.lines > self.lines_max
    }

    fn add_error(&mut self, line: Option<u64>, code: &str, message: &str, param: Option<&str>) {
        if self.state.errors.len() < ERRORS_MAX {
            self.state.errors.push(BatchError {
                code: code.to_owned(),
                line,
                message: message.to_owned(),
                param: param.map(str::to_owned),
            });
        }
    }

    fn line(&mut self, number: u64, line: &Result<Request, Box<RefusedLine>>) {
        self.state.lines += 1;
        if self.state.lines == self.lines_max + 1 {
            let message = format!("the input file has more than {} lines", self.lines_max);
            self.add_error(Some(number), "too_many_tasks", &message, Some(self.input_field));
        }
        match line {
            Ok(request) => self.request(request),
            Err(line) if line.refusal.status.is_some() => {
                self.state.refused += 1;
                let name = line.custom_id.as_deref().unwrap_or_default();
                self.check_custom_id(number, name, line.key);
            }
            Err(line) => {
                let refusal = &line.refusal;
                let code = code_of(refusal);
                self.add_error(Some(number), code, &refusal.message, refusal.param.as_deref());
            }
        }
    }

    /// Reports a `custom_id` that an earlier line has.
    fn check_custom_id(&mut self, number: u64, custom_id: &str, key: [u8; 32]) {
        let (hash, key) = (hash(custom_id), self.is_open.then_some(key));
        match self.custom_ids.entry(hash) {
            Entry::Vacant(entry) => {
                let number = u32::try_from(number).unwrap_or(u32::MAX);
                entry.insert(number);
                self.added.push(NamedLine { name: hash, line: number, key });
            }
            Entry::Occupied(entry) => {
                let first = *entry.get();
                let message = format!("line {number}: custom_id is the same as in line {first}");
                self.add_error(Some(number), "duplicate_custom_id", &message, Some("custom_id"));
            }
        }
    }

    fn request(&mut self, request: &Request) {
        let number = request.number;
        if request.endpoint == Endpoint::Plain {
            let message = format!("line {number}: custom_id is missing");
            return self.add_error(Some(number), "missing_custom_id", &message, Some("custom_id"));
        }
        if !self.is_mixed && request.endpoint.as_str() != self.endpoint {
            let (found, expected) = (request.endpoint.as_str(), &self.endpoint);
            let message =
                format!("line {number}: url is '{found}' but the batch's endpoint is '{expected}'");
            self.add_error(Some(number), "invalid_url", &message, Some("url"));
        }
        self.check_custom_id(number, &request.custom_id, request.key);
        let (prompt, generated) = request.body.estimated_tokens();
        self.state.tokens += u64::from(prompt) + u64::from(generated);
        if self.has_models {
            let queue = request.body.model.as_ref().and_then(|name| self.state.queues.get(name));
            self.state.refused += u64::from(!matches!(queue, Some(Some(_))));
            return;
        }
        match (&request.body.model, &self.state.model) {
            (None, _) => {
                let message = format!("line {number}: body.model is missing");
                self.add_error(Some(number), "model_not_found", &message, Some("body.model"));
            }
            (Some(name), None) => self.state.model = Some((name.clone(), number)),
            (Some(name), Some((first, line))) if name != first => {
                let message = format!(
                    "line {number}: body.model differs from line {line}; a batch has one model"
                );
                self.add_error(Some(number), "mismatched_model", &message, Some("body.model"));
            }
            (Some(_), Some(_)) => {}
        }
    }
}

/// Returns OpenAI's error code for a rejected line.
fn code_of(refusal: &Refusal) -> &str {
    match (refusal.code.as_str(), refusal.param.as_deref()) {
        ("invalid_json" | "invalid_utf8" | "invalid_type", None) => "invalid_json_line",
        ("missing_field", Some("custom_id")) => "missing_custom_id",
        (_, Some("custom_id")) => "invalid_custom_id",
        (_, Some("url")) => "invalid_url",
        (_, Some("method")) => "invalid_method",
        (code, _) => code,
    }
}

#[cfg(test)]
mod tests {
    use tritmill_client::{LineReader, parse_request};
    use tritmill_queue::QueueName;

    use super::*;

    fn checked(batch: &Batch, text: &str) -> Validation {
        let mut reader = LineReader::new(text.as_bytes());
        let mut check = Validation::new(batch, 6, ValidationState::default());
        let queue = QueueName { model: "m".to_owned(), format: "i2_s".to_owned() };
        check.state.queues.insert("m".to_owned(), Some(queue));
        while let Some(line) = reader.next_line().expect("memory") {
            check.line(line.number, &parse_request(&line));
        }
        check
    }

    fn codes(text: &str) -> Vec<(u64, String)> {
        let batch = Batch::empty("/v1/completions");
        let errors = checked(&batch, text).state.errors.into_iter();
        errors.map(|error| (error.line.unwrap_or(0), error.code)).collect()
    }

    fn line(custom_id: &str, url: &str, body: &str) -> String {
        format!(
            "{{\"custom_id\":\"{custom_id}\",\"method\":\"POST\",\"url\":\"{url}\",\"body\":{body}}}\n"
        )
    }

    #[test]
    fn errors_have_the_code_and_line_of_the_fault() {
        let (url, body) = ("/v1/completions", r#"{"model":"m","prompt":"a"}"#);
        let good = line("a", url, body);
        assert_eq!(codes(&good), []);
        let check = |second: &str, code: &str| {
            let expected = vec![(2, code.to_owned())];
            assert_eq!(codes(&format!("{good}{second}")), expected, "{second}");
        };
        check("{\n", "invalid_json_line");
        check("[]\n", "invalid_json_line");
        check(&line("", url, body), "invalid_custom_id");
        check(
            &format!("{{\"method\":\"POST\",\"url\":\"{url}\",\"body\":{body}}}"),
            "missing_custom_id",
        );
        check(&line("a", url, body), "duplicate_custom_id");
        check(&line("a", url, r#"{"model":"m","prompt":3}"#), "duplicate_custom_id");
        check(&line("b", "/v1/moderations", body), "invalid_url");
        check(&line("b", url, r#"{"model":"n","prompt":"a"}"#), "mismatched_model");
        check(&line("b", url, r#"{"prompt":"a"}"#), "model_not_found");
        let chat = r#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#;
        check(&line("b", "/v1/chat/completions", chat), "invalid_url");
        let many: String = (0..8).map(|id| line(&id.to_string(), url, body)).collect();
        assert_eq!(codes(&many), [(7, "too_many_tasks".to_owned())]);
    }

    #[test]
    fn lines_of_a_mixed_batch_are_checked_for_themselves() {
        let chat = r#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#;
        let message = r#"{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"a"}]}"#;
        let text = [
            line("a", "/v1/completions", r#"{"model":"m","prompt":"a"}"#),
            line("b", "/v1/chat/completions", chat),
            line("c", "/v1/messages", message),
            line("d", "/v1/completions", r#"{"model":"other","prompt":"a"}"#),
            line("e", "/v1/completions", r#"{"prompt":"a"}"#),
        ];
        let mixed = Batch::empty(crate::store::batches::MIXED);
        let check = checked(&mixed, &text.concat());
        assert_eq!((check.state.lines, check.state.refused, check.state.errors), (5, 2, vec![]));
        let twice = checked(&mixed, &format!("{}{}", text[0], text[0]));
        assert_eq!(twice.state.errors[0].code, "duplicate_custom_id");
        let messages = Batch::empty("/v1/messages");
        assert_eq!(checked(&messages, &text[2]).state.errors, []);
        assert_eq!(checked(&messages, &text[1]).state.errors[0].code, "invalid_url");
    }

    #[test]
    fn invalid_body_does_not_fail_the_batch() {
        let text = line("a", "/v1/completions", r#"{"model":"m","prompt":"a","temperature":9}"#);
        assert_eq!(codes(&text), []);
    }
}
