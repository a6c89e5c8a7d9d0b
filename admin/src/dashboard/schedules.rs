//! Page of schedules: their next runs, and what became of the last ones.

use askama::Template;
use axum::extract::{Path, Query};
use serde::Deserialize;
use serde_json::json;
use tritmill_queue::{Tenant, Timestamp, store::Page};

use super::{Content, PageError, PageForm, PageResult, Visit, filters, pager::Pager};
use crate::{
    ApiError, App, Caller,
    openai::schedules::{self, Turn},
    operator::audit,
    store::schedules::{Schedule, ScheduleId},
};

/// Schedules per page.
const PAGE_SIZE: u32 = 50;
const HOME: &str = "/dashboard/schedules";

/// The position in the list.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SchedulesQuery {
    after: String,
}

#[derive(Template)]
#[template(path = "schedules.html")]
struct SchedulesView {
    now: Timestamp,
    schedules: Vec<Schedule>,
    is_operator: bool,
    may_change: bool,
    pager: Pager,
}

impl SchedulesView {
    /// What its batches answer: the endpoint.
    fn endpoint(schedule: &Schedule) -> &str {
        schedule.record.batch.get("endpoint").and_then(|value| value.as_str()).unwrap_or("–")
    }
}

/// Shows the schedules of the visitor's tenant, or for an operator of all tenants, the latest first.
pub(crate) async fn list(visit: Visit, Query(query): Query<SchedulesQuery>) -> PageResult {
    visit.show(move |app, caller| load(app, caller, query.clone())).await
}

async fn load(app: App, caller: Caller, query: SchedulesQuery) -> Result<Content, PageError> {
    let after: Option<ScheduleId> = match query.after.as_str() {
        "" => None,
        id => Some(id.parse().map_err(|_| ApiError::not_found("schedule", id))?),
    };
    let is_operator = caller.may_operate();
    let page = Page { after, limit: PAGE_SIZE + 1, ascending: false };
    let mut found = app.store.schedules((!is_operator).then_some(&caller.tenant), page).await?;
    let has_more = found.len() > PAGE_SIZE as usize;
    found.truncate(PAGE_SIZE as usize);
    let next = found.last().filter(|_| has_more).map(|last| format!("{HOME}?after={}", last.id));
    let view = SchedulesView {
        now: app.client.now().await?,
        pager: Pager::latest_first("schedules", after.map(|_| HOME.to_owned()), next),
        schedules: found,
        is_operator,
        may_change: caller.may_submit(),
    };
    Ok(Content::new("Schedules", &view))
}

/// The tenant of a schedule; for operators, who may change that of any.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OfTenant {
    tenant: String,
}

impl OfTenant {
    /// Returns the tenant; records a change of another one's schedule in the audit log.
    async fn admit(self, visit: &Visit, action: &str, id: &str) -> Result<Tenant, PageError> {
        let own = &visit.caller.tenant;
        if !visit.caller.may_operate() || self.tenant.is_empty() || self.tenant == own.0 {
            return Ok(own.clone());
        }
        let detail = json!({ "tenant": self.tenant });
        audit::record(&visit.app, &visit.caller, action, id, detail).await?;
        Ok(Tenant(self.tenant))
    }
}

/// Pauses a schedule.
pub(crate) async fn pause(
    visit: Visit,
    Path(id): Path<String>,
    PageForm(of): PageForm<OfTenant>,
) -> PageResult {
    let tenant = of.admit(&visit, "schedule.pause", &id).await?;
    schedules::change(&visit.app, &tenant, &id, Turn::Pause).await?;
    Ok(visit.done(HOME, "The schedule is paused: it has no runs until it is resumed."))
}

/// Resumes a schedule.
pub(crate) async fn resume(
    visit: Visit,
    Path(id): Path<String>,
    PageForm(of): PageForm<OfTenant>,
) -> PageResult {
    let tenant = of.admit(&visit, "schedule.resume", &id).await?;
    schedules::change(&visit.app, &tenant, &id, Turn::Resume).await?;
    Ok(visit.done(HOME, "The schedule goes on at its next time."))
}

/// Deletes a schedule.
pub(crate) async fn delete(
    visit: Visit,
    Path(id): Path<String>,
    PageForm(of): PageForm<OfTenant>,
) -> PageResult {
    let tenant = of.admit(&visit, "schedule.delete", &id).await?;
    schedules::delete(&visit.app, &tenant, &id).await?;
    Ok(visit.done(HOME, "The schedule is deleted. Its batches stay."))
}
