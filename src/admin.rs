//! `tritmill admin`: the HTTP API and the dashboard.

use std::{
    net::SocketAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tritmill_admin::store::batches::parse_window;
use tritmill_admin::{
    App, Bounds, CallerLimits, CrossOrigin, Driver, Limits, Models, Network, Notifier, Proxies,
    Scheduler, Secret, Settings, Site, Tls, Watch, WebOrigin, router,
};
use tritmill_client::{Client, http::AddressPolicy};
use tritmill_data::{Address, AllowedAddresses, AllowedPrefix, DataError, objects::Objects};
use tritmill_queue::{
    billing::{Price, parse_price},
    job::UnknownWord,
    store::charges::PriceOf,
};
use tritmill_worker::machine::Machine;

use crate::{
    block_on, byte_sizes, descriptors,
    mail::MailOptions,
    options, output,
    servers::{ServerUrls, Servers},
    sign_on::SignOnOptions,
    signals::Signals,
    worker,
};

/// Connections to Postgres.
const CONNECTIONS: u32 = 16;
const MIB: u64 = 1 << 20;
/// Least budget of request bodies: some of the largest.
const REQUEST_BYTES_MIN: u64 = 32 * MIB;

/// Serve the OpenAI-compatible API (chat completions, files, batches) and the dashboard.
///
/// Any number of admins may run. Callers need a key. The first key, with the role operate, is printed
/// when the first admin of a database starts; `tritmill keys create` creates more.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill admin --redis redis://localhost --database postgres://tritmill@localhost/tritmill
  tritmill admin --listen 0.0.0.0:8080 --max-batch-lines 1000000 --max-file-mib 2000
  tritmill admin --mail-host smtp.example.com --mail-user me --mail-password-file pw --mail-from me@example.com --mail-to ops@example.com
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
    #[command(flatten)]
    sign_on: SignOnOptions,
    #[command(flatten)]
    first_key: FirstKeyOption,
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
        let (cert, key) = match (&self.tls_cert, &self.tls_key) {
            (None, None) => return Ok(None),
            (Some(cert), Some(key)) => (cert, key),
            // In the settings file, where nothing else checks it.
            _ => bail!("--tls-cert and --tls-key need each other"),
        };
        let tls = Tls::from_files(cert, key);
        let tls = tls.with_context(|| format!("cannot serve TLS with {}", cert.display()))?;
        Ok(Some(tls))
    }
}

/// The file for the first key.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP API")]
pub struct FirstKeyOption {
    /// File for the first key, which only its owner can read [default: tritmill-first-key; without servers, beside the SQLite file]
    #[arg(long, value_name = "FILE")]
    first_key_file: Option<PathBuf>,
}

impl FirstKeyOption {
    /// Returns the path, by default `fallback`.
    pub fn path(&self, fallback: &Path) -> PathBuf {
        self.first_key_file.clone().unwrap_or_else(|| fallback.to_owned())
    }
}

/// The name of the file for the first key, with servers.
pub const FIRST_KEY_FILE: &str = "tritmill-first-key";

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
    /// Time limit of a completion request, in seconds. A request is refused if its answer would take longer
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = worker::seconds)]
    answer_timeout: f64,
    /// Allow webhooks to call this machine and private networks
    #[arg(long)]
    webhook_allow_private: bool,
    /// Maximum number of connections; fewer if the process may not open as many files
    #[arg(long, value_name = "N", default_value = "8192", value_parser = connections)]
    max_connections: usize,
    /// Maximum number of connections of one address that wait for their client; a new one closes the
    /// oldest. Behind a proxy all clients have its address [default: an eighth of --max-connections]
    #[arg(long, value_name = "N", value_parser = options::up_to::<1_000_000>)]
    max_waiting_per_address: Option<NonZeroUsize>,
    /// Maximum number of requests of one key at once [default: three quarters of --max-connections]
    #[arg(long, value_name = "N", value_parser = options::up_to::<1_000_000>)]
    max_requests_per_key: Option<NonZeroUsize>,
    /// Maximum rate of requests of one key, per second; five times as many at once [default: unlimited]
    #[arg(long, value_name = "N")]
    max_key_rate: Option<NonZeroU32>,
    /// Maximum rate of requests of one address without a valid key, per second; five times as many at once
    #[arg(long, value_name = "N", default_value = "100")]
    max_stranger_rate: NonZeroU32,
    /// Seconds to wait for a client: for a request's body or the next part of an upload; half of it for a
    /// request to begin and its head to arrive, twice as long for the client to read
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = worker::seconds)]
    client_timeout: f64,
    /// Maximum bytes of request bodies in memory, over all connections, such as 512M; over it requests wait for a second
    /// and then get status 503 [default: an eighth of the memory of the machine or container]
    #[arg(long, value_name = "BYTES", value_parser = request_memory)]
    request_memory: Option<u64>,
    /// Where the content of files is kept, instead of in the database: s3://BUCKET/PREFIX, gs://…, az://… or a folder that
    /// every admin sees; credentials: the usual environment variables. Files from before stay where they are
    #[arg(long, value_name = "ADDRESS")]
    files: Option<String>,
    /// Where batches may read an input_url and write an output_url, with the credentials of this process: what lies below s3://BUCKET/PREFIX/, gs://…,
    /// az://… or https://HOST/PATH/, where {tenant} stands for the tenant; may be given several times [default: nowhere]
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    allow_url: Vec<AllowedPrefix>,
    #[command(flatten)]
    site: SiteOptions,
    #[command(flatten)]
    pub tiers: TierOptions,
    #[command(flatten)]
    pub mail: MailOptions,
}

