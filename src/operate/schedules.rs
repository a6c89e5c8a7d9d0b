//! `tritmill batches schedules`: the schedules of all tenants.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;
use tritmill_admin::store::{
    audit::AuditEntry,
    schedules::{Schedule, ScheduleId},
};
use tritmill_queue::{Tenant, Timestamp, store::Page};

use crate::{keys::StoreOptions, output};

/// Schedules that are read at once.
const PAGE: u32 = 500;

/// Which schedules to list, or to delete.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill batches schedules --tenant acme
  tritmill batches schedules --tenant acme --delete sched_0199f3c2…

Tenants create them: POST /v1/schedules.")]
pub struct ScheduleArguments {
    /// One tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Delete this schedule; its batches stay
    #[arg(long, value_name = "ID", requires = "tenant")]
    delete: Option<ScheduleId>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Runs the command.
pub async fn run(arguments: ScheduleArguments) -> anyhow::Result<ExitCode> {
    let ScheduleArguments { tenant, delete, store_options } = arguments;
    let store = store_options.open().await?;
    let tenant = tenant.map(Tenant);
    if let Some((id, tenant)) = delete.zip(tenant.as_ref()) {
        let line = AuditEntry::from_command_line("schedule.delete", &id.to_string(), json!({}));
        store.record_audit(&line).await.context("cannot write the audit log")?;
        if !store.delete_schedule(tenant, id).await.context("cannot delete")? {
            bail!("the tenant has no schedule {id}");
        }
        note!("{id} is deleted");
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = Page { after: None, limit: PAGE, ascending: true };
    loop {
        let found = store.schedules(tenant.as_ref(), page).await.context("cannot list")?;
        for schedule in &found {
            print(schedule)?;
        }
        match found.last() {
            Some(last) if found.len() == PAGE as usize => page.after = Some(last.id),
            _ => return Ok(ExitCode::SUCCESS),
        }
    }
}

fn print(Schedule { id, tenant, next_at, record, .. }: &Schedule) -> std::io::Result<()> {
    let at = |time: Option<Timestamp>| time.map(Timestamp::seconds);
    output::json(json!({
        "id": id.to_string(),
        "tenant": tenant,
        "cron": record.cron,
        "timezone": record.timezone,
        "next_run_at": at(*next_at),
        "last_run_at": at(record.last_run_at),
        "last_batch_id": record.last_batch.map(|id| id.to_string()),
        "error": record.error,
        "missed_runs": record.missed,
    }))
}
