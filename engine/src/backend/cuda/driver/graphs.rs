//! Recordings of launches: graphs of the CUDA driver.

use cudarc::driver::{result, sys};

use super::{
    super::{
        device::{Device as _, DeviceError, Launch, Recording},
        features::Feature,
    },
    Driver,
};

impl Driver {
    /// Records launches; without overlap, if the driver does not record it.
    pub(super) fn record_launches(
        &mut self,
        launches: &[Launch],
    ) -> Result<Recording, DeviceError> {
        let may_overlap = self.may_overlap;
        match self.capture(launches) {
            // A driver that promises to record overlap but does not still runs the pass.
            Err(error @ DeviceError::Call { .. }) if may_overlap => {
                self.may_overlap = false;
                let again = self.capture(launches);
                self.may_overlap = may_overlap;
                if again.is_ok() {
                    self.features.give_up(Feature::Overlap, error);
                    self.end_overlap();
                }
                again
            }
            result => result,
        }
    }

    fn capture(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        let stream = self.stream;
        self.after_kernel = false;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as this value.
        self.call("recording", || unsafe { result::stream::begin_capture(stream, mode) })?;
        self.is_recording = true;
        let launched = launches.iter().try_for_each(|launch| self.launch(launch));
        (self.after_kernel, self.is_recording) = (false, false);
        // SAFETY: as above. The capture is ended also if a launch failed.
        let ended = self.call("recording", || unsafe { result::stream::end_capture(stream) });
        // After a failed launch, the graph is destroyed and not instantiated.
        let recording = ended.and_then(|graph| {
            self.call("recording", || unsafe {
                // SAFETY: the graph was just captured, and is destroyed once.
                let flags = sys::CUgraphInstantiate_flags_enum(0);
                let made = launched.is_ok().then(|| result::graph::instantiate(graph, flags));
                let destroyed = result::graph::destroy(graph);
                made.transpose().and_then(|made| destroyed.map(|()| made))
            })
        });
        launched?;
        let recording = recording?.expect("a graph is instantiated unless a launch failed");
        let place = self.recordings.iter().position(Option::is_none);
        let place = place.unwrap_or_else(|| {
            self.recordings.push(None);
            self.recordings.len() - 1
        });
        self.recordings[place] = Some(recording);
        Ok(Recording(place))
    }

    pub(super) fn launch_recording(&mut self, recording: Recording) -> Result<(), DeviceError> {
        let graph = self.recordings[recording.0].expect("it is not forgotten");
        let stream = self.stream;
        self.after_kernel = false;
        // SAFETY: the graph is destroyed when the recording is forgotten, and not earlier.
        self.call("replaying", || unsafe { result::graph::launch(graph, stream) })?;
        self.features.count(Feature::Graphs);
        Ok(())
    }

    /// Waits, and destroys some recordings.
    pub(super) fn destroy_recordings(
        &mut self,
        recordings: &[Recording],
    ) -> Result<(), DeviceError> {
        self.synchronize()?;
        for recording in recordings {
            let graph = self.recordings[recording.0].take().expect("it is not forgotten");
            // SAFETY: the graph was taken from the list, and the device is idle.
            self.call("forgetting recordings", || unsafe { result::graph::exec_destroy(graph) })?;
        }
        Ok(())
    }

    pub(super) fn destroy_all_recordings(&mut self) -> Result<(), DeviceError> {
        let places = self.recordings.iter().enumerate().filter(|(_, graph)| graph.is_some());
        let all: Vec<Recording> = places.map(|(place, _)| Recording(place)).collect();
        self.destroy_recordings(&all)
    }
}
