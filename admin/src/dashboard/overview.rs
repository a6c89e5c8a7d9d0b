//! The overview: every queue, and how all of them fare.

use std::{cmp::Reverse, time::Duration};

use askama::Template;
use axum::{extract::Query, response::Response};
use serde::Deserialize;
use tritmill_queue::{
    QueueName,
    store::history::{Depth, Sample, Totals},
};

use super::{
    chart::Chart,
    filters::{self, scaled},
    history::{self, Span},
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::{
    app::App,
    operator::queues::{self, QueueLoad},
};

/// By what queues can be sorted: the word in addresses, the table's head.
const SORTS: [(&str, &str); 5] = [
    ("name", "Queue"),
    ("queued", "Queued"),
    ("running", "Running"),
    ("oldest", "Oldest waits"),
    ("failed", "Failed"),
];

/// A queue of the table.
pub(super) struct Row {
    pub load: QueueLoad,
}

impl Row {
    pub fn name(&self) -> &QueueName {
        &self.load.settings.queue
    }

    pub fn depth(&self) -> Depth {
        self.load.depth()
    }

    /// How long the oldest of those that wait has waited.
    pub fn oldest(&self) -> Option<Duration> {
        self.load.oldest_queued()
    }

    /// What it did since sampling began.
    pub fn totals(&self) -> Totals {
        self.load.sampled.as_ref().map_or_else(Totals::default, |sampled| sampled.totals)
    }

    pub fn href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.name().to_string()))
    }

    /// What a glance should tell: a class of the stylesheet, and words.
    pub fn state(&self) -> (&'static str, &'static str) {
        match (self.load.settings.paused, self.load.workers, self.depth().open()) {
            (true, ..) => ("paused", "paused"),
            (false, 0, 0) => ("idle", "idle"),
            (false, 0, _) => ("silent", "no workers"),
            (false, _, 0) => ("alive", "ready"),
            (false, ..) => ("running", "working"),
        }
    }

    /// Their share of all jobs that were answered or failed.
    fn failed_share(&self) -> Option<String> {
        let Totals { completed, failed, .. } = self.totals();
        let percent = 100.0 * failed as f64 / (completed + failed) as f64;
        (failed > 0).then(|| match percent {
            little if little < 0.1 => "< 0.1 %".to_owned(),
            percent => format!("{percent:.1} %"),
        })
    }
}

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    span: Span,
    sort: &'static str,
    rows: Vec<Row>,
    all: Depth,
    oldest: Option<Duration>,
    lately: Sample,
    workers: u64,
    charts: Vec<Chart>,
}

impl Overview {
    /// Jobs a second, lately.
    fn answered(&self) -> String {
        scaled(self.lately.per_second(self.lately.completed), "")
    }

    /// Tokens a second, lately.
    fn generated(&self) -> String {
        scaled(self.lately.per_second(self.lately.completion_tokens), "")
    }
}

impl View for Overview {
    fn title(&self) -> String {
        "Overview".to_owned()
    }
}

/// How it is looked at.
#[derive(Deserialize)]
pub(crate) struct Wish {
    span: Option<String>,
    sort: Option<String>,
}

/// Every queue, and charts of all.
pub(crate) async fn show(visit: Visit, Query(wish): Query<Wish>) -> Result<Response, PageError> {
    let span = Span::of(wish.span.as_deref());
    let sort =
        SORTS.into_iter().map(|(word, _)| word).find(|sort| wish.sort.as_deref() == Some(sort));
    let sort = sort.unwrap_or("oldest");
    visit.show(move |app, _| look(app, span, sort)).await
}

async fn look(app: App, span: Span, sort: &'static str) -> Result<Overview, PageError> {
    let now = app.client().now().await?;
    // By name, as they come.
    let mut rows: Vec<Row> =
        queues::loads(&app).await?.into_iter().map(|load| Row { load }).collect();
    match sort {
        "queued" => rows.sort_by_key(|row| Reverse(row.depth().queued)),
        "running" => rows.sort_by_key(|row| Reverse(row.depth().running)),
        "oldest" => rows.sort_by_key(|row| Reverse(row.oldest())),
        "failed" => rows.sort_by_key(|row| Reverse(row.totals().failed)),
        _ => {}
    }
    let mut all = Depth::default();
    rows.iter().for_each(|row| all.merge(&row.depth()));
    Ok(Overview {
        span,
        sort,
        all,
        oldest: rows.iter().filter_map(Row::oldest).max(),
        lately: history::last_minute(&app, now).await?,
        workers: rows.iter().map(|row| row.load.workers).sum(),
        charts: history::charts(&app, None, span, now).await?,
        rows,
    })
}
