//! Overview page: all queues, with totals and charts.

use std::{cmp::Reverse, time::Duration};

use askama::Template;
use axum::extract::Query;
use serde::Deserialize;
use tritmill_queue::{
    QueueName,
    store::history::{Depth, Sample, Totals},
};

use super::{
    Content, PageError, PageResult, Visit,
    chart::Chart,
    filters::{self, scaled},
    history::{self, Range, RangeQuery, Span},
    percent_encoded,
};
use crate::{
    App,
    operator::queues::{self, QueueLoad},
};

/// Sort orders of the table: word in URLs, and column title.
const SORTS: [(&str, &str); 5] = [
    ("name", "Queue"),
    ("queued", "Queued"),
    ("running", "Running"),
    ("oldest", "Oldest job"),
    ("failed", "Failed"),
];

/// A queue in the table.
pub(super) struct QueueRow {
    pub load: QueueLoad,
}

impl QueueRow {
    pub fn name(&self) -> &QueueName {
        &self.load.settings.queue
    }

    pub fn depth(&self) -> Depth {
        self.load.depth()
    }

    /// Age of the oldest queued job.
    pub fn oldest(&self) -> Option<Duration> {
        self.load.oldest_queued()
    }

    /// Finished jobs and tokens since sampling began.
    pub fn totals(&self) -> Totals {
        self.load.totals()
    }

    pub fn href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.name().to_string()))
    }

    /// Class in the stylesheet, and word, for the queue's state.
    pub fn state(&self) -> (&'static str, &'static str) {
        match (self.load.settings.paused, self.load.workers, self.depth().open()) {
            (true, ..) => ("paused", "paused"),
            (false, 0, 0) => ("idle", "idle"),
            (false, 0, _) => ("silent", "no workers"),
            (false, _, 0) => ("alive", "ready"),
            (false, ..) => ("running", "busy"),
        }
    }

    /// Share of failed jobs among completed and failed ones, as text.
    fn failed_share(&self) -> Option<String> {
        let Totals { completed, failed, .. } = self.totals();
        let percent = 100.0 * failed as f64 / (completed + failed) as f64;
        (failed > 0).then(|| match percent {
            small if small < 0.1 => "< 0.1 %".to_owned(),
            percent => format!("{percent:.1} %"),
        })
    }
}

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewView {
    range: Range,
    sort: &'static str,
    rows: Vec<QueueRow>,
    all: Depth,
    oldest: Option<Duration>,
    /// Sum of all queues over the last minute.
    last_minute: Sample,
    workers: u64,
    charts: Vec<Chart>,
}

impl OverviewView {
    /// Completed jobs per second over the last minute.
    fn completed(&self) -> String {
        scaled(self.last_minute.per_second(self.last_minute.completed), "")
    }

    /// Generated tokens per second over the last minute.
    fn generated(&self) -> String {
        scaled(self.last_minute.per_second(self.last_minute.completion_tokens), "")
    }
}

/// Time span and sort order.
#[derive(Deserialize)]
pub(crate) struct OverviewQuery {
    #[serde(flatten)]
    range: RangeQuery,
    sort: Option<String>,
}

/// Shows all queues, and charts of their sum.
pub(crate) async fn show(visit: Visit, Query(query): Query<OverviewQuery>) -> PageResult {
    let range = Range::parse(&query.range)?;
    let sort =
        SORTS.into_iter().map(|(word, _)| word).find(|sort| query.sort.as_deref() == Some(sort));
    let sort = sort.unwrap_or("oldest");
    visit.show(move |app, _| load(app, range, sort)).await
}

async fn load(app: App, range: Range, sort: &'static str) -> Result<Content, PageError> {
    let now = app.client.now().await?;
    // Sorted by name.
    let mut rows: Vec<QueueRow> =
        queues::loads(&app).await?.into_iter().map(|load| QueueRow { load }).collect();
    match sort {
        "queued" => rows.sort_by_key(|row| Reverse(row.depth().queued)),
        "running" => rows.sort_by_key(|row| Reverse(row.depth().running)),
        "oldest" => rows.sort_by_key(|row| Reverse(row.oldest())),
        "failed" => rows.sort_by_key(|row| Reverse(row.totals().failed)),
        _ => {}
    }
    let mut all = Depth::default();
    rows.iter().for_each(|row| all.merge(&row.depth()));
    let view = OverviewView {
        range,
        sort,
        all,
        oldest: rows.iter().filter_map(QueueRow::oldest).max(),
        last_minute: history::last_minute(&app, now).await?,
        workers: rows.iter().map(|row| row.load.workers).sum(),
        charts: history::charts(&app, None, range, now).await?,
        rows,
    };
    Ok(Content::new("Overview", &view))
}
