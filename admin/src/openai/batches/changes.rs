//! `/v1/batches/{id}/cancel`, `pause`, `resume` and `retry`.

use axum::{Json, extract::Path, http::HeaderMap};
use serde_json::{Map, Value};
use tritmill_client::Fields;
use tritmill_queue::Tenant;

use super::{BatchView, find};
use crate::{
    ApiError, App, Call, Caller, JsonResult,
    chosen_lines::{
        ChoiceError, ChosenLinesError, NAMES_MAX, Problem, check_complete, chosen_lines,
    },
    extract::OptionalBody,
    openai::{
        idempotency,
        schemas::{PauseRequest, RetryRequest},
    },
    store::{
        Batch, BatchId,
        batch_changes::{BatchChange, Changed, RetryKey},
        step_state::RerunLines,
    },
    tenant_limits,
};

/// Cancels a batch.
#[utoipa::path(post, path = "/v1/batches/{id}/cancel", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch, which is cancelling", body = BatchView)))]
pub(crate) async fn cancel(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(change_own(&app, &caller, &id, BatchChange::Cancel).await?.into()))
}

/// Pauses a batch: no line starts until it is resumed, and its deadline does not come nearer.
#[utoipa::path(post, path = "/v1/batches/{id}/pause", tag = "batches",
    params(("id" = String, Path)), request_body = Option<PauseRequest>,
    responses((status = 200, description = "The batch, which is paused", body = BatchView)))]
pub(crate) async fn pause(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    OptionalBody(body): OptionalBody,
) -> JsonResult<BatchView> {
    Ok(Json(change_own(&app, &caller, &id, pause_of(body)?).await?.into()))
}

/// Reads how a batch is paused.
pub(crate) fn pause_of(body: Map<String, Value>) -> Result<BatchChange, ApiError> {
    let mut fields = Fields::new(body, "");
    let now = fields.boolean("now")?.unwrap_or_default();
    fields.finish()?;
    Ok(BatchChange::Pause { now })
}

/// Resumes a paused batch, or opens a cancelled one again, to run its cancelled lines.
#[utoipa::path(post, path = "/v1/batches/{id}/resume", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch, which is validating until it is in progress",
        body = BatchView)))]
pub(crate) async fn resume(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(change_own(&app, &caller, &id, BatchChange::Resume).await?.into()))
}

/// Runs lines of a batch again. A batch that has ended is opened again, in a new completion window.
#[utoipa::path(post, path = "/v1/batches/{id}/retry", tag = "batches",
    params(("id" = String, Path), ("Idempotency-Key" = Option<String>, Header,
        description = "Requests with the same key run the lines again once")),
    request_body = Option<RetryRequest>,
    responses((status = 200, description = "The batch, which is validating until it is in progress",
        body = BatchView)))]
pub(crate) async fn retry(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    headers: HeaderMap,
    OptionalBody(body): OptionalBody,
) -> JsonResult<BatchView> {
    let key = idempotency::key(&headers)?.map(|key| {
        let body = Value::Object(body.clone()).to_string();
        let parts = ["retry".as_bytes(), id.as_bytes(), body.as_bytes()];
        RetryKey { key, request_hash: idempotency::hash(parts) }
    });
    let request = Retry::parse(body)?;
    let batch = find(&app, &caller, &id).await?;
    if let Some(key) = &key
        && app.store.has_call(&caller.tenant, key.as_call()).await?
    {
        // Its lines may have changed since.
        return Ok(Json(batch.into()));
    }
    let lines = match &request.custom_ids {
        None => RerunLines::Unanswered,
        Some(names) => chosen_lines(&app.files, &batch, names, request.force).await?,
    };
    let change = BatchChange::Retry { lines, key };
    Ok(Json(change_of_tenant(&app, &caller, (&batch.tenant, batch.id), change).await?.into()))
}

/// Which lines a request names.
#[derive(Debug, Default)]
struct Retry {
    /// Names of lines; `None` for all without an answer.
    custom_ids: Option<Vec<String>>,
    /// Whether those that have an answer run again as well.
    force: bool,
}

