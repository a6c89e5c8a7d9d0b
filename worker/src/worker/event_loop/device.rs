//! What the ends of requests say about their device, and what follows when it fails.

use std::sync::Arc;

use tritmill_engine::{FinishReason, Output, RequestError, backend::StepError};

use super::EventLoop;
use crate::{engine_thread::End, served::chain, worker::Mode};

impl EventLoop<'_> {
    /// Takes note of what a request's end says about its device. An embedded worker has nobody to
    /// leave its jobs to, and fails them as they come.
    pub(super) fn record_device_result(&mut self, place: usize, end: &End) {
        if self.worker.config.mode == Mode::Embedded {
            return;
        }
        match end {
            End::Failed(error) => {
                if let RequestError::Step(step) = error
                    && matches!(**step, StepError::DeviceLost(_))
                {
                    tracing::error!(why = chain(error), "the device is lost: this worker ends");
                    let device = self.devices.at(place).name.clone();
                    self.lost_device = Some((device, Arc::clone(step)));
                }
                let breaker = &mut self.devices.at(place).breaker;
                let before = breaker.failures();
                let opened = breaker.failed(error);
                if breaker.failures() > before {
                    self.worker.metrics.device_failed();
                }
                if opened {
                    self.suspend_device(place, &chain(error));
                }
            }
            End::Finished(output) if answers(output) => self.record_device_success(place),
            End::Finished(_) | End::Refused(_) => {}
        }
    }

    /// Notes that a request got tokens.
    pub(super) fn record_device_success(&mut self, place: usize) {
        let device = self.devices.at(place);
        if device.breaker.worked() {
            tracing::warn!(device = device.name, "the device works again");
            self.worker.metrics.set_device_failure(place, None);
        }
    }

    /// Leaves a device alone: takes nothing for it, and gives back what it holds.
    fn suspend_device(&mut self, place: usize, why: &str) {
        let device = self.devices.at(place);
        let (failures, name) = (device.breaker.failures(), device.name.clone());
        tracing::error!(
            device = name,
            failures,
            why,
            "the device fails again and again: nothing is taken for it for now"
        );
        let why = format!("{name} failed {failures} times in a row, the last time: {why}");
        self.worker.metrics.set_device_failure(place, Some(why));
        // It was asked for more than there is room for now.
        self.calls.pull = None;
        for held in self.in_flight.running_on(place) {
            self.in_flight.mark_for_hand_back(held);
            self.stop_work(held);
        }
    }
}

fn answers(output: &Output) -> bool {
    let ended = |reason| matches!(reason, FinishReason::Stop | FinishReason::Length);
    output.completion_tokens > 0 && output.choices.iter().all(|choice| ended(choice.finish_reason))
}
