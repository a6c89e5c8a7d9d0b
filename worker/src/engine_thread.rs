//! The engine on its own thread, so that computing never blocks the async side.
//!
//! Commands go in through one bounded channel and reports come out through another. The async side
//! never waits to send a command; the engine waits when its reports are not read. So the two cannot
//! wait for each other. The thread sleeps while the engine is idle and ends when the other side is
//! dropped.

mod jobs;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use jobs::Jobs;
use parking_lot::{FairMutex, Mutex};
use tokio::sync::mpsc as async_mpsc;
use tritmill_engine::{
    Engine, Event, Output, Request, RequestError, RequestId, StepReport, SubmitError, TokenLogprob,
};
use tritmill_queue::ClaimRef;

use crate::metrics::Metrics;

/// Maximum number of commands that the engine has not read yet. It reads them between two steps; a
/// claim causes two commands.
const COMMANDS_MAX: usize = 4096;
/// Maximum number of reports that the worker has not read yet.
const REPORTS_MAX: usize = 1024;
/// New tokens of a request before its progress is reported again.
const PROGRESS_TOKENS: usize = 32;

/// How often an engine that waits for its turn checks whether it is to end.
const TURN_CHECK: Duration = Duration::from_secs(1);

/// The turn on a device that several engines use: only one runs a step at a time, because two would fight for the
/// cores. An engine that waits gets the next turn.
pub type Turn = Arc<FairMutex<()>>;

/// The turns on the devices of several workers, by name. Without any, every engine has its device alone.
#[derive(Debug, Default)]
pub struct Turns(Option<Mutex<HashMap<String, Turn>>>);

impl Turns {
    /// Turns on every device.
    pub fn shared() -> Self {
        Self(Some(Mutex::default()))
    }

    /// Returns the turn on a device.
    pub fn turn(&self, device: &str) -> Option<Turn> {
        let mut turns = self.0.as_ref()?.lock();
        Some(Arc::clone(turns.entry(device.to_owned()).or_default()))
    }
}

#[derive(Debug)]
enum Command {
    Submit(ClaimRef, Vec<Request>, bool),
    Cancel(ClaimRef),
}

/// A report of the engine.
#[derive(Debug)]
pub enum Report {
    /// A request ended.
    Ended(ClaimRef, End),
    /// All tokens of a request so far, if it can be resumed from them.
    Progress(ClaimRef, Vec<u32>),
    /// Time at which the first token of a request was generated.
    FirstToken(ClaimRef, Instant),
    /// New text of one choice of a streaming request, and the log probabilities of its tokens, if requested.
    Text(ClaimRef, u32, String, Vec<TokenLogprob>),
}

/// How a request ended.
#[derive(Debug)]
pub enum End {
    /// The request was answered, or stopped by a cancel or its deadline (see its finish reasons).
    Finished(Output),
    /// The engine did not accept the request.
    Refused(SubmitError),
    /// The request failed after it was accepted.
    Failed(RequestError),
}

/// A running engine thread.
#[derive(Debug)]
pub struct EngineThread {
    commands: Option<mpsc::SyncSender<Command>>,
    /// The engine's reports: every submitted job ends exactly once. The channel returns `None`
    /// after a panic of the thread.
    pub reports: async_mpsc::Receiver<Report>,
    thread: Option<JoinHandle<()>>,
    /// Incremented when a step begins and when it ends: odd during a step.
    step_count: Arc<AtomicU64>,
}

impl EngineThread {
    /// Starts a thread for the engine of the device with this index.
    ///
    /// # Errors
    /// If the system cannot start another thread.
    pub fn start(
        engine: Engine,
        device: usize,
        turn: Option<Turn>,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Self> {
        Self::with_capacity(engine, device, turn, metrics, [COMMANDS_MAX, REPORTS_MAX])
    }

    fn with_capacity(
        engine: Engine,
        device: usize,
        turn: Option<Turn>,
        metrics: Arc<Metrics>,
        [commands, reports]: [usize; 2],
    ) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::sync_channel(commands);
        let (outbox, reports) = async_mpsc::channel(reports);
        let step_count = Arc::new(AtomicU64::new(0));
        let steps = Arc::clone(&step_count);
        let body = move || {
            let jobs = Jobs::default();
            let step_count = steps;
            EngineLoop { engine, device, turn, jobs, inbox, outbox, step_count, metrics }.run();
        };
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(body)?;
        Ok(Self { commands: Some(commands), reports, thread: Some(thread), step_count })
    }

    /// Starts the requests of a job, one for each of its prompts, and reports their text as it grows if `stream` is
    /// set. Returns false if the engine has too many unread commands. A dead thread is visible from `reports`.
    #[must_use]
    pub fn submit(&self, held: ClaimRef, requests: Vec<Request>, stream: bool) -> bool {
        self.send(Command::Submit(held, requests, stream))
    }

    /// Ends a job early; its end is still reported. Returns false as [`Self::submit`] does.
    #[must_use]
    pub fn cancel(&self, held: ClaimRef) -> bool {
        self.send(Command::Cancel(held))
    }

    /// Returns the number of the step that is running now, if any.
    pub fn running_step(&self) -> Option<u64> {
        let count = self.step_count.load(Ordering::Relaxed);
        (count % 2 == 1).then_some(count / 2)
    }

    /// Detaches a thread that hangs in a step: dropping `self` does not wait for it.
    pub fn abandon(&mut self) {
        self.thread = None;
    }

