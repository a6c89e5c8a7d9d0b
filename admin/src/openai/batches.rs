//! `/v1/batches`: files answered line by line.

use std::time::Duration;

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, Query as QueryOf, State, rejection::QueryRejection},
};
use serde_json::{Map, Value, json};
use tritmill_producer::{Endpoint, Fields};
use tritmill_queue::{
    Priority, Timestamp,
    store::{
        Batch, BatchId, BatchState, FileId, Page,
        batches::{BatchTimes, Place},
        files::FilePurpose,
    },
};

use super::{
    files::{EXPIRES_S, bad_expiry},
    paging::{self, Query},
};
use crate::{
    access::Caller,
    app::App,
    error::ApiError,
    json,
    openapi::{self as schemas, BatchList, BatchRequest, Refused},
};

/// Batches of a list.
const LIST_DEFAULT: u32 = 20;
const LIST_MAX: u32 = 100;
/// Pairs of metadata, and characters of a key and a value.
const PAIRS_MAX: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 512;
/// Longest window.
const WINDOW_MAX: Duration = Duration::from_secs(365 * 86_400);

/// A batch as callers see it.
fn shown(batch: &Batch) -> Value {
    let at = |time: Option<Timestamp>| time.map(Timestamp::seconds);
    let BatchTimes { in_progress, finalizing, completed, failed, expired, cancelling, cancelled } =
        batch.at;
    let errors =
        (!batch.errors.is_empty()).then(|| json!({ "object": "list", "data": batch.errors }));
    json!({
        "id": batch.id.to_string(),
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.queue.as_ref().map(ToString::to_string),
        "errors": errors,
        "input_file_id": batch.input.to_string(),
        "completion_window": batch.completion_window,
        "status": batch.state.as_str(),
        "output_file_id": batch.output.map(|id| id.to_string()),
        "error_file_id": batch.error_file.map(|id| id.to_string()),
        "created_at": batch.created_at.seconds(),
        "in_progress_at": at(in_progress),
        "expires_at": batch.expires_at.seconds(),
        "finalizing_at": at(finalizing),
        "completed_at": at(completed),
        "failed_at": at(failed),
        "expired_at": at(expired),
        "cancelling_at": at(cancelling),
        "cancelled_at": at(cancelled),
        "request_counts": {
            "total": batch.lines,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
    })
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found("batch", id)
}

/// What a caller asks for.
struct Asked {
    input: String,
    endpoint: String,
    window: String,
    within: Duration,
    priority: Priority,
    metadata: Option<Map<String, Value>>,
    output_expires_s: Option<u64>,
}

impl Asked {
    fn read(map: Map<String, Value>) -> Result<Self, ApiError> {
        let mut fields = Fields::new(map, "");
        let mut needed = |name: &str| {
            let missing =
                || ApiError::invalid("missing_field", format!("{name} is missing")).at(name);
            fields.text(name)?.ok_or_else(missing)
        };
        let (input, endpoint) = (needed("input_file_id")?, needed("endpoint")?);
        let window = needed("completion_window")?;
        if ![Endpoint::Chat, Endpoint::Completions].map(Endpoint::as_str).contains(&&*endpoint) {
            let message = "endpoint must be '/v1/chat/completions' or '/v1/completions'";
            return Err(ApiError::invalid("invalid_value", message).at("endpoint"));
        }
        let within = duration(&window).ok_or_else(|| {
            let message = "completion_window must be a number and one of s, m, h, d, at most 365d";
            ApiError::invalid("invalid_value", message).at("completion_window")
        })?;
        let priority = match fields.text("priority")?.as_deref().map(str::parse) {
            None => Priority::Normal,
            Some(Ok(priority @ (Priority::Normal | Priority::Low))) => priority,
            Some(_) => {
                let message = "priority must be 'normal' or 'low': high is for who waits";
                return Err(ApiError::invalid("invalid_value", message).at("priority"));
            }
        };
        let metadata = fields.take("metadata").map(metadata).transpose()?;
        let output_expires_s = fields.take("output_expires_after").map(expiry).transpose()?;
        fields.finish()?;
        Ok(Self { input, endpoint, window, within, priority, metadata, output_expires_s })
    }
}

/// `24h`, `90s`, `7d`.
fn duration(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let count: u64 = is_number.then(|| digits.parse().ok()).flatten()?;
    let window = Duration::from_secs(count.checked_mul(seconds)?);
    (!window.is_zero() && window <= WINDOW_MAX).then_some(window)
}

fn metadata(value: Value) -> Result<Map<String, Value>, ApiError> {
    let refuse = |message: String| ApiError::invalid("invalid_value", message).at("metadata");
    let Value::Object(map) = value else {
        return Err(refuse("metadata must be an object".to_owned()));
    };
    if map.len() > PAIRS_MAX {
        return Err(refuse(format!("metadata has {} pairs, at most {PAIRS_MAX}", map.len())));
    }
    for (key, value) in &map {
        let fits = value.as_str().is_some_and(|value| value.chars().count() <= VALUE_MAX);
        if key.chars().count() > KEY_MAX || !fits || key.contains('\0') {
            return Err(refuse(format!(
                "metadata must be strings of at most {VALUE_MAX} characters under names of at most \
                 {KEY_MAX}"
            )));
        }
        if value.as_str().is_some_and(|value| value.contains('\0')) {
            return Err(refuse("metadata must not have NUL characters".to_owned()));
        }
    }
    Ok(map)
}

fn expiry(value: Value) -> Result<u64, ApiError> {
    let bad = || bad_expiry("output_expires_after");
    let Value::Object(map) = value else { return Err(bad()) };
    let mut fields = Fields::new(map, "output_expires_after.");
    let is_known = fields.text("anchor")?.as_deref() == Some("created_at");
    let seconds = fields.count("seconds")?.map(u64::from);
    fields.finish()?;
    seconds.filter(|seconds| is_known && EXPIRES_S.contains(seconds)).ok_or_else(bad)
}

/// Takes a batch.
#[utoipa::path(post, path = "/v1/batches", tag = "batches",
    request_body = BatchRequest,
    responses((status = 200, description = "It is validating", body = schemas::Batch),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let asked = json::object(body).await?;
    Ok(Json(shown(&take(&app, &caller, asked).await?)))
}

/// Records the batch that a caller asks for.
///
/// # Errors
/// What is wrong with it, by the field's name.
pub(crate) async fn take(
    app: &App,
    caller: &Caller,
    asked: Map<String, Value>,
) -> Result<Batch, ApiError> {
    let asked = Asked::read(asked)?;
    let no_file = || ApiError::not_found("file", &asked.input).at("input_file_id");
    let input: FileId = asked.input.parse().map_err(|_| no_file())?;
    let file = app.store().file(&caller.tenant, input).await?.ok_or_else(no_file)?;
    if file.purpose != FilePurpose::Batch {
        let message = "input_file_id must be a file of purpose 'batch'";
        return Err(ApiError::invalid("invalid_value", message).at("input_file_id"));
    }
    let created_at = app.client().now().await?;
    let batch = Batch {
        id: BatchId::generate(),
        tenant: caller.tenant.clone(),
        state: BatchState::Validating,
        endpoint: asked.endpoint,
        input,
        completion_window: asked.window,
        priority: asked.priority,
        metadata: asked.metadata,
        output_expires_s: asked.output_expires_s,
        created_at,
        expires_at: created_at.after(asked.within),
        at: BatchTimes::default(),
        queue: None,
        lines: 0,
        refused: 0,
        submitted: Place::default(),
        completed: 0,
        failed: 0,
        errors: Vec::new(),
        output: None,
        error_file: None,
        overdue: false,
    };
    app.store().create_batch(&batch).await?;
    app.batches().notify_one();
    tracing::info!(key = %caller.key, batch = %batch.id, %input, "batch created");
    Ok(batch)
}

/// The caller's batches.
#[utoipa::path(get, path = "/v1/batches", tag = "batches",
    params(Query),
    responses((status = 200, description = "The latest first", body = BatchList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    query: Result<QueryOf<Query>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let page: Page<BatchId> = paging::read(query)?.page(LIST_DEFAULT, LIST_MAX)?;
    let batches = app.store().batches(&caller.tenant, page).await?;
    Ok(Json(paging::list(&page, batches.iter().map(shown).collect())))
}

/// Where a batch is.
#[utoipa::path(get, path = "/v1/batches/{id}", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "Where it is", body = schemas::Batch),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn one(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(shown(&find(&app, &caller, &id).await?)))
}

/// The caller's batch of this name.
///
/// # Errors
/// If there is none.
pub(crate) async fn find(app: &App, caller: &Caller, id: &str) -> Result<Batch, ApiError> {
    let batch: BatchId = id.parse().map_err(|_| unknown(id))?;
    app.store().batch(&caller.tenant, batch).await?.ok_or_else(|| unknown(id))
}

/// Withdraws it.
#[utoipa::path(post, path = "/v1/batches/{id}/cancel", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "It is cancelling", body = schemas::Batch),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn cancel(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(shown(&withdraw(&app, &caller, &id).await?)))
}