/// What batches may be promised, and what answers cost.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tiers and prices")]
pub struct TierOptions {
    /// Completion window that batches may have, such as 1h or background; may be given several times [default: any]
    #[arg(long, value_name = "WINDOW", value_delimiter = ',', value_parser = window)]
    completion_windows: Vec<String>,
    /// Refuse batches that do not fit into their completion window beside the others, by the measured rate of their model's
    /// workers. At 120, a fifth more than fits is promised [default: accept every batch]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    overbooking: Option<u32>,
    /// Price per million tokens, as MODEL,TIER,CURRENCY,INPUT,OUTPUT or with ,CACHED for input that was not computed again;
    /// MODEL and TIER may be `*`; may be given several times. Set at start, in place of the same one in the database
    #[arg(long, value_name = "PRICE", value_parser = price)]
    price: Vec<(PriceOf, Price)>,
}

impl TierOptions {
    /// Sets the prices.
    pub async fn set_prices(&self, app: &App) -> anyhow::Result<()> {
        for (of, price) in &self.price {
            app.set_price(of, price).await.context("cannot set a price")?;
        }
        Ok(())
    }
}

/// Parses a completion window.
fn window(text: &str) -> Result<String, String> {
    let expected = "expected background, or a number and one of s, m, h, d, at most 365d";
    parse_window(text).map(|_| text.to_owned()).ok_or_else(|| expected.to_owned())
}

/// Parses a price.
fn price(text: &str) -> Result<(PriceOf, Price), String> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let (model, tier, currency, amounts) = match parts.as_slice() {
        [model, tier, currency, amounts @ ..] if (2..=3).contains(&amounts.len()) => {
            (*model, *tier, *currency, amounts)
        }
        _ => return Err("expected MODEL,TIER,CURRENCY,INPUT,OUTPUT or with ,CACHED".to_owned()),
    };
    let amount = |text: &str| parse_price(text).map_err(|error| format!("'{text}' {error}"));
    let input = amount(amounts[0])?;
    let cached_input = amounts.get(2).map_or(Ok(input), |text| amount(text))?;
    let currency = currency.parse().map_err(|error: UnknownWord| error.to_string())?;
    let price = Price { currency, input, cached_input, output: amount(amounts[1])? };
    let of = PriceOf::parse(model, tier).map_err(|error| error.to_string())?;
    Ok((of, price))
}

impl LimitOptions {
    /// Opens the place of the content of files, if one is given, and checks that it can be written.
    pub async fn files(&self) -> anyhow::Result<Option<Objects>> {
        let Some(address) = &self.files else { return Ok(None) };
        let opened = async {
            let objects = Objects::open(&Address::parse(address)?)?;
            objects.check().await?;
            Ok::<_, DataError>(objects)
        };
        Ok(Some(opened.await.context("--files")?))
    }
}

