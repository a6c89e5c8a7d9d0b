//! Records how requests end on each device, and suspends devices that fail.

use std::sync::Arc;

use tritmill_engine::{FinishReason, Output, RequestError, backend::StepError};

use super::EventLoop;
use crate::{engine_thread::End, served::chain, worker::Mode};

impl EventLoop<'_> {
    /// Records the end of a request as a success or failure of its device. An embedded worker
    /// records nothing and lets jobs fail, since no other worker could take them.
    pub(super) fn record_device_result(&mut self, device: usize, end: &End) {
        if self.worker.config.mode == Mode::Embedded {
            return;
        }
        match end {
            End::Failed(error) => {
                if let RequestError::Step(step) = error
                    && matches!(**step, StepError::DeviceLost(_))
                {
                    tracing::error!(why = chain(error), "the device is lost: this worker ends");
                    let name = self.devices.get(device).name.clone();
                    self.lost_device = Some((name, Arc::clone(step)));
                }
                let breaker = &mut self.devices.get(device).breaker;
                let before = breaker.failures();
                let opened = breaker.record_failure(error);
                if breaker.failures() > before {
                    self.worker.metrics.device_failed();
                }
                if opened {
                    self.suspend_device(device, &chain(error));
                }
            }
            End::Finished(output) if is_answer(output) => self.record_device_success(device),
            End::Finished(_) | End::Refused(_) => {}
        }
    }

    /// Records that a request on the device got tokens.
    pub(super) fn record_device_success(&mut self, device: usize) {
        let running = self.devices.get(device);
        if running.breaker.record_success() {
            tracing::warn!(device = running.name, "the device works again");
            self.worker.metrics.set_device_failure(device, None);
        }
    }

    /// Takes no jobs for a device for a while, and hands back what it holds.
    fn suspend_device(&mut self, device: usize, why: &str) {
        let running = self.devices.get(device);
        let (failures, name) = (running.breaker.failures(), running.name.clone());
        tracing::error!(
            device = name,
            failures,
            why,
            "the device fails repeatedly: it gets no jobs for now"
        );
        let why = format!("{name} failed {failures} times in a row, the last time: {why}");
        self.worker.metrics.set_device_failure(device, Some(why));
        // The current pull requests more jobs than there is room for now.
        self.calls.pull = None;
        for held in self.in_flight.running_on(device) {
            if let Some(claim) = self.in_flight.get_mut(held) {
                claim.hand_back = true;
            }
            self.stop_work(held);
        }
    }
}

fn is_answer(output: &Output) -> bool {
    let complete = |reason| matches!(reason, FinishReason::Stop | FinishReason::Length);
    output.completion_tokens > 0
        && output.choices.iter().all(|choice| complete(choice.finish_reason))
}
