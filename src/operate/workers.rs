//! `tritmill workers`: the workers of all queues.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_queue::store::{Workers as _, workers::WorkReport};

use super::{
    ListArguments,
    deletion_costs::{self, DeletionCostArguments},
    record, with_store,
};
use crate::{output, servers::Servers};

/// List workers and drain them.
#[derive(Debug, Subcommand)]
pub enum WorkersCommand {
    /// List workers with a recent heartbeat
    #[command(after_help = "Examples:\n  tritmill workers list --json")]
    List(ListArguments),
    /// Ask a worker to finish its running jobs and exit
    #[command(after_help = "Examples:\n  tritmill workers drain host-1-4242-19a2b3c4d5")]
    Drain(DrainArguments),
    /// Tell Kubernetes how many jobs each worker's pod runs, so that it deletes idle ones first
    DeletionCosts(DeletionCostArguments),
}

/// A worker.
#[derive(Debug, Args)]
pub struct DrainArguments {
    /// Name of the worker, as printed by `tritmill workers list`
    owner: String,
    #[command(flatten)]
    servers: Servers,
}

/// Returns a report in words.
fn summary(report: &WorkReport) -> String {
    let share =
        |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.0} %", 100.0 * s));
    let wait = report.wait_ms.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
    format!(
        "busy {}  efficiency {}  {:.0} rows a step  wait {wait}",
        share(Some(report.utilisation)),
        share(report.efficiency),
        report.rows_per_step,
    )
}

/// Runs `workers …`.
pub fn run(command: WorkersCommand) -> anyhow::Result<ExitCode> {
    match command {
        WorkersCommand::List(ListArguments { json, servers }) => {
            with_store(&servers, async |store| {
                for worker in store.workers().await? {
                    let beat = &worker.heartbeat;
                    let silent = worker.silent.as_secs_f64();
                    let draining = beat.draining || worker.drain_requested;
                    if json {
                        output::json(json!({
                            "owner": beat.owner, "queue": beat.queue.to_string(), "host": beat.host,
                            "pid": beat.pid, "running": beat.running, "slots": beat.slots,
                            "draining": draining, "tokens_per_s": beat.tokens_per_s,
                            "report": beat.metrics.report, "silent_s": silent, "alive": worker.is_alive(),
                        }))?;
                    } else {
                        let state = match (worker.is_alive(), draining, beat.slots) {
                            (false, ..) => "silent:",
                            (true, true, _) => "draining",
                            (true, false, 0) => "has not loaded",
                            (true, false, _) => "serves",
                        };
                        output::line(format_args!(
                            "{}  {state} {}  {}/{} running  {:.0} tokens/s  {}  last heartbeat {silent:.0} s ago",
                            beat.owner,
                            beat.queue,
                            beat.running,
                            beat.slots,
                            beat.tokens_per_s,
                            summary(&beat.metrics.report),
                        ))?;
                    }
                }
                Ok(ExitCode::SUCCESS)
            })
        }
        WorkersCommand::Drain(DrainArguments { owner, servers }) => {
            let known = with_store(&servers, async |store| {
                record(&store, "worker.drain", &owner, json!({})).await?;
                Ok(store.request_drain(&owner).await?)
            })?;
            anyhow::ensure!(known, "no worker {owner}: see tritmill workers list");
            note!("{owner} drains with its next heartbeat");
            Ok(ExitCode::SUCCESS)
        }
        WorkersCommand::DeletionCosts(arguments) => deletion_costs::run(&arguments),
    }
}
