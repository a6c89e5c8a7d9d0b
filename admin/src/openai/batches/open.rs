//! `/v1/batches/{id}/lines` and `seal`: batches that lines are added to while they run.
//!
//! A line that is added is checked at once: a request adds all its lines, or none and names the first that is wrong.

use std::collections::{HashMap, hash_map::Entry};

use axum::{
    Json,
    extract::{Path, Request},
};
use serde::Serialize;
use tritmill_client::{Endpoint, LineReader, RawLine, Request as Line, parse_request};
use tritmill_queue::QueueName;
use utoipa::ToSchema;

use super::{BatchView, change_own, find};
use crate::{
    ApiError, App, Call, JsonResult,
    driver::{MODELS_MAX, custom_id_hash},
    error::ErrorResponse,
    extract::bounded,
    store::{
        Batch,
        batch_changes::BatchChange,
        batch_steps::CustomIdHash,
        open_batches::{AddedLine, AddedLines, Adding},
    },
    tenant_limits,
};

/// Most bytes and lines of a request.
const BYTES_MAX: usize = 8 << 20;
const LINES_MAX: usize = 10_000;

/// Lines that were added.
#[derive(Serialize, ToSchema)]
pub(crate) struct LinesAdded {
    object: &'static str,
    batch_id: String,
    /// Lines that are new.
    added: u64,
    /// Lines that the batch had already.
    known: u64,
    /// Lines of the batch with them.
    total: u64,
}

/// Adds lines to an open batch: all of them, or none. A line that the batch has already is not added again; another request
/// with its `custom_id` is refused.
#[utoipa::path(post, path = "/v1/batches/{id}/lines", tag = "batches", params(("id" = String, Path)),
    request_body(content = String, content_type = "application/x-ndjson",
        description = "Lines as those of a batch file: at most 10,000, and 8 MiB"),
    responses((status = 200, description = "All lines are in the batch", body = LinesAdded),
        (status = 409, body = ErrorResponse,
         description = "`batch_closed`: it was not created open, is sealed or has ended; `custom_id_taken`: by another \
                        request; `batch_validating`: its file is being checked")))]
pub(crate) async fn add_lines(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    request: Request,
) -> JsonResult<LinesAdded> {
    let bytes = bounded(request, BYTES_MAX).await?;
    let batch = find(&app, &caller, &id).await?;
    if !batch.is_open {
        return Err(closed(&batch));
    }
    let (lines, numbers) = read(&app, &batch, &bytes).await?;
    tenant_limits::file_room(&app, &caller.tenant).await?.check(bytes.len() as u64)?;
    let lines = AddedLines {
        lines,
        lines_max: app.limits.batch_lines_max,
        bytes_max: app.limits.file_bytes_max,
        models_max: MODELS_MAX,
    };
    let unknown = || ApiError::not_found("batch", &id);
    let adding = app.store.add_lines(&caller.tenant, batch.id, &lines).await?;
    match adding.ok_or_else(unknown)? {
        Adding::Added { batch, added, known } => {
            app.batch_changed.notify_one();
            tracing::debug!(key = %caller.key, batch = %batch.id, added, known, "lines added");
            let (batch_id, total) = (batch.id.to_string(), batch.total_lines());
            Ok(Json(LinesAdded { object: "batch.lines", batch_id, added, known, total }))
        }
        refused => Err(refusal(&app, &refused, &numbers)),
    }
}

/// Returns why lines were not added; `numbers` are those of the lines in the request.
fn refusal(app: &App, refused: &Adding, numbers: &[u64]) -> ApiError {
    let line = |index: &usize| numbers.get(*index).copied().unwrap_or_default();
    match refused {
        Adding::Closed(batch) => closed(batch),
        Adding::Validating | Adding::Added { .. } => {
            let message = "the file of the batch is being validated: add lines when it is done";
            ApiError::conflict("batch_validating", message).soon()
        }
        Adding::OtherRequest(index) => {
            let line = line(index);
            let message = format!(
                "line {line}: custom_id is the same as that of another request of the batch"
            );
            ApiError::conflict("custom_id_taken", &message).at("custom_id")
        }
        Adding::OtherModel(index) => {
            let line = line(index);
            let message = format!(
                "line {line}: body.model differs from that of earlier lines; a batch has one model, unless its endpoint is \
                 'mixed'"
            );
            ApiError::invalid("mismatched_model", message).at("body.model")
        }
        Adding::ManyModels(index) => {
            let line = line(index);
            let message = format!("line {line}: the batch has {MODELS_MAX} models, the maximum");
            ApiError::invalid("too_many_models", message).at("body.model")
        }
        Adding::ManyLines => {
            let message =
                format!("the batch would have more than {} lines", app.limits.batch_lines_max);
            ApiError::invalid("too_many_tasks", message)
        }
        Adding::TooLarge => ApiError::too_large("file of the batch", app.limits.file_bytes_max),
    }
}

