//! `/v1/batches`: files answered line by line.

mod asked;

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, Query as QueryOf, State, rejection::QueryRejection},
    http::HeaderMap,
};
use serde_json::{Map, Value, json};
use tritmill_queue::{
    Timestamp,
    store::{
        Batch, BatchId, BatchState, FileId, Page,
        batches::{BatchTimes, FilePosition},
        files::FilePurpose,
        webhooks::Webhook,
    },
};

use self::asked::Asked;
use super::paging::{self, Query};
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
/// Bytes of an idempotency key.
const KEY_BYTES_MAX: usize = 255;

/// A batch as callers see it.
pub(crate) fn shown(batch: &Batch) -> Value {
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
        "webhook": batch.webhook.as_ref().map(webhook),
    })
}

/// A webhook as callers see it: not its secret.
fn webhook(webhook: &Webhook) -> Value {
    let status = match (webhook.ended_at, &webhook.error) {
        (None, _) => "pending",
        (Some(_), None) => "delivered",
        (Some(_), Some(_)) => "failed",
    };
    json!({
        "url": webhook.url,
        "status": status,
        "attempts": webhook.attempts,
        "error": webhook.error,
    })
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found("batch", id)
}

/// Takes a batch.
#[utoipa::path(post, path = "/v1/batches", tag = "batches",
    request_body = BatchRequest,
    params(("Idempotency-Key" = Option<String>, Header,
        description = "Asking twice under one key makes one batch")),
    responses((status = 200, description = "It is validating", body = schemas::Batch),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let idempotency_key = idempotency_key(&headers)?;
    let asked = json::object(body).await?;
    let batch = take(&app, &caller, asked, idempotency_key).await?;
    let mut answer = shown(&batch);
    if let Some(webhook) = &batch.webhook {
        // To its creator alone, and here alone.
        answer["webhook"]["secret"] = json!(webhook.secret);
    }
    Ok(Json(answer))
}

/// The key that a request bears, if it is one.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let is_good = |text: &&str| (1..=KEY_BYTES_MAX).contains(&text.len());
    match value.to_str().ok().filter(is_good) {
        Some(text) => Ok(Some(text.to_owned())),
        None => {
            let message = format!("Idempotency-Key must be 1 to {KEY_BYTES_MAX} ASCII characters");
            Err(ApiError::invalid("invalid_value", message).at("Idempotency-Key"))
        }
    }
}

/// Records the batch that a caller asks for, or finds the one that was asked for under the same key.
///
/// # Errors
/// What is wrong with it, by the field's name.
pub(crate) async fn take(
    app: &App,
    caller: &Caller,
    asked: Map<String, Value>,
    idempotency_key: Option<String>,
) -> Result<Batch, ApiError> {
    let asked = Asked::read(asked, app.limits().webhook_addresses)?;
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
        submitted: FilePosition::default(),
        completed: 0,
        failed: 0,
        errors: Vec::new(),
        output: None,
        error_file: None,
        overdue: false,
        idempotency_key,
        webhook: asked.webhook,
    };
    let known = app.store().create_batch(&batch).await?;
    if known.as_ref().is_some_and(|known| !is_the_same(known, &batch)) {
        let message = "the idempotency key was used for another batch: choose another";
        return Err(ApiError::conflict("idempotency_conflict", message).at("Idempotency-Key"));
    }
    if known.is_none() {
        app.batches().notify_one();
        tracing::info!(key = %caller.key, batch = %batch.id, %input, "batch created");
    }
    Ok(known.unwrap_or(batch))
}

/// Whether both were asked for in the same words.
fn is_the_same(known: &Batch, new: &Batch) -> bool {
    let words = |batch: &Batch| {
        let url = batch.webhook.as_ref().map(|webhook| webhook.url.clone());
        let Batch { input, endpoint, completion_window, priority, .. } = batch.clone();
        (input, endpoint, completion_window, priority, url)
    };
    words(known) == words(new)
        && known.metadata == new.metadata
        && known.output_expires_s == new.output_expires_s
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
