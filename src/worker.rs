//! `tritmill worker`: answers the jobs of its models' queues until it is stopped.

use std::{
    io, net::SocketAddr, num::NonZeroUsize, pin::pin, process::ExitCode, sync::Arc, time::Duration,
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use serde_json::{Map, Value, json};
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
};
use tritmill_queue::{QueueName, store::NumericsClasses as _};
use tritmill_worker::{
    Metrics, Mode, Pages, Pool, PoolError, PoolUnit, ServedModel, Stop, Worker, WorkerConfig, http,
    machine,
};

use crate::{
    demo_model, descriptors,
    options::{self, CapacityOptions, MemoryOption, NamedModel, RunOptions},
    output,
    servers::{Servers, check, refusal},
    signals::Signals,
    units::{self, Choice, Unit, Units},
};

/// Shortest lease.
const LEASE_S_MIN: f64 = 0.5;
/// Said at the end of a process that had no model.
const STOPPED_EARLY: &str = "stopped before it claimed any jobs";

/// Answer the jobs of a queue, or of several.
///
/// The queue is the model's name and the format. With several models, each has its queue. They share the devices,
/// which give each a step in turn, and --memory: what does not fit is loaded when its queue has jobs, in the place
/// of a model without jobs, or of one that had its turn of a minute. Any number of workers may serve one queue. They must
/// have the same numerics class (weights, KV type, head, CPU or CUDA), which the first worker sets, or one
/// that an operator has also allowed (`tritmill queue allow-class`). With several GPUs, each holds the
/// weights and runs its own jobs. If one is lost, all jobs are handed back and the worker ends; restarted
/// with cuda:all, it uses the remaining ones. SIGTERM drains the worker: it takes no new jobs and finishes
/// the running jobs or hands them back.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  tritmill worker --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill worker --model ./bitnet-2b --format tl2 --slots 32 --listen 0.0.0.0:9100
  tritmill worker --model bitnet=hf:microsoft/bitnet-b1.58-2B-4T
  tritmill worker --model ./bitnet-2b --device cuda:0,cuda:1
  tritmill worker --model ./bitnet-2b --device cuda:all --kv-memory 40000
  tritmill worker --model small=./bitnet-0.7b --model large=./bitnet-3b.gguf --memory 3G

Exit codes:
  0 drained, 1 could not start, or the engine or the pages at --listen failed")]
pub struct Arguments {
    /// Model: a Hugging Face folder, a .gguf file, hf:ORG/NAME[@REVISION][:FILE] on the Hugging Face Hub, which is pulled
    /// first, or `demo`, which is built in. May be given several times; NAME is the name of the model's queue
    #[arg(long, value_name = "[NAME=]PATH", default_value = demo_model::NAME)]
    #[arg(value_parser = options::named_model)]
    pub model: Vec<NamedModel>,
    /// Name of the only model's queue [default: the folder's, file's or repository's]
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
    pub memory: MemoryOption,
    #[command(flatten)]
    pub servers: Servers,
}

impl Arguments {
    /// Returns the configuration of the worker of a queue.
    fn config(&self, queue: QueueName, owner: String, isa: String) -> WorkerConfig {
        let sequences = self.capacity.max_sequences.get();
        WorkerConfig {
            queue,
            owner,
            slots: self.slots.map_or(sequences + sequences.div_ceil(4), NonZeroUsize::get),
            lease: Duration::from_secs_f64(self.lease),
            drain: Duration::from_secs_f64(self.drain),
            step_limit: Duration::from_secs_f64(self.step_limit),
            mode: Mode::Service,
            isa,
        }
    }

    /// Makes the pool of the models, each with the worker that `worker` returns.
    pub fn pool(
        &self,
        Units { units, memory_bytes }: Units,
        worker: impl Fn(WorkerConfig, Arc<ServedModel>) -> Worker,
    ) -> Pool {
        let (process, is_alone) = (owner(), units.len() == 1);
        let unit = |(index, unit): (usize, Unit)| {
            let Unit { queue, served, kind, isa, memory_bytes, load } = unit;
            let owner = if is_alone { process.clone() } else { format!("{process}-{index}") };
            let worker = worker(self.config(queue, owner, isa), served);
            PoolUnit { worker, kind, memory_bytes, load }
        };
        Pool::new(units.into_iter().enumerate().map(unit).collect(), memory_bytes)
    }
}

