//! The encoding of a job in Redis: one string. `store.lua` reads and writes the same head.
//!
//! ```text
//! version 1, state 1, flags 1, epoch 8, attempts 4, attempts_max 4, expires_at 8 (0: never),
//! finished_at 8, cost 4, bytes of place 2, bytes of job 4          (big endian, 45 bytes)
//! place, encoded job, encoded outcome (empty for unfinished and cancelled jobs)
//! ```

use crate::{
    job::{Job, JobState, Timestamp},
    outcome::Outcome,
    store::{ClaimRef, JobRecord, StoreError},
    wire,
};

const VERSION: u8 = 1;
const HEAD_BYTES: usize = 45;
/// Largest integer that is exact in Lua, which handles times and counts.
const EXACT_MAX: i64 = 1 << 53;

/// Returns the letter of a state.
pub(super) fn letter(state: JobState) -> u8 {
    match state {
        JobState::Scheduled => b's',
        JobState::Queued => b'q',
        JobState::Running => b'r',
        JobState::Retrying => b't',
        JobState::Completed => b'c',
        JobState::Failed => b'f',
        JobState::Cancelled => b'x',
        JobState::Expired => b'e',
    }
}

/// The letter of a queued job that was recorded together with its entry.
pub(super) const ACCEPTED: u8 = b'a';

/// Returns the state of a letter.
pub(super) fn state(found: u8) -> Option<JobState> {
    if found == ACCEPTED {
        return Some(JobState::Queued);
    }
    JobState::ALL.into_iter().find(|state| letter(*state) == found)
}

pub(super) fn damaged(what: &'static str, detail: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged { what, detail: detail.to_string() }
}

/// Bits of an epoch in Redis that hold the tag of its claim; the bits above count. One number fences, so
/// that a failover that loses a claim does not lead to the same epoch again.
const TAG_BITS: u32 = 20;

/// Returns the part of a claim id that an epoch in Redis holds.
pub(super) fn tag(claim_id: i64) -> i64 {
    claim_id & ((1 << TAG_BITS) - 1)
}

/// Returns the epoch as Redis keeps it.
pub(super) fn raw_epoch(held: ClaimRef) -> i64 {
    (held.epoch << TAG_BITS) | tag(held.claim_id)
}

/// Returns the epoch without its tag.
pub(super) fn epoch(raw: i64) -> i64 {
    raw >> TAG_BITS
}

/// Limits a time to what is exact in Lua.
pub(super) fn exact(time: Timestamp) -> i64 {
    time.0.clamp(1, EXACT_MAX)
}

/// Encodes a new job, which is queued.
pub(super) fn encode(job: &Job, place: &str, accepted: bool) -> Result<Vec<u8>, StoreError> {
    let body = wire::encode(job);
    let place_bytes = u16::try_from(place.len());
    let place_bytes = place_bytes.map_err(|_| damaged("tenant", "the name is too long"))?;
    let job_bytes = u32::try_from(body.len()).map_err(|_| damaged("job", "too long"))?;
    let mut value = Vec::with_capacity(HEAD_BYTES + place.len() + body.len());
    let state = if accepted { ACCEPTED } else { letter(JobState::Queued) };
    value.extend([VERSION, state, 0]);
    value.extend(0_u64.to_be_bytes());
    value.extend(0_u32.to_be_bytes());
    value.extend(job.attempts_max.max(1).to_be_bytes());
    value.extend(job.expires_at.map_or(0, exact).to_be_bytes());
    value.extend(0_u64.to_be_bytes());
    value.extend(job.cost().to_be_bytes());
    value.extend(place_bytes.to_be_bytes());
    value.extend(job_bytes.to_be_bytes());
    value.extend(place.as_bytes());
    value.extend(body);
    Ok(value)
}

/// Takes bytes from the front.
fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], StoreError> {
    let (front, rest) =
        bytes.split_first_chunk().ok_or_else(|| damaged("job's head", "truncated"))?;
    *bytes = rest;
    Ok(*front)
}

/// The parts of a job's string.
struct Parts<'a> {
    state: JobState,
    raw_epoch: i64,
    attempts: u32,
    finished_at: Timestamp,
    job: &'a [u8],
    outcome: &'a [u8],
}

