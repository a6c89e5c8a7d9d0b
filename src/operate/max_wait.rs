//! `tritmill queue max-wait`: the longest predicted wait of a queue.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tritmill_admin::store::audit::AuditEntry;
use tritmill_queue::QueueName;

use super::queue_name;
use crate::keys::StoreOptions;

/// Longest settable wait, in seconds.
const LONGEST: f64 = 31_536_000.0;

/// A queue, on servers or in a file, and its longest wait.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill queue max-wait bitnet-2b@i2_s 30
  tritmill queue max-wait demo@i2_s 2.5 --store tritmill.sqlite
  tritmill queue max-wait bitnet-2b@i2_s

The wait of a new job is predicted: tokens before it, divided by the tokens that the workers of the queue take off
the backlog per second. Jobs that would wait longer are refused with a time to try again; lines of batches stay
in their file and fill four fifths of this. Producers apply it within seconds. Whatever is set here, jobs
that would miss their own deadline are refused.")]
pub struct MaxWaitArguments {
    /// Queue, as MODEL@FORMAT
    #[arg(value_parser = queue_name)]
    queue: QueueName,
    /// Longest wait in seconds, from 0.001; without it the limit is removed
    #[arg(value_name = "SECONDS", value_parser = wait)]
    seconds: Option<f64>,
    #[command(flatten)]
    store_options: StoreOptions,
}

fn wait(text: &str) -> Result<f64, String> {
    let range = 0.001..=LONGEST;
    let seconds = text.parse().ok().filter(|seconds| range.contains(seconds));
    seconds.ok_or_else(|| format!("expected seconds from {} to {LONGEST}", range.start()))
}

impl MaxWaitArguments {
    /// Sets the longest wait, and records this in the audit log.
    pub async fn run(&self) -> anyhow::Result<()> {
        let Self { queue, seconds, store_options } = self;
        let store = store_options.open().await?;
        let detail = json!({ "max_wait_s": seconds });
        let line = AuditEntry::from_command_line("queue.max_wait", &queue.to_string(), detail);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        store.set_max_wait(queue, seconds.map(Duration::from_secs_f64)).await?;
        match seconds {
            Some(seconds) => note!("new jobs of {queue} wait {seconds} s at most"),
            None => note!("{queue} has no longest wait now"),
        }
        Ok(())
    }
}