/// Parses a time.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("expected seconds between 0 and 86400".to_owned()),
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
    let servers = arguments.servers.needed()?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    // Before the model is loaded, which may take a while.
    let mut signals = {
        let _context = runtime.enter();
        Signals::listen().context("cannot listen for signals")?
    };
    // Connects to the servers, then opens the models.
    let starting = async {
        let dispatcher = servers.dispatcher().await?;
        let store = servers.store().await?;
        let units = open(&arguments).await?;
        for Unit { queue, .. } in &units.units {
            check(dispatcher.check_queue(queue)).await?;
        }
        anyhow::Ok((store, dispatcher, units))
    };
    let started = runtime.block_on(async {
        tokio::select! {
            biased;
            () = signals.next() => None,
            started = starting => Some(started),
        }
    });
    let Some(started) = started else {
        note!("{STOPPED_EARLY}");
        // The thread that opens models ends with the process.
        runtime.shutdown_background();
        return Ok(ExitCode::SUCCESS);
    };
    let (store, dispatcher, units) = started?;
    let ended = runtime.block_on(async {
        for Unit { queue, served, .. } in &units.units {
            let registered = store.register_class(queue, served.numerics_class()).await;
            registered.map_err(|error| refusal(error, ""))?;
        }
        let pool = arguments.pool(units, |config, served| Worker {
            store: store.clone(),
            events: Some(Arc::new(dispatcher.events())),
            dispatcher: dispatcher.clone(),
            operations: Some(store.clone()),
            served,
            config,
            committed: None,
            metrics: Arc::new(Metrics::from_dispatcher(&dispatcher)),
        });
        let pages = pool.pages().with_servers(&dispatcher, &store);
        let blocks = arguments.capacity.tiers.shared();
        let Arguments { listen, json, .. } = arguments;
        Ready { pool, pages, blocks, listen, json, extra }.serve(signals).await
    });
    // A thread may still turn a long prompt into tokens, or load a model; it ends with the process.
    runtime.shutdown_background();
    ended
}

/// A pool that is ready to start.
pub struct Ready {
    pub pool: Pool,
    /// Its health and metrics pages.
    pub pages: Pages,
    /// KV blocks that other workers may read there.
    pub blocks: Option<http::SharedBlocks>,
    /// Address of the pages.
    pub listen: SocketAddr,
    /// Whether to print name and address as JSON.
    pub json: bool,
    /// Fields to add to the JSON.
    pub extra: Map<String, Value>,
}

impl Ready {
    /// Runs until a signal arrives.
    pub async fn serve(self, signals: Signals) -> anyhow::Result<ExitCode> {
        let Self { pool, pages, blocks, listen, json: as_json, extra } = self;
        let workers = pool.workers();
        let (stop, stopped) = watch::channel(Stop::No);
        tokio::spawn(signals.stop(stop.clone()));
        let (loaded, first) = oneshot::channel();
        let mut work = Box::pin(pool.run(stopped, loaded));
        tokio::select! {
            biased;
            ended = &mut work => {
                ended?;
                note!("{STOPPED_EARLY}");
                return Ok(ExitCode::SUCCESS);
            }
            Ok(()) = first => {}
        }
        let (listener, address) =
            http::listen(listen).await.with_context(|| format!("--listen {listen}"))?;
        let connections = descriptors::room_for(http::CONNECTIONS_MAX);
        let serving = tokio::spawn(http::serve(listener, Arc::new(pages), blocks, connections));
        announce(&workers, address, as_json.then_some(extra))?;
        run_while_served(work, serving, stop).await?;
        for (owner, _) in &workers {
            note!("worker {owner} is drained");
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Says which workers run and where their pages are; with `extra`, as JSON with these fields.
fn announce(
    workers: &[(String, QueueName)],
    address: SocketAddr,
    extra: Option<Map<String, Value>>,
) -> anyhow::Result<()> {
    if let (Some(extra), [(owner, queue), others @ ..]) = (extra, workers) {
        let (queue, address) = (queue.to_string(), address.to_string());
        let mut ready = json!({ "owner": owner, "queue": queue, "listen": address });
        let fields = ready.as_object_mut().expect("made above");
        if !others.is_empty() {
            let worker = |(owner, queue): &(String, QueueName)| json!({ "owner": owner, "queue": queue.to_string() });
            fields.insert("workers".to_owned(), workers.iter().map(worker).collect());
        }
        fields.extend(extra);
        output::line(ready)?;
    }
    for (owner, queue) in workers {
        note!("worker {owner} serves {queue}; health and metrics at http://{address}");
    }
    Ok(())
}

/// Runs a pool while its pages are served. If the pages fail, the pool drains and ends with an error, so that its
/// supervisor restarts it.
async fn run_while_served(
    work: impl Future<Output = Result<(), PoolError>>,
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
    // Fails if the pool has ended.
    let _ = stop.send(Stop::Drain);
    work.await?;
    Err(error.context("health and metrics failed"))
}

/// Opens the models on a thread of its own: their files are read once.
pub async fn open(arguments: &Arguments) -> anyhow::Result<Units> {
    let arguments = arguments.clone();
    let open = move || {
        let Arguments { model, name, run, capacity, memory, .. } = &arguments;
        units::open(&Choice { models: model, name: name.as_ref(), run, capacity, memory })
    };
    tokio::task::spawn_blocking(open).await.context("opening failed")?
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
