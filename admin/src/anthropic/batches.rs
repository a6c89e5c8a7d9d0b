//! Anthropic's Message Batches, `/v1/messages/batches`: batches of lines for `/v1/messages`, which may name different models. A batch
//! that was created in either way is in both APIs, with one id.

mod create;
mod results;
mod view;

use std::str::FromStr;

use axum::{
    Json,
    extract::{Path, Request},
    http::HeaderMap,
};
use serde::{Deserialize, Serialize};
use tritmill_client::Endpoint;
use tritmill_queue::store::Page;
use utoipa::ToSchema;

use self::view::MessageBatch;
pub(crate) use self::{
    results::{__path_results, results},
    view::rfc_3339,
};
use super::schemas::MessageBatchRequest;
use crate::{
    ApiError, App, Call, Caller, JsonResult, QueryParams,
    openai::{batches as all, idempotency},
    store::{
        Batch, BatchId,
        batch_changes::BatchChange,
        batches::{BatchFilter, BatchSearch},
    },
};

/// Batches of a list by default, and at most.
const LIST_DEFAULT: u32 = 20;
const LIST_MAX: u32 = 1000;

/// Creates a batch of messages.
#[utoipa::path(post, path = "/v1/messages/batches", tag = "messages",
    request_body = MessageBatchRequest,
    params(("Idempotency-Key" = Option<String>, Header,
        description = "Requests with the same key create one batch")),
    responses((status = 200, description = "The batch", body = MessageBatch)))]
pub(crate) async fn create(
    Call { app, caller }: Call,
    headers: HeaderMap,
    request: Request,
) -> JsonResult<MessageBatch> {
    let key = idempotency::key(&headers)?;
    let batch = create::create(&app, &caller, request, key).await?;
    view::of(&app, batch).await.map(Json)
}

/// Returns a batch of messages.
#[utoipa::path(get, path = "/v1/messages/batches/{id}", tag = "messages", params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = MessageBatch)))]
pub(crate) async fn one(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<MessageBatch> {
    let batch = find(&app, &caller, &id).await?;
    view::of(&app, batch).await.map(Json)
}

/// Cancels a batch of messages; its answers so far are kept.
#[utoipa::path(post, path = "/v1/messages/batches/{id}/cancel", tag = "messages", params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = MessageBatch)))]
pub(crate) async fn cancel(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<MessageBatch> {
    find(&app, &caller, &id).await?;
    let batch = all::change_own(&app, &caller, &id, BatchChange::Cancel).await?;
    view::of(&app, batch).await.map(Json)
}

/// A deleted batch.
#[derive(Serialize, ToSchema)]
pub(crate) struct MessageBatchDeleted {
    id: String,
    /// `message_batch_deleted`
    r#type: &'static str,
}

/// Deletes a batch of messages that has ended, with its results.
#[utoipa::path(delete, path = "/v1/messages/batches/{id}", tag = "messages", params(("id" = String, Path)),
    responses((status = 200, description = "The batch is deleted", body = MessageBatchDeleted)))]
pub(crate) async fn remove(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<MessageBatchDeleted> {
    find(&app, &caller, &id).await?;
    all::delete_batch(&app, &caller, &id).await?;
    Ok(Json(MessageBatchDeleted { id, r#type: "message_batch_deleted" }))
}

/// Which batches to list.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct MessageBatchQuery {
    /// Most batches to return.
    #[param(nullable = false, value_type = Option<u32>, minimum = 1, maximum = 1000)]
    limit: Option<String>,
    /// Id of the last batch of the page before.
    #[param(nullable = false)]
    after_id: Option<String>,
    /// Id of the first batch of the page behind.
    #[param(nullable = false)]
    before_id: Option<String>,
    /// Accepted without effect: the beta of a client.
    #[param(nullable = false)]
    beta: Option<String>,
}

/// A page of batches.
#[derive(Serialize, ToSchema)]
pub(crate) struct MessageBatchList {
    data: Vec<MessageBatch>,
    has_more: bool,
    first_id: Option<String>,
    last_id: Option<String>,
}

/// Lists the tenant's batches of messages.
#[utoipa::path(get, path = "/v1/messages/batches", tag = "messages", params(MessageBatchQuery),
    responses((status = 200, description = "The latest first", body = MessageBatchList)))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<MessageBatchQuery>,
) -> JsonResult<MessageBatchList> {
    let limit = match query.limit.as_deref().map(u32::from_str) {
        None => LIST_DEFAULT,
        Some(Ok(limit)) if (1..=LIST_MAX).contains(&limit) => limit,
        Some(_) => {
            let message = format!("limit must be between 1 and {LIST_MAX}");
            return Err(ApiError::invalid_value("limit", message));
        }
    };
    let id = |param: &str, text: &Option<String>| match text.as_deref() {
        None | Some("") => Ok(None),
        Some(text) => text.parse::<BatchId>().map(Some).map_err(|_| {
            ApiError::invalid_value(param, format!("{param} must be the id of a batch"))
        }),
    };
    let (after, before) = (id("after_id", &query.after_id)?, id("before_id", &query.before_id)?);
    let filter = BatchFilter {
        tenant: Some(caller.tenant),
        search: BatchSearch {
            endpoint: Some(Endpoint::Messages.as_str().to_owned()),
            ..BatchSearch::default()
        },
        ..BatchFilter::default()
    };
    let (ascending, place) = (before.is_some(), before.or(after));
    let page = Page { after: place, limit: limit + 1, ascending };
    let mut found = app.store.find_batches(&filter, page).await?;
    let has_more = found.len() > limit as usize;
    found.truncate(limit as usize);
    if ascending {
        found.reverse();
    }
    let mut data = Vec::with_capacity(found.len());
    for batch in found {
        data.push(view::of(&app, batch).await?);
    }
    let (first_id, last_id) =
        (data.first().map(|batch| batch.id.clone()), data.last().map(|batch| batch.id.clone()));
    Ok(Json(MessageBatchList { data, has_more, first_id, last_id }))
}

/// Finds a batch of messages of the caller's tenant.
async fn find(app: &App, caller: &Caller, id: &str) -> Result<Batch, ApiError> {
    let batch = all::find(app, caller, id).await?;
    match batch.endpoint == Endpoint::Messages.as_str() {
        true => Ok(batch),
        false => Err(ApiError::not_found("batch of messages", id)),
    }
}
