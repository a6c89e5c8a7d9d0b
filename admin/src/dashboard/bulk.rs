//! Actions on all jobs that a filter of the page of jobs matches: first a page that says how many, then the action.
//!
//! One call changes at most [`BULK_MAX`] jobs. A cancelled job no longer matches, so that the rest is cancelled by
//! repeating the action. Dead letters are kept by a replay: the rest is replayed from where the call stopped, which the
//! form carries as `after`.

use std::str::FromStr;

use askama::Template;
use axum::extract::{Path, Query};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    JobId, JobState,
    job::UnknownWord,
    store::{
        bulk::{BULK_MAX, BulkAction},
        job_queries::{Count, JobFilter},
    },
};
use uuid::Uuid;

use super::{
    Content, PageError, PageForm, PageResult, Visit, dead_letters::rate, filters, jobs::FilterForm,
};
use crate::{
    ApiError, App, Caller,
    operator::{jobs::Bulk, params},
};

/// States of the jobs that can be cancelled, in the order in which jobs pass through them.
const OPEN: [JobState; 4] =
    [JobState::Scheduled, JobState::Retrying, JobState::Queued, JobState::Running];

/// An action on many jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Cancels unfinished jobs.
    Cancel,
    /// Submits dead letters again.
    Retry,
}

impl FromStr for Action {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = Self::ALL.into_iter().find(|action| action.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "action", word: word.to_owned() })
    }
}

impl Action {
    pub const ALL: [Self; 2] = [Self::Cancel, Self::Retry];

    /// The action's name in URLs.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Retry => "retry",
        }
    }

    /// URL of the page that asks for confirmation.
    pub fn page(self) -> String {
        format!("/dashboard/jobs/matching/{}", self.as_str())
    }

    /// The action's name on pages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancel => "Cancel",
            Self::Retry => "Retry",
        }
    }

    /// What the jobs are after the action.
    const fn done(self) -> &'static str {
        match self {
            Self::Cancel => "cancelled",
            Self::Retry => "submitted again",
        }
    }

    /// The action's name in the audit log.
    const fn audited(self) -> &'static str {
        match self {
            Self::Cancel => "jobs.cancel",
            Self::Retry => "dead_letters.replay",
        }
    }

    /// States of the jobs that it changes.
    const fn states(self) -> &'static [JobState] {
        match self {
            Self::Cancel => &OPEN,
            Self::Retry => &[JobState::Failed],
        }
    }

    /// The filter for each state of jobs that match it and that the action changes.
    fn filters(self, filter: &JobFilter) -> impl Iterator<Item = JobFilter> {
        let states = self.states().iter().copied();
        let states = states.filter(|state| filter.state.is_none_or(|wanted| wanted == *state));
        states.map(|state| JobFilter { state: Some(state), ..filter.clone() })
    }

    /// Whether jobs that match the filter can be changed by the action.
    pub fn applies_to(self, filter: &JobFilter) -> bool {
        self.filters(filter).next().is_some()
    }

    /// Counts the jobs that it would change.
    async fn count(self, app: &App, filter: &JobFilter) -> Result<Count, ApiError> {
        let mut all = Count::default();
        for filter in self.filters(filter) {
            let Count { jobs, or_more } = app.store.count_jobs(&filter).await?;
            all = Count { jobs: all.jobs + jobs, or_more: all.or_more || or_more };
        }
        Ok(all)
    }
}

/// The filter of the list, and the rest of the form.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct BulkForm {
    #[serde(flatten)]
    filter: FilterForm,
    /// Where the previous call of a retry stopped.
    after: String,
    per_second: String,
}

impl BulkForm {
    /// The filter for the store, and where to continue.
    async fn parsed(
        &self,
        app: &App,
        caller: &Caller,
    ) -> Result<(JobFilter, Option<JobId>), ApiError> {
        if !self.filter.is_set() {
            let message = "the filter must have at least one condition";
            return Err(ApiError::invalid("missing_field", message).at("filter"));
        }
        let filter = self.filter.job_filter(app, caller).await?;
        let after = match self.after.as_str() {
            "" => None,
            text => Some(params::job(text)?),
        };
        Ok((filter, after))
    }
}

#[derive(Template)]
#[template(path = "bulk.html")]
struct BulkView {
    action: Action,
    form: BulkForm,
    count: Count,
    bulk_max: u64,
}

impl BulkView {
    /// Whether one call may leave jobs unchanged.
    fn is_long(&self) -> bool {
        self.count.or_more || self.count.jobs > self.bulk_max
    }
}

fn parsed_action(word: &str) -> Result<Action, ApiError> {
    word.parse().map_err(|_| ApiError::not_found("action", word))
}

/// Shows how many jobs match, and asks for confirmation.
pub(crate) async fn confirm(
    visit: Visit,
    Path(action): Path<String>,
    Query(form): Query<BulkForm>,
) -> PageResult {
    let action = parsed_action(&action)?;
    visit.show(move |app, caller| load(app, caller, action, form.clone())).await
}

async fn load(
    app: App,
    caller: Caller,
    action: Action,
    form: BulkForm,
) -> Result<Content, PageError> {
    let (filter, after) = form.parsed(&app, &caller).await?;
    let ids_before = after.map(|after| {
        let before = Uuid::from(after).as_u128().saturating_sub(1);
        JobId::from(Uuid::nil())..=JobId::from(Uuid::from_u128(before))
    });
    let count = action.count(&app, &filter.within(ids_before)).await?;
    let view = BulkView { action, form, count, bulk_max: BULK_MAX };
    Ok(Content::new(format!("{} jobs", action.name()), &view))
}

/// Does the action.
pub(crate) async fn act(
    visit: Visit,
    Path(action): Path<String>,
    PageForm(form): PageForm<BulkForm>,
) -> PageResult {
    let action = parsed_action(&action)?;
    let (filter, mut after) = form.parsed(&visit.app, &visit.caller).await?;
    let act = match action {
        Action::Cancel => BulkAction::Cancel,
        Action::Retry => BulkAction::Replay { per_second: rate(&form.per_second)? },
    };
    let (mut done, mut is_complete) = (0, true);
    for filter in action.filters(&filter) {
        let limit = BULK_MAX.saturating_sub(done);
        if limit == 0 {
            is_complete = false;
            break;
        }
        let detail = json!({ "asked": form, "state": filter.state.map(JobState::as_str) });
        let bulk = Bulk { action: action.audited(), detail, filter, act, after, limit };
        let result = bulk.apply(&visit.app, &visit.caller).await?;
        done += result.done;
        is_complete &= result.next.is_none();
        // Only the retry, of one state, continues.
        after = result.next.filter(|_| action == Action::Retry);
    }
    let jobs = if done == 1 { "job" } else { "jobs" };
    let notice = format!("{} {jobs} {}.", filters::grouped(done), action.done());
    match is_complete {
        true => Ok(visit.done(&form.filter.href(None), &notice)),
        false => {
            let page = form.filter.href_of(&action.page(), "after", after);
            Ok(visit.done(&page, &format!("{notice} There are more: confirm the rest.")))
        }
    }
}
