//! Jobs: those of the visitor's tenant, or of all for an operator, by what they are.

use askama::Template;
use axum::{extract::Query, response::Response};
use serde::{Deserialize, Serialize};
use tritmill_queue::{
    JobId, JobState, Tenant, Timestamp,
    store::{
        BatchId, KeyRole, Page,
        job_queries::{Count, JobFilter, JobSummary},
    },
};

use super::{
    filters,
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::{access::Caller, app::App, error::ApiError};

/// Jobs of a page.
const PAGE: u32 = 50;

/// What is looked for, as addresses have it; nothing stands for all.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Wish {
    state: String,
    queue: String,
    tenant: String,
    error: String,
    signature: String,
    custom_id: String,
    batch: String,
    before: String,
}

impl Wish {
    fn fields(&self) -> [(&'static str, &str); 7] {
        [
            ("state", &self.state),
            ("queue", &self.queue),
            ("tenant", &self.tenant),
            ("error", &self.error),
            ("signature", &self.signature),
            ("custom_id", &self.custom_id),
            ("batch", &self.batch),
        ]
    }

    /// The list's address, from a job on.
    fn href(&self, before: Option<JobId>) -> String {
        let before = before.map(|id| id.to_string()).unwrap_or_default();
        let fields = self.fields().into_iter().chain([("before", before.as_str())]);
        let query: Vec<String> = fields
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("{name}={}", percent_encoded(value)))
            .collect();
        format!("/dashboard/jobs?{}", query.join("&"))
    }

    fn is_set(&self) -> bool {
        self.fields().iter().any(|(_, value)| !value.is_empty())
    }

    /// What it says, within what the caller may see.
    pub fn filter(&self, caller: &Caller) -> Result<JobFilter, ApiError> {
        let bad = |what: &'static str, value: &str| ApiError::not_found(what, value).at(what);
        let given = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let queue = given(&self.queue);
        let (model, format) = match queue.as_deref().map(|queue| queue.rsplit_once('@')) {
            None => (None, None),
            Some(None) => (queue, None),
            Some(Some((model, format))) => (Some(model.to_owned()), Some(format.to_owned())),
        };
        let state = given(&self.state)
            .map(|state| state.parse::<JobState>().map_err(|_| bad("state", &state)));
        let batch = given(&self.batch)
            .map(|batch| batch.parse::<BatchId>().map_err(|_| bad("batch", &batch)));
        let tenant = match caller.role {
            KeyRole::Operate => given(&self.tenant).map(Tenant),
            KeyRole::Read | KeyRole::Submit => Some(caller.tenant.clone()),
        };
        Ok(JobFilter {
            tenant,
            model,
            format,
            state: state.transpose()?,
            error_code: given(&self.error),
            error_signature: given(&self.signature),
            custom_id: given(&self.custom_id),
            batch: batch.transpose()?,
            from: None,
            to: None,
        })
    }
}

#[derive(Template)]
#[template(path = "jobs.html")]
struct List {
    now: Timestamp,
    wish: Wish,
    states: [JobState; 8],
    is_operator: bool,
    jobs: Vec<JobSummary>,
    count: Count,
    next: Option<JobId>,
}

impl List {
    /// The address of the next page.
    fn more(&self) -> Option<String> {
        self.next.map(|next| self.wish.href(Some(next)))
    }
}

impl View for List {
    fn title(&self) -> String {
        "Jobs".to_owned()
    }
}

/// Jobs, the latest first.
pub(crate) async fn list(visit: Visit, Query(wish): Query<Wish>) -> Result<Response, PageError> {
    visit.show(move |app, caller| look(app, caller, wish.clone())).await
}

async fn look(app: App, caller: Caller, wish: Wish) -> Result<List, PageError> {
    let filter = wish.filter(&caller)?;
    let before = match wish.before.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| ApiError::not_found("job", text))?),
    };
    let page = Page { after: before, limit: PAGE, ascending: false };
    let store = app.store();
    let (found, count) = tokio::try_join!(store.jobs(&filter, page), store.count_jobs(&filter))?;
    Ok(List {
        now: app.client().now().await?,
        count,
        wish,
        states: JobState::ALL,
        is_operator: caller.role == KeyRole::Operate,
        jobs: found.jobs,
        next: found.next,
    })
}
