//! A batch as Anthropic's API shows it.

use serde::Serialize;
use tritmill_queue::Timestamp;
use utoipa::ToSchema;

use crate::{
    ApiError, App,
    anthropic::PATH,
    dashboard::filters::date_and_time,
    store::{Batch, BatchState},
};

/// A batch of messages.
#[derive(Serialize, ToSchema)]
pub(crate) struct MessageBatch {
    pub id: String,
    /// `message_batch`
    r#type: &'static str,
    /// `in_progress`, `canceling` or `ended`.
    processing_status: &'static str,
    request_counts: MessageCounts,
    created_at: String,
    expires_at: String,
    ended_at: Option<String>,
    cancel_initiated_at: Option<String>,
    archived_at: Option<String>,
    /// Where the results are, when the batch has ended.
    results_url: Option<String>,
}

/// Numbers of requests. While the batch runs, all are processing.
#[derive(Default, Serialize, ToSchema)]
pub(crate) struct MessageCounts {
    processing: u64,
    succeeded: u64,
    errored: u64,
    canceled: u64,
    expired: u64,
}

/// Returns a batch as it is shown.
pub(super) async fn of(app: &App, batch: Batch) -> Result<MessageBatch, ApiError> {
    let times = &batch.at;
    let ended = match batch.state {
        BatchState::Completed => times.completed,
        BatchState::Failed => times.failed,
        BatchState::Expired => times.expired,
        BatchState::Cancelled => times.cancelled,
        _ => None,
    };
    let processing_status = match batch.state {
        state if state.is_terminal() => "ended",
        BatchState::Cancelling => "canceling",
        _ => "in_progress",
    };
    let results_url = ended.map(|_| {
        let server = app.public_url().unwrap_or_default().trim_end_matches('/');
        format!("{server}{PATH}/batches/{}/results", batch.id)
    });
    Ok(MessageBatch {
        id: batch.id.to_string(),
        r#type: "message_batch",
        processing_status,
        request_counts: counts(app, &batch).await?,
        created_at: rfc_3339(batch.created_at),
        expires_at: rfc_3339(batch.expires_at),
        ended_at: ended.map(rfc_3339),
        cancel_initiated_at: times.cancelling.map(rfc_3339),
        archived_at: batch.archived_at.map(rfc_3339),
        results_url,
    })
}

async fn counts(app: &App, batch: &Batch) -> Result<MessageCounts, ApiError> {
    let total = batch.total_lines();
    if !batch.state.is_terminal() {
        return Ok(MessageCounts { processing: total, ..MessageCounts::default() });
    }
    let (succeeded, rest) = (batch.completed, total.saturating_sub(batch.completed));
    let counts = MessageCounts { succeeded, ..MessageCounts::default() };
    if matches!(batch.state, BatchState::Completed | BatchState::Failed) {
        return Ok(MessageCounts { errored: rest, ..counts });
    }
    // Of a batch that was ended early, some lines have an error of their own.
    let jobs = app.store.range_progress(batch.id.all_jobs()).await?;
    let errored = (batch.refused + jobs.failed).min(rest);
    let left = rest - errored;
    Ok(match batch.state {
        BatchState::Expired => MessageCounts { errored, expired: left, ..counts },
        _ => {
            let expired = jobs.expired.min(left);
            MessageCounts { errored, expired, canceled: left - expired, ..counts }
        }
    })
}

/// Returns a time as RFC 3339 has it.
pub(crate) fn rfc_3339(at: Timestamp) -> String {
    let (date, time) = date_and_time(at);
    format!("{date}T{time}Z")
}
