//! Lines that are added to an open batch: each is checked at once, so that all of them are added, or none.

use std::collections::{HashMap, hash_map::Entry};

use tritmill_client::{Endpoint, LineReader, RefusedLine, Request, parse_request};
use tritmill_queue::{QueueName, StoreError};

use crate::{
    Models,
    driver::custom_id_hash,
    extract::blocking,
    store::{
        Batch, FrontStore,
        batch_steps::CustomIdHash,
        batches::MODELS_MAX,
        open_batches::{AddedLine, AddedLines, Adding},
    },
};

/// Most bytes that are added at once.
pub const BYTES_MAX: usize = 8 << 20;
/// Most lines that are added at once.
const LINES_MAX: usize = 10_000;

/// The bounds of a batch.
#[derive(Debug, Clone, Copy)]
pub struct LineBounds {
    /// Most lines.
    pub lines_max: u64,
    /// Most bytes of its file.
    pub bytes_max: u64,
}

/// Why lines were not added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    /// A line, or all of them, cannot be used.
    #[error("{message}")]
    Invalid {
        /// Code for programs.
        code: String,
        /// Message for people.
        message: String,
        /// Name of the invalid field.
        param: Option<String>,
    },
    /// The batch does not allow it, as it is now.
    #[error("{message}")]
    Conflict {
        /// Code for programs.
        code: &'static str,
        /// Message for people.
        message: String,
        /// Name of the field.
        param: Option<&'static str>,
    },
    /// The file of the batch would have more bytes than this.
    #[error("the file of the batch would have more than {0} bytes")]
    TooLarge(u64),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl AddError {
    fn invalid(code: &str, param: Option<&str>, message: impl Into<String>) -> Self {
        let (code, param) = (code.to_owned(), param.map(str::to_owned));
        Self::Invalid { code, message: message.into(), param }
    }

    /// A `custom_id` that another request has.
    fn taken(message: String) -> Self {
        Self::Conflict { code: "custom_id_taken", message, param: Some("custom_id") }
    }

    /// A batch that takes no lines.
    fn closed(batch: &Batch) -> Self {
        let why = match (batch.at.sealed, batch.state.is_terminal()) {
            (_, true) => format!("the batch has ended: it is {}", batch.state.as_str()),
            (Some(_), _) => "the batch is sealed".to_owned(),
            (None, _) if batch.is_open => "the batch is ending".to_owned(),
            (None, _) => "the batch was not created with \"open\": true".to_owned(),
        };
        let message = format!("{why}, so no lines can be added");
        Self::Conflict { code: "batch_closed", message, param: None }
    }
}

/// Lines that were added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Added {
    /// The batch with them.
    pub batch: Batch,
    /// Lines that are new.
    pub added: u64,
    /// Lines that the batch had already.
    pub known: u64,
}

/// Adds lines to a batch, which must have been read before; `None` if it was deleted meanwhile.
///
/// # Errors
/// Names the first line that cannot be added.
pub async fn add(
    store: &dyn FrontStore,
    models: &Models,
    batch: &Batch,
    bytes: &[u8],
    LineBounds { lines_max, bytes_max }: LineBounds,
) -> Result<Option<Added>, AddError> {
    if !batch.is_open {
        return Err(AddError::closed(batch));
    }
    let (lines, numbers) = read(models, batch, bytes).await?;
    let lines = AddedLines { lines, lines_max, bytes_max, models_max: MODELS_MAX };
    let adding = store.add_lines(&batch.tenant, batch.id, &lines).await?;
    adding.map(|adding| added(adding, &lines, &numbers)).transpose()
}

/// Returns what was added, or why nothing was; `numbers` are those of the lines in the request.
fn added(adding: Adding, lines: &AddedLines, numbers: &[u64]) -> Result<Added, AddError> {
    let number = |index: usize| numbers.get(index).copied().unwrap_or_default();
    Err(match adding {
        Adding::Added { batch, added, known } => return Ok(Added { batch: *batch, added, known }),
        Adding::Closed(batch) => AddError::closed(&batch),
        Adding::Validating => {
            let message = "the file of the batch is being checked: add lines when it is";
            let (code, message) = ("batch_validating", message.to_owned());
            AddError::Conflict { code, message, param: None }
        }
        Adding::OtherRequest(index) => AddError::taken(format!(
            "line {}: custom_id is the same as that of another request of the batch",
            number(index)
        )),
        Adding::OtherModel(index) => {
            let message = format!(
                "line {}: body.model differs from that of earlier lines; a batch has one model, unless its endpoint is \
                 'mixed' or '/v1/messages'",
                number(index)
            );
            AddError::invalid("mismatched_model", Some("body.model"), message)
        }
        Adding::ManyModels(index) => {
            let most = lines.models_max;
            let message =
                format!("line {}: the batch has {most} models, the maximum", number(index));
            AddError::invalid("too_many_models", Some("body.model"), message)
        }
        Adding::ManyLines => {
            let message = format!("the batch would have more than {} lines", lines.lines_max);
            AddError::invalid("too_many_tasks", None, message)
        }
        Adding::TooLarge => AddError::TooLarge(lines.bytes_max),
    })
}

