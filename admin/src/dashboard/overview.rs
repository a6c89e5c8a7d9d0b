//! The overview: every queue, and how all of them fare.

use std::{cmp::Reverse, collections::HashMap, time::Duration};

use askama::Template;
use axum::{extract::Query, response::Response};
use serde::Deserialize;
use tritmill_queue::{
    QueueName, Timestamp,
    store::{
        history::{Depth, Sample, Totals},
        operations::QueueState,
    },
};

use super::{
    chart::Chart,
    filters::{self, scaled},
    history::{self, Span},
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::app::App;

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
    pub name: QueueName,
    pub depth: Depth,
    pub totals: Totals,
    pub is_paused: bool,
    /// Workers that were heard of lately.
    pub workers: usize,
    oldest: Option<Duration>,
}

impl Row {
    pub fn href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.name.to_string()))
    }

    /// What a glance should tell: a class of the stylesheet, and words.
    pub fn state(&self) -> (&'static str, &'static str) {
        match (self.is_paused, self.workers, self.depth.open()) {
            (true, ..) => ("paused", "paused"),
            (false, 0, 0) => ("idle", "idle"),
            (false, 0, _) => ("silent", "no workers"),
            (false, _, 0) => ("alive", "ready"),
            (false, ..) => ("running", "working"),
        }
    }

    /// Their share of all jobs that were answered or failed.
    fn failed_share(&self) -> Option<String> {
        let ended = self.totals.completed + self.totals.failed;
        let percent = 100.0 * self.totals.failed as f64 / ended as f64;
        (self.totals.failed > 0).then(|| match percent {
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
    workers: usize,
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
    let mut rows = rows(&app, now).await?;
    rows.sort_by_key(|row| row.name.to_string());
    match sort {
        "queued" => rows.sort_by_key(|row| Reverse(row.depth.queued)),
        "running" => rows.sort_by_key(|row| Reverse(row.depth.running)),
        "oldest" => rows.sort_by_key(|row| Reverse(row.oldest)),
        "failed" => rows.sort_by_key(|row| Reverse(row.totals.failed)),
        _ => {}
    }
    let mut all = Depth::default();
    rows.iter().for_each(|row| all.merge(&row.depth));
    Ok(Overview {
        span,
        sort,
        all,
        oldest: all.oldest_queued_at.map(|at| now.since(at)),
        lately: history::last_minute(&app, None, now).await?,
        workers: rows.iter().map(|row| row.workers).sum(),
        charts: history::charts(&app, None, span, now).await?,
        rows,
    })
}

/// Every queue that is known, by whatever made it known.
pub(super) async fn rows(app: &App, now: Timestamp) -> Result<Vec<Row>, PageError> {
    let store = app.store();
    let mut rows: HashMap<QueueName, Row> = HashMap::new();
    let row = |name: &QueueName| Row {
        name: name.clone(),
        depth: Depth::default(),
        totals: Totals::default(),
        is_paused: false,
        workers: 0,
        oldest: None,
    };
    for sampled in store.sampled().await?.map_or_else(Vec::new, |sampled| sampled.queues) {
        let row = rows.entry(sampled.queue.clone()).or_insert_with(|| row(&sampled.queue));
        row.oldest = sampled.depth.oldest_queued_at.map(|at| now.since(at));
        (row.depth, row.totals) = (sampled.depth, sampled.totals);
    }
    for QueueState { queue, paused, .. } in store.queue_states().await? {
        rows.entry(queue.clone()).or_insert_with(|| row(&queue)).is_paused = paused;
    }
    for worker in store.workers().await?.into_iter().filter(|worker| worker.is_alive()) {
        let queue = worker.heartbeat.queue;
        rows.entry(queue.clone()).or_insert_with(|| row(&queue)).workers += 1;
    }
    Ok(rows.into_values().collect())
}
