//! Identifiers of jobs.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::job::Timestamp;

/// Identifier of a job: a UUID that is globally unique and ordered by time of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(Uuid);

impl JobId {
    /// Generates a new id, greater than every id that this process generated before. The generator counts in the
    /// bits above the last 32.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }

    /// Returns the time at which the id was generated.
    pub fn generated_at(self) -> Timestamp {
        Timestamp((self.0.as_u128() >> 80) as i64)
    }

    /// Returns the id with these bytes; `None` unless there are 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Uuid::from_slice(bytes).ok().map(Self)
    }

    /// Returns the smallest id with this time.
    pub fn first_of(at: Timestamp) -> Self {
        let ms = u128::from(u64::try_from(at.0).unwrap_or(0)).min((1 << 48) - 1);
        Self(Uuid::from_u128(ms << 80))
    }

    /// Returns the sixteen bytes; their order is the order of submission.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl From<Uuid> for JobId {
    fn from(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl From<JobId> for Uuid {
    fn from(id: JobId) -> Self {
        id.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

/// A text is not a job id.
#[derive(Debug, thiserror::Error)]
#[error("'{0}' is not a job id")]
pub struct InvalidJobId(pub String);

impl FromStr for JobId {
    type Err = InvalidJobId;

    fn from_str(text: &str) -> Result<Self, InvalidJobId> {
        Uuid::try_parse(text).map(Self).map_err(|_| InvalidJobId(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_ids_are_increasing_and_round_trip_as_text() {
        let ids: Vec<JobId> = (0..1000).map(|_| JobId::generate()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b));
        assert_eq!(ids[0].to_string().parse::<JobId>().expect("its own text"), ids[0]);
        assert!("no-id".parse::<JobId>().is_err());
    }

    #[test]
    fn ids_are_compared_by_their_time_first() {
        let id = JobId::generate();
        assert!(JobId::first_of(id.generated_at()) <= id);
        assert!(JobId::first_of(id.generated_at().after(std::time::Duration::from_millis(1))) > id);
    }
}
