//! `/v1/schedules`: batches that are created again and again.

use axum::{Json, extract::Path};
use serde::Serialize;
use serde_json::{Map, Value};
use tritmill_client::Fields;
use tritmill_queue::{Tenant, Timestamp};
use utoipa::ToSchema;

use super::{
    batches::check_request,
    list::{List, ListQuery},
    schemas::ScheduleRequest,
};
use crate::{
    ApiError, App, Call, JsonBody, JsonResult, QueryParams,
    schedules::{Times, named_in_batch},
    store::schedules::{Schedule, ScheduleId, ScheduleRecord},
};

/// Schedules of a list by default, and at most.
const LIST_DEFAULT: u32 = 20;
const LIST_MAX: u32 = 100;
/// Most schedules of a tenant.
const SCHEDULES_MAX: u32 = 1000;

/// A schedule.
#[derive(Serialize, ToSchema)]
#[schema(as = Schedule)]
pub(crate) struct ScheduleView {
    id: String,
    object: &'static str,
    cron: String,
    timezone: String,
    /// Body of the request that creates a batch.
    #[schema(value_type = Object)]
    batch: Map<String, Value>,
    created_at: i64,
    /// Null while it is paused.
    next_run_at: Option<i64>,
    last_run_at: Option<i64>,
    /// The latest batch.
    last_batch_id: Option<String>,
    /// Why the latest run created no batch.
    error: Option<String>,
    /// Runs that were not made, because the service was down.
    missed_runs: u64,
}

impl From<Schedule> for ScheduleView {
    fn from(Schedule { id, next_at, record, .. }: Schedule) -> Self {
        let at = |time: Option<Timestamp>| time.map(Timestamp::seconds);
        Self {
            id: id.to_string(),
            object: "schedule",
            cron: record.cron,
            timezone: record.timezone,
            batch: record.batch,
            created_at: record.created_at.seconds(),
            next_run_at: at(next_at),
            last_run_at: at(record.last_run_at),
            last_batch_id: record.last_batch.map(|id| id.to_string()),
            error: record.error,
            missed_runs: record.missed,
        }
    }
}

/// Creates a schedule: at each of its times a batch is created.
#[utoipa::path(post, path = "/v1/schedules", tag = "schedules", request_body = ScheduleRequest,
    responses((status = 200, description = "The schedule", body = ScheduleView)))]
pub(crate) async fn create(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<ScheduleView> {
    let mut fields = Fields::new(body, "");
    let cron = fields.text("cron")?.ok_or_else(|| ApiError::missing_field("cron"))?;
    let timezone = fields.text("timezone")?.unwrap_or_else(|| "UTC".to_owned());
    let batch = match fields.take("batch") {
        Some(Value::Object(batch)) => batch,
        Some(_) => return Err(ApiError::invalid_value("batch", "batch must be an object")),
        None => return Err(ApiError::missing_field("batch")),
    };
    fields.finish()?;
    let times = Times::parse(&cron, &timezone)?;
    let now = app.store.now().await?;
    let next = times.after(now).ok_or_else(|| {
        ApiError::invalid_value("cron", "cron never comes: no day has all of its fields")
    })?;
    check_request(&app, &caller, batch.clone()).await.map_err(named_in_batch)?;
    let record = ScheduleRecord::new(cron, timezone, batch, now);
    let schedule = Schedule {
        id: ScheduleId::generate(),
        tenant: caller.tenant,
        key: caller.key,
        next_at: Some(next),
        record,
    };
    if !app.store.add_schedule(&schedule, SCHEDULES_MAX).await? {
        let message = format!("the tenant has {SCHEDULES_MAX} schedules, the maximum: delete some");
        return Err(ApiError::conflict("too_many_schedules", &message));
    }
    Ok(Json(schedule.into()))
}

/// Lists the tenant's schedules.
#[utoipa::path(get, path = "/v1/schedules", tag = "schedules", params(ListQuery),
    responses((status = 200, description = "The latest first", body = List<ScheduleView>)))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(query): QueryParams<ListQuery>,
) -> JsonResult<List<ScheduleView>> {
    let page = query.page(LIST_DEFAULT, LIST_MAX)?;
    let found = app.store.schedules(Some(&caller.tenant), page).await?;
    let views = found.into_iter().map(ScheduleView::from).collect();
    Ok(Json(List::new(&page, views, |view: &ScheduleView| &view.id)))
}

/// Returns a schedule.
#[utoipa::path(get, path = "/v1/schedules/{id}", tag = "schedules", params(("id" = String, Path)),
    responses((status = 200, description = "The schedule", body = ScheduleView)))]
pub(crate) async fn one(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<ScheduleView> {
    Ok(Json(find(&app, &caller.tenant, &id).await?.into()))
}

async fn find(app: &App, tenant: &Tenant, id: &str) -> Result<Schedule, ApiError> {
    let unknown = || ApiError::not_found("schedule", id);
    let key: ScheduleId = id.parse().map_err(|_| unknown())?;
    app.store.schedule(tenant, key).await?.ok_or_else(unknown)
}

/// Pauses a schedule: it has no runs until it is resumed.
#[utoipa::path(post, path = "/v1/schedules/{id}/pause", tag = "schedules", params(("id" = String, Path)),
    responses((status = 200, description = "The schedule", body = ScheduleView)))]
pub(crate) async fn pause(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<ScheduleView> {
    Ok(Json(change(&app, &caller.tenant, &id, Turn::Pause).await?.into()))
}

/// Resumes a schedule: the next run is at its next time.
#[utoipa::path(post, path = "/v1/schedules/{id}/resume", tag = "schedules", params(("id" = String, Path)),
    responses((status = 200, description = "The schedule", body = ScheduleView)))]
pub(crate) async fn resume(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<ScheduleView> {
    Ok(Json(change(&app, &caller.tenant, &id, Turn::Resume).await?.into()))
}

/// Whether a schedule has runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// None, until it is resumed.
    Pause,
    /// The next one is at its next time.
    Resume,
}

/// Sets the time of the next run of a schedule.
pub(crate) async fn change(
    app: &App,
    tenant: &Tenant,
    id: &str,
    turn: Turn,
) -> Result<Schedule, ApiError> {
    // A run may come in between.
    const TRIES: usize = 5;
    for _ in 0..TRIES {
        let mut schedule = find(app, tenant, id).await?;
        let times = Times::parse(&schedule.record.cron, &schedule.record.timezone)?;
        let before = schedule.next_at;
        schedule.next_at = match turn {
            Turn::Pause => None,
            Turn::Resume => times.after(app.store.now().await?),
        };
        if app.store.save_schedule(&schedule, before).await? {
            return Ok(schedule);
        }
    }
    Err(ApiError::conflict("schedule_changes", "the schedule runs now: try again"))
}

/// Deletes a schedule of a tenant.
pub(crate) async fn delete(app: &App, tenant: &Tenant, id: &str) -> Result<(), ApiError> {
    let schedule = find(app, tenant, id).await?;
    app.store.delete_schedule(tenant, schedule.id).await?;
    Ok(())
}

/// A deleted schedule.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeletedSchedule {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Deletes a schedule. Its batches stay.
#[utoipa::path(delete, path = "/v1/schedules/{id}", tag = "schedules", params(("id" = String, Path)),
    responses((status = 200, description = "It is deleted", body = DeletedSchedule)))]
pub(crate) async fn remove(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<DeletedSchedule> {
    delete(&app, &caller.tenant, &id).await?;
    Ok(Json(DeletedSchedule { id, object: "schedule", deleted: true }))
}
