//! The world of the simulation: processes, servers, and what goes wrong between them. All chance comes from one
//! seed, so a seed always leads to the same life.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use fastrand::Rng;
use tritmill_engine::{Request, files::Model};
use tritmill_queue::{
    ClaimRef, JobId,
    store::workers::{Directive, Leadership},
};

use super::{
    super::{
        Core, CoreSetup, check_interval,
        io::{Command, Input, Prepared, Submission},
        policy::Policy,
    },
    Life,
    engine::{Behaviour, Did, Engine},
    servers::{Dispatcher, Store},
};
use crate::{
    Metrics, ServedModel,
    translate::Work,
    worker::{Mode, WorkerConfig},
};

pub(super) const LEASE: Duration = Duration::from_secs(15);
const STEP: u64 = 200;
const RECONCILE: u64 = 1000;

/// How a server treats calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Up,
    /// Every call fails at once.
    Refuses,
    /// No call is answered; some are executed.
    Hangs,
}

/// Something that happens at a time.
#[derive(Debug)]
pub(super) enum Event {
    Start(usize),
    Crash(usize),
    Drain(usize),
    /// The core's own time has come, an engine has computed, or its steps are checked.
    Wake(usize, u32),
    Step(usize, u32),
    Check(usize, u32),
    /// A call reaches its server.
    Arrive(u64, Command),
    Answer(u64, Input),
    Reconcile,
    Store(Health),
    Dispatcher(Health),
    /// No call of a worker reaches a server, or calls do so again.
    CutOff(usize, bool),
    /// The dispatcher loses all its data.
    Lose,
    /// Every step of a worker's device fails, or steps succeed again.
    Device(usize, bool),
    /// The store's clock jumps by this many milliseconds.
    Jump(i64),
    Pause(bool),
}

/// A call without an answer.
#[derive(Debug)]
pub(super) struct Call {
    pub worker: usize,
    pub life: u32,
    /// What the worker hears if there is no answer in time.
    pub failure: Option<Input>,
}

pub(super) struct Process {
    core: Core,
    engine: Engine,
    pub owner: String,
    /// Jobs of which the process knows that it has the delivery.
    pub held: BTreeSet<JobId>,
    pub pull: Option<u64>,
    is_stepping: bool,
    /// Time of the next wake-up.
    wake_at: u64,
}

pub(super) struct World {
    pub rng: Rng,
    pub start: Instant,
    /// Milliseconds since the start.
    pub now: u64,
    events: BTreeMap<(u64, u64), Event>,
    serial: u64,
    pub calls: BTreeMap<u64, Call>,
    pub store: Store,
    pub dispatcher: Dispatcher,
    pub store_health: Health,
    pub dispatcher_health: Health,
    /// How far the store's clock is ahead.
    jumped: i64,
    paused: bool,
    pub processes: Vec<Option<Process>>,
    pub lives: Vec<u32>,
    pub cut_off: Vec<bool>,
    broken: Vec<bool>,
    /// Steps with requests of the first worker: when, how many requests, and whether it failed.
    pub first_steps: Vec<(u64, usize, bool)>,
    behaviours: BTreeMap<JobId, Behaviour>,
    /// The chance of a call to fail, or to be executed without an answer.
    pub loss: f64,
    /// Steps that computed a job under an old claim while another worker had it.
    pub overlaps: u32,
}

fn served() -> Arc<ServedModel> {
    static SERVED: OnceLock<Arc<ServedModel>> = OnceLock::new();
    let open = || {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/golden/bitnet-tiny");
        let model = Arc::new(Model::open(folder.as_ref()).expect("the golden model"));
        Arc::new(ServedModel::new(model, "tiny".to_owned(), "class".to_owned()))
    };
    Arc::clone(SERVED.get_or_init(open))
}

