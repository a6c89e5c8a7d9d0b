//! `tritmill batches results`: the lines of a batch that ended.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use tokio::time::sleep;
use tritmill_admin::{
    results::{self, Cursor, ResultFilter},
    store::{BatchId, batch_ends::EndOrder},
};
use tritmill_queue::JobState;

use crate::{keys::StoreOptions, output};

/// Results that are read at once.
const PAGE: usize = 1000;
/// Pause between two reads while no line ends.
const POLL: Duration = Duration::from_millis(500);

/// How a line ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Status {
    Succeeded,
    Failed,
    Expired,
    Cancelled,
}

impl From<Status> for JobState {
    fn from(status: Status) -> Self {
        match status {
            Status::Succeeded => Self::Completed,
            Status::Failed => Self::Failed,
            Status::Expired => Self::Expired,
            Status::Cancelled => Self::Cancelled,
        }
    }
}

/// The order of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    Completion,
    Lines,
}

/// A batch and which of its results to print.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill batches results batch_0199f3c2…
  tritmill batches results batch_0199f3c2… --follow > answers.jsonl
  tritmill batches results batch_0199f3c2… --status failed --search timeout

Each line has its cursor, for --after.")]
pub struct ResultArguments {
    /// Id, as printed by `tritmill batches list`
    #[arg(value_name = "ID")]
    id: BatchId,
    /// Print the results behind this cursor
    #[arg(long, value_name = "CURSOR")]
    after: Option<Cursor>,
    /// Print at most this many results
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Print results with one of these statuses only
    #[arg(long, value_enum, value_name = "STATUS", value_delimiter = ',')]
    status: Vec<Status>,
    /// Print results with this text in their custom_id, answer or error only
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// As they ended, or as in the input, where a line waits for those before it
    #[arg(long, value_enum, default_value = "completion")]
    order: Order,
    /// Go on until the batch has ended
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

impl ResultArguments {
    /// Prints the results.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let order = match self.order {
            Order::Completion => EndOrder::Completion,
            Order::Lines => EndOrder::Lines,
        };
        let after = self.after.unwrap_or(Cursor { batch: self.id, order, position: 0 });
        ensure!(after.batch == self.id, "--after is a cursor of another batch");
        ensure!(after.order == order, "--after is a cursor of another --order");
        let states = self.status.into_iter().map(JobState::from).collect();
        let filter = ResultFilter { order, states, search: self.search };
        let store = self.store_options.open().await?;
        let (mut position, mut left) = (after.position, self.limit.unwrap_or(u64::MAX));
        while left > 0 {
            // The batch is read before its results: what it counts is there.
            let batch = store.batch_of_any_tenant(self.id).await?;
            let batch = batch
                .with_context(|| format!("no batch {}: see tritmill batches list", self.id))?;
            if !results::are_numbered(&batch) {
                bail!("an earlier release ended this batch: download its files");
            }
            let most = usize::try_from(left).unwrap_or(PAGE).min(PAGE);
            let page = results::read(&*store, &batch, &filter, position, most).await?;
            for line in &page.lines {
                output::line(format_args!("{}", line.with_cursor()))?;
            }
            (position, left) = (page.next.position, left - page.lines.len() as u64);
            if page.has_more {
                continue;
            }
            if batch.state.is_terminal() || !self.follow {
                break;
            }
            sleep(POLL).await;
        }
        Ok(ExitCode::SUCCESS)
    }
}
