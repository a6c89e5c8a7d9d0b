//! Rows to types and back. A row this program did not write is an error, never a panic.

use std::collections::HashSet;

use serde::{Serialize, de::DeserializeOwned};
use sqlx::{Row, sqlite::SqliteRow};

use super::{super::StoreError, unavailable};
use crate::{
    dispatch::Entry,
    job::{JobId, JobState, QueueName, Tenant, Timestamp},
    store::{ClaimRef, FinishedJob, JobRecord},
};

pub(super) fn damaged(what: &'static str, detail: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged { what, detail: detail.to_string() }
}

/// JSON of one of our own types, whose serialisation cannot fail.
pub(super) fn to_json(value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| damaged("value", error))
}

pub(super) fn from_json<T: DeserializeOwned>(
    what: &'static str,
    text: &str,
) -> Result<T, StoreError> {
    serde_json::from_str(text).map_err(|error| damaged(what, error))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// `["0192…", …]` for `json_each` and `unhex`.
pub(super) fn ids_json<'a>(ids: impl IntoIterator<Item = &'a JobId>) -> String {
    let texts: Vec<String> = ids.into_iter().map(|id| hex(id.as_bytes())).collect();
    serde_json::json!(texts).to_string()
}

pub(super) fn held_json(held: &[ClaimRef]) -> String {
    let rows: Vec<_> = held
        .iter()
        .map(|held| serde_json::json!({ "id": hex(held.id.as_bytes()), "epoch": held.epoch }))
        .collect();
    serde_json::json!(rows).to_string()
}

pub(super) fn id(row: &SqliteRow, column: &'static str) -> Result<JobId, StoreError> {
    let bytes: Vec<u8> = row.try_get(column).map_err(unavailable)?;
    JobId::from_bytes(&bytes).ok_or_else(|| damaged(column, hex(&bytes)))
}

pub(super) fn ids(rows: &[SqliteRow]) -> Result<HashSet<JobId>, StoreError> {
    rows.iter().map(|row| id(row, "id")).collect()
}

pub(super) fn held(rows: &[SqliteRow]) -> Result<HashSet<ClaimRef>, StoreError> {
    rows.iter()
        .map(|row| Ok(ClaimRef { id: id(row, "id")?, epoch: integer(row, "epoch")? }))
        .collect()
}

pub(super) fn text(row: &SqliteRow, column: &'static str) -> Result<String, StoreError> {
    row.try_get(column).map_err(unavailable)
}

pub(super) fn integer(row: &SqliteRow, column: &'static str) -> Result<i64, StoreError> {
    row.try_get(column).map_err(unavailable)
}

pub(super) fn count(row: &SqliteRow, column: &'static str) -> Result<u32, StoreError> {
    let value = integer(row, column)?;
    u32::try_from(value).map_err(|_| damaged(column, value))
}

pub(super) fn state(row: &SqliteRow) -> Result<JobState, StoreError> {
    text(row, "state")?.parse().map_err(|error| damaged("state", error))
}

pub(super) fn entry(row: &SqliteRow, queue: &QueueName) -> Result<Entry, StoreError> {
    Ok(Entry {
        id: id(row, "id")?,
        queue: queue.clone(),
        priority: text(row, "priority")?.parse().map_err(|error| damaged("priority", error))?,
        tenant: Tenant(text(row, "tenant")?),
        // One tenant, one process: nobody weighs it.
        cost: 1,
    })
}

/// The entry of a job that was moved, if it is queued now.
pub(super) fn queued(row: &SqliteRow) -> Result<Option<Entry>, StoreError> {
    if state(row)? != JobState::Queued {
        return Ok(None);
    }
    let queue = QueueName { model: text(row, "model")?, format: text(row, "format")? };
    entry(row, &queue).map(Some)
}

pub(super) fn record(row: &SqliteRow, errors: &[SqliteRow]) -> Result<JobRecord, StoreError> {
    let outcome: Option<String> = row.try_get("outcome").map_err(unavailable)?;
    let finished_at: Option<i64> = row.try_get("finished_at").map_err(unavailable)?;
    Ok(JobRecord {
        job: from_json("job", &text(row, "job")?)?,
        state: state(row)?,
        epoch: integer(row, "epoch")?,
        attempts: count(row, "attempts")?,
        outcome: outcome.map(|json| from_json("outcome", &json)).transpose()?,
        finished_at: finished_at.map(Timestamp),
        errors: errors
            .iter()
            .map(|row| from_json("attempt error", &text(row, "error")?))
            .collect::<Result<_, _>>()?,
    })
}

pub(super) fn ended(row: &SqliteRow) -> Result<FinishedJob, StoreError> {
    let outcome: Option<String> = row.try_get("outcome").map_err(unavailable)?;
    Ok(FinishedJob {
        id: id(row, "id")?,
        state: state(row)?,
        outcome: outcome.map(|json| from_json("outcome", &json)).transpose()?,
    })
}
