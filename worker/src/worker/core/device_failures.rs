//! What happens when a device works, fails, hangs or is lost.

use std::sync::Arc;

use tritmill_engine::{FinishReason, Output, RequestError, backend::StepError};
use tritmill_queue::{ErrorKind, JobError, Outcome};

use super::{in_flight::Disposition, io::Command, state::Core};
use crate::{engine_thread::End, served::chain, worker::error::WorkerError};

impl Core {
    /// Records the end of a request as a success or failure of its device.
    pub(super) fn record_device_result(&mut self, device: usize, end: &End) {
        if !self.policy.suspends_devices {
            return;
        }
        match end {
            End::Failed(error) => self.record_device_failure(device, error),
            End::Finished(output) if is_answer(output) => self.record_device_success(device),
            End::Finished(_) | End::Refused(_) => {}
        }
    }

    fn record_device_failure(&mut self, device: usize, error: &RequestError) {
        let (now, known) = (self.now, self.devices.get(device));
        let before = known.breaker.failures();
        let opened = known.breaker.record_failure(error, now);
        if known.breaker.failures() > before {
            self.metrics.device_failed();
        }
        if opened {
            self.suspend_device(device, &chain(error));
        }
        if let RequestError::Step(step) = error
            && matches!(**step, StepError::DeviceLost(_))
        {
            tracing::error!(why = chain(error), "the device is lost: this worker ends");
            let device = self.devices.get(device).name.clone();
            self.close(Err(WorkerError::DeviceLost { device, error: Arc::clone(step) }));
        }
    }

    /// Records that a request on the device got tokens.
    pub(super) fn record_device_success(&mut self, device: usize) {
        let known = self.devices.get(device);
        if known.breaker.record_success() {
            tracing::warn!(device = known.name, "the device works again");
            self.metrics.set_device_failure(device, None);
        }
    }

    /// Takes no jobs for a device for a while, and hands back what it holds.
    fn suspend_device(&mut self, device: usize, why: &str) {
        let known = self.devices.get(device);
        let (failures, name) = (known.breaker.failures(), known.name.clone());
        tracing::error!(
            device = name,
            failures,
            why,
            "the device fails repeatedly: it gets no jobs for now"
        );
        let why = format!("{name} failed {failures} times in a row, the last time: {why}");
        self.metrics.set_device_failure(device, Some(why));
        // The current pull requests more jobs than there is room for now.
        self.cancel_pull();
        for held in self.in_flight.running_on(device) {
            if let Some(claim) = self.in_flight.get_mut(held) {
                claim.hand_back = true;
            }
            self.stop_work(held);
        }
    }

    /// Checks whether a step of an engine does not end.
    pub(super) fn check_steps(&mut self, running: &[Option<u64>]) {
        if let Some(device) = self.watchdog.check(running) {
            self.commands.push(Command::Abandon(device));
            let (name, limit) = (self.devices.get(device).name.clone(), self.step_limit);
            self.end_broken_device(device, WorkerError::EngineHangs { device: name, limit });
        }
    }

    /// Ends the worker because the engine of a device hangs or has died. The cause is one of the jobs
    /// in its engine, or the device. A job that ran alone is charged an attempt; several are handed
    /// back as suspects, and each of them runs alone from now on.
    pub(super) fn end_broken_device(&mut self, device: usize, error: WorkerError) {
        for held in self.in_flight.running_on(device) {
            let Some(claim) = self.in_flight.get(held) else { continue };
            let disposition = match (claim.submitted, claim.is_alone) {
                (false, _) => Disposition::HandBack,
                (true, false) => Disposition::HandBackSuspect,
                (true, true) => {
                    let message = format!("it ran alone when {error}");
                    let error = JobError::new(ErrorKind::Engine, "engine_broken", message);
                    Disposition::Record(Outcome::Error(error))
                }
            };
            self.in_flight.end(held, disposition, self.now);
        }
        self.close(Err(error));
    }
}

fn is_answer(output: &Output) -> bool {
    let complete = |reason| matches!(reason, FinishReason::Stop | FinishReason::Length);
    output.completion_tokens > 0
        && output.choices.iter().all(|choice| complete(choice.finish_reason))
}