/// Withdraws the caller's batch of this name.
///
/// # Errors
/// If there is none, or if it is over.
pub(crate) async fn withdraw(app: &App, caller: &Caller, id: &str) -> Result<Batch, ApiError> {
    let batch: BatchId = id.parse().map_err(|_| unknown(id))?;
    let batch = app.store().cancel_batch(&caller.tenant, batch).await?;
    let batch = batch.ok_or_else(|| unknown(id))?;
    match batch.state {
        BatchState::Cancelling | BatchState::Cancelled => {
            app.batches().notify_one();
            tracing::info!(key = %caller.key, batch = %batch.id, "batch cancelled");
            Ok(batch)
        }
        state => {
            let message = format!("a batch that is {} cannot be cancelled", state.as_str());
            Err(ApiError::invalid("invalid_state", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_any_duration() {
        let check = |text: &str, seconds: Option<u64>| {
            assert_eq!(duration(text), seconds.map(Duration::from_secs), "{text}");
        };
        check("24h", Some(86_400));
        check("90s", Some(90));
        check("7d", Some(604_800));
        for wrong in [
            "",
            "h",
            "0h",
            "24",
            "-1h",
            "+1h",
            "1.5h",
            "24 h",
            "366d",
            "1é",
            "99999999999999999999d",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn what_is_asked_is_refused_by_the_name_of_the_field() {
        let fault = |change: Value| {
            let mut map = Map::new();
            map.insert("input_file_id".to_owned(), json!("file-0"));
            map.insert("endpoint".to_owned(), json!("/v1/completions"));
            map.insert("completion_window".to_owned(), json!("24h"));
            let Value::Object(change) = change else { panic!("an object") };
            map.extend(change);
            Asked::read(map).map(|_| ()).map_err(|error| error.body()["error"]["param"].clone())
        };
        assert_eq!(fault(json!({ "metadata": { "a": "b" }, "priority": "low" })), Ok(()));
        let many: Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("x"))).collect();
        for (wrong, param) in [
            (json!({ "endpoint": "/v1/embeddings" }), "endpoint"),
            (json!({ "completion_window": "soon" }), "completion_window"),
            (json!({ "metadata": [] }), "metadata"),
            (json!({ "metadata": many }), "metadata"),
            (json!({ "metadata": { "a": "x".repeat(513) } }), "metadata"),
            (json!({ "metadata": { "k".repeat(65): "x" } }), "metadata"),
            (json!({ "metadata": { "a": 1 } }), "metadata"),
            (json!({ "priority": "high" }), "priority"),
            (
                json!({ "output_expires_after": { "anchor": "created_at", "seconds": 1 } }),
                "output_expires_after",
            ),
            (json!({ "color": "red" }), "color"),
        ] {
            assert_eq!(fault(wrong.clone()), Err(json!(param)), "{wrong}");
        }
    }
}
