//! `tritmill worker`: answers the jobs of one queue until it is stopped.

use std::{
    io, net::SocketAddr, num::NonZeroUsize, pin::pin, process::ExitCode, sync::Arc, time::Duration,
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use serde_json::{Map, Value, json};
use tokio::{sync::watch, task::JoinHandle};
use tritmill_engine::{files::Model, load::EngineOptions};
use tritmill_queue::{QueueName, store::FAST_RETENTION};
use tritmill_worker::{
    Device, Metrics, Mode, ServedModel, Stop, Worker, WorkerConfig, WorkerError, http, machine,
};

use crate::{
    descriptors,
    engines::Engines,
    options::{self, CapacityOptions, ModelOption, RunOptions},
    output,
    servers::{Given, Keeper, ModeOptions},
    signals::Signals,
};

const DAY: Duration = Duration::from_secs(86_400);
/// Shortest lease.
const LEASE_S_MIN: f64 = 0.5;
/// The least retention of the fast mode: longer than a client may take to read a result.
const RETENTION_DAYS_MIN: f64 = 1.0 / 720.0;

/// Answer the jobs of a queue.
///
/// The queue is the model's name and the format. Any number of workers may serve one queue. They must
/// have the same numerics class (weights, KV type, head, CPU or CUDA), which the first worker sets, or one
/// that an operator has also allowed (`tritmill queue allow-class`). With several GPUs, each holds the
/// weights and runs its own jobs. If one is lost, all jobs are handed back and the worker ends; restarted
/// with cuda:all, it uses the remaining ones. SIGTERM drains the worker: it takes no new jobs and finishes
/// the running jobs or hands them back.
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
    /// Jobs held at once, per device [default: --max-sequences and a quarter more]
    #[arg(long, value_name = "N", value_parser = options::up_to::<131_072>)]
    pub slots: Option<NonZeroUsize>,
    /// Seconds until the jobs of a silent worker are given to others
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0, value_parser = lease)]
    pub lease: f64,
    /// Seconds for running jobs to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub drain: f64,
    /// Seconds a single step may take before the engine counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    pub step_limit: f64,
    /// With --fast: days to keep finished jobs and results, 0.05 for example [default: 1]; for a database
    /// see `tritmill migrate --retention`
    #[arg(long, value_name = "DAYS", requires = "fast", value_parser = days)]
    retention: Option<f64>,
    /// Address to serve /healthz, /readyz and /metrics at
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Print name and address of the worker as JSON when it is ready
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
    /// Returns the URLs of Redis and Postgres, if given; the fast mode has only one.
    pub fn servers_given(&self) -> anyhow::Result<Option<Given<'_>>> {
        let ModeOptions { servers, fast } = &self.servers;
        if *fast { servers.needed().map(Some) } else { servers.given() }
    }

    /// Returns the configuration of the worker of a queue.
    pub fn config(&self, queue: QueueName, isa: String) -> WorkerConfig {
        let sequences = self.capacity.max_sequences.get();
        WorkerConfig {
            queue,
            owner: owner(),
            slots: self.slots.map_or(sequences + sequences.div_ceil(4), NonZeroUsize::get),
            lease: Duration::from_secs_f64(self.lease),
            drain: Duration::from_secs_f64(self.drain),
            step_limit: Duration::from_secs_f64(self.step_limit),
            mode: Mode::Service,
            isa,
        }
    }
}

/// Parses a time.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("expected seconds between 0 and 86400".to_owned()),
    }
}

/// Parses a retention.
fn days(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (RETENTION_DAYS_MIN..=36_500.0).contains(&value) => Ok(value),
        _ => Err("expected days from 0.0014 (two minutes) to 36500".to_owned()),
    }
}

/// Parses a lease, which must outlast some round trips to the store.
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

/// Runs the command; `extra` is added to its JSON.
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
    // Connects to the database, if there is one, then loads the model.
    let starting = async {
        let database = servers.database().await?;
        let (model, engines) = open(&arguments, options).await?;
        anyhow::Ok((database, model, engines))
    };
    let started = runtime.block_on(async {
        tokio::select! {
            biased;
            () = signals.next() => None,
            started = starting => Some(started),
        }
    });
    let Some(started) = started else {
        eprintln!("stopped before it claimed any jobs");
        // The loading thread ends with the process.
        runtime.shutdown_background();
        return Ok(ExitCode::SUCCESS);
    };
    let (database, model, engines) = started?;
    let Engines { devices, numerics_class: class, isa } = engines;
    let name = arguments.name.clone().unwrap_or_else(|| model.name().to_owned());
    let queue = QueueName { model: name.clone(), format: options.format.to_string() };
    let retention = arguments.retention.map_or(FAST_RETENTION, |days| DAY.mul_f64(days));
    let metrics = Arc::new(Metrics::with_servers(&dispatcher, database.as_deref()));
    let keeper = runtime.block_on(Keeper::of(database, &dispatcher, &queue, retention))?;
    let config = arguments.config(queue.clone(), isa);
    let worker = Worker {
        store: keeper.store(),
        events: Some(Arc::new(dispatcher.events())),
        dispatcher: Arc::new(dispatcher),
        operations: keeper.operations(),
        served: Arc::new(ServedModel::new(model, name, class.clone())),
        config,
        committed: None,
        metrics: Arc::clone(&metrics),
    };
    let ended = runtime.block_on(async {
        keeper.register_class(&queue, &class).await?;
        let Arguments { listen, json, .. } = arguments;
        Ready { worker, devices, listen, json, extra }.serve(signals).await
    });
    // A thread may still turn a long prompt into tokens; it ends with the process.
    runtime.shutdown_background();
    ended
}

