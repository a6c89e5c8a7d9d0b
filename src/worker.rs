//! `tritmill worker`: answers the jobs of one queue until it is told to stop.

use std::{
    io, net::SocketAddr, num::NonZeroUsize, pin::pin, process::ExitCode, sync::Arc, time::Duration,
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use serde_json::{Map, Value, json};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tritmill_engine::{files::Model, load::EngineOptions};
use tritmill_queue::{
    QueueName,
    store::{FAST_RETENTION, PostgresStore},
};
use tritmill_worker::{
    Device, Metrics, Mode as WorkerMode, ServedModel, Stop, Worker, WorkerConfig, WorkerError,
    http, machine,
};

use crate::{
    engines::Engines,
    options::{self, CapacityOptions, ModelOption, RunOptions},
    output,
    servers::{Given, Keeper, Mode, ModeOptions},
    signals::Signals,
};

const DAY: Duration = Duration::from_secs(86_400);
/// Shortest lease.
const LEASE_S_MIN: f64 = 0.5;

/// Answer the jobs of a queue.
///
/// The queue is the model's name and the format. Any number of workers may serve one queue; they
/// must be of one numerics class (same weights, KV type, head, CPU or CUDA), which the first one sets,
/// or of one that an operator has allowed beside it (`tritmill queue allow-class`). With several GPUs
/// each has the weights and runs jobs of its own. When one is lost, all jobs are handed back and the
/// worker ends: started again with cuda:all, it goes on with those that are left.
/// SIGTERM drains: nothing new is taken, what runs is finished or handed back.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill worker --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill worker --redis redis://localhost --fast
  tritmill worker --model ./bitnet-2b --format tl2 --slots 32 --listen 0.0.0.0:9100
  tritmill worker --model ./bitnet-2b --device cuda:0,cuda:1
  tritmill worker --model ./bitnet-2b --device cuda:all --kv-memory 40000

Exit codes:
  0 drained, 1 could not start, or the engine or the pages at --listen failed")]
pub struct Arguments {
    #[command(flatten)]
    pub model: ModelOption,
    /// Name of the model's queue [default: the folder's or file's]
    #[arg(long, value_name = "NAME", value_parser = options::model_name)]
    pub name: Option<String>,
    /// Jobs held at once, for each device [default: the sequences that run at once, and a quarter more]
    #[arg(long, value_name = "N", value_parser = options::up_to::<131_072>)]
    pub slots: Option<NonZeroUsize>,
    /// Seconds a job stays this worker's without a sign of life
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0, value_parser = lease)]
    pub lease: f64,
    /// Seconds that running jobs get to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub drain: f64,
    /// Seconds a single step may take before the engine counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    pub step_limit: f64,
    /// With --fast: days that jobs and results are kept after they are over [default: 1]; a database
    /// has one setting for all, see `tritmill migrate --retention`
    #[arg(long, value_name = "DAYS", requires = "fast")]
    retention: Option<u32>,
    /// Where /healthz, /readyz and /metrics are served
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Print the worker's name and address as JSON when it is ready
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub run: RunOptions,
    #[command(flatten)]
    pub capacity: CapacityOptions,
    #[command(flatten)]
    servers: ModeOptions,
}

impl Arguments {
    /// Where Redis and Postgres are, if they are given; the fast mode has but one.
    pub fn servers_given(&self) -> anyhow::Result<Option<Given<'_>>> {
        let ModeOptions { servers, fast } = &self.servers;
        if *fast { servers.needed().map(Some) } else { servers.given() }
    }

    /// What the worker of a queue is told.
    pub fn config(&self, queue: QueueName, isa: String) -> WorkerConfig {
        let sequences = self.capacity.max_sequences.get();
        WorkerConfig {
            queue,
            owner: owner(),
            slots: self.slots.map_or(sequences + sequences.div_ceil(4), NonZeroUsize::get),
            lease: Duration::from_secs_f64(self.lease),
            drain: Duration::from_secs_f64(self.drain),
            step_limit: Duration::from_secs_f64(self.step_limit),
            mode: WorkerMode::Service,
            isa,
        }
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("expected seconds between 0 and 86400".to_owned()),
    }
}

/// A lease must outlast some round trips to the store.
fn lease(text: &str) -> Result<f64, String> {
    seconds(text)
        .ok()
        .filter(|value| *value >= LEASE_S_MIN)
        .ok_or_else(|| format!("expected seconds between {LEASE_S_MIN} and 86400"))
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    run_with(arguments, Map::new())
}

