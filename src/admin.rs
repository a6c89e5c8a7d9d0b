//! `tritmill admin`: the HTTP API and the dashboard.

use std::{net::SocketAddr, num::NonZeroUsize, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tritmill_admin::{
    App, CONNECTIONS_MAX, Driver, Limits, Models, Secret, Tls, Watch, Webhooks, router, serve,
};
use tritmill_client::{Client, http::AddressPolicy};

use crate::{
    block_on, options, output,
    servers::{Given, Servers},
    signals::Signals,
    worker,
};

/// Connections to Postgres.
const CONNECTIONS: u32 = 16;
const MIB: u64 = 1 << 20;
/// Open files besides the connections of callers.
const OTHER_FILES: u64 = 256;

/// Serve the OpenAI-compatible API (chat completions, files, batches) and the dashboard.
///
/// Any number of admins may run. Callers need a key. The first key, with the role operate, is printed
/// when the first admin of a database starts; `tritmill keys create` creates more.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill admin --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill admin --listen 0.0.0.0:8080 --max-batch-lines 1000000 --max-file-mib 2000
  curl http://127.0.0.1:8080/v1/models -H 'Authorization: Bearer tm-…'

Exit codes:
  0 stopped, 1 could not start")]
pub struct Arguments {
    /// Address to serve the API at
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    #[arg(help_heading = "HTTP API")]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsOptions,
    #[command(flatten)]
    limits: LimitOptions,
    /// Print the address, and the first key if it was created now, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    servers: Servers,
}

/// TLS settings.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP API")]
pub struct TlsOptions {
    /// Serve HTTPS with this certificate: a PEM file, which may contain the chain; read at start
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl TlsOptions {
    /// Reads the certificate, if one is given.
    pub fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let tls = Tls::from_files(cert, key);
        let tls = tls.with_context(|| format!("cannot serve TLS with {}", cert.display()))?;
        Ok(Some(tls))
    }
}

/// Limits of requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP API")]
pub struct LimitOptions {
    /// Maximum size of an uploaded file, in MiB
    #[arg(long, value_name = "MIB", default_value = "200", value_parser = options::up_to::<1_048_576>)]
    max_file_mib: NonZeroUsize,
    /// Maximum number of lines of a batch
    #[arg(long, value_name = "N", default_value = "50000", value_parser = options::up_to::<100_000_000>)]
    max_batch_lines: NonZeroUsize,
    /// Maximum number of unfinished batches of a tenant; more are refused with status 429
    #[arg(long, value_name = "N", default_value = "1000", value_parser = options::up_to::<1_000_000>)]
    max_open_batches: NonZeroUsize,
    /// Maximum number of batches of a tenant that are in progress; more wait in state validating
    #[arg(long, value_name = "N", default_value = "100", value_parser = options::up_to::<1_000_000>)]
    max_active_batches: NonZeroUsize,
    /// Allow webhooks to call this machine and private networks
    #[arg(long)]
    webhook_allow_private: bool,
}

impl LimitOptions {
    /// Returns the limits of a service.
    pub fn limits(&self) -> Limits {
        Limits {
            file_bytes_max: self.max_file_mib.get() as u64 * MIB,
            batch_lines_max: self.max_batch_lines.get() as u64,
            open_batches_max: self.max_open_batches.get() as u32,
            active_batches_max: self.max_active_batches.get() as u32,
            webhook_addresses: match self.webhook_allow_private {
                true => AddressPolicy::Any,
                false => AddressPolicy::PublicOnly,
            },
            ..Limits::default()
        }
    }
}

/// A running service.
pub struct Running {
    /// The address it listens at.
    pub address: SocketAddr,
    /// `http` or `https`.
    scheme: &'static str,
    /// The first key, if it was created now.
    pub first_key: Option<Secret>,
    stop: watch::Sender<bool>,
    tasks: [JoinHandle<()>; 4],
}

impl Running {
    /// Prints the URL, and the first key if it was created now.
    pub fn announce(&self) -> std::io::Result<()> {
        if let Some(secret) = &self.first_key {
            eprintln!("the first key, with the role operate; it is not shown again:");
            output::line(secret.reveal())?;
        }
        let Self { scheme, address, .. } = self;
        eprintln!("admin serves {scheme}://{address}/v1, and a dashboard at {scheme}://{address}/");
        Ok(())
    }

    /// Returns the first key, if it was created now.
    pub fn first_key(&self) -> Option<&str> {
        self.first_key.as_ref().map(Secret::reveal)
    }

    /// Lets requests finish, releases batches, and ends.
    pub async fn stop(self) {
        // The tasks may have ended.
        let _ = self.stop.send(true);
        for task in self.tasks {
            let _ = task.await;
        }
    }
}

/// Returns the service over Postgres and Redis.
pub async fn with_servers(servers: Given<'_>, limits: Limits) -> anyhow::Result<App> {
    let store = servers.store_with(CONNECTIONS).await?;
    let client = Client::from_servers(store.clone(), servers.dispatcher()?);
    let models = Models::registered(store.clone());
    Ok(App::new(client, store, models, limits))
}

/// Raises the limit of open files to the connections of the service, as far as the system allows.
fn raise_limit() {
    let wanted = CONNECTIONS_MAX as u64 + OTHER_FILES;
    match rlimit::increase_nofile_limit(wanted) {
        Ok(given) if given < wanted => tracing::warn!(
            "this process may open {given} files, so fewer than {CONNECTIONS_MAX} \
             connections: raise the hard limit (ulimit -Hn) to {wanted}"
        ),
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open files"),
    }
}

/// Starts a service and creates its first key, if it has none.
pub async fn start(app: App, listen: SocketAddr, tls: Option<Tls>) -> anyhow::Result<Running> {
    raise_limit();
    let listener = TcpListener::bind(listen).await;
    let listener = listener.with_context(|| format!("cannot listen at {listen}"))?;
    let address = listener.local_addr().context("the listener has no address")?;
    let first_key = app.first_key().await.context("cannot create the first key")?;
    let (stop, stopped) = watch::channel(false);
    let mut stop_server = stopped.clone();
    let stopping = app.clone();
    let until = async move {
        // A dropped sender is a stop, too.
        let _ = stop_server.wait_for(|stop| *stop).await;
        stopping.stop();
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let driver = Driver::new(app.clone(), worker::owner(), stopped.clone());
    let watch = Watch::new(app.clone());
    let webhooks = Webhooks::new(app.clone(), worker::owner()).context("cannot call webhooks")?;
    let tasks = [
        tokio::spawn(serve(listener, tls, router(app), until)),
        tokio::spawn(driver.run()),
        tokio::spawn(webhooks.run(stopped.clone())),
        tokio::spawn(watch.run(stopped)),
    ];
    Ok(Running { address, scheme, first_key, stop, tasks })
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.needed()?;
    block_on(async {
        let mut signals = Signals::listen().context("cannot listen for signals")?;
        let tls = arguments.tls.tls()?;
        let app = with_servers(servers, arguments.limits.limits()).await?;
        let running = start(app, arguments.listen, tls).await?;
        if arguments.json {
            let listen = running.address.to_string();
            output::line(json!({ "listen": listen, "first_key": running.first_key() }))?;
        } else {
            running.announce()?;
        }
        signals.next().await;
        eprintln!("stopping: running requests finish first; signal again to stop at once");
        tokio::select! {
            () = running.stop() => {}
            () = signals.next() => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}
