//! `tritmill standalone`: API and worker in one process, with Redis and Postgres or without.

use std::{
    fs::{File, TryLockError},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;
use tritmill_admin::{App, Models, store::release_batches};
use tritmill_client::Client;
use tritmill_queue::{
    QueueName,
    dispatch::MemoryDispatcher,
    events::MemoryEvents,
    store::{NumericsClasses as _, SqliteStore},
};
use tritmill_worker::Worker;

use crate::{
    admin::{self, FIRST_KEY_FILE, FirstKeyOption, LimitOptions, Running, TlsOptions},
    migrate,
    servers::{ServerUrls, refusal},
    sign_on::SignOnOptions,
    signals::Signals,
    units::Unit,
    worker::{self, Ready},
};

/// Maximum entries in the dispatcher; the store has the others.
const DISPATCH_LIMIT: usize = 1 << 16;

/// Run `admin` and `worker` in one process: serve the OpenAI-compatible API and answer its requests.
///
/// With Redis and Postgres, it migrates the database, and more workers and admins may join at any time.
/// Without them, it keeps jobs, batches and keys in a file that no other process may use.
#[derive(Debug, Args)]
#[group(id = "standalone")]
#[command(after_help = "\
Examples:
  tritmill standalone                         # no server: everything in ./tritmill.sqlite
  tritmill standalone --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill standalone --model ./bitnet-2b --device cuda:all
  tritmill standalone --model small=./bitnet-0.7b --model large=./bitnet-3b.gguf --memory 3G
  tritmill standalone --model ./bitnet-2b --format tl2 --api 0.0.0.0:8080 --listen 0.0.0.0:9100

Exit codes:
  0 drained, 1 could not start, or the engine failed")]
pub struct Arguments {
    /// Address to serve the API at
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    #[arg(help_heading = "HTTP API")]
    api: SocketAddr,
    #[command(flatten)]
    tls: TlsOptions,
    #[command(flatten)]
    limits: LimitOptions,
    #[command(flatten)]
    sign_on: SignOnOptions,
    #[command(flatten)]
    first_key: FirstKeyOption,
    /// Without servers: file for jobs, batches and keys
    #[arg(long, value_name = "FILE", default_value = "tritmill.sqlite")]
    #[arg(help_heading = "Servers")]
    store: PathBuf,
    #[command(flatten)]
    worker: worker::Arguments,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let runtime = Runtime::new().context("cannot start the async runtime")?;
    match arguments.worker.servers.given()? {
        None => runtime.block_on(embedded(arguments)),
        Some(servers) => {
            let running = runtime.block_on(with_servers(&runtime, &arguments, servers))?;
            let extra = api_fields(&running, arguments.worker.json)?;
            let ended = worker::run_with(arguments.worker, extra);
            runtime.block_on(running.stop());
            ended
        }
    }
}

/// Migrates the database and starts the API.
async fn with_servers(
    runtime: &Runtime,
    arguments: &Arguments,
    servers: ServerUrls<'_>,
) -> anyhow::Result<Running> {
    let tls = arguments.tls.tls()?;
    let url = servers.database_url().to_owned();
    // `migrate::up` creates its own runtime.
    let migrated = runtime.spawn_blocking(move || migrate::up(&url, None));
    migrated.await.context("migrating failed")??;
    let bounds = arguments.limits.bounds();
    let settings = arguments.limits.settings(&bounds);
    let sign_on = arguments.sign_on.sign_on(&settings.site)?;
    let mailer = arguments.limits.mail.mailer()?;
    let app = admin::with_servers(servers, settings).await?;
    let app = app.with_sign_on(sign_on).with_mailer(mailer);
    let app = app.with_files(arguments.limits.files().await?);
    arguments.limits.tiers.set_prices(&app).await?;
    let key_file = arguments.first_key.path(FIRST_KEY_FILE.as_ref());
    admin::start(app, arguments.api, tls, bounds, key_file).await
}

/// Returns the fields of the API for the worker's JSON; without JSON, prints them instead.
fn api_fields(running: &Running, as_json: bool) -> anyhow::Result<Map<String, Value>> {
    if !as_json {
        running.announce()?;
        return Ok(Map::new());
    }
    Ok(Map::from_iter([
        ("api".to_owned(), json!(running.address.to_string())),
        ("first_key".to_owned(), json!(running.first_key())),
    ]))
}

/// Runs everything in this process, over one file.
async fn embedded(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let tls = arguments.tls.tls()?;
    let mailer = arguments.limits.mail.mailer()?;
    let _lock = lock(&arguments.store)?;
    let opened = SqliteStore::open(&arguments.store).await;
    let store = opened.with_context(|| format!("cannot use {}", arguments.store.display()))?;
    // This process has the lock, so earlier claimants are gone.
    let taken_over = async {
        store.hand_back_all().await?;
        release_batches(&store).await
    };
    taken_over.await.context("cannot take over the store")?;
    let opened = tokio::select! {
        biased;
        () = signals.next() => return Ok(ExitCode::SUCCESS),
        opened = worker::open(&arguments.worker) => opened,
    };
    let units = opened?;
    let store = Arc::new(store);
    let place = format!(" --store {}", arguments.store.display());
    for Unit { queue, served, .. } in &units.units {
        let registered = store.register_class(queue, served.numerics_class()).await;
        registered.map_err(|error| refusal(error, &place))?;
    }
    let queues: Vec<QueueName> = units.units.iter().map(|unit| unit.queue.clone()).collect();
    let dispatcher = Arc::new(MemoryDispatcher::new(DISPATCH_LIMIT));
    let events = Arc::new(MemoryEvents::default());
    let client = Client::embedded(store.clone(), dispatcher.clone(), events.clone());
    let client = client.limited_by(store.clone());
    let registered = store.registered_queues().await.context("cannot read the store")?;
    // The file may have other queues, without a worker.
    let served = registered.into_iter().filter(|known| queues.contains(&known.queue));
    let models = Models::fixed(served.collect());
    let bounds = arguments.limits.bounds();
    let settings = arguments.limits.settings(&bounds);
    let sign_on = arguments.sign_on.sign_on(&settings.site)?;
    let app = App::new(client, store.clone(), models, settings).with_sign_on(sign_on);
    let app = app.with_mailer(mailer).with_files(arguments.limits.files().await?);
    arguments.limits.tiers.set_prices(&app).await?;
    let key_file = arguments.first_key.path(&beside(&arguments.store, "-first-key"));
    let running = admin::start(app, arguments.api, tls, bounds, key_file).await?;
    let pool = arguments.worker.pool(units, |config, served| Worker {
        store: store.clone(),
        dispatcher: dispatcher.clone(),
        operations: Some(store.clone()),
        events: Some(events.clone()),
        served,
        config,
        committed: None,
        metrics: Arc::default(),
    });
    let pages = pool.pages();
    let blocks = arguments.worker.capacity.tiers.shared();
    let worker::Arguments { listen, json, .. } = arguments.worker;
    let extra = api_fields(&running, json)?;
    let ended = Ready { pool, pages, blocks, listen, json, extra }.serve(signals).await;
    running.stop().await;
    store.close().await;
    ended
}

/// Returns the path of a file beside the store.
fn beside(store: &Path, suffix: &str) -> PathBuf {
    let mut path = store.as_os_str().to_owned();
    path.push(suffix);
    PathBuf::from(path)
}

/// Locks the store for this process.
fn lock(store: &Path) -> anyhow::Result<File> {
    let path = beside(store, "-lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("cannot write {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            bail!(
                "{} is in use by another process: stop that, or choose another --store",
                store.display()
            )
        }
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}
