//! Rows to types and back. A row this program did not write is an error, never a panic.

use std::time::Duration;

use serde::de::DeserializeOwned;
use sqlx::{
    Row as _,
    postgres::{PgRow, Postgres},
};
use uuid::Uuid;

use super::unavailable;
use crate::{
    dispatch::Entry,
    job::{Job, JobId, JobState, Priority, Prompt, QueueName, Tenant, Timestamp},
    outcome::{JobError, Outcome},
    sampling::Sampling,
    store::{ClaimRef, StoreError, attempts},
    wire::{self, WireError},
};

pub(super) fn damaged(what: &'static str, detail: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged { what, detail: detail.to_string() }
}

/// A column as it is, of a type that fits the schema.
pub(super) fn get<'r, T>(row: &'r PgRow, column: &str) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(column).map_err(unavailable)
}

pub(super) fn integer(row: &PgRow, column: &str) -> Result<i64, StoreError> {
    get(row, column)
}

/// A `bigint` that is never negative.
pub(super) fn count(row: &PgRow, column: &'static str) -> Result<u64, StoreError> {
    let value = integer(row, column)?;
    u64::try_from(value).map_err(|_| damaged(column, value))
}

/// A `bigint` that fits thirty-two bits.
pub(super) fn small(row: &PgRow, column: &'static str) -> Result<u32, StoreError> {
    let value = integer(row, column)?;
    u32::try_from(value).map_err(|_| damaged(column, value))
}

pub(super) fn attempts(row: &PgRow) -> Result<u32, StoreError> {
    let value: i32 = get(row, "attempts")?;
    u32::try_from(value).map_err(|_| damaged("attempts", value))
}

pub(super) fn time(row: &PgRow, column: &str) -> Result<Timestamp, StoreError> {
    integer(row, column).map(Timestamp)
}

pub(super) fn id(row: &PgRow, column: &str) -> Result<JobId, StoreError> {
    get::<Uuid>(row, column).map(JobId::from)
}

pub(super) fn ids(rows: &[PgRow]) -> Result<Vec<JobId>, StoreError> {
    rows.iter().map(|row| id(row, "id")).collect()
}

pub(super) fn held(row: &PgRow) -> Result<ClaimRef, StoreError> {
    Ok(ClaimRef { id: id(row, "id")?, epoch: integer(row, "epoch")? })
}

pub(super) fn state(row: &PgRow) -> Result<JobState, StoreError> {
    get::<&str>(row, "state")?.parse().map_err(|error| damaged("state", error))
}

pub(super) fn priority(row: &PgRow) -> Result<Priority, StoreError> {
    get::<&str>(row, "priority")?.parse().map_err(|error| damaged("priority", error))
}

pub(super) fn queue(row: &PgRow) -> Result<QueueName, StoreError> {
    Ok(QueueName { model: get(row, "model")?, format: get(row, "format")? })
}

/// A value in wire format.
pub(super) fn decode<T: DeserializeOwned>(
    row: &PgRow,
    column: &'static str,
) -> Result<T, StoreError> {
    wire::decode(get::<&[u8]>(row, column)?).map_err(|error| damaged(column, error))
}

/// A job; of one that cannot be read what its row says, and why it cannot.
pub(super) fn job(row: &PgRow) -> Result<(Job, Option<JobError>), StoreError> {
    let error = match decode(row, "job") {
        Ok(job) => return Ok((job, None)),
        Err(error @ StoreError::Damaged { .. }) => error,
        Err(error) => return Err(error),
    };
    let attempts_max: i32 = get(row, "attempts_max")?;
    let job = Job {
        id: id(row, "id")?,
        tenant: Tenant(get(row, "tenant")?),
        queue: queue(row)?,
        priority: priority(row)?,
        prompt: Prompt::Text(String::new()),
        sampling: Sampling::default(),
        seed: 0,
        attempts_max: attempts_max.unsigned_abs(),
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
        custom_id: None,
    };
    Ok((job, Some(attempts::unreadable(&error))))
}

/// An attempt's error; of one that cannot be read, why.
pub(super) fn attempt_error(row: &PgRow) -> Result<JobError, StoreError> {
    match decode(row, "error") {
        Err(error @ StoreError::Damaged { .. }) => Ok(attempts::unreadable(&error)),
        read => read,
    }
}

/// An outcome, or NULL; of one that cannot be read, why. The second is whether it may be read by a
/// later release.
pub(super) fn outcome(row: &PgRow) -> Result<(Option<Outcome>, bool), StoreError> {
    let bytes: Option<&[u8]> = get(row, "outcome")?;
    match bytes.map(wire::decode).transpose() {
        Ok(outcome) => Ok((outcome, false)),
        Err(error) => {
            let is_later = matches!(error, WireError::Version(_) | WireError::Encoding(_));
            let error = attempts::unreadable(&damaged("outcome", error));
            Ok((Some(Outcome::Error(error)), is_later))
        }
    }
}

pub(super) fn entry(row: &PgRow, queue: &QueueName) -> Result<Entry, StoreError> {
    Ok(Entry {
        id: id(row, "id")?,
        queue: queue.clone(),
        priority: priority(row)?,
        tenant: Tenant(get(row, "tenant")?),
        cost: small(row, "cost")?,
    })
}

/// A difference of two times; zero if the earlier one is later.
pub(super) fn duration(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Ids in ascending order: the order in which every statement locks its rows.
pub(super) fn sorted(ids: impl IntoIterator<Item = JobId>) -> Vec<Uuid> {
    let mut sorted: Vec<Uuid> = ids.into_iter().map(Uuid::from).collect();
    sorted.sort_unstable();
    sorted.dedup();
    sorted
}

/// Ids in ascending order, and their epochs.
pub(super) fn columns(held: &[ClaimRef]) -> (Vec<Uuid>, Vec<i64>) {
    let mut sorted: Vec<(Uuid, i64)> =
        held.iter().map(|held| (Uuid::from(held.id), held.epoch)).collect();
    sorted.sort_unstable();
    sorted.dedup();
    sorted.into_iter().unzip()
}

/// Longest name of a queue or tenant: several of them must fit an index entry.
const NAME_BYTES_MAX: usize = 512;

/// A name that Postgres can hold and index: short, and without NUL.
pub(super) fn storable(what: &'static str, text: &str) -> Result<(), StoreError> {
    if text.contains('\0') {
        return Err(StoreError::InvalidValue {
            what,
            problem: "it has a NUL character".to_owned(),
        });
    }
    if text.len() > NAME_BYTES_MAX {
        let problem = format!("it has {} bytes, the limit is {NAME_BYTES_MAX}", text.len());
        return Err(StoreError::InvalidValue { what, problem });
    }
    Ok(())
}