impl Retry {
    fn parse(body: Map<String, Value>) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "");
        let force = fields.boolean("force")?.unwrap_or_default();
        let list = fields.list("custom_ids")?;
        fields.finish()?;
        let Some(list) = list else {
            return match force {
                true => Err(ApiError::missing_field("custom_ids")),
                false => Ok(Self::default()),
            };
        };
        if list.is_empty() || list.len() > NAMES_MAX {
            let message =
                format!("custom_ids must have 1 to {NAMES_MAX} names, got {}", list.len());
            return Err(ApiError::invalid_value("custom_ids", message));
        }
        let text = |(index, value)| match value {
            Value::String(text) => Ok(text),
            _ => {
                let param = format!("custom_ids[{index}]");
                Err(ApiError::invalid_value(&param, format!("{param} must be a string")))
            }
        };
        let custom_ids = list.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
        Ok(Self { custom_ids: Some(custom_ids), force })
    }
}

/// Changes a batch of the caller's tenant.
pub(crate) async fn change_own(
    app: &App,
    caller: &Caller,
    id: &str,
    change: BatchChange,
) -> Result<Batch, ApiError> {
    let batch: BatchId = id.parse().map_err(|_| ApiError::not_found("batch", id))?;
    change_of_tenant(app, caller, (&caller.tenant, batch), change).await
}

/// Changes a batch of a tenant that the caller may act for.
pub(crate) async fn change_of_tenant(
    app: &App,
    caller: &Caller,
    (tenant, id): (&Tenant, BatchId),
    change: BatchChange,
) -> Result<Batch, ApiError> {
    let unknown = || ApiError::not_found("batch", &id.to_string());
    if matches!(change, BatchChange::Resume | BatchChange::Retry { .. }) {
        let batch = app.store.batch(tenant, id).await?.ok_or_else(unknown)?;
        check_complete(&app.store, &batch).await?;
    }
    let max = tenant_limits::open_batches(app, tenant).await?;
    let done = change.done();
    match app.store.change_batch(tenant, id, &change, max).await?.ok_or_else(unknown)? {
        Changed::Done(batch) => {
            app.batch_changed.notify_one();
            tracing::info!(key = %caller.key, batch = %batch.id, change = done, "batch changed");
            Ok(*batch)
        }
        Changed::Refused(batch) => {
            let message = format!("a batch in state '{}' cannot be {done}", batch.state.as_str());
            Err(match change {
                // As OpenAI's service answers.
                BatchChange::Cancel => ApiError::invalid("invalid_state", message),
                _ => ApiError::conflict("invalid_state", &message),
            })
        }
        Changed::ManyRetries => Err(ApiError::busy(
            "too many retries of the batch wait for their turn: try again later",
        )),
        Changed::Full => Err(ApiError::too_many_batches(max)),
        Changed::KeyConflict => Err(idempotency::conflict("request")),
    }
}

impl From<ChosenLinesError> for ApiError {
    fn from(error: ChosenLinesError) -> Self {
        let message = error.to_string();
        match error {
            ChosenLinesError::Choice(ChoiceError { index, problem, .. }) => {
                let param = format!("custom_ids[{index}]");
                match problem {
                    Problem::Unknown => Self::invalid("unknown_custom_id", message),
                    Problem::Refused(_) => Self::invalid("refused_line", message),
                    Problem::Open(_) => Self::conflict("line_not_ended", &message),
                    Problem::Answered => Self::conflict("line_answered", &message),
                }
                .at(param)
            }
            ChosenLinesError::AnswersDeleted => Self::conflict("answers_deleted", &message),
            ChosenLinesError::NoInput => {
                Self::conflict("file_not_found", &message).at("input_file_id")
            }
            ChosenLinesError::Store(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn retry_names_lines_or_none() {
        let parse = |body: Value| {
            let Value::Object(map) = body else { panic!("an object") };
            Retry::parse(map).map(|retry| (retry.custom_ids, retry.force))
        };
        assert_eq!(parse(json!({})), Ok((None, false)));
        let named = parse(json!({ "custom_ids": ["a", "b"], "force": true }));
        assert_eq!(named, Ok((Some(vec!["a".to_owned(), "b".to_owned()]), true)));
        let many = vec!["x"; NAMES_MAX + 1];
        for (wrong, param) in [
            (json!({ "force": true }), "custom_ids"),
            (json!({ "custom_ids": [] }), "custom_ids"),
            (json!({ "custom_ids": many }), "custom_ids"),
            (json!({ "custom_ids": "a" }), "custom_ids"),
            (json!({ "custom_ids": ["a", 3] }), "custom_ids[1]"),
            (json!({ "lines": [1] }), "lines"),
        ] {
            let error = parse(wrong.clone()).expect_err("it is invalid");
            assert_eq!(error.param(), Some(param), "{param}");
        }
    }
}
