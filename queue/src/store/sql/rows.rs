//! Conversion of rows. A value that this program did not write is an error, never a panic.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use sqlx::{Decode, Row as _, Type};
use uuid::Uuid;

use super::{
    calls::Row,
    dialect::{self, Db},
};
use crate::{
    billing::{Billing, Tier},
    dispatch::Entry,
    job::{Job, JobId, JobState, Priority, Prompt, QueueName, Tenant, Timestamp},
    outcome::{JobError, Outcome},
    sampling::Sampling,
    store::{Claim, ClaimRef, FinishedAttempt, Serving, StoreError, attempts, sampler::Load},
};

/// Returns the error of a value that this program did not write.
pub fn damaged(what: &'static str, detail: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged { what, detail: detail.to_string() }
}

/// Returns a column of a type that fits the schema.
pub fn get<'r, T>(row: &'r Row, column: &str) -> Result<T, StoreError>
where
    T: Decode<'r, Db> + Type<Db>,
{
    Ok(row.try_get(column)?)
}

/// Returns a 64-bit column.
pub fn integer(row: &Row, column: &str) -> Result<i64, StoreError> {
    get(row, column)
}

/// Returns a 64-bit column that is never negative.
pub fn count(row: &Row, column: &'static str) -> Result<u64, StoreError> {
    let value = integer(row, column)?;
    u64::try_from(value).map_err(|_| damaged(column, value))
}

/// Returns a 64-bit column with a value of 32 bits.
pub fn small(row: &Row, column: &'static str) -> Result<u32, StoreError> {
    let value = integer(row, column)?;
    u32::try_from(value).map_err(|_| damaged(column, value))
}

/// Returns the column `shard_key`.
fn shard_key(row: &Row) -> Result<u16, StoreError> {
    let value: i32 = get(row, "shard_key")?;
    u16::try_from(value).map_err(|_| damaged("shard_key", value))
}

/// Returns a 32-bit column that is never negative.
pub(crate) fn attempts(row: &Row, column: &'static str) -> Result<u32, StoreError> {
    let value: i32 = get(row, column)?;
    u32::try_from(value).map_err(|_| damaged(column, value))
}

/// Returns a column with a time.
pub fn time(row: &Row, column: &str) -> Result<Timestamp, StoreError> {
    integer(row, column).map(Timestamp)
}

/// Returns a column with a time, or NULL.
pub fn time_or_none(row: &Row, column: &str) -> Result<Option<Timestamp>, StoreError> {
    Ok(get::<Option<i64>>(row, column)?.map(Timestamp))
}

/// Returns a number of tokens, or NULL.
pub fn tokens(row: &Row, column: &str) -> Result<Option<u64>, StoreError> {
    Ok(get::<Option<i64>>(row, column)?.map(i64::unsigned_abs))
}

pub(crate) fn duration_or_none(row: &Row, column: &str) -> Result<Option<Duration>, StoreError> {
    Ok(get::<Option<i64>>(row, column)?.map(duration))
}

