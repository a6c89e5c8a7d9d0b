//! The first step: is the file a batch? All of it, or nothing is submitted.
//!
//! What makes a line no request, or one for somebody else, is an error of the whole batch. A request
//! whose body cannot be served is not: it gets its error line at the end, beside the others' answers.

use std::collections::{HashMap, hash_map::Entry};

use sha2::{Digest as _, Sha256};
use tritmill_client::{Endpoint, Refusal, RefusedLine, Request};
use tritmill_queue::store::{
    BatchState,
    batches::{BatchClaim, BatchError, BatchWrites, FilePosition},
};

use super::{Interrupted, lines, save};
use crate::app::App;

/// Errors that are listed; the rest is not looked for.
const ERRORS_MAX: usize = 100;

/// Reads every line; then the batch is in progress, or failed.
pub(super) async fn validate(app: &App, held: &mut BatchClaim) -> Result<(), Interrupted> {
    let mut check = Check::new(&held.batch.endpoint, app.limits().batch_lines_max);
    // Deleted or expired before anybody looked.
    if app.store().file(&held.batch.tenant, held.batch.input).await?.is_none() {
        check.refuse(None, "file_not_found", "the input file is gone", Some("input_file_id"));
    } else {
        let mut pages = lines::read(app.store(), held.batch.input, FilePosition::default());
        while let Some(page) = pages.recv().await {
            for line in page? {
                check.line(line.after.line, &line.parsed);
            }
            if check.is_over() {
                break;
            }
        }
    }
    if check.lines == 0 && check.errors.is_empty() {
        check.refuse(None, "empty_file", "the input file has no lines", Some("input_file_id"));
    }
    if let Some((name, line)) = check.model.take() {
        held.batch.queue = app.models().find(&name).await?;
        if held.batch.queue.is_none() {
            let message = format!("line {line}: no worker serves model '{name}'");
            check.refuse(Some(line), "model_not_found", &message, Some("body.model"));
        }
    }
    let now = app.store().now().await?;
    held.batch.lines = check.lines;
    held.batch.refused = check.refused;
    held.batch.failed = check.refused;
    held.batch.errors = check.errors;
    let is_batch = held.batch.errors.is_empty();
    if !is_batch {
        // Nothing of it was or will be tried.
        (held.batch.lines, held.batch.refused, held.batch.failed) = (0, 0, 0);
    }
    held.batch.enter(if is_batch { BatchState::InProgress } else { BatchState::Failed }, now);
    save(app, held, BatchWrites::default()).await
}

/// What was seen of a file so far.
struct Check<'a> {
    endpoint: &'a str,
    lines_max: u64,
    lines: u64,
    refused: u64,
    errors: Vec<BatchError>,
    /// The first line that bore a name, by the first half of the name's hash: 20 bytes a line are all
    /// that is kept of a file.
    named: HashMap<[u8; 16], u32>,
    /// The model of the first line that names one, and that line.
    model: Option<(String, u64)>,
}

impl<'a> Check<'a> {
    fn new(endpoint: &'a str, lines_max: u64) -> Self {
        let (errors, named) = (Vec::new(), HashMap::new());
        Self { endpoint, lines_max, lines: 0, refused: 0, errors, named, model: None }
    }

    /// Whether there is no need to look on.
    fn is_over(&self) -> bool {
        self.errors.len() >= ERRORS_MAX || self.lines > self.lines_max
    }

    fn refuse(&mut self, line: Option<u64>, code: &str, message: &str, param: Option<&str>) {
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
            self.refuse(Some(number), "too_many_tasks", &message, Some("input_file_id"));
        }
        match line {
            Ok(request) => self.request(request),
            Err(line) if line.refusal.status.is_some() => {
                self.refused += 1;
                self.name(number, line.custom_id.as_deref().unwrap_or_default());
            }
            Err(line) => {
                let refusal = &line.refusal;
                let code = code_of(refusal);
                self.refuse(Some(number), code, &refusal.message, refusal.param.as_deref());
            }
        }
    }

    /// No two lines bear one name.
    fn name(&mut self, number: u64, custom_id: &str) {
        let hash: [u8; 32] = Sha256::digest(custom_id.as_bytes()).into();
        let half: [u8; 16] = hash[..16].try_into().expect("a hash has 32 bytes");
        match self.named.entry(half) {
            Entry::Vacant(free) => {
                free.insert(u32::try_from(number).unwrap_or(u32::MAX));
            }
            Entry::Occupied(taken) => {
                let first = *taken.get();
                let message = format!("line {number}: custom_id is already that of line {first}");
                self.refuse(Some(number), "duplicate_custom_id", &message, Some("custom_id"));
            }
        }
    }

    fn request(&mut self, request: &Request) {
        let number = request.number;
        if request.endpoint == Endpoint::Plain {
            let message = format!("line {number}: custom_id is missing");
            return self.refuse(Some(number), "missing_custom_id", &message, Some("custom_id"));
        }
        if request.endpoint.as_str() != self.endpoint {
            let (found, asked) = (request.endpoint.as_str(), self.endpoint);
            let message = format!("line {number}: url is '{found}', the batch's is '{asked}'");
            self.refuse(Some(number), "invalid_url", &message, Some("url"));
        }
        self.name(number, &request.custom_id);
        match (&request.body.model, &self.model) {
            (None, _) => {
                let message = format!("line {number}: body.model is missing");
                self.refuse(Some(number), "model_not_found", &message, Some("body.model"));
            }
            (Some(name), None) => self.model = Some((name.clone(), number)),
            (Some(name), Some((first, line))) if name != first => {
                let message = format!(
                    "line {number}: body.model differs from that of line {line}: a batch has one"
                );
                self.refuse(Some(number), "mismatched_model", &message, Some("body.model"));
            }
            (Some(_), Some(_)) => {}
        }
    }
}

/// The word that OpenAI's batches have for it.
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
        let mut check = Check::new("/v1/completions", 6);
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
    fn every_kind_of_error_has_its_word_and_its_line() {
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
    fn a_body_that_cannot_be_served_is_no_error_of_the_batch() {
        let text = line("a", "/v1/completions", r#"{"model":"m","prompt":"a","temperature":9}"#);
        assert_eq!(codes(&text), []);
    }
}
