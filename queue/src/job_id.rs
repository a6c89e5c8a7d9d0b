//! Identifiers of jobs.

use std::{fmt, ops::RangeInclusive, str::FromStr};

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

    /// Returns the range of the ids with a text that begins with `prefix`: hexadecimal digits, with or without hyphens;
    /// `None` for other texts.
    pub fn with_prefix(prefix: &str) -> Option<RangeInclusive<Self>> {
        let digits: String = prefix.chars().filter(|one| *one != '-').collect();
        if !(1..=32).contains(&digits.len()) || !digits.bytes().all(|one| one.is_ascii_hexdigit()) {
            return None;
        }
        let filled = |digit: &str| {
            let text = digits.clone() + &digit.repeat(32 - digits.len());
            Uuid::try_parse(&text).ok().map(Self)
        };
        Some(filled("0")?..=filled("f")?)
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
    fn prefix_covers_the_ids_that_begin_with_it() {
        let id = JobId::generate();
        let text = id.to_string();
        for length in [1, 8, 9, 20, text.len()] {
            let range = JobId::with_prefix(&text[..length]).expect("a prefix");
            assert!(range.contains(&id), "{length}");
        }
        let exact = JobId::with_prefix(&text.to_uppercase()).expect("the whole id");
        assert_eq!((*exact.start(), *exact.end()), (id, id));
        let other = JobId::with_prefix("f").expect("a prefix");
        assert!(!other.contains(&id));
        for wrong in ["", "-", "xyz", "0x1", &"0".repeat(33)] {
            assert!(JobId::with_prefix(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn ids_are_compared_by_their_time_first() {
        let id = JobId::generate();
        assert!(JobId::first_of(id.generated_at()) <= id);
        assert!(JobId::first_of(id.generated_at().after(std::time::Duration::from_millis(1))) > id);
    }
}
