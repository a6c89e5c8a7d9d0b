//! `tritmill queue show | allow-class | withdraw-class`: which numerics classes serve a queue.

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::{Value, json};
use tritmill_admin::store::{FrontStore, audit::AuditEntry};
use tritmill_queue::{QueueName, store::workers::Worker};

use super::queue_name;
use crate::{keys::StoreOptions, output};

/// A queue, on servers or in a file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill queue show bitnet-2b@i2_s
  tritmill queue show demo@i2_s --store tritmill.sqlite --json")]
pub struct ShowArguments {
    /// Queue, as MODEL@FORMAT
    #[arg(value_parser = queue_name)]
    queue: QueueName,
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// A queue and a numerics class.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill queue show bitnet-2b@i2_s
  tritmill queue allow-class bitnet-2b@i2_s 9c0f…/kv-f16/head-BF16/draw-2/cuda
  tritmill queue withdraw-class bitnet-2b@i2_s 9c0f…/kv-f16/head-BF16/draw-2/cuda

A worker that is refused prints its class. While two classes serve a queue, each answer is of one of
them (`tritmill results`: numerics_class). A retry may change the class; a job that a worker of one class
started is restarted by a worker of the other. Workers of a withdrawn class drain at their next heartbeat.")]
pub struct ClassArguments {
    /// Queue, as MODEL@FORMAT
    #[arg(value_parser = queue_name)]
    queue: QueueName,
    /// Numerics class
    class: String,
    #[command(flatten)]
    store_options: StoreOptions,
}

impl ClassArguments {
    async fn record(&self, action: &str) -> anyhow::Result<Box<dyn FrontStore>> {
        let store = self.store_options.open().await?;
        let details = json!({ "numerics_class": self.class });
        let line = AuditEntry::from_command_line(action, &self.queue.to_string(), details);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        Ok(store)
    }

    /// Allows workers of the class to serve the queue.
    pub async fn allow(&self) -> anyhow::Result<()> {
        let Self { queue, class, .. } = self;
        let is_new = self.record("queue.allow_class").await?.allow_class(queue, class).await?;
        let already = if is_new { "" } else { " already" };
        note!("workers of class '{class}' may{already} serve {queue}");
        Ok(())
    }

    /// Withdraws an allowed class.
    pub async fn withdraw(&self) -> anyhow::Result<()> {
        let Self { queue, class, .. } = self;
        let was = self.record("queue.withdraw_class").await?.withdraw_class(queue, class).await?;
        ensure!(was, "class '{class}' is not allowed for {queue}: see tritmill queue show");
        note!("workers of class '{class}' drain at their next heartbeat");
        Ok(())
    }
}

/// Prints the settings and workers of a queue.
pub async fn show(arguments: &ShowArguments) -> anyhow::Result<()> {
    let store = arguments.store_options.open().await?;
    let state = store.queue_state(&arguments.queue).await?;
    let mut workers = store.workers().await?;
    workers.retain(|worker| worker.heartbeat.queue == arguments.queue && worker.is_alive());
    let queue = arguments.queue.to_string();
    if arguments.json {
        let worker = |worker: &Worker| -> Value {
            let beat = &worker.heartbeat;
            json!({ "owner": beat.owner, "device": beat.metrics.device,
                    "numerics_class": beat.metrics.numerics_class })
        };
        output::json(json!({
            "queue": queue, "paused": state.paused, "limit_tokens": state.limit_tokens,
            "numerics_class": state.class, "allowed_classes": state.allowed_classes,
            "workers": workers.iter().map(worker).collect::<Vec<_>>(),
        }))?;
        return Ok(());
    }
    let paused = if state.paused { "paused" } else { "open" };
    let limit = state.limit_tokens.map_or(String::new(), |tokens| format!(", {tokens} tokens"));
    output::line(format_args!("{queue}: {paused}{limit}"))?;
    let class = state.class.as_deref().unwrap_or("none yet: the first worker sets it");
    output::line(format_args!("numerics class  {class}"))?;
    for class in &state.allowed_classes {
        output::line(format_args!("allowed as well {class}"))?;
    }
    for worker in workers {
        let beat = worker.heartbeat;
        let (device, class) = (beat.metrics.device, beat.metrics.numerics_class);
        output::line(format_args!("worker          {} on {device}, {class}", beat.owner))?;
    }
    Ok(())
}