/// Where the service is on the web.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP API")]
pub struct SiteOptions {
    /// Site with scripts that may call the API, such as https://chat.example; may be given several times; `*` is every site
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    cors_origin: Vec<CrossOrigin>,
    /// URL under which clients reach the service, such as https://llm.example. With https, cookies and browsers are held to
    /// it
    #[arg(long, value_name = "URL")]
    public_url: Option<WebOrigin>,
    /// Proxy, or a network of proxies, to believe the Forwarded or X-Forwarded-For and -Proto headers of; may be given
    /// several times
    #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
    trusted_proxy: Vec<Network>,
}

impl SiteOptions {
    fn site(&self) -> Site {
        Site {
            public_url: self.public_url.clone(),
            cross_origins: self.cors_origin.clone(),
            proxies: Proxies::of_networks(self.trusted_proxy.clone()),
        }
    }
}

/// Parses the budget of request bodies: at least some of the largest.
fn request_memory(text: &str) -> Result<u64, String> {
    let bytes = byte_sizes::parse(text)?;
    match bytes >= REQUEST_BYTES_MIN {
        true => Ok(bytes),
        false => Err("expected at least 32M".to_owned()),
    }
}

/// Returns the default budget of request bodies.
fn default_request_memory() -> u64 {
    let machine = Machine::read();
    let memory = machine.memory_limit_bytes.or(machine.memory_bytes).unwrap_or_default();
    (memory / 8).max(REQUEST_BYTES_MIN)
}

/// Parses a number of connections.
fn connections(text: &str) -> Result<usize, String> {
    let range = descriptors::CONNECTIONS_MIN..=1_000_000;
    let count = text.parse().ok().filter(|count| range.contains(count));
    count.ok_or_else(|| format!("expected a number from {} to {}", range.start(), range.end()))
}

impl LimitOptions {
    /// Returns the bounds of the server; raises the limit of open files for them.
    pub fn bounds(&self) -> Bounds {
        let bounds = Bounds::of_connections(descriptors::room_for(self.max_connections));
        Bounds {
            per_address: self.max_waiting_per_address.map_or(bounds.per_address, NonZeroUsize::get),
            client_timeout: Duration::from_secs_f64(self.client_timeout),
            request_bytes: usize::try_from(
                self.request_memory.unwrap_or_else(default_request_memory),
            )
            .unwrap_or(usize::MAX),
            ..bounds
        }
    }

    /// Returns the settings of a service with these bounds.
    pub fn settings(&self, bounds: &Bounds) -> Settings {
        Settings {
            limits: self.limits(bounds),
            site: self.site.site(),
            windows: self.tiers.completion_windows.clone(),
            urls: AllowedAddresses::new(self.allow_url.clone()),
        }
    }

    /// Returns the limits of a service with these bounds.
    fn limits(&self, bounds: &Bounds) -> Limits {
        let callers = CallerLimits::of_connections(bounds.connections);
        let per_key = self.max_requests_per_key.map_or(callers.requests_per_key, NonZeroUsize::get);
        Limits {
            callers: CallerLimits {
                stranger_rate: self.max_stranger_rate.get(),
                requests_per_key: per_key,
                key_rate: self.max_key_rate.map(NonZeroU32::get),
            },
            file_bytes_max: self.max_file_mib.get() as u64 * MIB,
            batch_lines_max: self.max_batch_lines.get() as u64,
            open_batches_max: self.max_open_batches.get() as u32,
            answer_within: Duration::from_secs_f64(self.answer_timeout),
            active_batches_max: self.max_active_batches.get() as u32,
            webhook_addresses: match self.webhook_allow_private {
                true => AddressPolicy::Any,
                false => AddressPolicy::PublicOnly,
            },
            overbooking_percent: self.tiers.overbooking,
            ..Limits::default()
        }
    }
}

/// A running service.
pub struct Running {
    /// The address it listens at.
    pub address: SocketAddr,
    /// URL under which clients reach it.
    url: String,
    /// The first key, if it was created now.
    pub first_key: Option<Secret>,
    /// The file that has the first key, too.
    key_file: Option<PathBuf>,
    stop: watch::Sender<bool>,
    tasks: [JoinHandle<()>; 5],
}

