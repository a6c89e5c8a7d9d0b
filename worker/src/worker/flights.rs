//! What a worker holds: claims in the engine, and results that wait for their commit.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tritmill_queue::{Claim, Delivery, Finished, Held, Outcome, Prompt};

#[derive(Debug)]
struct Flight {
    delivery: Delivery,
    prompt: Prompt,
    /// Choices it asked for: slots it takes.
    choices: usize,
}

/// Claims by what happens to them.
#[derive(Debug, Default)]
pub(super) struct Flights {
    running: HashMap<Held, Flight>,
    /// Ended, not committed; `None` when there is nothing to record.
    done: Vec<(Held, Delivery, Option<Outcome>)>,
    /// When the oldest of `done` ended.
    waiting_since: Option<Instant>,
    choices: usize,
}

impl Flights {
    /// Notes a claim that is about to run.
    pub(super) fn start(&mut self, claim: &Claim, delivery: Delivery) {
        let choices = claim.job.sampling.n as usize;
        self.choices += choices;
        let prompt = claim.job.prompt.clone();
        self.running.insert(claim.held(), Flight { delivery, prompt, choices });
    }

    /// The prompt of a running claim.
    pub(super) fn prompt(&self, held: Held) -> Option<&Prompt> {
        self.running.get(&held).map(|flight| &flight.prompt)
    }

    /// Moves a claim from running to done.
    pub(super) fn end(&mut self, held: Held, outcome: Option<Outcome>) {
        let Some(flight) = self.running.remove(&held) else { return };
        self.choices -= flight.choices;
        self.done.push((held, flight.delivery, outcome));
        self.waiting_since.get_or_insert_with(Instant::now);
    }

    /// Everything that is done, for one commit.
    pub(super) fn take_done(&mut self) -> Vec<(Delivery, Option<Finished>)> {
        self.waiting_since = None;
        let record = |(held, delivery, outcome): (Held, Delivery, Option<Outcome>)| {
            (delivery, outcome.map(|outcome| Finished { held, outcome }))
        };
        self.done.drain(..).map(record).collect()
    }

    /// When what is done must be committed.
    pub(super) fn flush_at(&self, wait: Duration) -> Option<Instant> {
        self.waiting_since.map(|since| since + wait)
    }

    /// Results that wait.
    pub(super) fn done_count(&self) -> usize {
        self.done.len()
    }

    /// Whether nothing runs that a commit could wait for.
    pub(super) fn only_done(&self) -> bool {
        self.running.is_empty() && !self.done.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.done.is_empty()
    }

    /// Slots taken by running claims.
    pub(super) fn choices(&self) -> usize {
        self.choices
    }

    /// Every claim whose lease must live on.
    pub(super) fn held(&self) -> Vec<Held> {
        self.running.keys().copied().chain(self.done.iter().map(|(held, ..)| *held)).collect()
    }

    /// Deliveries of the running claims.
    pub(super) fn deliveries(&self) -> Vec<Delivery> {
        self.running.values().map(|flight| flight.delivery.clone()).collect()
    }
}
