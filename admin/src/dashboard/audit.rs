//! What operators did, the latest first.

use askama::Template;
use axum::{extract::Query, response::Response};
use serde::Deserialize;
use tritmill_queue::{
    Timestamp,
    store::{Page, audit::AuditEntry},
};
use uuid::Uuid;

use super::{
    filters,
    page::{PageError, View, Visit},
};
use crate::{app::App, error::ApiError};

/// Lines of a page.
const PAGE: u32 = 50;

#[derive(Template)]
#[template(path = "audit.html")]
struct Log {
    now: Timestamp,
    lines: Vec<AuditEntry>,
    /// The last of the page, if there are more.
    more: Option<Uuid>,
    is_first: bool,
}

impl Log {
    /// How it was done, if there is anything to say of it.
    fn detail(line: &AuditEntry) -> String {
        match line.detail.as_object() {
            Some(detail) if !detail.is_empty() => line.detail.to_string(),
            _ => String::new(),
        }
    }
}

impl View for Log {
    fn title(&self) -> String {
        "Audit log".to_owned()
    }
}

/// Which page of the log.
#[derive(Deserialize)]
pub(crate) struct After {
    after: Option<String>,
}

/// The log.
pub(crate) async fn list(
    visit: Visit,
    Query(After { after }): Query<After>,
) -> Result<Response, PageError> {
    let line = |text: String| text.parse::<Uuid>().map_err(|_| ApiError::not_found("line", &text));
    let after = after.map(line).transpose()?;
    visit.show(move |app, _| look(app, after)).await
}

async fn look(app: App, after: Option<Uuid>) -> Result<Log, PageError> {
    let page = Page { after, limit: PAGE + 1, ascending: false };
    let mut lines = app.store().audit_log(page).await?;
    let has_more = lines.len() > PAGE as usize;
    lines.truncate(PAGE as usize);
    Ok(Log {
        now: app.client().now().await?,
        more: lines.last().map(|line| line.id).filter(|_| has_more),
        is_first: after.is_none(),
        lines,
    })
}