impl World {
    /// Creates a world with these jobs and workers; the workers start at once.
    pub fn new(life: &Life) -> Self {
        // Claim ids and backoffs are drawn from the thread's generator.
        fastrand::seed(life.seed);
        let mut world = Self {
            rng: Rng::with_seed(life.seed),
            start: Instant::now(),
            now: 0,
            events: BTreeMap::new(),
            serial: 0,
            calls: BTreeMap::new(),
            store: Store::default(),
            dispatcher: Dispatcher::default(),
            store_health: Health::Up,
            dispatcher_health: Health::Up,
            jumped: 0,
            paused: false,
            processes: Vec::new(),
            lives: vec![0; life.workers],
            cut_off: vec![false; life.workers],
            broken: vec![false; life.workers],
            first_steps: Vec::new(),
            behaviours: BTreeMap::new(),
            loss: life.loss,
            overlaps: 0,
        };
        for (number, behaviour) in (1..).zip(&life.jobs) {
            let job = super::job(number);
            world.behaviours.insert(job.id, *behaviour);
            world.dispatcher.enqueue(&[job.id]);
            world.store.submit(job);
        }
        for worker in 0..life.workers {
            world.processes.push(None);
            world.at(0, Event::Start(worker));
        }
        world.reconcile();
        world
    }

    /// Adds an event at a time in milliseconds.
    pub fn at(&mut self, time: u64, event: Event) {
        self.serial += 1;
        self.events.insert((time, self.serial), event);
    }

    pub fn after(&mut self, wait: u64, event: Event) {
        self.at(self.now + wait, event);
    }

    /// Usually some milliseconds, sometimes seconds.
    pub fn delay(&mut self) -> u64 {
        match self.rng.u32(..100) {
            0 if self.loss > 0.0 => self.rng.u64(..20_000),
            1..5 => self.rng.u64(..1_000),
            _ => self.rng.u64(..20),
        }
    }

