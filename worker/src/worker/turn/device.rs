//! What the ends of requests say about the device, and what follows when it fails.

use std::sync::Arc;

use tritmill_engine::{FinishReason, Output, RequestError, backend::StepError};

use super::Turn;
use crate::{engine_thread::End, served::chain, worker::Mode};

impl Turn<'_> {
    /// Takes note of what a request's end says about the device. An embedded worker has nobody to
    /// leave its jobs to, and fails them as they come.
    pub(super) fn judge(&mut self, end: &End) {
        if self.worker.config.mode == Mode::Embedded {
            return;
        }
        match end {
            End::Failed(error) => {
                if let RequestError::Step(step) = error
                    && matches!(**step, StepError::DeviceLost(_))
                {
                    tracing::error!(why = chain(error), "the device is lost: this worker ends");
                    self.lost_device = Some(Arc::clone(step));
                }
                let before = self.breaker.failures();
                let opened = self.breaker.failed(error);
                if self.breaker.failures() > before {
                    self.worker.vitals.device_failed();
                }
                if opened {
                    self.rest(&chain(error));
                }
            }
            End::Finished(output) if answers(output) => self.device_works(),
            End::Finished(_) | End::Refused(_) => {}
        }
    }

    /// Notes that a request got tokens.
    pub(super) fn device_works(&mut self) {
        if self.breaker.worked() {
            tracing::warn!("the device works again");
            self.worker.vitals.device_broken(None);
        }
    }

    /// Leaves the device alone: takes nothing, and gives back what is held.
    fn rest(&mut self, why: &str) {
        let failures = self.breaker.failures();
        tracing::error!(
            failures,
            why,
            "the device fails again and again: nothing is taken for now"
        );
        let why = format!("the device failed {failures} times in a row, the last time: {why}");
        self.worker.vitals.device_broken(Some(why));
        self.calls.pull = None;
        for held in self.flights.running() {
            self.flights.will_go_back(held);
            self.halt(held);
        }
    }
}

fn answers(output: &Output) -> bool {
    let ended = |reason| matches!(reason, FinishReason::Stop | FinishReason::Length);
    output.completion_tokens > 0 && output.choices.iter().all(|choice| ended(choice.finish_reason))
}
