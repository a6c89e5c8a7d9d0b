//! The first step: validates the whole file before any line is submitted.
//!
//! A line that is not a request, or a request for another endpoint or model, fails the whole batch. A
//! request with an invalid body does not; it gets a line in the error file.

use std::collections::{HashMap, hash_map::Entry};

use sha2::{Digest as _, Sha256};
use tritmill_client::{Endpoint, Refusal, RefusedLine, Request};
use tritmill_queue::store::{
    BatchState,
    batches::{BatchClaim, BatchError, BatchWrites, FilePosition},
};

use super::{Interrupted, lines, save};
use crate::App;

/// Most errors to report; validation stops there.
const ERRORS_MAX: usize = 100;

/// Reads every line; then the batch is in progress, or failed.
pub(super) async fn validate(app: &App, claim: &mut BatchClaim) -> Result<(), Interrupted> {
    let mut check = Validation::new(&claim.batch.endpoint, app.limits.batch_lines_max);
    // The file may have been deleted or have expired meanwhile.
    if app.store.file(&claim.batch.tenant, claim.batch.input).await?.is_none() {
        check.add_error(
            None,
            "file_not_found",
            "the input file no longer exists",
            Some("input_file_id"),
        );
    } else {
        let mut pages = lines::read(&app.store, claim.batch.input, FilePosition::default());
        while let Some(page) = pages.recv().await {
            for line in page? {
                check.line(line.after.line, &line.parsed);
            }
            if check.is_done() {
                break;
            }
        }
    }
    if check.lines == 0 && check.errors.is_empty() {
        check.add_error(None, "empty_file", "the input file has no lines", Some("input_file_id"));
    }
    if let Some((name, line)) = check.model.take() {
        claim.batch.queue = app.models.find(&name).await?;
        if claim.batch.queue.is_none() {
            let message = format!("line {line}: no worker serves model '{name}'");
            check.add_error(Some(line), "model_not_found", &message, Some("body.model"));
        }
    }
    let now = app.store.now().await?;
    claim.batch.lines = check.lines;
    claim.batch.refused = check.refused;
    claim.batch.failed = check.refused;
    claim.batch.errors = check.errors;
    let is_valid = claim.batch.errors.is_empty();
    if !is_valid {
        // No line is processed.
        (claim.batch.lines, claim.batch.refused, claim.batch.failed) = (0, 0, 0);
    }
    claim.batch.enter(if is_valid { BatchState::InProgress } else { BatchState::Failed }, now);
    save(app, claim, BatchWrites::default()).await
}

/// State of the validation.
struct Validation<'a> {
    endpoint: &'a str,
    lines_max: u64,
    lines: u64,
    refused: u64,
    errors: Vec<BatchError>,
    /// Line of each `custom_id`, by the first half of its hash. Validation keeps only these 20 bytes per
    /// line in memory.
    custom_ids: HashMap<[u8; 16], u32>,
    /// First named model, and its line.
    model: Option<(String, u64)>,
}

impl<'a> Validation<'a> {
    fn new(endpoint: &'a str, lines_max: u64) -> Self {
        let (errors, custom_ids) = (Vec::new(), HashMap::new());
        Self { endpoint, lines_max, lines: 0, refused: 0, errors, custom_ids, model: None }
    }

    /// Whether validation can stop.
    fn is_done(&self) -> bool {
        self.errors.len() >= ERRORS_MAX || self.lines > self.lines_max
    }

    fn add_error(&mut self, line: Option<u64>, code: &str, message: &str, param: Option<&str>) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(BatchError {
                code: code.to_owned(),
                line,
                message: message.to_owned(),
                param: param.map(str::to_owned),
            });
        }
    }

    fn line(&mut self, number: u64, line: &Result<Request, Box<RefusedLine>>) {
        self.lines += 1;
        if self.lines == self.lines_max + 1 {
            let message = format!("the input file has more than {} lines", self.lines_max);
            self.add_error(Some(number), "too_many_tasks", &message, Some("input_file_id"));
        }
        match line {
            Ok(request) => self.request(request),
            Err(line) if line.refusal.status.is_some() => {
                self.refused += 1;
                self.check_custom_id(number, line.custom_id.as_deref().unwrap_or_default());
            }
            Err(line) => {
                let refusal = &line.refusal;
                let code = code_of(refusal);
                self.add_error(Some(number), code, &refusal.message, refusal.param.as_deref());
            }
        }
    }

    /// Reports a `custom_id` that an earlier line has.
    fn check_custom_id(&mut self, number: u64, custom_id: &str) {
        let hash: [u8; 32] = Sha256::digest(custom_id.as_bytes()).into();
        let half: [u8; 16] = hash[..16].try_into().expect("a hash has 32 bytes");
        match self.custom_ids.entry(half) {
            Entry::Vacant(entry) => {
                entry.insert(u32::try_from(number).unwrap_or(u32::MAX));
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
        if request.endpoint.as_str() != self.endpoint {
            let (found, expected) = (request.endpoint.as_str(), self.endpoint);
            let message =
                format!("line {number}: url is '{found}' but the batch's endpoint is '{expected}'");
            self.add_error(Some(number), "invalid_url", &message, Some("url"));
        }
        self.check_custom_id(number, &request.custom_id);
        match (&request.body.model, &self.model) {
            (None, _) => {
                let message = format!("line {number}: body.model is missing");
                self.add_error(Some(number), "model_not_found", &message, Some("body.model"));
            }
            (Some(name), None) => self.model = Some((name.clone(), number)),
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

    use super::*;

    fn codes(text: &str) -> Vec<(u64, String)> {
        let mut reader = LineReader::new(text.as_bytes());
        let mut check = Validation::new("/v1/completions", 6);
        while let Some(line) = reader.next_line().expect("memory") {
            check.line(line.number, &parse_request(&line));
        }
        check.errors.into_iter().map(|error| (error.line.unwrap_or(0), error.code)).collect()
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
        check(&line("b", "/v1/embeddings", body), "invalid_url");
        check(&line("b", url, r#"{"model":"n","prompt":"a"}"#), "mismatched_model");
        check(&line("b", url, r#"{"prompt":"a"}"#), "model_not_found");
        let chat = r#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#;
        check(&line("b", "/v1/chat/completions", chat), "invalid_url");
        let many: String = (0..8).map(|id| line(&id.to_string(), url, body)).collect();
        assert_eq!(codes(&many), [(7, "too_many_tasks".to_owned())]);
    }

    #[test]
    fn invalid_body_does_not_fail_the_batch() {
        let text = line("a", "/v1/completions", r#"{"model":"m","prompt":"a","temperature":9}"#);
        assert_eq!(codes(&text), []);
    }
}
