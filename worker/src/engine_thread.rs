//! The engine on its own thread: compute never runs on, and is never waited for by, the async side.
//!
//! Requests go in through a channel, their ends come out through another. The thread sleeps while
//! the engine is idle and ends when the other side is dropped.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, TryRecvError},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use tokio::sync::mpsc as async_mpsc;
use tritmill_engine::{Engine, Event, Output, Request, RequestError, RequestId, SubmitError};
use tritmill_queue::ClaimRef;

use crate::metrics::Metrics;

/// What the engine is told.
#[derive(Debug)]
enum Command {
    Submit(ClaimRef, Box<Request>, bool),
    Cancel(ClaimRef),
}

/// New tokens of a request before its tokens so far are told.
const PROGRESS_TOKENS: usize = 32;

/// What the engine tells.
#[derive(Debug)]
pub enum Report {
    /// A request ended.
    Ended(ClaimRef, End),
    /// All tokens of a request so far; told of requests that can be resumed from them.
    Progress(ClaimRef, Vec<u32>),
    /// The first token of a request, and when it was drawn.
    FirstToken(ClaimRef, Instant),
    /// More text of one choice of a request that streams.
    Text(ClaimRef, u32, String),
}

/// How a request ended.
#[derive(Debug)]
pub enum End {
    /// Answered, or cut short by cancel or deadline (see its finish reasons).
    Finished(Output),
    /// Not accepted.
    Refused(SubmitError),
    /// Accepted, and failed.
    Failed(RequestError),
}

/// A running engine thread.
#[derive(Debug)]
pub struct EngineThread {
    commands: Option<mpsc::Sender<Command>>,
    /// Every submitted request ends here exactly once. `None` after a panic of the thread.
    pub reports: async_mpsc::UnboundedReceiver<Report>,
    thread: Option<JoinHandle<()>>,
    /// Grows when a step begins and when it ends: odd while one runs.
    pulse: Arc<AtomicU64>,
}

impl EngineThread {
    /// Moves the engine to a thread of its own; `place` is its device's among the worker's.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub fn start(engine: Engine, place: usize, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        // Unbounded, but never longer than the requests the worker has room for.
        let (outbox, reports) = async_mpsc::unbounded_channel();
        let pulse = Arc::new(AtomicU64::new(0));
        let beat = Arc::clone(&pulse);
        let body = move || {
            Loop { engine, place, held: HashMap::new(), inbox, outbox, pulse: beat, metrics }.run();
        };
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(body)?;
        Ok(Self { commands: Some(commands), reports, thread: Some(thread), pulse })
    }

    /// Starts a request, whose text is told while it grows if `stream` says so. A thread that died
    /// answers nothing; `reports` says so.
    pub fn submit(&self, held: ClaimRef, request: Request, stream: bool) {
        self.send(Command::Submit(held, Box::new(request), stream));
    }

    /// Ends a request early; it still comes back.
    pub fn cancel(&self, held: ClaimRef) {
        self.send(Command::Cancel(held));
    }

    /// The number of the step that runs at this moment, if one does.
    pub fn running_step(&self) -> Option<u64> {
        let pulse = self.pulse.load(Ordering::Relaxed);
        (pulse % 2 == 1).then_some(pulse / 2)
    }

    /// Gives up a thread whose step does not end: nobody waits for it any more.
    pub fn abandon(&mut self) {
        self.thread = None;
    }

    fn send(&self, command: Command) {
        if let Some(commands) = &self.commands {
            // Fails only when the thread is gone, which `reports` shows.
            let _ = commands.send(command);
        }
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        // Closing the channel ends the thread after the step it is in.
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the closed `reports` channel already.
            let _ = thread.join();
        }
    }
}

/// A request in the engine.
struct RunningClaim {
    held: ClaimRef,
    /// Its tokens, if it can be resumed from them.
    tokens: Option<Vec<u32>>,
    /// How many of them were told.
    told: usize,
    /// Whether its text is told.
    stream: bool,
    /// Whether it has a token.
    began: bool,
}

struct Loop {
    engine: Engine,
    place: usize,
    held: HashMap<RequestId, RunningClaim>,
    inbox: mpsc::Receiver<Command>,
    outbox: async_mpsc::UnboundedSender<Report>,
    pulse: Arc<AtomicU64>,
    metrics: Arc<Metrics>,
}

impl Loop {
    fn run(mut self) {
        loop {
            if self.engine.is_idle() {
                match self.inbox.recv() {
                    Ok(command) => self.obey(command),
                    Err(mpsc::RecvError) => return,
                }
            }
            loop {
                match self.inbox.try_recv() {
                    Ok(command) => self.obey(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.pulse.fetch_add(1, Ordering::Relaxed);
            let step = self.engine.step(Instant::now());
            self.pulse.fetch_add(1, Ordering::Relaxed);
            self.metrics.record_step(self.place, step.sequences, self.engine.stats());
            for event in step.events {
                match event {
                    Event::Delta { id, choice, text, tokens } => {
                        self.grow(id, choice, text, &tokens)
                    }
                    Event::Finished { id, output } => self.end(id, End::Finished(output)),
                    Event::Failed { id, error, .. } => self.end(id, End::Failed(error)),
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(held, request, stream) => {
                let whole = request.sampling.n == 1 && request.sampling.logprobs.is_none();
                let tokens = whole.then(|| request.resume.clone());
                let told = request.resume.len();
                match self.engine.submit(*request) {
                    Ok(id) => {
                        self.held
                            .insert(id, RunningClaim { held, tokens, told, stream, began: false });
                    }
                    Err(error) => self.report(Report::Ended(held, End::Refused(error))),
                }
            }
            Command::Cancel(held) => {
                let found = self.held.iter().find(|(_, flight)| flight.held == held);
                if let Some((id, _)) = found {
                    self.engine.cancel(*id);
                }
            }
        }
    }

    fn grow(&mut self, id: RequestId, choice: u32, text: String, new: &[u32]) {
        if let Some(flight) = self.held.get_mut(&id).filter(|flight| !flight.began) {
            flight.began = true;
            let first = Report::FirstToken(flight.held, Instant::now());
            self.report(first);
        }
        if let Some(RunningClaim { held, stream: true, .. }) = self.held.get(&id)
            && !text.is_empty()
        {
            self.report(Report::Text(*held, choice, text));
        }
        let Some(flight) = self.held.get_mut(&id) else { return };
        let Some(tokens) = &mut flight.tokens else { return };
        tokens.extend(new);
        if tokens.len() >= flight.told + PROGRESS_TOKENS {
            flight.told = tokens.len();
            let report = Report::Progress(flight.held, tokens.clone());
            self.report(report);
        }
    }

    fn end(&mut self, id: RequestId, end: End) {
        if let Some(flight) = self.held.remove(&id) {
            self.report(Report::Ended(flight.held, end));
        }
    }

    fn report(&self, report: Report) {
        // Nobody listens any more only while the worker is being dropped.
        let _ = self.outbox.send(report);
    }
}
