//! Recorded launches of passes, by bucket. They take device memory, so those that were not used for the longest time are forgotten.

use std::collections::HashMap;

use super::{buffers::Bucket, device::Recording};

/// Recordings that are kept.
#[derive(Debug, Default)]
pub struct Recordings {
    kept: HashMap<Bucket, RecordedPass>,
    /// Launches of all that are kept.
    launches: usize,
    /// Uses of all recordings so far.
    uses: u64,
}

#[derive(Debug)]
struct RecordedPass {
    /// `None` if the device could not record the pass.
    recording: Option<Recording>,
    launches: usize,
    last_use: u64,
}

impl Recordings {
    /// Returns the recording of a bucket: `Some(None)` if the device could not make it.
    pub fn find(&mut self, bucket: &Bucket) -> Option<Option<Recording>> {
        self.uses += 1;
        let kept = self.kept.get_mut(bucket)?;
        kept.last_use = self.uses;
        Some(kept.recording)
    }

    pub fn insert(&mut self, bucket: Bucket, recording: Option<Recording>, launches: usize) {
        let launches = if recording.is_some() { launches } else { 0 };
        self.launches += launches;
        self.kept.insert(bucket, RecordedPass { recording, launches, last_use: self.uses });
    }

    /// Removes those that were not used for the longest time, until there is room for so many launches.
    pub fn make_room(&mut self, launches: usize, launches_max: usize) -> Vec<Recording> {
        let mut removed = Vec::new();
        while self.launches + launches > launches_max {
            let of_use = self.kept.iter().filter(|(_, kept)| kept.recording.is_some());
            let oldest = of_use.min_by_key(|(_, kept)| kept.last_use).map(|(bucket, _)| *bucket);
            let Some(kept) = oldest.and_then(|bucket| self.kept.remove(&bucket)) else { break };
            self.launches -= kept.launches;
            removed.extend(kept.recording);
        }
        removed
    }

    /// Returns the number of recordings.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.kept.values().filter(|kept| kept.recording.is_some()).count()
    }

    /// Removes all.
    pub fn clear(&mut self) -> Vec<Recording> {
        self.launches = 0;
        self.kept.drain().filter_map(|(_, kept)| kept.recording).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::attention_mode::AttentionMode, *};

    fn bucket(rows: usize) -> Bucket {
        Bucket {
            rows,
            whole: 0,
            screened: rows,
            reported: 0,
            reach: 1024,
            attention: AttentionMode::Split,
            digits: 2,
            filters: false,
            changes: false,
        }
    }

    #[test]
    fn recordings_that_were_not_used_for_the_longest_time_make_room() {
        let mut recordings = Recordings::default();
        for rows in 1..=3 {
            assert_eq!(recordings.find(&bucket(rows)), None);
            assert_eq!(recordings.make_room(10, 35), []);
            recordings.insert(bucket(rows), Some(Recording(rows)), 10);
        }
        recordings.insert(bucket(9), None, 10);
        assert_eq!(recordings.find(&bucket(1)), Some(Some(Recording(1))));
        assert_eq!(recordings.make_room(10, 35), [Recording(2)]);
        assert_eq!(recordings.find(&bucket(2)), None);
        assert_eq!(recordings.make_room(30, 35), [Recording(3), Recording(1)]);
        assert_eq!(recordings.make_room(99, 35), [], "there is nothing more to remove");
        assert_eq!(recordings.find(&bucket(9)), Some(None), "it takes no memory");
    }
}