/// Returns a difference of two times; zero if the earlier one is later.
pub(crate) fn duration(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// Returns a duration in the schema's milliseconds.
pub fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Returns a count as a 64-bit column stores it.
pub fn stored(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Returns a column with an id of a job.
pub fn id(row: &Row, column: &str) -> Result<JobId, StoreError> {
    get::<Uuid>(row, column).map(JobId::from)
}

/// Returns the ids of the column `id`.
pub fn ids(rows: &[Row]) -> Result<Vec<JobId>, StoreError> {
    rows.iter().map(|row| id(row, "id")).collect()
}

pub(crate) fn claim_ref(row: &Row) -> Result<ClaimRef, StoreError> {
    let (id, epoch) = (id(row, "id")?, integer(row, "epoch")?);
    Ok(ClaimRef { id, epoch, claim_id: integer(row, "claim_id")? })
}

/// Returns a word of an enumeration.
pub fn word<T>(row: &Row, column: &'static str) -> Result<T, StoreError>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    get::<&str>(row, column)?.parse().map_err(|error| damaged(column, error))
}

pub(crate) fn state(row: &Row) -> Result<JobState, StoreError> {
    word(row, "state")
}

pub(crate) fn queue(row: &Row) -> Result<QueueName, StoreError> {
    Ok(QueueName { model: get(row, "model")?, format: get(row, "format")? })
}

/// Returns a JSON document, read as text.
pub fn document<T: DeserializeOwned>(row: &Row, column: &'static str) -> Result<T, StoreError> {
    serde_json::from_str(get(row, column)?).map_err(|error| damaged(column, error))
}

/// Returns bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// Returns a value of this program as JSON text.
pub fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("maps of this program have text keys")
}

/// Returns the job in the column `job`, with the queue of the columns `model` and `format`: it may have moved there since it was
/// submitted.
pub(crate) fn stored_job(row: &Row) -> Result<Job, StoreError> {
    let job = dialect::decode::<Job>(row, "job")?;
    Ok(Job { queue: queue(row)?, ..job })
}

/// Returns a job. If it cannot be read, a stand-in made from its other columns, and the reason.
pub(crate) fn job(row: &Row) -> Result<(Job, Option<JobError>), StoreError> {
    let error = match stored_job(row) {
        Ok(job) => return Ok((job, None)),
        Err(error @ StoreError::Damaged { .. }) => error,
        Err(error) => return Err(error),
    };
    let job = Job {
        id: id(row, "id")?,
        tenant: Tenant(get(row, "tenant")?),
        queue: queue(row)?,
        priority: word(row, "priority")?,
        prompt: Prompt::Text(String::new()),
        sampling: Sampling::default(),
        seed: 0,
        attempts_max: attempts(row, "attempts_max")?,
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
        task: crate::job::Task::Generate,
        echo: Map::new(),
        custom_id: None,
        line_key: None,
        billing: Billing::default(),
        line_shape: None,
    };
    Ok((job, Some(attempts::unreadable(&error))))
}

/// Returns what the answer of a job repeats of its request, if the column `repeating` has the job. A job that cannot be read has an
/// error as its outcome, and repeats nothing.
pub(crate) fn repeated(row: &Row) -> Result<Map<String, Value>, StoreError> {
    if get::<Option<&[u8]>>(row, "repeating")?.is_none() {
        return Ok(Map::new());
    }
    match dialect::decode::<Job>(row, "repeating") {
        Err(StoreError::Damaged { .. }) => Ok(Map::new()),
        read => Ok(read?.echo),
    }
}

/// Returns an attempt's error, or the reason why it cannot be read.
pub(crate) fn attempt_error(row: &Row) -> Result<JobError, StoreError> {
    match dialect::decode(row, "error") {
        Err(error @ StoreError::Damaged { .. }) => Ok(attempts::unreadable(&error)),
        read => read,
    }
}

/// Returns the entry of a queued job, from the columns `id`, `tenant`, `priority`, `cost`, `shard_key`, `expires_at` and
/// `tier`.
pub(crate) fn entry(row: &Row, queue: QueueName) -> Result<Entry, StoreError> {
    Ok(Entry {
        id: id(row, "id")?,
        queue,
        priority: word::<Priority>(row, "priority")?,
        tenant: Tenant(get(row, "tenant")?),
        cost: small(row, "cost")?,
        shard_key: shard_key(row)?,
        is_first: word::<Tier>(row, "tier")? == Tier::Priority,
        expires_at: get::<Option<i64>>(row, "expires_at")?.map(Timestamp),
    })
}

/// Returns the entry of a job that changed its state, if it is queued now.
pub(crate) fn queued(row: &Row) -> Result<Option<Entry>, StoreError> {
    (state(row)? == JobState::Queued).then(|| entry(row, queue(row)?)).transpose()
}

/// The claimed jobs by id, and the end of the attempts of those that cannot be read.
pub(crate) fn claims(
    rows: &[Row],
) -> Result<(HashMap<JobId, Claim>, Vec<FinishedAttempt>), StoreError> {
    let (mut claims, mut unreadable) = (HashMap::with_capacity(rows.len()), Vec::new());
    for row in rows {
        let claim = claim_ref(row)?;
        match claim_of(row) {
            Ok(read) => {
                claims.insert(claim.id, read);
            }
            Err(error) => {
                tracing::error!(job = %claim.id, %error, "a claimed job cannot be read");
                let outcome = Outcome::Error(attempts::unreadable(&error));
                unreadable.push(FinishedAttempt { claim, outcome, first_token: None });
            }
        }
    }
    Ok((claims, unreadable))
}

fn claim_of(row: &Row) -> Result<Claim, StoreError> {
    let expires_in: Option<i64> = get(row, "expires_in")?;
    Ok(Claim {
        job: stored_job(row)?,
        epoch: integer(row, "epoch")?,
        claim_id: integer(row, "claim_id")?,
        attempts: attempts(row, "attempts")?,
        alone: get(row, "alone")?,
        expires_in: expires_in.map(duration),
        checkpoint: get(row, "checkpoint")?,
    })
}

/// The claims that are not among the rows.
pub(crate) fn lost(
    claims: impl IntoIterator<Item = ClaimRef>,
    kept: &[Row],
) -> Result<Vec<ClaimRef>, StoreError> {
    let kept: HashSet<ClaimRef> = kept.iter().map(claim_ref).collect::<Result<_, _>>()?;
    Ok(claims.into_iter().filter(|claim| !kept.contains(claim)).collect())
}

/// Returns what the live workers of a queue can do, from their sums.
pub(crate) fn serving(row: &Row) -> Result<Serving, StoreError> {
    let slots = count(row, "slots")?;
    let measured_slots = count(row, "measured_slots")?;
    Ok(Serving {
        now: time(row, "now")?,
        workers: count(row, "workers")?,
        gpu_workers: count(row, "gpu_workers")?,
        slots,
        running: count(row, "running")?,
        drain_tokens_per_s: Serving::rate_of_all(get(row, "rate")?, measured_slots, slots),
        kv_blocks_used: count(row, "blocks_used")?,
        kv_blocks_total: count(row, "blocks_total")?,
    })
}

/// Returns what a worker reports of the present.
pub(in crate::store) fn load(row: &Row) -> Result<Load, StoreError> {
    Ok(Load {
        running: count(row, "running")?,
        slots: count(row, "slots")?,
        kv_used: count(row, "kv_used")?,
        kv_total: count(row, "kv_total")?,
        prefill_tokens_per_s: get(row, "prefill")?,
        decode_tokens_per_s: get(row, "decode")?,
        utilisation: get(row, "busy")?,
    })
}
