//! A model on a device: what it consists of, and its state between steps.

use super::{
    ahead::Ahead,
    buffers::{Bucket, Buffers, Limits},
    device::{Address, Device, DeviceError, Launch, Reading, Recording},
    draws::Draws,
    features::Feature,
    found::Downloaded,
    memory::RECORDINGS_BYTES,
    plan::Image,
    recordings::Recordings,
    shape::Shape,
    tuning::Tuning,
    weights::Weights,
};
use crate::config::ModelConfig;

/// A model on a device.
pub struct CudaBackend {
    pub(super) device: Box<dyn Device>,
    pub(super) weights: Weights,
    pub(super) buffers: Buffers,
    pub(super) shape: Shape,
    pub(super) config: ModelConfig,
    pub(super) limits: Limits,
    pub(super) kv_base: Address,
    pub(super) block_count: usize,
    pub(super) numerics_class: String,
    pub(super) tuning: Tuning,
    pub(super) state: State,
}

/// State between steps. No result depends on it.
#[derive(Default)]
pub(super) struct State {
    pub(super) recordings: Recordings,
    pub(super) image: Image,
    pub(super) found: Downloaded,
    pub(super) draws: Draws,
    /// Decodes that the last step has begun.
    pub(super) ahead: Ahead,
    /// The end of a pass without outputs, while nothing has waited for it.
    pub(super) unread: Option<Reading>,
    /// Whether steps begin no decodes, so that they can be measured one by one.
    pub(super) alone: bool,
    /// Candidates of the last step's screened rows.
    pub(super) candidates: usize,
    /// Scratch of the check of a step.
    pub(super) written: Vec<u64>,
    /// Whether one digit has ever left too many candidates; later steps then use two.
    pub(super) coarse: bool,
    /// Whether the device has kernels with products of warpgroups, and attention in tiles, tested at load.
    pub(super) has_warpgroups: bool,
    pub(super) has_tiles: bool,
}

impl CudaBackend {
    /// Changes the constants for later steps.
    pub(super) fn set_tuning(&mut self, tuning: Tuning) -> Result<(), DeviceError> {
        if tuning.shared_percent != self.tuning.shared_percent {
            self.device.prefer_shared(tuning.shared_percent)?;
        }
        self.tuning = tuning;
        self.state.coarse = false;
        self.forget_recordings()
    }

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
        if !self.device.features().allows(Feature::Graphs) {
            return self.launch_all(&launches(self));
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
                if matches!(error, DeviceError::Call { .. }) {
                    self.device.features_mut().give_up(Feature::Graphs, error);
                }
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

    /// Waits for a pass without outputs, if nothing has.
    pub(super) fn finish_unread(&mut self) -> Result<(), DeviceError> {
        let unread = self.state.unread.take();
        unread.map_or(Ok(()), |reading| self.device.finish_read(reading, &mut Vec::new()))
    }
}