/// A worker that is ready to start.
pub struct Ready {
    pub worker: Worker,
    pub devices: Vec<Device>,
    /// Address of its health and metrics pages.
    pub listen: SocketAddr,
    /// Whether to print name and address as JSON.
    pub json: bool,
    /// Fields to add to the JSON.
    pub extra: Map<String, Value>,
}

impl Ready {
    /// Runs until a signal arrives.
    pub async fn serve(self, signals: Signals) -> anyhow::Result<ExitCode> {
        let Self { worker, devices, listen, json: as_json, extra } = self;
        let (owner, queue) = (worker.config.owner.clone(), worker.config.queue.to_string());
        let (listener, address) = http::listen(listen).await.context("--listen")?;
        let (stop, stopped) = watch::channel(Stop::No);
        tokio::spawn(signals.stop(stop.clone()));
        let connections = descriptors::room_for(http::CONNECTIONS_MAX);
        let serving = http::serve(listener, Arc::clone(&worker.metrics), connections);
        let serving = tokio::spawn(serving);
        if as_json {
            let mut ready =
                json!({ "owner": owner, "queue": queue, "listen": address.to_string() });
            ready.as_object_mut().expect("made above").extend(extra);
            output::line(ready)?;
        }
        eprintln!("worker {owner} serves {queue}; health and metrics at http://{address}");
        run_while_served(worker.run(devices, stopped), serving, stop).await?;
        eprintln!("worker {owner} is drained");
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs a worker while its pages are served. If the pages fail, the worker drains and ends with an error,
/// so that its supervisor restarts it.
async fn run_while_served(
    work: impl Future<Output = Result<(), WorkerError>>,
    serving: JoinHandle<io::Result<()>>,
    stop: watch::Sender<Stop>,
) -> anyhow::Result<()> {
    let mut work = pin!(work);
    let ended = tokio::select! {
        done = &mut work => return Ok(done?),
        ended = serving => ended,
    };
    let error = match ended {
        Ok(Ok(())) => anyhow!("it stopped"),
        Ok(Err(error)) => error.into(),
        Err(panic) => panic.into(),
    };
    tracing::error!(%error, "health and metrics are not served any more: draining");
    // Fails if the worker has ended.
    let _ = stop.send(Stop::Drain);
    work.await?;
    Err(error.context("health and metrics failed"))
}

/// Loads the model on every device, on a thread of its own.
pub async fn open(
    arguments: &Arguments,
    options: EngineOptions,
) -> anyhow::Result<(Arc<Model>, Engines)> {
    let (model, devices) = (arguments.model.clone(), arguments.run.device.clone());
    let disk = arguments.capacity.disk()?;
    let load = move || {
        let opened = model.open()?;
        let engines = Engines::load(&opened, &options, &devices, disk.as_ref())
            .with_context(|| format!("cannot load model {}", model.model))?;
        anyhow::Ok((opened, engines))
    };
    tokio::task::spawn_blocking(load).await.context("loading failed")?
}

/// Returns a name for this incarnation of the process.
pub fn owner() -> String {
    let host = machine::host_name();
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    format!("{host}-{}-{:x}", std::process::id(), since.unwrap_or_default().as_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn worker_drains_and_fails_if_its_pages_fail() {
        let (stop, mut stopped) = watch::channel(Stop::No);
        let work = async {
            stopped.wait_for(|stop| *stop == Stop::Drain).await.expect("told to drain");
            Ok(())
        };
        let broken = tokio::spawn(async { Err(io::Error::other("no more files")) });
        let error = run_while_served(work, broken, stop).await.expect_err("the pages failed");
        let text = format!("{error:#}");
        assert!(text.contains("health and metrics") && text.contains("no more files"), "{text}");
    }

    #[tokio::test]
    async fn drained_worker_succeeds() {
        let (stop, _stopped) = watch::channel(Stop::No);
        let serving = tokio::spawn(std::future::pending());
        run_while_served(async { Ok(()) }, serving, stop).await.expect("a success");
    }
}