    fn send(&self, command: Command) -> bool {
        let sent = self.commands.as_ref().map(|commands| commands.try_send(command));
        !matches!(sent, Some(Err(mpsc::TrySendError::Full(_))))
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        // Closing the channels ends the thread after its current step.
        self.commands = None;
        self.reports.close();
        if let Some(thread) = self.thread.take() {
            // The closed `reports` channel has reported a panic already.
            let _ = thread.join();
        }
    }
}

struct EngineLoop {
    engine: Engine,
    device: usize,
    turn: Option<Turn>,
    jobs: Jobs,
    inbox: mpsc::Receiver<Command>,
    outbox: async_mpsc::Sender<Report>,
    step_count: Arc<AtomicU64>,
    metrics: Arc<Metrics>,
}

impl EngineLoop {
    fn run(mut self) {
        let mut step = StepReport::default();
        loop {
            if !self.take_commands() {
                return;
            }
            if !self.step(&mut step) {
                return;
            }
            // After the turn, so that other engines compute meanwhile.
            self.engine.wait(&step);
            let mut has_ended = false;
            // What is not taken out of the report is memory for the next one.
            for event in &mut step.events {
                match event {
                    Event::Delta { id, choice, text, tokens, logprobs } => {
                        self.handle_delta(*id, *choice, (text, logprobs), tokens);
                    }
                    Event::Finished { id, output } => {
                        has_ended = true;
                        self.finish(*id, End::Finished(std::mem::take(output)));
                    }
                    Event::Failed { id, error, .. } => {
                        has_ended = true;
                        self.finish(*id, End::Failed(error.clone()));
                    }
                }
            }
            if has_ended {
                for (held, end) in self.jobs.refill(&mut self.engine) {
                    self.report(Report::Ended(held, end));
                }
            }
        }
    }

    /// Handles the commands that have arrived; waits for them while the engine is idle or has few rows. False if the thread
    /// is to end.
    fn take_commands(&mut self) -> bool {
        let mut arrived = None;
        if self.engine.is_idle() {
            let Ok(command) = self.inbox.recv() else { return false };
            arrived = Some(Instant::now());
            self.handle_command(command);
        }
        loop {
            let wait = arrived.and_then(|at| self.engine.wait_for_more(at.elapsed()));
            match self.inbox.recv_timeout(wait.unwrap_or_default()) {
                Ok(command) => self.handle_command(command),
                Err(mpsc::RecvTimeoutError::Timeout) => return true,
                Err(mpsc::RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Runs a step in this engine's turn; false if the thread is to end. Waiting is not part of the step: it is
    /// another engine that hangs then.
    fn step(&mut self, report: &mut StepReport) -> bool {
        let turn = self.turn.clone();
        let _turn = match &turn {
            None => None,
            Some(turn) => Some(loop {
                if let Some(guard) = turn.try_lock_for(TURN_CHECK) {
                    break guard;
                }
                if self.outbox.is_closed() {
                    return false;
                }
            }),
        };
        self.step_count.fetch_add(1, Ordering::Relaxed);
        let began = Instant::now();
        self.engine.step_into(began, report);
        let took = began.elapsed();
        self.engine.record_time(report, took);
        self.step_count.fetch_add(1, Ordering::Relaxed);
        for id in &report.admitted {
            let job = self.jobs.find(*id, 0);
            if let Some(since) = job.and_then(|(.., job)| job.waits_since.take()) {
                self.metrics.record_wait(self.device, began.saturating_duration_since(since));
            }
        }
        self.metrics.record_step(self.device, report.sequences, took, self.engine.stats());
        true
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Submit(held, requests, stream) => {
                if let Some(end) = self.jobs.start(&mut self.engine, held, requests, stream) {
                    self.report(Report::Ended(held, end));
                }
            }
            Command::Cancel(held) => {
                if let Some(end) = self.jobs.cancel(&mut self.engine, held) {
                    self.report(Report::Ended(held, end));
                }
            }
        }
    }

    fn handle_delta(
        &mut self,
        id: RequestId,
        choice: u32,
        (text, logprobs): (&mut String, &mut Vec<TokenLogprob>),
        new: &[u32],
    ) {
        let Some((held, choice, job)) = self.jobs.find(id, choice) else { return };
        let is_first = !std::mem::replace(&mut job.has_token, true);
        let is_new = !text.is_empty() || !logprobs.is_empty();
        let text = (job.stream && is_new).then(|| (std::mem::take(text), std::mem::take(logprobs)));
        let mut progress = None;
        if let Some(tokens) = &mut job.tokens {
            tokens.extend(new);
            if tokens.len() >= job.reported + PROGRESS_TOKENS {
                job.reported = tokens.len();
                progress = Some(tokens.clone());
            }
        }
        let first = is_first.then(|| Report::FirstToken(held, Instant::now()));
        let text = text.map(|(text, logprobs)| Report::Text(held, choice, text, logprobs));
        let progress = progress.map(|tokens| Report::Progress(held, tokens));
        first.into_iter().chain(text).chain(progress).for_each(|report| self.report(report));
    }

    fn finish(&mut self, id: RequestId, end: End) {
        if let Some((held, end)) = self.jobs.finish(id, end) {
            self.report(Report::Ended(held, end));
        }
    }

    /// Waits until the worker has room for the report.
    fn report(&self, report: Report) {
        // Fails only while the worker is being dropped.
        let _ = self.outbox.blocking_send(report);
    }
}
