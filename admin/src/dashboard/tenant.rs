//! Page of a tenant: its jobs, errors, keys and limits, and the deletion of all it has.

use askama::Template;
use axum::extract::{Path, Query};
use serde::Deserialize;
use tritmill_queue::{JobState, Tenant, Timestamp, store::history::Subject};

use super::{
    Content, PageError, PageForm, PageResult, Visit,
    chart::Chart,
    filters,
    history::{self, Range, RangeQuery, Span},
    percent_encoded,
    tenants::{self, TenantReader, TenantRow},
};
use crate::{ApiError, App, Caller, operator::keys::erase_tenant};

/// The tenant's latest jobs that are counted.
const COUNTED: u32 = 1000;

#[derive(Template)]
#[template(path = "tenant.html")]
struct TenantView {
    now: Timestamp,
    row: TenantRow,
    counted: u64,
    /// Whether it is another tenant than the visitor's.
    may_erase: bool,
    range: Range,
    charts: Vec<Chart>,
}

impl TenantView {
    /// The number of jobs in each state.
    fn states(&self) -> Vec<(&'static str, u64)> {
        let mut jobs = self.row.jobs;
        let count = |state: JobState| (state.as_str(), *jobs.counter(state));
        JobState::ALL.map(count).to_vec()
    }

    /// URL of its dead letters with an error.
    fn error_href(&self, code: &str) -> String {
        format!("{}&error={}", self.row.jobs_href("failed"), percent_encoded(code))
    }
}

/// Shows a tenant.
pub(crate) async fn one(
    visit: Visit,
    Path(tenant): Path<String>,
    Query(query): Query<RangeQuery>,
) -> PageResult {
    let range = Range::parse(&query)?;
    visit.show(move |app, caller| load(app, caller, tenant.clone(), range)).await
}

async fn load(app: App, caller: Caller, name: String, range: Range) -> Result<Content, PageError> {
    if name.contains('\0') {
        return Err(ApiError::not_found("tenant", &name).into());
    }
    let mut keys = tenants::keys(&app).await?;
    let reader = TenantReader::new(&app, COUNTED).await?;
    let known = keys.remove(&name);
    let is_known = known.is_some();
    let tenant = Tenant(name.clone());
    let may_erase = tenant != caller.tenant;
    let row = reader.row(tenant, known.unwrap_or_default()).await?;
    let mut jobs = row.jobs;
    let has_jobs = JobState::ALL.into_iter().any(|state| *jobs.counter(state) > 0);
    if !is_known && !has_jobs && row.files.files == 0 {
        return Err(ApiError::not_found("tenant", &name).into());
    }
    let now = app.client.now().await?;
    let subject = Subject::Tenant(row.tenant.clone());
    let charts = history::subject_charts(&app, &subject, range, now).await?;
    let view = TenantView { now, row, counted: u64::from(COUNTED), may_erase, range, charts };
    Ok(Content::new(format!("Tenant {name}"), &view))
}

/// The form to delete everything of a tenant.
#[derive(Deserialize)]
pub(crate) struct EraseForm {
    /// The tenant's name again.
    confirm: String,
}

/// Deletes everything of a tenant, as far as one call does.
pub(crate) async fn erase(
    visit: Visit,
    Path(tenant): Path<String>,
    PageForm(EraseForm { confirm }): PageForm<EraseForm>,
) -> PageResult {
    let erased = erase_tenant(&visit.app, &visit.caller, &tenant, confirm.trim()).await?;
    let (jobs, files) = (filters::grouped(erased.jobs), filters::grouped(erased.files));
    let notice = format!("{jobs} jobs, {files} files and {} keys are deleted.", erased.keys);
    match erased.done {
        true => Ok(visit.done("/dashboard/tenants", &notice)),
        false => {
            let page = format!("/dashboard/tenants/{}", percent_encoded(&tenant));
            Ok(visit.done(&page, &format!("{notice} There are more jobs: erase the rest.")))
        }
    }
}
