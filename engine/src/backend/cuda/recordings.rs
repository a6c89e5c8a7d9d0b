//! Recorded launches of passes, by bucket. They take device memory, so those that were not used for the longest time are forgotten.

use std::collections::HashMap;

use super::{
    buffers::Bucket,
    device::{DeviceError, Launch, Recording},
    memory::RECORDINGS_BYTES,
    step::CudaBackend,
};

/// Recordings that are kept.
#[derive(Debug, Default)]
pub struct Recordings {
    kept: HashMap<Bucket, Kept>,
    /// Launches of all that are kept.
    launches: usize,
    /// Uses of all recordings so far.
    uses: u64,
}

#[derive(Debug)]
struct Kept {
    /// `None` if the device could not record the pass.
    recording: Option<Recording>,
    launches: usize,
    last_use: u64,
}

impl Recordings {
    /// Returns the recording of a bucket: `Some(None)` if the device could not make it.
    fn find(&mut self, bucket: &Bucket) -> Option<Option<Recording>> {
        self.uses += 1;
        let kept = self.kept.get_mut(bucket)?;
        kept.last_use = self.uses;
        Some(kept.recording)
    }

    fn insert(&mut self, bucket: Bucket, recording: Option<Recording>, launches: usize) {
        let launches = if recording.is_some() { launches } else { 0 };
        self.launches += launches;
        self.kept.insert(bucket, Kept { recording, launches, last_use: self.uses });
    }

    /// Removes those that were not used for the longest time, until there is room for so many launches.
    fn make_room(&mut self, launches: usize, launches_max: usize) -> Vec<Recording> {
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
    fn clear(&mut self) -> Vec<Recording> {
        self.launches = 0;
        self.kept.drain().filter_map(|(_, kept)| kept.recording).collect()
    }
}

impl CudaBackend {
    /// Drops all recordings.
    pub(super) fn forget_recordings(&mut self) -> Result<(), DeviceError> {
        let all = self.state.recordings.clear();
        self.device.forget(&all)
    }

    /// Replays the launches of a bucket; records them first if they are not recorded. A pass that the device cannot record is
    /// launched kernel by kernel.
    pub(super) fn replay(
        &mut self,
        bucket: &Bucket,
        launches: impl Fn(&Self) -> Vec<Launch>,
    ) -> Result<(), DeviceError> {
        match self.state.recordings.find(bucket) {
            Some(Some(recording)) => return self.device.replay(recording),
            Some(None) => return self.launch_all(&launches(self)),
            None => {}
        }
        let launches = launches(self);
        let launches_max = RECORDINGS_BYTES / self.device.recorded_launch_bytes().max(1);
        let removed = self.state.recordings.make_room(launches.len(), launches_max as usize);
        if !removed.is_empty() {
            self.device.forget(&removed)?;
        }
        let mut recorded = self.record(&launches);
        if matches!(recorded, Err(DeviceError::OutOfMemory { .. })) {
            self.forget_recordings()?;
            recorded = self.record(&launches);
        }
        let recording = match recorded {
            Ok(recording) => Some(recording),
            Err(error @ (DeviceError::OutOfMemory { .. } | DeviceError::Call { .. })) => {
                tracing::warn!(%error, rows = bucket.rows, "a pass is not recorded");
                self.launch_all(&launches)?;
                None
            }
            Err(error) => return Err(error),
        };
        self.state.recordings.insert(*bucket, recording, launches.len());
        Ok(())
    }

    /// Records launches and replays them.
    fn record(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        let recording = self.device.record(launches)?;
        // The first replay takes memory, too.
        match self.device.replay(recording) {
            Ok(()) => Ok(recording),
            Err(error) => {
                self.device.forget(&[recording])?;
                Err(error)
            }
        }
    }

    /// Launches kernels one by one.
    pub(super) fn launch_all(&mut self, launches: &[Launch]) -> Result<(), DeviceError> {
        launches.iter().try_for_each(|launch| self.device.launch(launch))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::buffers::AttentionMode, *};

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
