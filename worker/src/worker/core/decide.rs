//! What follows from an input, and what is due after it.

use std::time::Instant;

use tritmill_queue::store::workers::Directive;

use super::{
    io::{Command, Input},
    shutdown::Shutdown,
    state::{CHECKPOINT_INTERVAL, Core, FLUSH_WAIT},
    streamed::StreamedChoice,
};
use crate::{engine_thread::Report, worker::error::WorkerError};

impl Core {
    /// Handles an input; returns what to do, in order. Nothing follows [`Command::Exit`].
    pub fn on(&mut self, now: Instant, input: Input) -> Vec<Command> {
        self.now = now;
        if matches!(self.shutdown, Shutdown::Exited) {
            return Vec::new();
        }
        if let Err(error) = self.handle(input) {
            self.exit(Err(error));
        }
        self.advance();
        std::mem::take(&mut self.commands)
    }

    /// Returns the time at which the core needs [`Input::Tick`] if there is no other input before.
    pub fn wake_at(&self) -> Instant {
        let commits = !self.calls.commit && !self.shutdown.is_closing();
        let flush_at = self.in_flight.flush_at(FLUSH_WAIT).filter(|_| commits);
        // Failed results wait like everything else that the failure was about.
        let flush_at = flush_at.max(flush_at.and(self.retry_at));
        let device_at = self.devices.retry_at().filter(|at| *at > self.now);
        let regular = self.renewals.due_at().min(self.checkpoint_at);
        let high_at = self.high_at.filter(|at| *at > self.now);
        let others = [flush_at, self.retry_at, device_at, high_at, self.shutdown.until()];
        others.into_iter().flatten().fold(regular, Instant::min)
    }

    fn handle(&mut self, input: Input) -> Result<(), WorkerError> {
        match input {
            Input::Tick => Ok(()),
            Input::Directive(directive) => {
                self.directive = directive;
                Ok(())
            }
            Input::Drain => {
                self.start_drain();
                Ok(())
            }
            Input::Finish => {
                self.finish_running();
                Ok(())
            }
            Input::Report(device, report) => {
                self.handle_report(device, report);
                Ok(())
            }
            Input::EngineStopped(device) => {
                let name = self.devices.get(device).name.clone();
                self.end_broken_device(device, WorkerError::EngineStopped(name));
                Ok(())
            }
            Input::NotSubmitted(held) => {
                self.handle_not_submitted(held);
                Ok(())
            }
            Input::NotCancelled(held) => {
                if let Some(claim) = self.in_flight.get_mut(held) {
                    claim.stopping = false;
                }
                Ok(())
            }
            Input::Steps(running) => {
                self.check_steps(&running);
                Ok(())
            }
            Input::Checked(finished) => self.handle_checked(finished),
            Input::Pulled(pulled) => self.handle_pulled(pulled),
            Input::Claimed(claims) => self.handle_claimed(claims),
            Input::Prepared(prepared) => {
                self.handle_prepared(prepared);
                Ok(())
            }
            Input::Committed(settled) => self.handle_committed(settled),
            Input::Saved(result) => {
                self.handle_saved(result);
                Ok(())
            }
            Input::Acknowledged(result) => self.handle_acknowledged(result),
            Input::Released(result) => self.handle_released(result),
            Input::Renewed(lost) => {
                self.handle_renewed(lost);
                Ok(())
            }
        }
    }

    /// Does everything that is due.
    fn advance(&mut self) {
        let paused = self.apply_directive();
        self.renew_leases();
        if self.retry_at.is_some_and(|at| at <= self.now) {
            self.retry_at = None;
        }
        if self.checkpoint_at <= self.now {
            self.checkpoint_at = self.now + CHECKPOINT_INTERVAL;
            self.save_checkpoints();
        }
        self.acknowledge();
        self.release();
        self.advance_shutdown();
        if !self.shutdown.is_closing() {
            self.start_suspect();
            self.commit_if_due();
        }
        if !paused && matches!(self.shutdown, Shutdown::No) {
            self.look_for_work();
        }
        let (running, uncommitted) =
            (self.in_flight.running_count(), self.in_flight.uncommitted_count());
        self.metrics.set_in_flight(running, uncommitted);
    }

    /// Applies what operators ask for; returns whether the queue is paused.
    fn apply_directive(&mut self) -> bool {
        let Directive { drain, paused, .. } = self.directive;
        if paused {
            self.cancel_pull();
            // A paused worker does not read its queue, but counts as ready.
            self.metrics.queue_read();
        }
        if drain {
            self.start_drain();
        }
        paused
    }

    /// Handles a report of a device's engine.
    fn handle_report(&mut self, device: usize, report: Report) {
        match report {
            Report::Ended(held, end) => self.handle_end(device, held, end),
            Report::Progress(held, tokens) => {
                self.record_device_success(device);
                self.unsaved.insert(held, tokens);
            }
            Report::FirstToken(held, at) => {
                if let Some(claim) = self.in_flight.get_mut(held) {
                    claim.first_token_at = Some(at);
                }
            }
            Report::Text(held, choice, text, logprobs) => {
                let Some(claim) = self.in_flight.get_mut(held) else { return };
                let layout = &claim.expected.layout;
                let streamed = claim.streamed.entry(choice);
                let streamed = streamed.or_insert_with(|| StreamedChoice::new(choice, layout));
                for event in streamed.push(&text, logprobs) {
                    self.publish(held.id, event);
                }
            }
        }
    }
}