impl Running {
    /// Prints the URL, and the first key if it was created now.
    pub fn announce(&self) -> std::io::Result<()> {
        if let Some(secret) = &self.first_key {
            let also = match &self.key_file {
                Some(file) => format!("it is in {}, too", file.display()),
                None => "it is not shown again".to_owned(),
            };
            note!("the first key, with the role operate; {also}:");
            output::line(secret.reveal())?;
        }
        let Self { url, .. } = self;
        note!("admin serves {url}/v1, and a dashboard at {url}/");
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
pub async fn with_servers(servers: ServerUrls<'_>, settings: Settings) -> anyhow::Result<App> {
    let store = servers.store_with(CONNECTIONS).await?;
    let client = Client::from_servers(store.clone(), servers.dispatcher().await?);
    let models = Models::registered(store.clone());
    Ok(App::new(client, store, models, settings))
}

/// Writes the first key to a file that only its owner can read. It is in no other place but the log, so a file that cannot be
/// written is no reason to stop.
fn save_key(secret: &Secret, file: PathBuf) -> Option<PathBuf> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let mut options = std::fs::File::options();
    let opened = options.write(true).create(true).truncate(true).mode(0o600).open(&file);
    match opened.and_then(|mut opened| writeln!(opened, "{}", secret.reveal())) {
        Ok(()) => Some(file),
        Err(error) => {
            tracing::warn!(%error, "cannot write the first key to {}", file.display());
            None
        }
    }
}

/// Starts a service and creates its first key, if it has none.
pub async fn start(
    app: App,
    listen: SocketAddr,
    tls: Option<Tls>,
    bounds: Bounds,
    key_file: PathBuf,
) -> anyhow::Result<Running> {
    let listener = TcpListener::bind(listen).await;
    let listener = listener.with_context(|| format!("cannot listen at {listen}"))?;
    let address = listener.local_addr().context("the listener has no address")?;
    let first_key = app.first_key().await.context("cannot create the first key")?;
    let key_file = first_key.as_ref().and_then(|secret| save_key(secret, key_file));
    let (stop, stopped) = watch::channel(false);
    let mut stop_server = stopped.clone();
    let stopping = app.clone();
    let until = async move {
        // A dropped sender is a stop, too.
        let _ = stop_server.wait_for(|stop| *stop).await;
        stopping.stop();
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = app.public_url().map_or_else(|| format!("{scheme}://{address}"), str::to_owned);
    let driver = Driver::new(app.clone(), worker::owner(), stopped.clone());
    let watch = Watch::new(app.clone());
    let scheduler = Scheduler::new(app.clone());
    let notifier = Notifier::new(app.clone(), worker::owner()).context("cannot call webhooks")?;
    let server = app.server(bounds, tls);
    let serving = async move {
        // Never: these bounds do not give a listener up.
        if let Err(error) = server.serve(listener, router(app), until).await {
            tracing::error!(%error, "the API is not served any more");
        }
    };
    let tasks = [
        tokio::spawn(serving),
        tokio::spawn(driver.run()),
        tokio::spawn(notifier.run(stopped.clone())),
        tokio::spawn(scheduler.run(stopped.clone())),
        tokio::spawn(watch.run(stopped)),
    ];
    Ok(Running { address, url, first_key, key_file, stop, tasks })
}

/// Runs the command.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let servers = arguments.servers.needed()?;
    block_on(async {
        let mut signals = Signals::listen().context("cannot listen for signals")?;
        let tls = arguments.tls.tls()?;
        let bounds = arguments.limits.bounds();
        let settings = arguments.limits.settings(&bounds);
        let sign_on = arguments.sign_on.sign_on(&settings.site)?;
        let mailer = arguments.limits.mail.mailer()?;
        let app = with_servers(servers, settings).await?;
        let app = app.with_sign_on(sign_on).with_mailer(mailer);
        let app = app.with_files(arguments.limits.files().await?);
        arguments.limits.tiers.set_prices(&app).await?;
        let key_file = arguments.first_key.path(FIRST_KEY_FILE.as_ref());
        let running = start(app, arguments.listen, tls, bounds, key_file).await?;
        if arguments.json {
            let listen = running.address.to_string();
            output::json(json!({ "listen": listen, "first_key": running.first_key() }))?;
        } else {
            running.announce()?;
        }
        signals.next().await;
        note!("stopping: running requests finish first; signal again to stop at once");
        tokio::select! {
            () = running.stop() => {}
            () = signals.next() => {}
        }
        Ok(ExitCode::SUCCESS)
    })
}
