//! `tritmill keys`: API keys.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_admin::new_key;
use tritmill_admin::store::{ApiKey, FrontStore, KeyRole, audit::AuditEntry};
use tritmill_queue::{
    Tenant,
    store::{PostgresStore, SqliteStore},
};
use uuid::Uuid;

use crate::{block_on, output, servers::Servers};

/// Create, list and revoke API keys.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a key and print its secret, which is not shown again
    Create(Create),
    /// List keys, without their secrets
    List(List),
    /// Revoke keys at once
    Revoke(Revoke),
}

/// Create a key and print its secret, which is not shown again.
///
/// Each role includes the ones before it: read reads the tenant's data, submit submits jobs, manage makes and revokes
/// keys of the tenant, operate runs the service. A key with the role metrics reads the metrics and nothing else.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill keys create --tenant acme --role submit --name 'nightly reports'
  tritmill keys create --role metrics --name prometheus --expires-after 365d
  export OPENAI_API_KEY=$(tritmill keys create)")]
pub struct Create {
    /// Tenant of the key
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: String,
    /// Role of the key
    #[arg(long, default_value = "submit", value_parser = ["metrics", "read", "submit", "manage", "operate"])]
    role: String,
    /// Name of the key, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    name: String,
    /// Time until it expires, such as 90d or 12h [default: never]
    #[arg(long, value_name = "TIME", value_parser = lifetime)]
    expires_after: Option<Duration>,
    /// Print id, tenant, role and secret as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Parses a number and one of s, m, h, d.
fn lifetime(text: &str) -> Result<Duration, String> {
    let unit = |letter| match letter {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3600),
        'd' => Some(86_400),
        _ => None,
    };
    let seconds = text.char_indices().last().and_then(|(at, letter)| {
        let count: u64 = text[..at].parse().ok().filter(|count| *count > 0)?;
        count.checked_mul(unit(letter)?).filter(|seconds| *seconds <= LIFETIME_MAX_S)
    });
    let invalid = || "expected a number and one of s, m, h, d, at most 36500d".to_owned();
    seconds.map(Duration::from_secs).ok_or_else(invalid)
}

/// Longest lifetime of a key that expires: a hundred years.
const LIFETIME_MAX_S: u64 = 36_500 * 86_400;

/// List keys.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill keys list --database postgres://tritmill@localhost/tritmill
  tritmill keys list --store tritmill.sqlite")]
pub struct List {
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Revoke keys.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill keys list
  tritmill keys revoke 019aa0de-3f5c-7d61-b8f7-2c7f1d9b7c11")]
pub struct Revoke {
    /// Key ids, as printed by `tritmill keys list`
    #[arg(required = true, value_name = "ID")]
    ids: Vec<Uuid>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Where keys and queue settings are.
#[derive(Debug, Args)]
pub struct StoreOptions {
    #[command(flatten)]
    servers: Servers,
    /// Store file of a standalone service without servers
    #[arg(long, value_name = "FILE", help_heading = "Servers")]
    store: Option<PathBuf>,
}

impl StoreOptions {
    /// Opens the store.
    pub async fn open(&self) -> anyhow::Result<Box<dyn FrontStore>> {
        let Some(file) = &self.store else {
            let store = PostgresStore::connect(self.servers.database()?).await;
            return Ok(Box::new(store.context("cannot use the database")?));
        };
        if !file.exists() {
            bail!("{} does not exist", file.display());
        }
        let store = SqliteStore::open(file).await;
        Ok(Box::new(store.with_context(|| format!("cannot use {}", file.display()))?))
    }
}

/// Runs the command.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    block_on(async {
        match command {
            Command::Create(arguments) => create(arguments).await,
            Command::List(arguments) => list(&arguments.store_options).await,
            Command::Revoke(arguments) => revoke(&arguments).await,
        }
    })
}

async fn create(arguments: Create) -> anyhow::Result<ExitCode> {
    if arguments.tenant.is_empty() {
        bail!("--tenant must not be empty");
    }
    let store = arguments.store_options.open().await?;
    let role: KeyRole = arguments.role.parse()?;
    let (mut key, secret) = new_key(Tenant(arguments.tenant), role, &arguments.name);
    if let Some(lifetime) = arguments.expires_after {
        key.expires_at = Some(store.now().await.context("cannot read the time")?.after(lifetime));
    }
    let lifetime_s = arguments.expires_after.map(|lifetime| lifetime.as_secs());
    let detail = json!({
        "tenant": key.tenant, "role": role.as_str(), "name": key.name,
        "expires_after_s": lifetime_s,
    });
    let line = AuditEntry::from_command_line("key.create", &key.id.to_string(), detail);
    store.record_audit(&line).await.context("cannot write the audit log")?;
    store.add_key(&key, &secret.hash()).await.context("cannot keep the key")?;
    match arguments.json {
        true => output::json(json!({
            "id": key.id,
            "tenant": key.tenant,
            "role": role.as_str(),
            "expires_at": key.expires_at.map(|at| at.seconds()),
            "secret": secret.reveal(),
        }))?,
        false => output::line(secret.reveal())?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(store_options: &StoreOptions) -> anyhow::Result<ExitCode> {
    for key in store_options.open().await?.keys().await.context("cannot list the keys")? {
        let ApiKey { id, tenant, role, name, created_at, .. } = key;
        output::json(json!({
            "id": id,
            "tenant": tenant,
            "role": role.as_str(),
            "name": name,
            "created_at": created_at.seconds(),
            "revoked_at": key.revoked_at.map(|at| at.seconds()),
            "expires_at": key.expires_at.map(|at| at.seconds()),
            "last_used_at": key.last_used_at.map(|at| at.seconds()),
        }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn revoke(arguments: &Revoke) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let mut code = ExitCode::SUCCESS;
    for id in &arguments.ids {
        let line = AuditEntry::from_command_line("key.revoke", &id.to_string(), json!({}));
        store.record_audit(&line).await.context("cannot write the audit log")?;
        match store.revoke_key(*id).await.context("cannot revoke")? {
            true => note!("{id} is revoked"),
            false => {
                note!("{id} is not a valid key");
                code = ExitCode::from(2);
            }
        }
    }
    Ok(code)
}
