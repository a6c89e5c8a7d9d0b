//! Runs the commands of the [`Core`]: calls store and dispatcher, talks to the engine threads and
//! publishes events. It decides nothing.
//!
//! Each call runs as a task of its own, so a call that hangs delays no other and no engine report.

mod calls;

use std::{collections::VecDeque, future::poll_fn, sync::Arc, task::Poll, time::Instant};

use tokio::{
    sync::{mpsc::OwnedPermit, watch},
    task::{AbortHandle, JoinSet},
    time::{MissedTickBehavior, interval, sleep_until},
};
use tritmill_queue::store::workers::Directive;

use super::{
    committed::Committed,
    config::Stop,
    core::{
        Core, CoreSetup, check_interval,
        io::{Command, Input, Submission},
        policy::Policy,
    },
    error::WorkerError,
    event_publisher::{self, EventSender},
    heartbeat,
    setup::{Device, Worker},
};
use crate::engine_thread::{EngineThread, Report, Turn};

/// The resources that commands use.
pub(super) struct Shell {
    worker: Arc<Worker>,
    policy: Policy,
    threads: Vec<EngineThread>,
    /// Calls without an answer.
    calls: JoinSet<CallEnd>,
    /// Drops the current pull.
    pull: Option<AbortHandle>,
    /// Room for the report of the current commit, if there is a listener.
    permit: Option<OwnedPermit<Committed>>,
    events: Option<EventSender>,
    /// What happened while commands were run.
    inputs: VecDeque<Input>,
}

/// The end of a call: its answer, and room for the report of a commit.
type CallEnd = (Input, Option<OwnedPermit<Committed>>);

/// Returns the next report of an engine and the index of its device; `None` if the device's thread is
/// dead. Dropping the future loses nothing.
async fn next_report(threads: &mut [EngineThread]) -> (usize, Option<Report>) {
    poll_fn(|context| {
        for (index, thread) in threads.iter_mut().enumerate() {
            if let Poll::Ready(report) = thread.reports.poll_recv(context) {
                return Poll::Ready((index, report));
            }
        }
        Poll::Pending
    })
    .await
}

impl Shell {
    /// Starts the engine threads, each with its turns, and a core, and runs until the core exits.
    pub async fn run(
        worker: Arc<Worker>,
        devices: Vec<Device>,
        turns: Vec<Option<Turn>>,
        mut stop: watch::Receiver<Stop>,
        mut directive: watch::Receiver<Directive>,
    ) -> Result<(), WorkerError> {
        let names: Vec<String> = devices.iter().map(|device| device.name.clone()).collect();
        worker.metrics.set_devices(names.clone());
        let start = |(index, (Device { engine, .. }, turn))| {
            EngineThread::start(engine, index, turn, Arc::clone(&worker.metrics))
        };
        let devices = devices.into_iter().zip(turns).enumerate();
        let threads = devices.map(start).collect::<Result<_, _>>();
        let policy = Policy::for_mode(worker.config.mode, worker.config.lease);
        let setup = CoreSetup {
            policy,
            served: Arc::clone(&worker.served),
            metrics: Arc::clone(&worker.metrics),
            devices: names,
            has_events: worker.events.is_some(),
            directive: heartbeat::initial_directive(worker.operations.is_some()),
        };
        let mut core = Core::new(&worker.config, setup, Instant::now());
        let mut shell = Self {
            policy,
            threads: threads.map_err(WorkerError::Thread)?,
            calls: JoinSet::new(),
            pull: None,
            permit: None,
            events: worker.events.clone().map(event_publisher::start),
            inputs: VecDeque::from([Input::Tick]),
            worker,
        };
        // A request to stop, and a directive, may have come before this.
        stop.mark_changed();
        directive.mark_changed();
        let mut checks = interval(check_interval(shell.worker.config.step_limit));
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while let Some(input) = shell.inputs.pop_front() {
                for command in core.on(Instant::now(), input) {
                    if let Command::Exit(result) = command {
                        return result;
                    }
                    shell.execute(command);
                }
            }
            tokio::select! {
                biased;
                (device, report) = next_report(&mut shell.threads) => shell.push_report(device, report),
                Ok(()) = stop.changed() => {
                    match *stop.borrow_and_update() {
                        Stop::No => {}
                        Stop::Finish => shell.inputs.push_back(Input::Finish),
                        Stop::Drain => shell.inputs.push_back(Input::Drain),
                    }
                }
                Ok(()) = directive.changed() => {
                    shell.inputs.push_back(Input::Directive(*directive.borrow_and_update()));
                }
                _ = checks.tick() => {
                    let steps = shell.threads.iter().map(EngineThread::running_step).collect();
                    shell.inputs.push_back(Input::Steps(steps));
                }
                Some(ended) = shell.calls.join_next() => shell.push_answer(ended),
                () = sleep_until(core.wake_at().into()) => shell.inputs.push_back(Input::Tick),
            }
        }
    }

    /// Adds a report and all others that are available now.
    fn push_report(&mut self, device: usize, report: Option<Report>) {
        let Some(report) = report else {
            return self.inputs.push_back(Input::EngineStopped(device));
        };
        self.inputs.push_back(Input::Report(device, report));
        for (index, thread) in self.threads.iter_mut().enumerate() {
            while let Ok(report) = thread.reports.try_recv() {
                self.inputs.push_back(Input::Report(index, report));
            }
        }
    }

    fn push_answer(&mut self, ended: Result<CallEnd, tokio::task::JoinError>) {
        match ended {
            Ok((input, permit)) => {
                self.permit = permit.or(self.permit.take());
                self.inputs.push_back(input);
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The pull was dropped.
            Err(_) => {}
        }
    }

    fn execute(&mut self, command: Command) {
        let (worker, limit) = (Arc::clone(&self.worker), self.policy.call_limit);
        match command {
            Command::Pull(plan) => {
                let pull = async move { (calls::pull(worker, plan).await, None) };
                self.pull = Some(self.calls.spawn(pull));
            }
            Command::CancelPull => {
                if let Some(pull) = self.pull.take() {
                    pull.abort();
                }
            }
            Command::Submit(Submission { device, held, requests, stream }) => {
                if !self.threads[device].submit(held, requests, stream) {
                    self.inputs.push_back(Input::NotSubmitted(held));
                }
            }
            Command::Cancel(device, held) => {
                if !self.threads[device].cancel(held) {
                    self.inputs.push_back(Input::NotCancelled(held));
                }
            }
            Command::Publish(job, event) => {
                if let Some(events) = &self.events {
                    events.send(job, event);
                }
            }
            Command::Report(report) => {
                if let Some(permit) = self.permit.take() {
                    permit.send(report);
                }
            }
            Command::Abandon(device) => self.threads[device].abandon(),
            Command::Commit(commit) => {
                self.calls.spawn(calls::commit(worker, limit, commit));
            }
            call => {
                self.calls.spawn(async move { (calls::run(worker, limit, call).await, None) });
            }
        }
    }
}
