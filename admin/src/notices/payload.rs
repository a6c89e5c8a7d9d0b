//! What a notice says: a JSON document for webhooks, a text for mails.

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Value, json};

use crate::{
    budgets::BudgetState,
    days::day_text,
    openai::batches::BatchView,
    operator::prices::BudgetView,
    store::{
        Batch,
        events::{NoticeKind, SpentBudget, Subject},
        notices::Notice,
    },
};

impl From<&SpentBudget> for BudgetState {
    fn from(spent: &SpentBudget) -> Self {
        Self { budget: spent.budget.clone(), spent: spent.spent, period: spent.period }
    }
}

/// Returns the document: the same at every attempt.
pub(super) fn json(notice: &Notice) -> Value {
    let data = match &notice.subject {
        Subject::Batch { batch, added } => {
            json!(BatchView::from(Batch { added: *added, ..(**batch).clone() }))
        }
        Subject::Budget(spent) => json!(BudgetView::from(&BudgetState::from(&**spent))),
    };
    let at: Option<DateTime<Utc>> = DateTime::from_timestamp_millis(notice.created_at.0);
    json!({
        "id": notice.event,
        "object": "event",
        "type": notice.kind.as_str(),
        "timestamp": at.map(|at| at.to_rfc3339_opts(SecondsFormat::Millis, true)),
        "created_at": notice.created_at.seconds(),
        "data": data,
    })
}

/// Returns the subject and the text of a mail; `site` is the URL of the service, if it is known.
pub(super) fn mail(notice: &Notice, site: Option<&str>) -> (String, String) {
    match &notice.subject {
        Subject::Batch { batch, added } => {
            let batch = Batch { added: *added, ..(**batch).clone() };
            of_batch(notice, &batch, site)
        }
        Subject::Budget(spent) => of_budget(notice, &(&**spent).into(), site),
    }
}

fn of_batch(notice: &Notice, batch: &Batch, site: Option<&str>) -> (String, String) {
    let what = match notice.kind {
        NoticeKind::BatchCompleted => "completed",
        NoticeKind::BatchFailed => "failed: its file was rejected",
        NoticeKind::BatchExpired => "expired before every line was answered",
        NoticeKind::BatchCancelled => "was cancelled",
        NoticeKind::BatchPaused => "was paused",
        NoticeKind::BatchResumed => "goes on",
        NoticeKind::BudgetSoftReached | NoticeKind::BudgetSpent => "changed",
    };
    let mut text = format!(
        "Batch {} of tenant {} {what}.\n\nLines: {}\nAnswered: {}\nFailed: {}\n",
        batch.id,
        batch.tenant.0,
        batch.total_lines(),
        batch.completed,
        batch.failed
    );
    for error in batch.errors.iter().take(5) {
        let line = error.line.map(|line| format!("line {line}: ")).unwrap_or_default();
        text.push_str(&format!("Error: {line}{}\n", error.message));
    }
    for charge in &batch.cost {
        text.push_str(&format!("Cost: {charge}\n"));
    }
    if let Some(site) = site {
        text.push_str(&format!("\n{site}/dashboard/batches/{}\n", batch.id));
    }
    (format!("Batch {} {what}", batch.id), text)
}

fn of_budget(notice: &Notice, state: &BudgetState, site: Option<&str>) -> (String, String) {
    let of = &state.budget.of;
    let owner = match of.key {
        Some(key) => format!("API key {key} of tenant {}", of.tenant.0),
        None => format!("tenant {}", of.tenant.0),
    };
    let (spent, period) = (state.charge(state.spent), of.period.as_str());
    let bound = |amount: Option<i64>| state.charge(amount.unwrap_or_default());
    let (subject, text) = match notice.kind {
        NoticeKind::BudgetSpent => (
            format!("The budget of {owner} is spent"),
            format!(
                "The {owner} has spent {spent} of its budget of {} for this {period}.\nNew work is refused; work \
                 that was accepted goes on.\n",
                bound(state.budget.hard)
            ),
        ),
        _ => (
            format!("The budget of {owner} is nearly spent"),
            format!(
                "The {owner} has spent {spent} in this {period}: its soft bound is {}.\n",
                bound(state.budget.soft)
            ),
        ),
    };
    let next = day_text(state.period.1);
    let link = site.map(|site| format!("\n{site}/dashboard/costs\n")).unwrap_or_default();
    (subject, format!("{text}The budget begins anew on {next}.\n{link}"))
}