/// Runs the command; its JSON also says what else runs in the process.
pub fn run_with(arguments: Arguments, extra: Map<String, Value>) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.mode()?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let dispatcher = servers.dispatcher()?;
    // Before the model is loaded, which may take a while.
    let mut signals = {
        let _context = runtime.enter();
        Signals::listen().context("cannot listen for signals")?
    };
    let options = arguments.capacity.apply(arguments.run.engine());
    let started = runtime.block_on(async {
        tokio::select! {
            biased;
            () = signals.next() => None,
            started = start(servers, &arguments, options) => Some(started),
        }
    });
    let Some(started) = started else {
        eprintln!("stopped before it held anything");
        // What loads goes on until the process ends, in a moment.
        runtime.shutdown_background();
        return Ok(ExitCode::SUCCESS);
    };
    let (database, model, engines) = started?;
    let Engines { devices, numerics_class: class, isa } = engines;
    let name = arguments.name.clone().unwrap_or_else(|| model.name().to_owned());
    let queue = QueueName { model: name.clone(), format: options.format.to_string() };
    let retention = arguments.retention.map_or(FAST_RETENTION, |days| DAY * days.max(1));
    let keeper = runtime.block_on(Keeper::of(database, &dispatcher, &queue, retention))?;
    let metrics = Arc::new(Metrics::with_dispatcher(&dispatcher));
    let config = arguments.config(queue.clone(), isa);
    // Nobody listens: what is committed is counted by the metrics.
    let (committed, _) = mpsc::unbounded_channel();
    let worker = Worker {
        store: keeper.store(),
        events: Some(Arc::new(dispatcher.events())),
        dispatcher: Arc::new(dispatcher),
        operations: keeper.operations(),
        served: Arc::new(ServedModel::new(model, name, class.clone())),
        config,
        committed,
        metrics: Arc::clone(&metrics),
    };
    runtime.block_on(async {
        keeper.register_class(&queue, &class).await?;
        let Arguments { listen, json, .. } = arguments;
        Ready { worker, devices, listen, json, extra }.serve(signals).await
    })
}

/// A worker that can begin.
pub struct Ready {
    pub worker: Worker,
    pub devices: Vec<Device>,
    /// Where its pages are served.
    pub listen: SocketAddr,
    /// Say what is served where as JSON.
    pub json: bool,
    /// What else runs in the process.
    pub extra: Map<String, Value>,
}

impl Ready {
    /// Works until a signal says stop.
    pub async fn serve(self, signals: Signals) -> anyhow::Result<ExitCode> {
        let Self { worker, devices, listen, json: as_json, extra } = self;
        let (owner, queue) = (worker.config.owner.clone(), worker.config.queue.to_string());
        let (listener, address) = http::listen(listen).await.context("--listen")?;
        let (stop, stopped) = watch::channel(Stop::No);
        tokio::spawn(signals.stop(stop.clone()));
        let serving = tokio::spawn(http::serve(listener, Arc::clone(&worker.metrics)));
        if as_json {
            let mut said = json!({ "owner": owner, "queue": queue, "listen": address.to_string() });
            said.as_object_mut().expect("made above").extend(extra);
            output::line(said)?;
        }
        eprintln!("worker {owner} serves {queue}; health and metrics at http://{address}");
        while_served(worker.run(devices, stopped), serving, stop).await?;
        eprintln!("worker {owner} is drained");
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs a worker while its pages are served. One that nobody can ask how it is drains, and ends with
/// an error: whoever started it starts it again.
async fn while_served(
    work: impl Future<Output = Result<(), WorkerError>>,
    serving: JoinHandle<io::Result<()>>,
    stop: watch::Sender<Stop>,
) -> anyhow::Result<()> {
    let mut work = pin!(work);
    let ended = tokio::select! {
        done = &mut work => return Ok(done?),
        ended = serving => ended,
    };
    let why = match ended {
        Ok(Ok(())) => anyhow!("it stopped"),
        Ok(Err(error)) => error.into(),
        Err(panic) => panic.into(),
    };
    tracing::error!(error = %why, "health and metrics are served no more: draining");
    // It may just have ended.
    let _ = stop.send(Stop::Drain);
    work.await?;
    Err(why.context("health and metrics were served no more"))
}

/// Connects to the database, if there is one, then loads the model.
async fn start(
    servers: Mode<'_>,
    arguments: &Arguments,
    options: EngineOptions,
) -> anyhow::Result<(Option<Arc<PostgresStore>>, Arc<Model>, Engines)> {
    let database = servers.database().await?;
    let (model, engines) = open(arguments, options).await?;
    Ok((database, model, engines))
}

/// Loads the model on every device, on a thread of its own.
pub async fn open(
    arguments: &Arguments,
    options: EngineOptions,
) -> anyhow::Result<(Arc<Model>, Engines)> {
    let (model, devices) = (arguments.model.clone(), arguments.run.device.clone());
    let load = move || {
        let opened = model.open()?;
        let engines = Engines::load(&opened, &options, &devices)
            .with_context(|| format!("cannot load model {}", model.model))?;
        anyhow::Ok((opened, engines))
    };
    tokio::task::spawn_blocking(load).await.context("loading failed")?
}

/// A name for this incarnation of the process.
pub fn owner() -> String {
    let host = machine::host_name();
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    format!("{host}-{}-{:x}", std::process::id(), since.unwrap_or_default().as_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_without_its_pages_drains_and_ends_with_an_error() {
        let (stop, mut stopped) = watch::channel(Stop::No);
        let work = async {
            stopped.wait_for(|stop| *stop == Stop::Drain).await.expect("told to drain");
            Ok(())
        };
        let broken = tokio::spawn(async { Err(io::Error::other("no more files")) });
        let error = while_served(work, broken, stop).await.expect_err("it is no success");
        let said = format!("{error:#}");
        assert!(said.contains("health and metrics") && said.contains("no more files"), "{said}");
    }

    #[tokio::test]
    async fn a_worker_that_drains_by_itself_is_a_success() {
        let (stop, _stopped) = watch::channel(Stop::No);
        let serving = tokio::spawn(std::future::pending());
        while_served(async { Ok(()) }, serving, stop).await.expect("a success");
    }
}
