//! `tritmill keys`: API keys.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_admin::new_key;
use tritmill_admin::store::{ApiKey, FrontStore, KeyRole};
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
/// Each role includes the one before it: read reads the tenant's data, submit submits jobs, operate
/// runs the service.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill keys create --tenant acme --role submit --name 'nightly reports'
  export OPENAI_API_KEY=$(tritmill keys create)")]
pub struct Create {
    /// Tenant of the key
    #[arg(long, value_name = "NAME", default_value = "default")]
    tenant: String,
    /// Role of the key
    #[arg(long, default_value = "submit", value_parser = ["read", "submit", "operate"])]
    role: String,
    /// Name of the key, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    name: String,
    /// Print id, tenant, role and secret as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

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
    let (key, secret) = new_key(Tenant(arguments.tenant), role, &arguments.name);
    store.add_key(&key, &secret.hash()).await.context("cannot keep the key")?;
    match arguments.json {
        true => output::json(json!({
            "id": key.id,
            "tenant": key.tenant,
            "role": role.as_str(),
            "secret": secret.reveal(),
        }))?,
        false => output::line(secret.reveal())?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(store_options: &StoreOptions) -> anyhow::Result<ExitCode> {
    for key in store_options.open().await?.keys().await.context("cannot list the keys")? {
        let ApiKey { id, tenant, role, name, created_at, revoked_at } = key;
        output::json(json!({
            "id": id,
            "tenant": tenant,
            "role": role.as_str(),
            "name": name,
            "created_at": created_at.seconds(),
            "revoked_at": revoked_at.map(|at| at.seconds()),
        }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn revoke(arguments: &Revoke) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let mut code = ExitCode::SUCCESS;
    for id in &arguments.ids {
        match store.revoke_key(*id).await.context("cannot revoke")? {
            true => eprintln!("{id} is revoked"),
            false => {
                eprintln!("{id} is not a valid key");
                code = ExitCode::from(2);
            }
        }
    }
    Ok(code)
}