fn closed(batch: &Batch) -> ApiError {
    let message = match (batch.at.sealed, batch.state.is_terminal()) {
        (_, true) => format!("the batch has ended: it is {}", batch.state.as_str()),
        (Some(_), _) => "the batch is sealed".to_owned(),
        (None, _) => "the batch was not created with \"open\": true".to_owned(),
    };
    ApiError::conflict("batch_closed", &format!("{message}, so no lines can be added"))
}

/// Reads the lines of a request; returns them with their numbers.
async fn read(
    app: &App,
    batch: &Batch,
    bytes: &[u8],
) -> Result<(Vec<AddedLine>, Vec<u64>), ApiError> {
    let mut reader = LineReader::new(bytes);
    let (mut lines, mut numbers): (Vec<AddedLine>, Vec<u64>) = Default::default();
    let mut names: HashMap<CustomIdHash, usize> = HashMap::new();
    let broken = |_| ApiError::invalid("invalid_body", "the body cannot be read");
    while let Some(raw) = reader.next_line().map_err(broken)? {
        let line = request(batch, &raw)?;
        let (number, queue) = (raw.number, queue(app, &line).await?);
        let name = custom_id_hash(&line.custom_id);
        let model = (line.body.model.unwrap_or_default(), queue);
        let text = raw.content.unwrap_or_default();
        match names.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(lines.len());
                lines.push(AddedLine { name, key: line.key, model, text });
                numbers.push(number);
            }
            Entry::Occupied(first) if lines[*first.get()].key == line.key => {}
            Entry::Occupied(first) => {
                let first = numbers[*first.get()];
                let message = format!("line {number}: custom_id is the same as in line {first}");
                return Err(ApiError::conflict("custom_id_taken", &message).at("custom_id"));
            }
        }
        if lines.len() > LINES_MAX {
            let message = format!("the request has more than {LINES_MAX} lines");
            return Err(ApiError::invalid("too_many_lines", message));
        }
    }
    match lines.is_empty() {
        true => Err(ApiError::invalid("empty_body", "the body has no lines")),
        false => Ok((lines, numbers)),
    }
}

/// Parses a line that fits its batch.
fn request(batch: &Batch, raw: &RawLine) -> Result<Line, ApiError> {
    let line = parse_request(raw).map_err(|refused| {
        let refusal = refused.refusal;
        let error = ApiError::invalid(&refusal.code, refusal.message);
        match (refusal.param, refusal.status) {
            (Some(param), Some(_)) => error.at(format!("body.{param}")),
            (Some(param), None) => error.at(param),
            (None, _) => error,
        }
    })?;
    let number = line.number;
    if line.endpoint == Endpoint::Plain {
        let message = format!("line {number}: method, url and body are missing");
        return Err(ApiError::invalid("missing_field", message).at("url"));
    }
    let (found, expected) = (line.endpoint.as_str(), &batch.endpoint);
    if !batch.is_mixed() && found != expected {
        let message =
            format!("line {number}: url is '{found}' but the batch's endpoint is '{expected}'");
        return Err(ApiError::invalid("invalid_url", message).at("url"));
    }
    Ok(line)
}

/// Returns the queue of the model that a line names.
async fn queue(app: &App, line: &Line) -> Result<QueueName, ApiError> {
    let number = line.number;
    let Some(name) = &line.body.model else {
        let message = format!("line {number}: body.model is missing");
        return Err(ApiError::invalid("missing_field", message).at("body.model"));
    };
    let found = app.models.find(name).await?;
    found.ok_or_else(|| ApiError::model_not_found(name).at("body.model").in_line(number))
}

/// Seals an open batch: no more lines are added, and it ends when its lines have.
#[utoipa::path(post, path = "/v1/batches/{id}/seal", tag = "batches", params(("id" = String, Path)),
    responses((status = 200, description = "The batch, which is sealed", body = BatchView),
        (status = 409, description = "The batch was not created open", body = ErrorResponse)))]
pub(crate) async fn seal(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(change_own(&app, &caller, &id, BatchChange::Seal).await?.into()))
}