/// Reads lines for a batch; returns them with their numbers.
async fn read(
    models: &Models,
    batch: &Batch,
    bytes: &[u8],
) -> Result<(Vec<AddedLine>, Vec<u64>), AddError> {
    let mut reader = LineReader::new(bytes);
    let (mut lines, mut numbers): (Vec<AddedLine>, Vec<u64>) = Default::default();
    let mut names: HashMap<CustomIdHash, usize> = HashMap::new();
    let broken = |_| AddError::invalid("invalid_body", None, "the lines cannot be read");
    while let Some(raw) = reader.next_line().map_err(broken)? {
        // Checking its schema can take long.
        let (parsed, raw) = blocking(move || (parse_request(&raw), raw)).await;
        let request = request(batch, parsed)?;
        let (number, queue) = (raw.number, queue(models, &request).await?);
        let name = custom_id_hash(&request.custom_id);
        let model = (request.body.model.unwrap_or_default(), queue);
        let text = raw.content.unwrap_or_default();
        match names.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(lines.len());
                lines.push(AddedLine { name, key: request.key, model, text });
                numbers.push(number);
            }
            Entry::Occupied(first) if lines[*first.get()].key == request.key => {}
            Entry::Occupied(first) => {
                let first = numbers[*first.get()];
                let message = format!("line {number}: custom_id is the same as in line {first}");
                return Err(AddError::taken(message));
            }
        }
        if lines.len() > LINES_MAX {
            let message = format!("there are more than {LINES_MAX} lines: add them in parts");
            return Err(AddError::invalid("too_many_lines", None, message));
        }
    }
    match lines.is_empty() {
        true => Err(AddError::invalid("empty_body", None, "there are no lines")),
        false => Ok((lines, numbers)),
    }
}

/// Returns the request of a line that fits its batch.
fn request(batch: &Batch, parsed: Result<Request, Box<RefusedLine>>) -> Result<Request, AddError> {
    let request = parsed.map_err(|refused| {
        let refusal = refused.refusal;
        let param = refusal.param.map(|param| match refusal.status {
            Some(_) => format!("body.{param}"),
            None => param,
        });
        AddError::Invalid { code: refusal.code, message: refusal.message, param }
    })?;
    let number = request.number;
    if request.endpoint == Endpoint::Plain {
        let message = format!("line {number}: method, url and body are missing");
        return Err(AddError::invalid("missing_field", Some("url"), message));
    }
    let (found, expected) = (request.endpoint.as_str(), &batch.endpoint);
    if !batch.is_mixed() && found != expected {
        let message =
            format!("line {number}: url is '{found}' but the batch's endpoint is '{expected}'");
        return Err(AddError::invalid("invalid_url", Some("url"), message));
    }
    Ok(request)
}

/// Returns the queue of the model that a line names.
async fn queue(models: &Models, request: &Request) -> Result<QueueName, AddError> {
    const PARAM: Option<&str> = Some("body.model");
    let number = request.number;
    let Some(name) = &request.body.model else {
        let message = format!("line {number}: body.model is missing");
        return Err(AddError::invalid("missing_field", PARAM, message));
    };
    models.find(name).await?.ok_or_else(|| {
        let short: String = name.chars().filter(|c| !c.is_control()).take(80).collect();
        let message = format!("line {number}: no worker serves model '{short}'");
        AddError::invalid("model_not_found", PARAM, message)
    })
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{Timestamp, store::classes::RegisteredQueue};

    use super::*;

    /// Reads lines for a batch of completions; returns their numbers, or the code and the message of the error.
    async fn numbers(text: &str) -> Result<Vec<u64>, (String, String)> {
        let batch = serde_json::json!({
            "id": uuid::Uuid::nil(), "tenant": "t", "state": "in_progress", "endpoint": "/v1/completions",
            "input": uuid::Uuid::nil(), "completion_window": "1h", "priority": "normal", "is_open": true,
            "metadata": null, "output_expires_s": null, "created_at": 0, "expires_at": 0,
        });
        let batch: Batch = serde_json::from_value(batch).expect("fields of a batch");
        let queue = QueueName { model: "m".to_owned(), format: "i2_s".to_owned() };
        let models = Models::fixed(vec![RegisteredQueue { queue, at: Timestamp(0) }]);
        match read(&models, &batch, text.as_bytes()).await {
            Ok((_, numbers)) => Ok(numbers),
            Err(error @ AddError::Conflict { code, .. }) => {
                Err((code.to_owned(), error.to_string()))
            }
            Err(AddError::Invalid { code, message, .. }) => Err((code, message)),
            Err(other) => panic!("{other}"),
        }
    }

    #[tokio::test]
    async fn first_line_that_cannot_be_used_is_named() {
        let line = |name: &str, url: &str, body: &str| {
            format!(
                "{{\"custom_id\":\"{name}\",\"method\":\"POST\",\"url\":\"{url}\",\"body\":{body}}}\n"
            )
        };
        let (url, body) = ("/v1/completions", r#"{"model":"m","prompt":"a"}"#);
        let fine = line("a", url, body);
        let same = line("a", url, r#"{ "prompt": "a", "model": "m" }"#);
        assert_eq!(
            numbers(&format!("{fine}\n{same}{}", line("b", url, body))).await,
            Ok(vec![1, 4])
        );
        for (wrong, code) in [
            ("{".to_owned(), "invalid_json"),
            (line("", url, body), "invalid_value"),
            (line("a", url, r#"{"model":"m","prompt":"b"}"#), "custom_id_taken"),
            (line("b", url, r#"{"model":"m","prompt":"b","temperature":9}"#), "invalid_value"),
            (line("b", url, r#"{"prompt":"b"}"#), "missing_field"),
            (line("b", url, r#"{"model":"n","prompt":"b"}"#), "model_not_found"),
            (line("b", "/v1/embeddings", r#"{"model":"m","input":"b"}"#), "invalid_url"),
            (r#"{"prompt":"b"}"#.to_owned(), "missing_field"),
        ] {
            let (found, message) = numbers(&format!("{fine}{wrong}")).await.expect_err(&wrong);
            assert!(found == code && message.starts_with("line 2"), "{wrong}: {found} {message}");
        }
        assert_eq!(numbers("\n").await.expect_err("it has no lines").0, "empty_body");
    }
}
