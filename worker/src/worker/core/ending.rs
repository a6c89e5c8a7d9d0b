//! The end of a worker: a drain, and the close that commits results, saves running work and hands it
//! back.

use super::{
    in_flight::Disposition,
    io::Command,
    shutdown::{Shutdown, Stage},
    state::Core,
};
use crate::worker::error::WorkerError;

impl Core {
    /// Takes nothing new from now on. Running answers are saved first, because what stops this worker may
    /// not wait for the end of the drain.
    pub(super) fn start_drain(&mut self) {
        self.finish_running();
        if let Shutdown::Drain { until } = &mut self.shutdown {
            until.get_or_insert(self.now + self.drain_limit);
        }
    }

    /// Takes nothing new from now on, and ends when running jobs have ended, however long that takes.
    pub(super) fn finish_running(&mut self) {
        if matches!(self.shutdown, Shutdown::No) {
            self.shutdown = Shutdown::Drain { until: None };
            self.checkpoint_at = self.now;
            self.metrics.set_draining();
            self.cancel_pull();
        }
    }

    /// Commits what has ended, saves and hands back what runs, and ends the worker with this result.
    /// Leases of what the store does not answer in time expire.
    pub(super) fn close(&mut self, result: Result<(), WorkerError>) {
        if !self.shutdown.is_closing() {
            self.cancel_pull();
            let until = self.now.checked_add(self.policy.shutdown_limit);
            self.shutdown = Shutdown::Close { stage: Stage::Answers, until, result };
        }
    }

    pub(super) fn exit(&mut self, result: Result<(), WorkerError>) {
        self.shutdown = Shutdown::Exited;
        self.commands.push(Command::Exit(result));
    }

    /// Ends a drain that has nothing left to wait for, and does what the stages of a close do.
    pub(super) fn advance_shutdown(&mut self) {
        if let Shutdown::Drain { until } = self.shutdown {
            if self.is_empty() {
                return self.exit(Ok(()));
            }
            if until.is_some_and(|until| self.now >= until) {
                self.close(Ok(()));
            }
        }
        while let Shutdown::Close { stage, until, .. } = &self.shutdown {
            let (stage, late) = (*stage, until.is_some_and(|until| self.now >= until));
            if late {
                tracing::warn!("no answer in time: leases of the remaining claims will expire");
            } else if self.close_waits() {
                return;
            }
            match stage {
                _ if late => return self.finish_close(),
                Stage::Answers => {
                    self.commit();
                    self.save_checkpoints();
                }
                Stage::Results => {
                    let running: Vec<_> = self.in_flight.running().map(|(held, _)| held).collect();
                    for held in running {
                        self.in_flight.end(held, Disposition::HandBack, self.now);
                    }
                    self.commit();
                }
                Stage::Claims => {
                    self.acknowledge();
                    self.release();
                }
                Stage::Deliveries => return self.finish_close(),
            }
            if let Shutdown::Close { stage, .. } = &mut self.shutdown {
                *stage = match stage {
                    Stage::Answers => Stage::Results,
                    Stage::Results => Stage::Claims,
                    Stage::Claims | Stage::Deliveries => Stage::Deliveries,
                };
            }
        }
    }

    /// Returns whether a close waits for the answer to a call. Requests that are still being prepared
    /// are not waited for: their claims are handed back.
    fn close_waits(&self) -> bool {
        let calls = &self.calls;
        calls.claim.is_some()
            || calls.commit
            || calls.save.is_some()
            || calls.acknowledge.is_some()
            || calls.release.is_some()
    }

    fn finish_close(&mut self) {
        if let Shutdown::Close { result, .. } = std::mem::replace(&mut self.shutdown, Shutdown::No)
        {
            self.exit(result);
        }
    }
}
