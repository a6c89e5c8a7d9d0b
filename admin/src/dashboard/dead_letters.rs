//! Dead letters, by what they failed with: replayed or purged, a group or all at once.

use askama::Template;
use axum::{Form, extract::rejection::FormRejection, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    Timestamp,
    store::{
        bulk::{self, BULK_MAX, BulkAction},
        job_queries::{DeadLetterGroup, JobFilter},
    },
};
use uuid::Uuid;

use super::{
    filters,
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::{app::App, error::ApiError};

/// Groups that a page shows.
const GROUPS_MAX: usize = 100;

/// A group as the page shows it.
struct Shown {
    group: DeadLetterGroup,
}

impl Shown {
    /// The jobs in it.
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

    /// When the latest was named.
    fn last_at(&self) -> Timestamp {
        let at = Uuid::from(self.group.last).get_timestamp().map(|at| at.to_unix());
        at.map_or(Timestamp(0), |(seconds, _)| {
            Timestamp(i64::try_from(seconds).unwrap_or(0).saturating_mul(1000))
        })
    }
}

#[derive(Template)]
#[template(path = "dead_letters.html")]
struct Groups {
    now: Timestamp,
    groups: Vec<Shown>,
    total: u64,
    or_more: bool,
    most: u64,
}

impl View for Groups {
    fn title(&self) -> String {
        "Dead letters".to_owned()
    }
}

/// Dead letters of all queues.
pub(crate) async fn list(visit: Visit) -> Result<Response, PageError> {
    visit.show(|app, _| look(app)).await
}

async fn look(app: App) -> Result<Groups, PageError> {
    let found = app.store().dead_letter_groups(None).await?;
    let total = found.groups.iter().map(|group| group.jobs).sum();
    let groups = found.groups.into_iter().take(GROUPS_MAX).map(|group| Shown { group });
    Ok(Groups {
        now: app.client().now().await?,
        groups: groups.collect(),
        total,
        or_more: found.or_more,
        most: BULK_MAX,
    })
}

/// Which of them, and how fast; nothing stands for all, at once.
#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Wish {
    model: String,
    format: String,
    error: String,
    signature: String,
    per_second: String,
}

impl Wish {
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

    fn rate(&self) -> Result<Option<u32>, ApiError> {
        match self.per_second.trim() {
            "" => Ok(None),
            text => {
                let rate = text.parse().ok().filter(|rate| (1..=100_000).contains(rate));
                let message = "jobs a second must be between 1 and 100000";
                let refused = || ApiError::invalid("invalid_value", message).at("per_second");
                rate.map(Some).ok_or_else(refused)
            }
        }
    }
}

const HERE: &str = "/dashboard/dead-letters";

fn of(wish: Result<Form<Wish>, FormRejection>) -> Result<Wish, ApiError> {
    let Form(wish) = wish.map_err(|error| ApiError::invalid("invalid_form", error.body_text()))?;
    Ok(wish)
}

/// Submits dead letters again.
pub(crate) async fn replay(
    visit: Visit,
    wish: Result<Form<Wish>, FormRejection>,
) -> Result<Response, PageError> {
    let wish = of(wish)?;
    let act = BulkAction::Replay { per_second: wish.rate()? };
    visit.note("dead_letters.replay", "jobs", json!({ "asked": wish })).await?;
    let app = &visit.app;
    let done = bulk::apply(app.store().as_ref(), &wish.filter(), act, None, BULK_MAX).await?;
    // The others are announced when their time comes.
    let due: Vec<_> = done.jobs.iter().filter(|job| job.run_at.is_none()).cloned().collect();
    app.client().announce(&due).await;
    Ok(visit.done(HERE, &said(done.done, "submitted again", done.next.is_some())))
}

/// Deletes dead letters.
pub(crate) async fn purge(
    visit: Visit,
    wish: Result<Form<Wish>, FormRejection>,
) -> Result<Response, PageError> {
    let wish = of(wish)?;
    visit.note("dead_letters.purge", "jobs", json!({ "asked": wish })).await?;
    let filter = wish.filter();
    let store = visit.app.store().as_ref();
    let done = bulk::apply(store, &filter, BulkAction::Purge, None, BULK_MAX).await?;
    Ok(visit.done(HERE, &said(done.done, "deleted", done.next.is_some())))
}

fn said(count: u64, what: &str, is_more: bool) -> String {
    let letters = if count == 1 { "dead letter" } else { "dead letters" };
    let more = if is_more { " There are more: do it again for the rest." } else { "" };
    format!("{} {letters} {what}.{more}", filters::grouped(count))
}
