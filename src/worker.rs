//! `tritmill worker`: answers the jobs of one queue until it is told to stop.

use std::{net::SocketAddr, num::NonZeroUsize, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tritmill_engine::{
    Engine,
    files::Model,
    load::{self, EngineOptions},
};
use tritmill_queue::{Operations as _, QueueName, store::PostgresStore};
use tritmill_worker::{Mode, Served, Stop, Vitals, Worker, WorkerConfig, http, machine};

use crate::{
    options::{CapacityOptions, ModelOption, RunOptions},
    output,
    servers::{Given, Servers},
    signals::Signals,
};

/// Answer the jobs of a queue.
///
/// The queue is the model's name and the format. Any number of workers may serve one queue; they
/// must be of one numerics class (same weights, KV type, head), which the first one sets.
/// SIGTERM drains: nothing new is taken, what runs is finished or handed back.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill worker --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill worker --model ./bitnet-2b --format tl2 --slots 32 --listen 0.0.0.0:9100

Exit codes:
  0 drained, 1 could not start, or the engine failed")]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Name of the model's queue [default: the folder's or file's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Jobs held at once [default: the sequences that run at once, and a quarter more]
    #[arg(long, value_name = "N")]
    slots: Option<NonZeroUsize>,
    /// Seconds a job stays this worker's without a sign of life
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0, value_parser = seconds)]
    lease: f64,
    /// Seconds that running jobs get to finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    drain: f64,
    /// Seconds a single step may take before the engine counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    step_limit: f64,
    /// Where /healthz, /readyz and /metrics are served
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Print the worker's name and address as JSON when it is ready
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    capacity: CapacityOptions,
    #[command(flatten)]
    servers: Servers,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("expected seconds between 0 and 86400".to_owned()),
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.needed()?;
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
            started = start(servers, arguments.model, options) => Some(started),
        }
    });
    let Some(started) = started else {
        eprintln!("stopped before it held anything");
        // What loads goes on until the process ends, in a moment.
        runtime.shutdown_background();
        return Ok(ExitCode::SUCCESS);
    };
    let (store, model, engine) = started?;
    let name = arguments.name.unwrap_or_else(|| model.name().to_owned());
    let queue = QueueName { model: name.clone(), format: options.format.to_string() };
    let class = engine.backend().numerics_class().to_owned();
    let vitals = Arc::new(Vitals::default());
    let slots = options.max_sequences + options.max_sequences.div_ceil(4);
    let config = WorkerConfig {
        queue: queue.clone(),
        owner: owner(),
        slots: arguments.slots.map_or(slots, NonZeroUsize::get),
        lease: Duration::from_secs_f64(arguments.lease),
        drain: Duration::from_secs_f64(arguments.drain),
        step_limit: Duration::from_secs_f64(arguments.step_limit),
        mode: Mode::Service,
    };
    let owner = config.owner.clone();
    // Nobody listens: what is committed is counted by the vitals.
    let (committed, _) = mpsc::unbounded_channel();
    let worker = Worker {
        store: store.clone(),
        events: Some(dispatcher.events()),
        dispatcher,
        operations: Some(store.clone()),
        served: Arc::new(Served::new(model, name, class.clone())),
        config,
        committed,
        vitals: Arc::clone(&vitals),
    };
    runtime.block_on(async {
        store.register_class(&queue, &class).await?;
        let (listener, address) = http::listen(arguments.listen).await.context("--listen")?;
        let (stop, stopped) = watch::channel(Stop::No);
        tokio::spawn(signals.stop(stop));
        tokio::spawn(http::serve(listener, vitals));
        if arguments.json {
            let address = address.to_string();
            output::line(json!({"owner": owner, "queue": queue.to_string(), "listen": address}))?;
        }
        eprintln!("worker {owner} serves {queue}; health and metrics at http://{address}");
        worker.run(engine, stopped).await?;
        eprintln!("worker {owner} is drained");
        Ok(ExitCode::SUCCESS)
    })
}

/// Connects to the database, then loads the model.
async fn start(
    servers: Given<'_>,
    model: ModelOption,
    options: EngineOptions,
) -> anyhow::Result<(Arc<PostgresStore>, Arc<Model>, Engine)> {
    let store = servers.store().await?;
    let load = move || {
        let opened = model.open()?;
        let engine = load::engine(&opened, &options)
            .with_context(|| format!("cannot load model {}", model.model))?;
        anyhow::Ok((opened, engine))
    };
    let (model, engine) = tokio::task::spawn_blocking(load).await.context("loading failed")??;
    Ok((store, model, engine))
}

/// A name for this incarnation of the process.
fn owner() -> String {
    let host = machine::host_name();
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    format!("{host}-{}-{:x}", std::process::id(), since.unwrap_or_default().as_millis())
}
