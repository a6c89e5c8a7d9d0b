//! Page of the audit log.

use askama::Template;
use axum::extract::Query;
use serde::Deserialize;
use tritmill_queue::{Timestamp, store::Page};
use uuid::Uuid;

use super::{Content, PageError, PageResult, Visit, filters, pager::Pager};
use crate::{ApiError, App, store::audit::AuditEntry};

/// Entries per page.
const PAGE_SIZE: u32 = 50;

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditView {
    now: Timestamp,
    lines: Vec<AuditEntry>,
    pager: Pager,
}

impl AuditView {
    /// The parameters of the action as text, empty if there are none.
    fn detail(line: &AuditEntry) -> String {
        match line.detail.as_object() {
            Some(detail) if !detail.is_empty() => line.detail.to_string(),
            _ => String::new(),
        }
    }
}

/// A page of a list.
#[derive(Deserialize)]
pub(crate) struct PageQuery {
    after: Option<String>,
}

/// Shows a page of the log, the latest entries first.
pub(crate) async fn list(visit: Visit, Query(PageQuery { after }): Query<PageQuery>) -> PageResult {
    let entry = |id: String| id.parse::<Uuid>().map_err(|_| ApiError::not_found("entry", &id));
    let after = after.map(entry).transpose()?;
    visit.show(move |app, _| load(app, after)).await
}

async fn load(app: App, after: Option<Uuid>) -> Result<Content, PageError> {
    let page = Page { after, limit: PAGE_SIZE + 1, ascending: false };
    let mut lines = app.store.audit_log(page).await?;
    let has_more = lines.len() > PAGE_SIZE as usize;
    lines.truncate(PAGE_SIZE as usize);
    let href = |entry: &AuditEntry| format!("/dashboard/audit?after={}", entry.id);
    let first = after.map(|_| "/dashboard/audit".to_owned());
    let next = lines.last().filter(|_| has_more).map(href);
    let pager = Pager::latest_first("entries", first, next);
    let view = AuditView { now: app.client.now().await?, pager, lines };
    Ok(Content::new("Audit log", &view))
}
