//! Page of dead letters, in groups by error: replay and purge.

use askama::Template;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    Timestamp,
    store::{
        bulk::{BULK_MAX, BulkAction},
        job_queries::{DeadLetterGroup, JobFilter},
    },
};

use super::{Content, PageError, PageForm, PageResult, Visit, filters, percent_encoded};
use crate::{ApiError, App, operator::jobs::Bulk};

/// Most groups that the page shows.
const GROUPS_MAX: usize = 100;

/// A group of dead letters in the table.
struct GroupRow {
    group: DeadLetterGroup,
}

impl GroupRow {
    /// URL of the list of its jobs.
    fn href(&self) -> String {
        format!(
            "/dashboard/jobs?state=failed&queue={}&error={}&signature={}",
            percent_encoded(&self.group.queue.to_string()),
            percent_encoded(&self.group.error_code),
            percent_encoded(&self.group.error_signature),
        )
    }

    fn last_href(&self) -> String {
        format!("/dashboard/jobs/{}", self.group.last)
    }

    /// Creation time of the latest job.
    fn last_at(&self) -> Timestamp {
        self.group.last.generated_at()
    }
}

#[derive(Template)]
#[template(path = "dead_letters.html")]
struct DeadLettersView {
    now: Timestamp,
    groups: Vec<GroupRow>,
    total: u64,
    or_more: bool,
    bulk_max: u64,
}

/// Shows the dead letters of all queues.
pub(crate) async fn list(visit: Visit) -> PageResult {
    visit.show(|app, _| load(app)).await
}

async fn load(app: App) -> Result<Content, PageError> {
    let found = app.store.dead_letter_groups(None).await?;
    let total = found.groups.iter().map(|group| group.jobs).sum();
    let groups = found.groups.into_iter().take(GROUPS_MAX).map(|group| GroupRow { group });
    let view = DeadLettersView {
        now: app.client.now().await?,
        groups: groups.collect(),
        total,
        or_more: found.or_more,
        bulk_max: BULK_MAX,
    };
    Ok(Content::new("Dead letters", &view))
}

/// The dead letters to act on, and the rate of a replay; empty fields mean all, and at once.
#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct BulkForm {
    model: String,
    format: String,
    error: String,
    signature: String,
    per_second: String,
}

impl BulkForm {
    fn filter(&self) -> JobFilter {
        let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        JobFilter {
            model: given(&self.model),
            format: given(&self.format),
            error_code: given(&self.error),
            error_signature: given(&self.signature),
            ..JobFilter::default()
        }
    }
}

/// Parses the rate of a replay: jobs per second; empty: all at once.
pub(super) fn rate(text: &str) -> Result<Option<u32>, ApiError> {
    match text.trim() {
        "" => Ok(None),
        text => {
            let rate = text.parse().ok().filter(|rate| (1..=100_000).contains(rate));
            let message = "jobs per second must be between 1 and 100000";
            rate.map(Some).ok_or_else(|| ApiError::invalid_value("per_second", message))
        }
    }
}

/// Submits dead letters again.
pub(crate) async fn replay(visit: Visit, PageForm(form): PageForm<BulkForm>) -> PageResult {
    let act = BulkAction::Replay { per_second: rate(&form.per_second)? };
    bulk(visit, form, "dead_letters.replay", act, "submitted again").await
}

/// Deletes dead letters.
pub(crate) async fn purge(visit: Visit, PageForm(form): PageForm<BulkForm>) -> PageResult {
    bulk(visit, form, "dead_letters.purge", BulkAction::Purge, "deleted").await
}

async fn bulk(
    visit: Visit,
    form: BulkForm,
    action: &str,
    act: BulkAction,
    done: &str,
) -> PageResult {
    let (filter, detail) = (form.filter(), json!({ "asked": form }));
    let bulk = Bulk { action, detail, filter, act, after: None, limit: BULK_MAX };
    let result = bulk.apply(&visit.app, &visit.caller).await?;
    let letters = if result.done == 1 { "dead letter" } else { "dead letters" };
    let more =
        if result.next.is_some() { " There are more: repeat this for the rest." } else { "" };
    let notice = format!("{} {letters} {done}.{more}", filters::grouped(result.done));
    Ok(visit.done("/dashboard/dead-letters", &notice))
}
