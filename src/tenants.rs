//! `tritmill tenants`: limits of tenants.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_admin::store::{
    audit::AuditEntry,
    tenants::{TenantAccount, TenantLimits},
};
use tritmill_queue::Tenant;

use crate::{block_on, byte_sizes, keys::StoreOptions, output};

/// Limit what tenants may have.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the tenants with limits of their own, and what they use
    List(List),
    /// Set the limits of a tenant
    Limit(Limit),
}

/// List the tenants with limits of their own, and what they use.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill tenants list
  tritmill tenants list acme")]
pub struct List {
    /// One tenant, also without limits of its own
    #[arg(value_name = "TENANT")]
    tenant: Option<String>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Set the limits of a tenant.
///
/// All limits are set at once: one that is not given is removed. What the tenant has above a limit stays.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill tenants limit acme --file-bytes 20G --open-batches 50 --keys 10
  tritmill tenants limit acme                   # no limits of its own any more")]
pub struct Limit {
    /// Tenant, which may be a new one
    #[arg(value_name = "TENANT")]
    tenant: String,
    /// Maximum bytes of all its files together, such as 20G
    #[arg(long, value_name = "BYTES", value_parser = byte_sizes::parse)]
    file_bytes: Option<u64>,
    /// Maximum number of its unfinished batches, instead of --max-open-batches of the admin
    #[arg(long, value_name = "N")]
    open_batches: Option<u32>,
    /// Maximum number of its API keys that are not revoked
    #[arg(long, value_name = "N")]
    keys: Option<u32>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Runs the command.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    block_on(async {
        match command {
            Command::List(arguments) => list(&arguments).await,
            Command::Limit(arguments) => limit(arguments).await,
        }
    })
}

async fn list(arguments: &List) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let found = match &arguments.tenant {
        Some(tenant) => vec![store.tenant_account(&Tenant(tenant.clone())).await?],
        None => store.limited_tenants().await.context("cannot list the limits")?,
    };
    for TenantAccount { tenant, limits, used } in found {
        output::json(json!({
            "tenant": tenant,
            "file_bytes": { "limit": limits.file_bytes, "used": used.file_bytes },
            "open_batches": { "limit": limits.open_batches, "used": used.open_batches },
            "keys": { "limit": limits.keys, "used": used.keys },
        }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn limit(arguments: Limit) -> anyhow::Result<ExitCode> {
    let Limit { tenant, file_bytes, open_batches, keys, store_options } = arguments;
    if tenant.is_empty() {
        bail!("TENANT must not be empty");
    }
    let store = store_options.open().await?;
    let detail = json!({ "file_bytes": file_bytes, "open_batches": open_batches, "keys": keys });
    let line = AuditEntry::from_command_line("tenant.limit", &tenant, detail);
    store.record_audit(&line).await.context("cannot write the audit log")?;
    let limits = TenantLimits { file_bytes, open_batches, keys };
    store.set_tenant_limits(&Tenant(tenant), limits).await.context("cannot set the limits")?;
    note!("the limits are set");
    Ok(ExitCode::SUCCESS)
}
