//! Page of notices: what receivers were told, and what failed.

use askama::Template;
use axum::extract::{Path, Query};
use serde::Deserialize;
use tritmill_queue::{Timestamp, store::Page};

use super::{Content, PageError, PageResult, Visit, filters, pager::Pager};
use crate::{
    ApiError, App, Caller,
    openai::notices,
    store::{
        KeyRole,
        notices::{FailingReceiver, Notice, NoticeFilter, NoticeId},
    },
};

/// Notices per page.
const PAGE_SIZE: u32 = 50;

/// The position in the list.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct NoticesQuery {
    after: String,
}

/// A notice on a page.
pub(super) struct NoticeRow {
    pub notice: Notice,
}

impl NoticeRow {
    /// The state, as it is shown: with the name of a job's state of the same colour.
    pub fn colour(&self) -> &'static str {
        match self.notice.delivery.state() {
            "delivered" => "completed",
            "failed" => "failed",
            _ => "queued",
        }
    }

    pub fn state(&self) -> &'static str {
        self.notice.delivery.state()
    }

    /// The receiver without what may be a password: the query of a URL.
    pub fn receiver(&self) -> &str {
        let address = self.notice.to.address();
        address.split_once('?').map_or(address, |(path, _)| path)
    }

    /// Time of the next attempt, if one was made before.
    pub fn next(&self) -> Option<Timestamp> {
        self.notice.delivery.due_at.filter(|at| at.0 > 0)
    }
}

#[derive(Template)]
#[template(path = "notices.html")]
struct NoticesView {
    now: Timestamp,
    notices: Vec<NoticeRow>,
    is_operator: bool,
    may_redeliver: bool,
    /// The webhook of the tenant, if it failed at the last call.
    failing: Option<FailingReceiver>,
    pager: Pager,
}

impl NoticesView {
    /// Time until which the webhook is left alone.
    fn rests_until(&self) -> Option<Timestamp> {
        self.failing.as_ref()?.rests_until.filter(|at| *at > self.now)
    }
}

/// Shows the notices of the visitor's tenant, or for an operator of all tenants, the latest first.
pub(crate) async fn list(visit: Visit, Query(query): Query<NoticesQuery>) -> PageResult {
    visit.show(move |app, caller| load(app, caller, query.clone())).await
}

async fn load(app: App, caller: Caller, query: NoticesQuery) -> Result<Content, PageError> {
    let after: Option<NoticeId> = match query.after.as_str() {
        "" => None,
        id => Some(id.parse().map_err(|_| ApiError::not_found("notice", id))?),
    };
    let is_operator = caller.may_operate();
    let filter =
        NoticeFilter { tenant: (!is_operator).then(|| caller.tenant.clone()), batch: None };
    let page = Page { after, limit: PAGE_SIZE + 1, ascending: false };
    let mut found = app.store.notices(&filter, page).await?;
    let has_more = found.len() > PAGE_SIZE as usize;
    found.truncate(PAGE_SIZE as usize);
    let list = "/dashboard/notices";
    let next = found.last().filter(|_| has_more).map(|last| format!("{list}?after={}", last.id));
    let webhook = app.store.tenant_webhook(&caller.tenant).await?;
    let failing = match webhook {
        Some(webhook) => app.store.failing_receiver(&caller.tenant, &webhook.url).await?,
        None => None,
    };
    let view = NoticesView {
        now: app.client.now().await?,
        pager: Pager::latest_first("notices", after.map(|_| list.to_owned()), next),
        notices: found.into_iter().map(|notice| NoticeRow { notice }).collect(),
        is_operator,
        may_redeliver: caller.role.includes(KeyRole::Manage),
        failing,
    };
    Ok(Content::new("Notices", &view))
}

/// Delivers a notice again.
pub(crate) async fn redeliver(visit: Visit, Path(id): Path<String>) -> PageResult {
    let own = visit.caller.tenant.clone();
    let tenant = (!visit.caller.may_operate()).then_some(&own);
    notices::redeliver_notice(&visit.app, &visit.caller, tenant, &id).await?;
    Ok(visit.done("/dashboard/notices", "The notice is delivered again."))
}