    /// Returns how many leases ended, how many steps computed a job that another worker had, and how many
    /// entries only the scan of all queued jobs restored.
    pub fn flaws(&self) -> (u32, u32, usize) {
        (self.store.lapses, self.overlaps, self.dispatcher.restored)
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    pub fn store_now(&self) -> u64 {
        self.now.saturating_add_signed(self.jumped) + 1_000_000
    }

    /// Handles the next event.
    pub fn advance(&mut self) {
        let ((time, _), event) = self.events.pop_first().expect("reconciling has no end");
        self.now = time;
        match event {
            Event::Start(worker) => self.start(worker),
            Event::Crash(worker) => self.end(worker),
            Event::Drain(worker) => self.input(worker, Input::Drain),
            Event::Wake(worker, life) if self.lives[worker] == life => {
                // Only the latest of several wake-ups counts.
                if self.processes[worker].as_ref().is_some_and(|process| process.wake_at == time) {
                    self.input(worker, Input::Tick);
                }
            }
            Event::Step(worker, life) if self.lives[worker] == life => self.step(worker),
            Event::Check(worker, life) if self.lives[worker] == life => {
                if let Some(process) = &self.processes[worker] {
                    let steps = vec![process.engine.running_step()];
                    self.after(1000, Event::Check(worker, life));
                    self.input(worker, Input::Steps(steps));
                }
            }
            Event::Wake(..) | Event::Step(..) | Event::Check(..) => {}
            Event::Arrive(call, command) => self.arrive(call, command),
            Event::Answer(call, input) => self.answer(call, input),
            Event::Reconcile => self.reconcile(),
            Event::Store(health) => self.store_health = health,
            Event::Dispatcher(health) => self.dispatcher_health = health,
            Event::CutOff(worker, cut_off) => self.cut_off[worker] = cut_off,
            Event::Device(worker, broken) => self.broken[worker] = broken,
            Event::Lose => self.dispatcher.lose(),
            Event::Jump(by) => self.jumped += by,
            Event::Pause(paused) => {
                self.paused = paused;
                for worker in 0..self.processes.len() {
                    self.input(
                        worker,
                        Input::Directive(Directive {
                            drain: false,
                            paused,
                            leads: Leadership::ALL,
                        }),
                    );
                }
            }
        }
    }

    fn start(&mut self, worker: usize) {
        self.lives[worker] += 1;
        let life = self.lives[worker];
        let config = WorkerConfig {
            queue: super::queue(),
            owner: format!("worker {worker}, life {life}"),
            slots: 4,
            lease: LEASE,
            drain: Duration::from_secs(30),
            step_limit: Duration::from_secs(16),
            mode: Mode::Service,
            isa: String::new(),
        };
        assert_eq!(check_interval(config.step_limit), Duration::from_secs(1));
        let metrics = Arc::<Metrics>::default();
        metrics.set_devices(vec!["cpu".to_owned()]);
        let setup = CoreSetup {
            policy: Policy::for_mode(config.mode, config.lease),
            served: served(),
            metrics,
            devices: vec!["cpu".to_owned()],
            has_events: false,
            directive: Directive { drain: false, paused: self.paused, leads: Leadership::ALL },
        };
        self.processes[worker] = Some(Process {
            core: Core::new(&config, setup, self.instant()),
            engine: Engine::default(),
            owner: config.owner,
            held: BTreeSet::new(),
            pull: None,
            is_stepping: false,
            wake_at: 0,
        });
        self.after(1000, Event::Check(worker, life));
        self.input(worker, Input::Tick);
    }

    /// Ends a process; another takes its place.
    fn end(&mut self, worker: usize) {
        if self.processes[worker].take().is_some() {
            let wait = self.rng.u64(500..3_000);
            self.after(wait, Event::Start(worker));
        }
    }

    pub fn input(&mut self, worker: usize, input: Input) {
        let (now, life) = (self.instant(), self.lives[worker]);
        let Some(process) = &mut self.processes[worker] else { return };
        let commands = process.core.on(now, input);
        let wake = process.core.wake_at().saturating_duration_since(self.start);
        let wake = u64::try_from(wake.as_millis()).expect("a short life") + 1;
        let wake = wake.max(self.now + 1);
        if std::mem::replace(&mut process.wake_at, wake) != wake {
            self.at(wake, Event::Wake(worker, life));
        }
        for command in commands {
            if !self.execute(worker, command) {
                return;
            }
        }
    }

    /// Returns whether the process lives on.
    fn execute(&mut self, worker: usize, command: Command) -> bool {
        let (now, life) = (self.instant(), self.lives[worker]);
        let Some(process) = &mut self.processes[worker] else { return false };
        match command {
            Command::Exit(_) => {
                self.end(worker);
                return false;
            }
            Command::Submit(Submission { held, .. }) => {
                process.engine.submit(held, self.behaviours[&held.id], now);
                if !std::mem::replace(&mut process.is_stepping, true) {
                    self.after(STEP, Event::Step(worker, life));
                }
            }
            Command::Cancel(_, held) => process.engine.cancel(held),
            Command::CancelPull => {
                // The answer may be on its way to the core.
                if let Some(call) = process.pull.take()
                    && self.rng.bool()
                {
                    self.calls.remove(&call);
                }
            }
            Command::Prepare(claims) => {
                let prepared = claims.iter().map(|claim| Prepared {
                    held: claim.claim_ref(),
                    stream: false,
                    work: Ok(Work { requests: vec![Request::default()], ..Work::default() }),
                });
                let input = Input::Prepared(prepared.collect());
                let call = self.call(worker, None);
                self.after(5, Event::Answer(call, input));
            }
            Command::Publish(..) | Command::Report(_) | Command::Abandon(_) | Command::Check => {}
            command => self.send(worker, command),
        }
        true
    }

    pub fn call(&mut self, worker: usize, failure: Option<Input>) -> u64 {
        self.serial += 1;
        let life = self.lives[worker];
        self.calls.insert(self.serial, Call { worker, life, failure });
        self.serial
    }

    fn step(&mut self, worker: usize) {
        let (now, life) = (self.instant(), self.lives[worker]);
        let Some(process) = &mut self.processes[worker] else { return };
        let another = |held: &ClaimRef| self.store.is_claimed_by_another(*held);
        self.overlaps += u32::from(process.engine.running().any(another));
        let (sequences, is_broken) = (process.engine.sequences(), self.broken[worker]);
        if worker == 0 && sequences > 0 {
            self.first_steps.push((self.now, sequences, is_broken));
        }
        let did = if is_broken { process.engine.fail() } else { process.engine.run(now) };
        for did in did {
            match did {
                Did::Died => return self.end(worker),
                Did::Report(report) => self.input(worker, Input::Report(0, report)),
            }
        }
        self.after(STEP, Event::Step(worker, life));
    }

    fn reconcile(&mut self) {
        self.after(RECONCILE, Event::Reconcile);
        if self.store_health != Health::Up {
            return;
        }
        let now = self.store_now();
        self.store.reconcile(now);
        if self.dispatcher_health != Health::Up {
            return;
        }
        self.dispatcher.enqueue(&self.store.announced(now));
        self.dispatcher.restored += self.dispatcher.enqueue(&self.store.queued());
    }
}
