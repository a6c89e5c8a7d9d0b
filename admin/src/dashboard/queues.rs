//! Page of a queue: load, workers and settings.

use askama::Template;
use axum::extract::{Path, Query};
use serde::Deserialize;
use serde_json::json;
use tritmill_queue::QueueName;

use super::{
    Content, PageError, PageForm, PageResult, Visit,
    chart::Chart,
    filters::{self, scaled},
    history::{self, Range, RangeQuery, Span},
    overview::QueueRow,
    percent_encoded,
    workers::WorkerRow,
};
use crate::{
    ApiError, App,
    operator::{
        audit, params,
        queues::{loads, set_paused},
    },
};

#[derive(Template)]
#[template(path = "queue.html")]
struct QueueView {
    range: Range,
    row: QueueRow,
    workers: Vec<WorkerRow>,
    charts: Vec<Chart>,
}

impl QueueView {
    /// Submitted jobs per second over the last minute.
    fn arrived(&self) -> String {
        scaled(self.row.load.rates().arrived, "")
    }

    /// Finished jobs per second over the last minute.
    fn finished(&self) -> String {
        scaled(self.row.load.rates().ended, "")
    }

    fn encoded(&self) -> String {
        percent_encoded(&self.row.name().to_string())
    }
}

/// Shows a queue.
pub(crate) async fn one(
    visit: Visit,
    Path(name): Path<String>,
    Query(query): Query<RangeQuery>,
) -> PageResult {
    let (name, range) = (params::queue(&name)?, Range::parse(&query)?);
    visit.show(move |app, _| load(app, name.clone(), range)).await
}

async fn load(app: App, name: QueueName, range: Range) -> Result<Content, PageError> {
    let now = app.client.now().await?;
    let load = loads(&app).await?.into_iter().find(|load| load.settings.queue == name);
    let load = load.ok_or_else(|| ApiError::not_found("queue", &name.to_string()))?;
    let workers = app.store.workers().await?.into_iter();
    let view = QueueView {
        range,
        row: QueueRow { load },
        workers: workers
            .filter(|worker| worker.heartbeat.queue == name)
            .map(|worker| WorkerRow { worker })
            .collect(),
        charts: history::charts(&app, Some(&name), range, now).await?,
    };
    Ok(Content::new(name.to_string(), &view))
}

/// A form to change a queue's settings.
#[derive(Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub(crate) enum SettingsForm {
    Pause,
    Resume,
    /// Limits the queued tokens; an empty text removes the limit.
    Limit {
        #[serde(default)]
        tokens: String,
    },
}

/// Pauses, resumes or limits a queue.
pub(crate) async fn update(
    visit: Visit,
    Path(name): Path<String>,
    PageForm(form): PageForm<SettingsForm>,
) -> PageResult {
    let name = params::queue(&name)?;
    let (app, caller) = (&visit.app, &visit.caller);
    let notice = match form {
        SettingsForm::Pause => {
            set_paused(app, caller, &name, true).await?;
            "The queue is paused. Running jobs finish; no new ones start."
        }
        SettingsForm::Resume => {
            set_paused(app, caller, &name, false).await?;
            "The queue is resumed."
        }
        SettingsForm::Limit { tokens } => {
            let tokens = parse_limit(&tokens)?;
            let detail = json!({ "limit_tokens": tokens });
            audit::record(app, caller, "queue.limit", &name.to_string(), detail).await?;
            app.store.set_limit(&name, tokens).await?;
            "The limit is set. It applies within seconds."
        }
    };
    let page = format!("/dashboard/queues/{}", percent_encoded(&name.to_string()));
    Ok(visit.done(&page, notice))
}

/// Parses a number of tokens, with or without separators; empty text means no limit.
fn parse_limit(text: &str) -> Result<Option<u64>, ApiError> {
    let digits: String = text.chars().filter(|c| !matches!(c, ' ' | ',' | '_')).collect();
    if digits.is_empty() {
        return Ok(None);
    }
    let tokens = digits.parse::<u64>().ok().filter(|tokens| (1..=i64::MAX as u64).contains(tokens));
    let invalid = || ApiError::invalid_value("tokens", "tokens must be a number above 0");
    tokens.map(Some).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_a_positive_number_or_empty() {
        assert_eq!(parse_limit(" "), Ok(None));
        assert_eq!(parse_limit("50,000 000"), Ok(Some(50_000_000)));
        for wrong in ["0", "-1", "1.5", "many", "99999999999999999999"] {
            assert!(parse_limit(wrong).is_err(), "{wrong}");
        }
    }
}