fn parts(value: &[u8]) -> Result<Parts<'_>, StoreError> {
    let mut rest = value;
    let [version, state_letter, _flags] = take::<3>(&mut rest)?;
    if version != VERSION {
        return Err(damaged("job's head", format_args!("unknown version {version}")));
    }
    let state = state(state_letter).ok_or_else(|| damaged("state", state_letter.escape_ascii()))?;
    let raw_epoch = i64::from_be_bytes(take(&mut rest)?);
    let attempts = u32::from_be_bytes(take(&mut rest)?);
    let _attempts_max = take::<4>(&mut rest)?;
    let _expires_at = take::<8>(&mut rest)?;
    let finished_at = Timestamp(i64::from_be_bytes(take(&mut rest)?));
    let _cost = take::<4>(&mut rest)?;
    let place_bytes = usize::from(u16::from_be_bytes(take(&mut rest)?));
    let job_bytes = u32::from_be_bytes(take(&mut rest)?) as usize;
    let cut = || damaged("job", "truncated");
    let (_, rest) = rest.split_at_checked(place_bytes).ok_or_else(cut)?;
    let (job, outcome) = rest.split_at_checked(job_bytes).ok_or_else(cut)?;
    Ok(Parts { state, raw_epoch, attempts, finished_at, job, outcome })
}

/// Returns the job as submitted.
pub(super) fn decode_job(value: &[u8]) -> Result<Job, StoreError> {
    wire::decode(parts(value)?.job).map_err(|error| damaged("job", error))
}

/// Returns a job's record, without its errors.
pub(super) fn decode(value: &[u8]) -> Result<JobRecord, StoreError> {
    let Parts { state, raw_epoch, attempts, finished_at, job, outcome } = parts(value)?;
    Ok(JobRecord {
        job: wire::decode(job).map_err(|error| damaged("job", error))?,
        state,
        epoch: epoch(raw_epoch),
        attempts,
        outcome: decode_outcome(outcome)?,
        finished_at: state.is_terminal().then_some(finished_at),
        errors: Vec::new(),
    })
}

/// Returns an outcome, if there is one.
pub(super) fn decode_outcome(bytes: &[u8]) -> Result<Option<Outcome>, StoreError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    wire::decode(bytes).map(Some).map_err(|error| damaged("outcome", error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobId, Priority, Prompt, QueueName, Tenant};

    fn job() -> Job {
        Job {
            id: JobId::generate(),
            tenant: Tenant::default(),
            queue: QueueName { model: "m".into(), format: "i2_s".into() },
            priority: Priority::Low,
            prompt: Prompt::Tokens(vec![1, 2]),
            sampling: crate::Sampling::default(),
            seed: 1,
            attempts_max: 3,
            run_at: None,
            expires_at: Some(Timestamp(i64::MAX)),
            stream: false,
            traceparent: None,
            custom_id: None,
        }
    }

    #[test]
    fn job_round_trips() {
        let job = job();
        let value = encode(&job, "low:default", false).expect("it is short");
        let read = decode(&value).expect("just written");
        assert_eq!((read.job, read.state, read.epoch), (job, JobState::Queued, 0));
        assert_eq!((read.outcome, read.finished_at), (None, None));
    }

    #[test]
    fn every_state_has_its_own_letter() {
        for one in JobState::ALL {
            assert_eq!(state(letter(one)), Some(one));
        }
        assert_eq!((state(ACCEPTED), state(b'-')), (Some(JobState::Queued), None));
    }

    #[test]
    fn damaged_record_is_an_error() {
        let value = encode(&job(), "low:default", true).expect("it is short");
        for end in 0..value.len() {
            assert!(decode(&value[..end]).is_err(), "{end} bytes");
        }
        for (at, byte) in [(0, 2), (1, b'-'), (HEAD_BYTES + 11, 0xc1)] {
            let mut changed = value.clone();
            changed[at] = byte;
            assert!(decode(&changed).is_err(), "byte {at}");
        }
    }

    #[test]
    fn too_long_place_is_refused() {
        assert!(encode(&job(), &"x".repeat(1 << 16), false).is_err());
    }
}
