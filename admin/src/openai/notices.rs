//! `/v1/notices`: what the tenant's receivers were told, or are yet to be told.

use axum::{Json, extract::Path};
use serde::Serialize;
use serde_json::json;
use tritmill_queue::Tenant;
use utoipa::ToSchema;

use super::{
    list::{List, ListQuery},
    webhook::next_attempt,
};
use crate::{
    ApiError, App, Call, Caller, JsonResult, QueryParams,
    operator::audit,
    store::notices::{Notice, NoticeFilter, NoticeId},
};

/// Notices of a list by default, and at most.
const LIST_DEFAULT: u32 = 20;
const LIST_MAX: u32 = 100;

/// An event for a receiver.
#[derive(Serialize, ToSchema)]
#[schema(as = Notice)]
pub(crate) struct NoticeView {
    id: String,
    object: &'static str,
    /// Id of the event, which receivers get as `webhook-id`.
    event_id: String,
    /// `batch.completed`, `batch.failed`, `batch.expired`, `batch.cancelled`, `batch.paused`, `batch.resumed`,
    /// `budget.soft_reached` or `budget.spent`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// Time of the event.
    created_at: i64,
    /// The batch that it is about.
    batch_id: Option<String>,
    /// `webhook` or `mail`.
    channel: &'static str,
    /// The URL or the mail address.
    receiver: String,
    /// `pending`; finally `delivered` or `failed`.
    status: &'static str,
    attempts: u32,
    /// Error of the last attempt.
    error: Option<String>,
    /// Time of the next attempt; null before the first, which is due at once, and after the last.
    next_attempt_at: Option<i64>,
    /// Time of the last attempt, if no other follows.
    ended_at: Option<i64>,
}

impl From<Notice> for NoticeView {
    fn from(notice: Notice) -> Self {
        Self {
            id: notice.id.to_string(),
            object: "notice",
            event_id: notice.event,
            kind: notice.kind.as_str(),
            created_at: notice.created_at.seconds(),
            batch_id: notice.batch.map(|id| id.to_string()),
            channel: notice.to.channel().as_str(),
            receiver: notice.to.address().to_owned(),
            status: notice.delivery.state(),
            attempts: notice.delivery.attempts,
            next_attempt_at: next_attempt(&notice.delivery),
            ended_at: notice.delivery.ended_at.map(|at| at.seconds()),
            error: notice.delivery.error,
        }
    }
}

/// Lists the tenant's notices.
#[utoipa::path(get, path = "/v1/notices", tag = "notices", params(ListQuery),
    responses((status = 200, description = "The latest first", body = List<NoticeView>)))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<ListQuery>,
) -> JsonResult<List<NoticeView>> {
    let page = query.page(LIST_DEFAULT, LIST_MAX)?;
    let filter = NoticeFilter { tenant: Some(caller.tenant), batch: None };
    let found = app.store.notices(&filter, page).await?;
    let views = found.into_iter().map(NoticeView::from).collect();
    Ok(Json(List::new(&page, views, |view: &NoticeView| &view.id)))
}

/// Delivers a notice again, now and for another day. A receiver that was left alone or gone is told again from now on.
#[utoipa::path(post, path = "/v1/notices/{id}/redeliver", tag = "notices", params(("id" = String, Path)),
    responses((status = 200, description = "The notice, which is pending", body = NoticeView)))]
pub(crate) async fn redeliver(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<NoticeView> {
    let tenant = caller.tenant.clone();
    Ok(Json(redeliver_notice(&app, &caller, Some(&tenant), &id).await?.into()))
}

/// Makes a notice due again; of a tenant, or for operators of any.
pub(crate) async fn redeliver_notice(
    app: &App,
    caller: &Caller,
    tenant: Option<&Tenant>,
    id: &str,
) -> Result<Notice, ApiError> {
    let unknown = || ApiError::not_found("notice", id);
    let parsed: NoticeId = id.parse().map_err(|_| unknown())?;
    // Without the receiver: its URL may have a password.
    audit::record(app, caller, "notice.redeliver", id, json!({})).await?;
    let found = app.store.redeliver_notice(tenant, parsed).await?.ok_or_else(unknown)?;
    app.notice_due.notify_one();
    Ok(found)
}
