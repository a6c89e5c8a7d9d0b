//! The engine of a worker in the simulation: requests take some time, or break it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tritmill_engine::{Choice, FinishReason, Output, RequestError, backend::StepError};
use tritmill_queue::ClaimRef;

use crate::engine_thread::{End, Report};

/// Steps between two reports of a request's tokens.
const PROGRESS_STEPS: u32 = 8;

/// What a job does to its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Behaviour {
    /// It is answered after this time.
    Answers(Duration),
    /// Its step never ends.
    Hangs,
    /// It ends the process.
    Kills,
}

/// A running engine.
#[derive(Debug, Default)]
pub(super) struct Engine {
    running: BTreeMap<ClaimRef, (Behaviour, Instant, u32)>,
    cancelled: Vec<ClaimRef>,
    /// The number of the current step.
    step: u64,
}

/// What an engine did until now.
#[derive(Debug)]
pub(super) enum Did {
    Report(Report),
    Died,
}

impl Engine {
    pub fn submit(&mut self, held: ClaimRef, behaviour: Behaviour, now: Instant) {
        self.running.insert(held, (behaviour, now, 0));
    }

    pub fn cancel(&mut self, held: ClaimRef) {
        self.cancelled.push(held);
    }

    /// Returns the claims that it computes; a hanging engine computes nothing.
    pub fn running(&self) -> impl Iterator<Item = &ClaimRef> {
        let computes = !self.hangs();
        self.running.keys().filter(move |held| computes && !self.cancelled.contains(held))
    }

    fn hangs(&self) -> bool {
        self.running.values().any(|(behaviour, ..)| *behaviour == Behaviour::Hangs)
    }

    /// Returns the number of the running step, as a watchdog sees it.
    pub fn running_step(&self) -> Option<u64> {
        (!self.running.is_empty()).then_some(self.step)
    }

    /// Returns how many requests take part in the next step.
    pub fn sequences(&self) -> usize {
        self.running.len()
    }

    /// Fails the next step, and with it all its requests.
    pub fn fail(&mut self) -> Vec<Did> {
        self.step += 1;
        self.cancelled.clear();
        let error = Arc::new(StepError::Device("off the bus".into()));
        let failed = |(held, _)| {
            let error = RequestError::Step(Arc::clone(&error));
            Did::Report(Report::Ended(held, End::Failed(error)))
        };
        std::mem::take(&mut self.running).into_iter().map(failed).collect()
    }

    /// Computes until `now`; a hanging engine does nothing.
    pub fn run(&mut self, now: Instant) -> Vec<Did> {
        if self.hangs() {
            return Vec::new();
        }
        self.step += 1;
        let mut did = Vec::new();
        for held in std::mem::take(&mut self.cancelled) {
            if self.running.remove(&held).is_some() {
                did.push(Did::Report(ended(held, FinishReason::Cancelled)));
            }
        }
        let held: Vec<ClaimRef> = self.running.keys().copied().collect();
        for held in held {
            let (behaviour, began, saved) = self.running.get_mut(&held).expect("listed above");
            match *behaviour {
                Behaviour::Kills => return vec![Did::Died],
                Behaviour::Hangs => {}
                Behaviour::Answers(time) if now >= *began + time => {
                    self.running.remove(&held);
                    did.push(Did::Report(ended(held, FinishReason::Stop)));
                }
                Behaviour::Answers(_) => {
                    *saved += 1;
                    if *saved % PROGRESS_STEPS == 0 {
                        let tokens = vec![1; *saved as usize];
                        did.push(Did::Report(Report::Progress(held, tokens)));
                    }
                }
            }
        }
        did
    }
}

fn ended(held: ClaimRef, finish_reason: FinishReason) -> Report {
    let choice = Choice {
        index: 0,
        tokens: vec![1],
        text: "a".to_owned(),
        finish_reason,
        stop_string: None,
        logprobs: None,
        vector: None,
    };
    let output =
        Output { choices: vec![choice], prompt_tokens: 1, completion_tokens: 1, cached_tokens: 0 };
    Report::Ended(held, End::Finished(output))
}
