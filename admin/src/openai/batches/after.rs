//! The field `after` of a batch: the earlier batch, of which its lines are made.

use serde::Serialize;
use serde_json::Value;
use tritmill_queue::Timestamp;
use utoipa::ToSchema;

use super::find;
use crate::{
    ApiError, App, Caller,
    line_template::LineTemplate,
    store::{Batch, BatchId, after::After},
};

/// The earlier batch of a batch.
#[derive(Serialize, ToSchema)]
#[schema(as = AfterBatch)]
pub(crate) struct AfterView {
    batch_id: String,
    /// The template of its lines.
    #[schema(value_type = Object)]
    lines: Value,
    /// When the earlier batch had ended and the first lines were made. The completion window begins then. Null while it waits.
    began_at: Option<i64>,
}

impl From<&After> for AfterView {
    fn from(after: &After) -> Self {
        Self {
            batch_id: after.batch.to_string(),
            lines: after.lines.to_json(),
            began_at: after.began_at.map(Timestamp::seconds),
        }
    }
}

/// Finds the earlier batch of a new one, and checks that its answers may have what the template reads.
pub(super) async fn check(
    app: &App,
    caller: &Caller,
    earlier: &str,
    lines: LineTemplate,
) -> Result<After, ApiError> {
    let of = |error: ApiError| match error.param() {
        None => error.at("after.batch_id"),
        Some(_) => error,
    };
    let earlier = find(app, caller, earlier).await.map_err(of)?;
    lines.check_earlier(&earlier.endpoint, "after.lines.")?;
    Ok(After::new(earlier.id, lines))
}

/// An earlier batch that was deleted after it was found.
pub(super) fn deleted_meanwhile(batch: &Batch) -> ApiError {
    let earlier = batch.after.as_ref().map(|after| after.batch.to_string()).unwrap_or_default();
    ApiError::not_found("batch", &earlier).at("after.batch_id")
}

/// A batch that cannot be deleted, because another one waits for its answers.
pub(super) fn awaited(by: BatchId) -> ApiError {
    let message =
        format!("{by} waits for the answers of this batch: delete it later, or cancel that one");
    ApiError::conflict("batch_awaited", &message)
}
