//! Page of tenants: what each has in the store, and its limits.
//!
//! Jobs and tokens are counted over a tenant's latest [`COUNTED`] jobs, on its own page over more, so that a page costs the
//! same however many jobs there are.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
};

use askama::Template;
use axum::extract::Query;
use serde::Deserialize;
use tritmill_queue::{
    JobState, Progress, QueueName, Tenant,
    dispatch::Quotas,
    store::{Page, job_queries::JobFilter},
};

use super::{Content, PageError, PageResult, Visit, filters, pager::Pager, percent_encoded};
use crate::{
    ApiError, App,
    store::{ApiKey, tenants::StoredFiles},
};

/// Tenants per page.
const PAGE_SIZE: usize = 20;
/// A tenant's latest jobs that the list counts.
const COUNTED: u32 = 200;
/// Most queues that a page looks at for limits.
const QUEUES_MAX: usize = 50;

/// What a tenant has.
pub(super) struct TenantRow {
    pub tenant: Tenant,
    /// Its latest jobs by state, and their tokens.
    pub jobs: Progress,
    /// Whether it has more jobs than were counted.
    pub or_more: bool,
    /// Dead letters by error code, the most frequent first.
    pub errors: Vec<(String, u64)>,
    pub files: StoredFiles,
    /// Its keys that are not revoked.
    pub keys: Vec<ApiKey>,
    /// Its limit of queued tokens in each queue that has one.
    pub limits: Vec<(QueueName, u64)>,
}

impl TenantRow {
    /// URL of the tenant's page.
    pub fn href(&self) -> String {
        format!("/dashboard/tenants/{}", percent_encoded(&self.tenant.0))
    }

    /// URL of its jobs, in a state.
    pub fn jobs_href(&self, state: &str) -> String {
        format!("/dashboard/jobs?tenant={}&state={state}", percent_encoded(&self.tenant.0))
    }

    /// Jobs that are scheduled, queued or retrying.
    pub fn waiting(&self) -> u64 {
        self.jobs.scheduled + self.jobs.queued + self.jobs.retrying
    }

    /// Its limit, if only one queue has one.
    pub fn only_limit(&self) -> Option<u64> {
        match self.limits.as_slice() {
            [(_, limit)] => Some(*limit),
            _ => None,
        }
    }

    /// Whether the counts are lower bounds, as a suffix.
    pub fn plus(&self) -> &'static str {
        if self.or_more { "+" } else { "" }
    }
}

/// Reads what tenants have.
pub(super) struct TenantReader<'a> {
    app: &'a App,
    /// How many of a tenant's latest jobs are counted.
    counted: u32,
    /// The limits of queues.
    limits: Vec<(QueueName, Quotas)>,
}

impl<'a> TenantReader<'a> {
    pub async fn new(app: &'a App, counted: u32) -> Result<Self, ApiError> {
        let mut limits = Vec::new();
        for state in app.store.queue_states().await?.into_iter().take(QUEUES_MAX) {
            let quotas = app.store.quotas(&state.queue).await?;
            limits.push((state.queue, quotas));
        }
        Ok(Self { app, counted, limits })
    }

    /// Reads what a tenant has beside its keys.
    pub async fn row(&self, tenant: Tenant, keys: Vec<ApiKey>) -> Result<TenantRow, ApiError> {
        let store = &self.app.store;
        let filter = JobFilter { tenant: Some(tenant.clone()), ..JobFilter::default() };
        let page = Page { after: None, limit: self.counted, ascending: false };
        let found = store.jobs(&filter, page).await?;
        let (mut jobs, mut errors) = (Progress::default(), BTreeMap::<String, u64>::new());
        for job in found.jobs {
            *jobs.counter(job.state) += 1;
            jobs.prompt_tokens += job.prompt_tokens;
            jobs.completion_tokens += job.completion_tokens;
            if let (JobState::Failed, Some(code)) = (job.state, job.error_code) {
                *errors.entry(code).or_default() += 1;
            }
        }
        let mut errors: Vec<(String, u64)> = errors.into_iter().collect();
        errors.sort_by_key(|(_, count)| Reverse(*count));
        let limit = |(queue, quotas): &(QueueName, Quotas)| {
            Some((queue.clone(), quotas.of_tenant(&tenant)?))
        };
        Ok(TenantRow {
            limits: self.limits.iter().filter_map(limit).collect(),
            jobs,
            or_more: found.next.is_some(),
            errors,
            files: store.stored_files(&tenant).await?,
            keys,
            tenant,
        })
    }
}

/// The keys that are not revoked, by tenant.
pub(super) async fn keys(app: &App) -> Result<BTreeMap<String, Vec<ApiKey>>, ApiError> {
    let mut keys = BTreeMap::<String, Vec<ApiKey>>::new();
    for key in app.store.keys().await? {
        let of_tenant = match keys.entry(key.tenant.0.clone()) {
            Entry::Vacant(empty) => empty.insert(Vec::new()),
            Entry::Occupied(known) => known.into_mut(),
        };
        if key.revoked_at.is_none() {
            of_tenant.push(key);
        }
    }
    Ok(keys)
}

#[derive(Template)]
#[template(path = "tenants.html")]
struct TenantsView {
    rows: Vec<TenantRow>,
    counted: u64,
    pager: Pager,
}

/// The position in the list: the last tenant of the previous page.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TenantsQuery {
    after: String,
}

/// Shows the tenants with keys or jobs, by name.
pub(crate) async fn list(visit: Visit, Query(query): Query<TenantsQuery>) -> PageResult {
    visit.show(move |app, _| load(app, query.after.clone())).await
}

async fn load(app: App, after: String) -> Result<Content, PageError> {
    if after.contains('\0') {
        return Err(ApiError::not_found("tenant", &after).into());
    }
    let (mut keys, reader) = (keys(&app).await?, TenantReader::new(&app, COUNTED).await?);
    let from = Tenant(after.clone());
    let with_jobs = app.store.job_tenants(Some(&from), PAGE_SIZE as u32 + 1).await?;
    let with_keys = keys.keys().filter(|name| **name > after).cloned();
    let names: BTreeSet<String> =
        with_jobs.into_iter().map(|tenant| tenant.0).chain(with_keys).collect();
    let next = (names.len() > PAGE_SIZE).then(|| names.iter().nth(PAGE_SIZE - 1).cloned());
    let mut rows = Vec::with_capacity(PAGE_SIZE);
    for name in names.into_iter().take(PAGE_SIZE) {
        let keys = keys.remove(&name).unwrap_or_default();
        rows.push(reader.row(Tenant(name), keys).await?);
    }
    let href = |last: String| format!("/dashboard/tenants?after={}", percent_encoded(&last));
    let pager = Pager {
        what: "tenants",
        first_name: "First",
        next_name: "Next",
        first: (!after.is_empty()).then(|| "/dashboard/tenants".to_owned()),
        next: next.flatten().map(href),
    };
    let view = TenantsView { rows, counted: u64::from(COUNTED), pager };
    Ok(Content::new("Tenants", &view))
}
