//! `tritmill batches`: the batches of all tenants.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_admin::store::{Batch, BatchId, BatchState, audit::AuditEntry, batches::BatchFilter};
use tritmill_queue::{Tenant, store::Page};

use super::{EXIT_INCOMPLETE, block_on};
use crate::{keys::StoreOptions, output};

/// List and cancel batches of the HTTP API, of all tenants.
#[derive(Debug, Subcommand)]
pub enum BatchesCommand {
    /// List batches, the latest first
    List(BatchListArguments),
    /// Cancel batches: their jobs are cancelled, and their answers so far are kept
    Cancel(BatchArguments),
}

/// A filter and a page.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill batches list --tenant acme --state in_progress
  tritmill batches list --limit 1000 --json")]
pub struct BatchListArguments {
    /// List the batches of this tenant only
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// List batches in this state only: validating, in_progress, finalizing, completed, failed, expired,
    /// cancelling or cancelled
    #[arg(long, value_name = "STATE")]
    state: Option<BatchState>,
    /// Maximum number of batches
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    /// List those before this one
    #[arg(long, value_name = "ID")]
    after: Option<BatchId>,
    /// Print one line of JSON for each batch
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Batches.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill batches cancel batch_0199f3c2…

Exit codes:
  0 all are cancelled, 1 failure, 2 some are unknown or were finished")]
pub struct BatchArguments {
    /// Ids, as printed by `tritmill batches list`
    #[arg(value_name = "ID", required = true)]
    ids: Vec<BatchId>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Runs `batches …`.
pub fn run(command: BatchesCommand) -> anyhow::Result<ExitCode> {
    match command {
        BatchesCommand::List(arguments) => block_on(list(arguments)),
        BatchesCommand::Cancel(arguments) => block_on(cancel(&arguments)),
    }
}

async fn list(arguments: BatchListArguments) -> anyhow::Result<ExitCode> {
    let BatchListArguments { tenant, state, limit, after, json, store_options } = arguments;
    let store = store_options.open().await?;
    let filter = BatchFilter { tenant: tenant.map(Tenant), state, metadata: None };
    let page = Page { after, limit, ascending: false };
    for batch in store.find_batches(&filter, page).await? {
        print(&batch, json)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(batch: &Batch, as_json: bool) -> anyhow::Result<()> {
    let Batch { id, tenant, state, lines, completed, failed, .. } = batch;
    let queue = batch.queue.as_ref().map(ToString::to_string);
    if as_json {
        output::json(json!({
            "id": id.to_string(), "tenant": tenant, "state": state.as_str(), "queue": queue,
            "lines": lines, "completed": completed, "failed": failed,
            "created_at_ms": batch.created_at.0, "expires_at_ms": batch.expires_at.0,
        }))?;
        return Ok(());
    }
    let (state, queue) = (state.as_str(), queue.as_deref().unwrap_or("-"));
    output::line(format_args!(
        "{id}  {state:<11}  {completed}/{lines} answered, {failed} failed  {queue}  {}",
        tenant.0
    ))?;
    Ok(())
}

async fn cancel(arguments: &BatchArguments) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let mut all = true;
    for id in &arguments.ids {
        let Some(batch) = store.batch_of_any_tenant(*id).await? else {
            eprintln!("no batch {id}: see tritmill batches list");
            all = false;
            continue;
        };
        let detail = json!({ "tenant": batch.tenant });
        let line = AuditEntry::from_command_line("batch.cancel", &id.to_string(), detail);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        let cancelled = store.cancel_batch(&batch.tenant, *id).await?;
        match cancelled.map(|batch| batch.state) {
            Some(BatchState::Cancelling | BatchState::Cancelled) => eprintln!("{id}: cancelled"),
            Some(state) => {
                eprintln!("{id}: not cancelled, it is {}", state.as_str());
                all = false;
            }
            None => {
                eprintln!("{id}: deleted meanwhile");
                all = false;
            }
        }
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
}
