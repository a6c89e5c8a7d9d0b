//! Page of jobs with filters: those of the visitor's tenant; for operators, of all tenants.

use askama::Template;
use axum::extract::Query;
use serde::{Deserialize, Serialize};
use tritmill_queue::{
    JobId, JobState, Tenant, Timestamp,
    store::{
        Page,
        job_queries::{Count, JobFilter, JobSummary},
    },
};

use super::{
    Content, PageError, PageResult, Visit, bulk::Action, filters, pager::Pager, percent_encoded,
};
use crate::{
    ApiError, App, Caller,
    operator::{metadata, params},
    store::BatchId,
};

/// Jobs per page.
const PAGE_SIZE: u32 = 50;

/// The filter, as in URLs; an empty field matches all jobs.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct FilterForm {
    state: String,
    queue: String,
    tenant: String,
    error: String,
    signature: String,
    custom_id: String,
    metadata: String,
    batch: String,
    id: String,
    worker: String,
    from: String,
    to: String,
    before: String,
}

impl FilterForm {
    /// The conditions, by their names in forms.
    pub(super) fn fields(&self) -> [(&'static str, &str); 12] {
        [
            ("state", &self.state),
            ("queue", &self.queue),
            ("tenant", &self.tenant),
            ("error", &self.error),
            ("signature", &self.signature),
            ("custom_id", &self.custom_id),
            ("metadata", &self.metadata),
            ("batch", &self.batch),
            ("id", &self.id),
            ("worker", &self.worker),
            ("from", &self.from),
            ("to", &self.to),
        ]
    }

    /// URL of the list of jobs before a job.
    pub(super) fn href(&self, before: Option<JobId>) -> String {
        self.href_of("/dashboard/jobs", "before", before)
    }

    /// URL of a page with this filter and a position in the list.
    pub(super) fn href_of(&self, page: &str, position: &str, at: Option<JobId>) -> String {
        let at = at.map(|id| id.to_string()).unwrap_or_default();
        let fields = self.fields().into_iter().chain([(position, at.as_str())]);
        let query: Vec<String> = fields
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("{name}={}", percent_encoded(value)))
            .collect();
        format!("{page}?{}", query.join("&"))
    }

    /// Whether it has a condition.
    pub(super) fn is_set(&self) -> bool {
        self.fields().iter().any(|(_, value)| !value.is_empty())
    }

    /// The filter for the store, limited to what the caller may see.
    pub(super) async fn job_filter(
        &self,
        app: &App,
        caller: &Caller,
    ) -> Result<JobFilter, ApiError> {
        let unknown = |what: &'static str, value: &str| ApiError::not_found(what, value).at(what);
        let given = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let queue = given(&self.queue);
        let (model, format) = match queue.as_deref().map(|queue| queue.rsplit_once('@')) {
            None => (None, None),
            Some(None) => (queue, None),
            Some(Some((model, format))) => (Some(model.to_owned()), Some(format.to_owned())),
        };
        let state = given(&self.state)
            .map(|state| state.parse::<JobState>().map_err(|_| unknown("state", &state)));
        let batch = given(&self.batch)
            .map(|batch| batch.parse::<BatchId>().map_err(|_| unknown("batch", &batch)));
        let tenant = match caller.may_operate() {
            true => given(&self.tenant).map(Tenant),
            false => Some(caller.tenant.clone()),
        };
        let prefix = given(&self.id).map(|prefix| params::job_prefix(&prefix)).transpose()?;
        let custom_id = given(&self.custom_id);
        let (custom_id, custom_id_prefix) =
            match custom_id.as_deref().and_then(|id| id.strip_suffix('*')) {
                Some(prefix) => (None, Some(prefix.to_owned())),
                None => (custom_id, None),
            };
        let time =
            |param, text: &str| given(text).map(|text| filters::minute(param, &text)).transpose();
        let filter = JobFilter {
            tenant,
            model,
            format,
            state: state.transpose()?,
            error_code: given(&self.error),
            error_signature: given(&self.signature),
            custom_id,
            custom_id_prefix,
            metadata: match self.metadata.as_str() {
                "" => None,
                pair => Some(metadata::condition(pair)?),
            },
            owner: given(&self.worker),
            ids: batch.transpose()?.map(BatchId::all_jobs),
            from: time("from", &self.from)?,
            to: time("to", &self.to)?,
        };
        metadata::with_batches(app, filter.within(prefix)).await
    }
}

#[derive(Template)]
#[template(path = "jobs.html")]
struct JobsView {
    now: Timestamp,
    filter: FilterForm,
    states: [JobState; 8],
    is_operator: bool,
    /// Actions on all matching jobs that are possible.
    actions: Vec<Action>,
    jobs: Vec<JobSummary>,
    count: Count,
    pager: Pager,
}

/// Shows jobs, the latest first.
pub(crate) async fn list(visit: Visit, Query(form): Query<FilterForm>) -> PageResult {
    visit.show(move |app, caller| load(app, caller, form.clone())).await
}

async fn load(app: App, caller: Caller, form: FilterForm) -> Result<Content, PageError> {
    let filter = form.job_filter(&app, &caller).await?;
    let before = match form.before.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| ApiError::not_found("job", text))?),
    };
    let page = Page { after: before, limit: PAGE_SIZE, ascending: false };
    let store = &app.store;
    let (found, count) = tokio::try_join!(store.jobs(&filter, page), store.count_jobs(&filter))?;
    let first = before.map(|_: JobId| form.href(None));
    let next = found.next.map(|next| form.href(Some(next)));
    let view = JobsView {
        pager: Pager::latest_first("jobs", first, next),
        now: app.client.now().await?,
        count,
        actions: match caller.may_operate() && form.is_set() {
            true => Action::ALL.into_iter().filter(|action| action.applies_to(&filter)).collect(),
            false => Vec::new(),
        },
        filter: form,
        states: JobState::ALL,
        is_operator: caller.may_operate(),
        jobs: found.jobs,
    };
    Ok(Content::new("Jobs", &view))
}
