//! The engine on its own thread, so that computing never blocks the async side.
//!
//! Commands go in through one bounded channel and reports come out through another. The async side
//! never waits to send a command; the engine waits when its reports are not read. So the two cannot
//! wait for each other. The thread sleeps while the engine is idle and ends when the other side is
//! dropped.

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

use parking_lot::{FairMutex, Mutex};
use tokio::sync::mpsc as async_mpsc;
use tritmill_engine::{
    Engine, Event, Output, Request, RequestError, RequestId, StepReport, SubmitError,
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
    pub fn of(&self, device: &str) -> Option<Turn> {
        let mut turns = self.0.as_ref()?.lock();
        Some(Arc::clone(turns.entry(device.to_owned()).or_default()))
    }
}

#[derive(Debug)]
enum Command {
    Submit(ClaimRef, Box<Request>, bool),
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
    /// New text of one choice of a streaming request.
    Text(ClaimRef, u32, String),
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
    /// The engine's reports: every submitted request ends exactly once. The channel returns `None`
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
            let requests = HashMap::new();
            let step_count = steps;
            EngineLoop { engine, device, turn, requests, inbox, outbox, step_count, metrics }.run();
        };
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(body)?;
        Ok(Self { commands: Some(commands), reports, thread: Some(thread), step_count })
    }

    /// Starts a request and reports its text as it grows if `stream` is set. Returns false if the
    /// engine has too many unread commands. A dead thread is visible from `reports`.
    #[must_use]
    pub fn submit(&self, held: ClaimRef, request: Box<Request>, stream: bool) -> bool {
        self.send(Command::Submit(held, request, stream))
    }

    /// Ends a request early; its end is still reported. Returns false as [`Self::submit`] does.
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

/// A request in the engine.
struct ActiveRequest {
    held: ClaimRef,
    /// Its tokens, if it can be resumed from them.
    tokens: Option<Vec<u32>>,
    /// Number of tokens in the last progress report.
    reported: usize,
    stream: bool,
    has_token: bool,
    /// Time of its arrival, until its first step.
    waits_since: Option<Instant>,
}

struct EngineLoop {
    engine: Engine,
    device: usize,
    turn: Option<Turn>,
    requests: HashMap<RequestId, ActiveRequest>,
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
            // What is not taken out of the report is memory for the next one.
            for event in &mut step.events {
                match event {
                    Event::Delta { id, choice, text, tokens } => {
                        self.handle_delta(*id, *choice, text, tokens);
                    }
                    Event::Finished { id, output } => {
                        self.finish(*id, End::Finished(std::mem::take(output)));
                    }
                    Event::Failed { id, error, .. } => self.finish(*id, End::Failed(error.clone())),
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
            let request = self.requests.get_mut(id);
            if let Some(since) = request.and_then(|request| request.waits_since.take()) {
                self.metrics.record_wait(self.device, began.saturating_duration_since(since));
            }
        }
        self.metrics.record_step(self.device, report.sequences, took, self.engine.stats());
        true
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Submit(held, request, stream) => {
                let resumable = request.sampling.n == 1 && request.sampling.logprobs.is_none();
                let tokens = resumable.then(|| request.resume.clone());
                let reported = request.resume.len();
                match self.engine.submit(*request) {
                    Ok(id) => {
                        let waits_since = Some(Instant::now());
                        let has_token = false;
                        let request = ActiveRequest {
                            held,
                            tokens,
                            reported,
                            stream,
                            has_token,
                            waits_since,
                        };
                        self.requests.insert(id, request);
                    }
                    Err(error) => self.report(Report::Ended(held, End::Refused(error))),
                }
            }
            Command::Cancel(held) => {
                let found = self.requests.iter().find(|(_, request)| request.held == held);
                if let Some((id, _)) = found {
                    self.engine.cancel(*id);
                }
            }
        }
    }

    fn handle_delta(&mut self, id: RequestId, choice: u32, text: &mut String, new: &[u32]) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let held = request.held;
        let is_first = !std::mem::replace(&mut request.has_token, true);
        let text = (request.stream && !text.is_empty()).then(|| std::mem::take(text));
        let mut progress = None;
        if let Some(tokens) = &mut request.tokens {
            tokens.extend(new);
            if tokens.len() >= request.reported + PROGRESS_TOKENS {
                request.reported = tokens.len();
                progress = Some(tokens.clone());
            }
        }
        let first = is_first.then(|| Report::FirstToken(held, Instant::now()));
        let text = text.map(|text| Report::Text(held, choice, text));
        let progress = progress.map(|tokens| Report::Progress(held, tokens));
        first.into_iter().chain(text).chain(progress).for_each(|report| self.report(report));
    }

    fn finish(&mut self, id: RequestId, end: End) {
        if let Some(request) = self.requests.remove(&id) {
            self.report(Report::Ended(request.held, end));
        }
    }

    /// Waits until the worker has room for the report.
    fn report(&self, report: Report) {
        // Fails only while the worker is being dropped.
        let _ = self.outbox.blocking_send(report);
    }
}
