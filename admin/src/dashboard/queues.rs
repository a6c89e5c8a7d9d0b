//! A queue: how it fares, who serves it, and what is set for it.

use std::time::Duration;

use askama::Template;
use axum::{
    Form,
    extract::{Path, Query, rejection::FormRejection},
    response::Response,
};
use serde::Deserialize;
use tritmill_queue::{
    QueueName, Timestamp,
    store::{history::Sample, operations::QueueState},
};

use super::{
    chart::Chart,
    filters::{self, scaled},
    history::{self, Span},
    overview::{self, Row},
    page::{PageError, View, Visit},
    session::percent_encoded,
    workers::Shown,
};
use crate::{app::App, error::ApiError};

#[derive(Template)]
#[template(path = "queue.html")]
struct One {
    span: Span,
    row: Row,
    settings: QueueState,
    oldest: Option<Duration>,
    lately: Sample,
    workers: Vec<Shown>,
    charts: Vec<Chart>,
}

impl One {
    /// How long what waits takes, at the rate of the last minute.
    fn drains_in(&self) -> Option<Duration> {
        let rate = self.lately.per_second(self.lately.ended());
        let waits = self.row.depth.queued + self.row.depth.retrying;
        (rate > 0.0).then(|| Duration::try_from_secs_f64(waits as f64 / rate).ok()).flatten()
    }

    /// Jobs a second that came, lately.
    fn arrived(&self) -> String {
        scaled(self.lately.per_second(self.lately.arrived), "")
    }

    /// Jobs a second that ended, lately.
    fn ended(&self) -> String {
        scaled(self.lately.per_second(self.lately.ended()), "")
    }

    fn encoded(&self) -> String {
        percent_encoded(&self.row.name.to_string())
    }
}

impl View for One {
    fn title(&self) -> String {
        self.row.name.to_string()
    }
}

/// How it is looked at.
#[derive(Deserialize)]
pub(crate) struct Wish {
    span: Option<String>,
}

fn named(text: &str) -> Result<QueueName, ApiError> {
    let unknown = || ApiError::not_found("queue", text);
    let (model, format) = text.rsplit_once('@').ok_or_else(unknown)?;
    let checked = [model, format].map(QueueName::check_part);
    if checked.iter().any(Result::is_err) {
        return Err(unknown());
    }
    Ok(QueueName { model: model.to_owned(), format: format.to_owned() })
}

/// A queue.
pub(crate) async fn one(
    visit: Visit,
    Path(name): Path<String>,
    Query(wish): Query<Wish>,
) -> Result<Response, PageError> {
    let (name, span) = (named(&name)?, Span::of(wish.span.as_deref()));
    visit.show(move |app, _| look(app, name.clone(), span)).await
}

async fn look(app: App, name: QueueName, span: Span) -> Result<One, PageError> {
    let now: Timestamp = app.client().now().await?;
    let rows = overview::rows(&app, now).await?;
    let row = rows.into_iter().find(|row| row.name == name);
    let row = row.ok_or_else(|| ApiError::not_found("queue", &name.to_string()))?;
    let workers = app.store().workers().await?.into_iter();
    Ok(One {
        span,
        oldest: row.depth.oldest_queued_at.map(|at| now.since(at)),
        settings: app.store().queue_state(&name).await?,
        lately: history::last_minute(&app, Some(&name), now).await?,
        workers: workers
            .filter(|worker| worker.heartbeat.queue == name)
            .map(|worker| Shown { worker })
            .collect(),
        charts: history::charts(&app, Some(&name), span, now).await?,
        row,
    })
}

/// What is to be set.
#[derive(Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub(crate) enum Setting {
    /// Workers leave it alone.
    Pause,
    /// They do so no more.
    Resume,
    /// So many tokens may wait; nothing lifts the bound.
    Limit {
        #[serde(default)]
        tokens: String,
    },
}

/// Pauses, resumes or bounds a queue.
pub(crate) async fn set(
    visit: Visit,
    Path(name): Path<String>,
    setting: Result<Form<Setting>, FormRejection>,
) -> Result<Response, PageError> {
    let name = named(&name)?;
    let Form(setting) =
        setting.map_err(|error| ApiError::invalid("invalid_form", error.body_text()))?;
    let store = visit.app.store();
    let done = match setting {
        Setting::Pause => {
            store.set_paused(&name, true).await?;
            "The queue is paused: what runs ends, and nothing new begins."
        }
        Setting::Resume => {
            store.set_paused(&name, false).await?;
            "The queue goes on."
        }
        Setting::Limit { tokens } => {
            store.set_limit(&name, bound(&tokens)?).await?;
            "The bound is set: producers hear of it within seconds."
        }
    };
    let there = format!("/dashboard/queues/{}", percent_encoded(&name.to_string()));
    Ok(visit.done(&there, done))
}

/// Tokens, with or without separators; none for nothing.
fn bound(text: &str) -> Result<Option<u64>, ApiError> {
    let digits: String = text.chars().filter(|c| !matches!(c, ' ' | ',' | '_')).collect();
    if digits.is_empty() {
        return Ok(None);
    }
    let tokens = digits.parse::<u64>().ok().filter(|tokens| (1..=i64::MAX as u64).contains(tokens));
    let refused = || ApiError::invalid("invalid_value", "tokens must be a number above 0");
    tokens.map(Some).ok_or_else(|| refused().at("tokens"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_a_number_or_nothing() {
        assert_eq!(bound(" "), Ok(None));
        assert_eq!(bound("50,000 000"), Ok(Some(50_000_000)));
        for wrong in ["0", "-1", "1.5", "many", "99999999999999999999"] {
            assert!(bound(wrong).is_err(), "{wrong}");
        }
    }
}
