//! Calls between workers and servers: they are delayed, fail, are executed late or not at all, and their
//! answers are lost.

use std::time::Duration;

use tritmill_queue::{DispatchError, StoreError};

use super::{
    super::{
        io::{Command, Input, Pulled},
        renewal_period,
    },
    world::{Call, Event, Health, LEASE, World},
};
use crate::worker::WorkerError;

/// Time after which a pull without an answer fails.
const PULL_LIMIT: Duration = Duration::from_secs(8);

fn store_fails() -> WorkerError {
    StoreError::Unavailable("injected".into()).into()
}

fn dispatcher_fails() -> WorkerError {
    DispatchError::Unavailable("injected".into()).into()
}

/// Returns what a worker hears when a call fails, and the limit after which it does.
fn failure(command: &Command) -> (Option<Input>, Duration) {
    let input = match command {
        Command::Pull(_) => {
            let pulled = Pulled { feed: None, deliveries: Err(dispatcher_fails()) };
            return (Some(Input::Pulled(pulled)), PULL_LIMIT);
        }
        Command::Renew(_) => {
            return (Some(Input::Renewed(Err(store_fails()))), renewal_period(LEASE));
        }
        Command::Claim(..) => Input::Claimed(Err(store_fails())),
        Command::Commit(_) => Input::Committed(Err(store_fails())),
        Command::Save(_) => Input::Saved(Err(store_fails())),
        Command::Acknowledge(_) => Input::Acknowledged(Err(dispatcher_fails())),
        Command::Release(_) => Input::Released(Err(dispatcher_fails())),
        _ => return (None, LEASE),
    };
    (Some(input), LEASE)
}

fn uses_dispatcher(command: &Command) -> bool {
    use Command::{Acknowledge, Pull, Release, RenewDeliveries};
    matches!(command, Pull(_) | Acknowledge(_) | Release(_) | RenewDeliveries(_))
}

impl World {
    /// Sends a call to its server.
    pub fn send(&mut self, worker: usize, command: Command) {
        let (failure, limit) = failure(&command);
        let call = self.call(worker, failure);
        if let (Command::Pull(_), Some(process)) = (&command, &mut self.processes[worker]) {
            process.pull = Some(call);
        }
        let (wait, limit) = (self.delay(), limit.as_millis());
        self.after(wait, Event::Arrive(call, command));
        // The input is replaced by the failure, since there is no answer.
        self.after(u64::try_from(limit).expect("seconds"), Event::Answer(call, Input::Tick));
    }

    pub fn answer(&mut self, call: u64, input: Input) {
        let Some(Call { worker, life, failure }) = self.calls.remove(&call) else { return };
        if self.lives[worker] != life {
            return;
        }
        let Some(process) = &mut self.processes[worker] else { return };
        let input = if matches!(input, Input::Tick) { failure.unwrap_or(input) } else { input };
        if let Input::Pulled(pulled) = &input {
            process.pull = None;
            if let Ok(deliveries) = &pulled.deliveries {
                process.held.extend(deliveries.iter().map(|delivery| delivery.id));
            }
        }
        self.input(worker, input);
    }

    /// Executes a call at its server.
    pub fn arrive(&mut self, call: u64, command: Command) {
        let health = match uses_dispatcher(&command) {
            true => self.dispatcher_health,
            false => self.store_health,
        };
        let fate = self.rng.f64();
        if self.calls.get(&call).is_some_and(|call| self.cut_off[call.worker]) {
            return;
        }
        match health {
            Health::Refuses => return self.after(1, Event::Answer(call, Input::Tick)),
            Health::Hangs if self.rng.bool() => return,
            Health::Up if fate < self.loss => {
                return self.after(1, Event::Answer(call, Input::Tick));
            }
            Health::Hangs | Health::Up => {}
        }
        let (failed, _) = failure(&command);
        let Some(Call { worker, life, .. }) = self.calls.get(&call) else { return };
        let (worker, is_gone) = (*worker, self.lives[*worker] != *life);
        // The owner of a call that arrives after its process has ended.
        let owner = self.processes[worker].as_ref().map(|process| process.owner.clone());
        let owner = owner.filter(|_| !is_gone).unwrap_or_else(|| "gone".to_owned());
        let input = self.serve(worker, &owner, command);
        let answered = health == Health::Up && fate >= 2.0 * self.loss;
        if answered || failed.is_none() {
            let wait = self.delay();
            self.after(wait, Event::Answer(call, input));
        }
    }

    fn serve(&mut self, worker: usize, owner: &str, command: Command) -> Input {
        let (now, lease) = (self.now, LEASE.as_millis() as u64);
        let until = self.store_now() + lease;
        let held = self.processes[worker].as_ref().map(|process| process.held.clone());
        let mut held = held.unwrap_or_default();
        let input = match command {
            Command::Pull(plan) => {
                let deliveries = match plan.reclaim {
                    true => self.dispatcher.reclaim(owner, plan.max, lease, now),
                    false => self.dispatcher.pull(owner, &held, &plan, now),
                };
                return Input::Pulled(Pulled { feed: None, deliveries: Ok(deliveries) });
            }
            Command::Claim(ids, claim_id) => {
                return Input::Claimed(Ok(self.store.claim(&ids, owner, claim_id, until)));
            }
            Command::Commit(commit) => {
                let now = self.store_now();
                return Input::Committed(Ok(self.store.commit(&commit, now)));
            }
            Command::Save(saved) => {
                self.store.save(&saved);
                return Input::Saved(Ok(()));
            }
            Command::Renew(claims) => return Input::Renewed(Ok(self.store.renew(&claims, until))),
            Command::RenewDeliveries(deliveries) => {
                self.dispatcher.renew(owner, &deliveries, now);
                return Input::Tick;
            }
            Command::Acknowledge(deliveries) => {
                self.dispatcher.acknowledge(owner, &deliveries);
                held.retain(|id| deliveries.iter().all(|delivery| delivery.id != *id));
                Input::Acknowledged(Ok(()))
            }
            Command::Release(deliveries) => {
                self.dispatcher.hand_back(owner, &deliveries);
                held.retain(|id| deliveries.iter().all(|delivery| delivery.id != *id));
                Input::Released(Ok(()))
            }
            other => unreachable!("not sent to a server: {other:?}"),
        };
        if let Some(process) = self.processes[worker].as_mut().filter(|p| p.owner == owner) {
            process.held = held;
        }
        input
    }
}
