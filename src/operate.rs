//! `tritmill queue | dlq`: commands of operators. `workers` and `batches` have files of their own.

mod batch_results;
pub mod batches;
mod classes;
mod deletion_costs;
mod max_wait;
mod new_batch;
mod schedules;
pub mod workers;

use std::{collections::HashSet, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tritmill_admin::store::{Audit as _, audit::AuditEntry};
use tritmill_queue::{
    Dispatcher as _, Entry, Job, JobId, QueueName, Tenant,
    store::{
        DeadLetters as _, NumericsClasses as _, PostgresStore, QueueSettings as _,
        queue_settings::{QueueOverview, QueueState},
    },
};

use self::{
    classes::{ClassArguments, ShowArguments},
    max_wait::MaxWaitArguments,
};
use crate::{block_on, jobs, output, servers::Servers};

/// Exit code: some of the named jobs were not found.
const EXIT_INCOMPLETE: u8 = 2;

/// List, pause, resume and limit queues, and manage their numerics classes.
#[derive(Debug, Subcommand)]
pub enum QueueCommand {
    /// List queues with their jobs by state
    #[command(after_help = "Examples:\n  tritmill queue list --json")]
    List(ListArguments),
    /// Show the settings of a queue and the numerics classes of its workers
    Show(ShowArguments),
    /// Pause a queue: workers finish running jobs and take no new ones
    #[command(after_help = "Examples:\n  tritmill queue pause demo@i2_s")]
    Pause(QueueArguments),
    /// Resume a paused queue
    #[command(after_help = "Examples:\n  tritmill queue resume demo@i2_s")]
    Resume(QueueArguments),
    /// Limit the backlog of a queue
    Limit(LimitArguments),
    /// Limit how long a new job of a queue may wait
    MaxWait(MaxWaitArguments),
    /// Allow workers of another numerics class to serve a queue, too
    AllowClass(ClassArguments),
    /// Withdraw an allowed numerics class: its workers drain
    WithdrawClass(ClassArguments),
    /// Delete the numerics classes of a queue, to serve another model or other settings; refused while
    /// workers serve the queue
    #[command(after_help = "Examples:\n  tritmill queue reset-class demo@i2_s")]
    ResetClass(QueueArguments),
}

/// Look at dead letters (jobs that failed permanently), replay or delete them.
#[derive(Debug, Subcommand)]
pub enum DlqCommand {
    /// List the dead letters of a queue
    #[command(after_help = "Examples:\n  tritmill dlq list demo@i2_s --limit 10")]
    List(DlqListArguments),
    /// Print dead letters with their prompts and errors
    #[command(after_help = "Examples:\n  tritmill dlq show 0199f3c2-…")]
    Show(DlqArguments),
    /// Submit dead letters again as new jobs
    #[command(after_help = "Examples:\n  tritmill dlq replay 0199f3c2-… 0199f3c2-…")]
    Replay(DlqArguments),
    /// Delete dead letters
    #[command(after_help = "Examples:\n  tritmill dlq purge 0199f3c2-…")]
    Purge(DlqArguments),
}

/// Arguments of the lists.
#[derive(Debug, Args)]
pub struct ListArguments {
    /// Print one line of JSON for each item
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    servers: Servers,
}

/// A queue.
#[derive(Debug, Args)]
pub struct QueueArguments {
    /// Queue, as MODEL@FORMAT
    #[arg(value_parser = queue_name)]
    queue: QueueName,
    #[command(flatten)]
    servers: Servers,
}

/// A queue and its limit.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill queue limit demo@i2_s 50000000
  tritmill queue limit demo@i2_s 2000000 --each-tenant
  tritmill queue limit demo@i2_s 9000000 --tenant big-customer
  tritmill queue limit demo@i2_s

Producers apply it within seconds: jobs beyond the limit are refused with a time to try again.")]
pub struct LimitArguments {
    #[command(flatten)]
    queue: QueueArguments,
    /// Maximum tokens of queued jobs; without it the limit is removed
    #[arg(value_name = "TOKENS")]
    tokens: Option<u64>,
    /// Limit the jobs of this tenant only
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Limit the jobs of each tenant without a limit of its own
    #[arg(long, conflicts_with = "tenant")]
    each_tenant: bool,
}

/// A queue and a page of its dead letters.
#[derive(Debug, Args)]
pub struct DlqListArguments {
    #[command(flatten)]
    queue: QueueArguments,
    /// Maximum number of dead letters
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// List those after this id
    #[arg(long, value_name = "ID")]
    after: Option<JobId>,
}

/// Dead letters.
#[derive(Debug, Args)]
pub struct DlqArguments {
    /// Ids, as printed by `tritmill dlq list`
    #[arg(value_name = "ID", required = true)]
    ids: Vec<JobId>,
    #[command(flatten)]
    servers: Servers,
}

/// Parses MODEL@FORMAT.
pub fn queue_name(text: &str) -> Result<QueueName, String> {
    match text.rsplit_once('@') {
        Some((model, format)) if !model.is_empty() && !format.is_empty() => {
            for part in [model, format] {
                QueueName::check_part(part).map_err(|problem| problem.to_string())?;
            }
            Ok(QueueName { model: model.to_owned(), format: format.to_owned() })
        }
        _ => Err("expected MODEL@FORMAT, e.g. demo@i2_s".to_owned()),
    }
}

/// Connects to the store and runs `work`.
fn with_store<T>(
    servers: &Servers,
    work: impl AsyncFnOnce(Arc<PostgresStore>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let url = servers.database()?;
    block_on(async {
        let store = PostgresStore::connect(url).await.context("cannot use the database")?;
        work(Arc::new(store)).await
    })
}

/// Records what an operator is about to do. If this fails, it must not be done.
async fn record(
    store: &PostgresStore,
    action: &str,
    target: &str,
    detail: Value,
) -> anyhow::Result<()> {
    let line = AuditEntry::from_command_line(action, target, detail);
    store.record_audit(&line).await.context("cannot write the audit log")
}

fn set_paused(servers: &Servers, queue: &QueueName, paused: bool) -> anyhow::Result<()> {
    with_store(servers, async |store| {
        let action = if paused { "queue.pause" } else { "queue.resume" };
        record(&store, action, &queue.to_string(), json!({})).await?;
        Ok(store.set_paused(queue, paused).await?)
    })
}

/// Runs `queue …`.
pub fn queue(command: QueueCommand) -> anyhow::Result<ExitCode> {
    match command {
        QueueCommand::List(ListArguments { json, servers }) => {
            with_store(&servers, async |store| print_queues(&store.queues().await?, json))?;
        }
        QueueCommand::Pause(QueueArguments { queue, servers }) => {
            set_paused(&servers, &queue, true)?;
            note!("{queue} is paused: workers finish running jobs and take no new ones");
        }
        QueueCommand::Resume(QueueArguments { queue, servers }) => {
            set_paused(&servers, &queue, false)?;
            note!("{queue} is resumed");
        }
        QueueCommand::Limit(arguments) => limit(arguments)?,
        QueueCommand::MaxWait(arguments) => block_on(arguments.run())?,
        QueueCommand::Show(arguments) => block_on(classes::show(&arguments))?,
        QueueCommand::AllowClass(arguments) => block_on(arguments.allow())?,
        QueueCommand::WithdrawClass(arguments) => block_on(arguments.withdraw())?,
        QueueCommand::ResetClass(QueueArguments { queue, servers }) => {
            let had = with_store(&servers, async |store| {
                record(&store, "queue.reset_class", &queue.to_string(), json!({})).await?;
                Ok(store.reset_class(&queue).await?)
            })?;
            match had {
                Some(class) => {
                    note!("{queue} had class '{class}'; the next worker sets a new one")
                }
                None => note!("{queue} has no class; the next worker sets one"),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn limit(arguments: LimitArguments) -> anyhow::Result<()> {
    let LimitArguments { queue: QueueArguments { queue, servers }, tokens, tenant, each_tenant } =
        arguments;
    let tenant = tenant.map(Tenant);
    with_store(&servers, async |store| {
        let detail =
            json!({ "limit_tokens": tokens, "tenant": tenant, "each_tenant": each_tenant });
        record(&store, "queue.limit", &queue.to_string(), detail).await?;
        match (&tenant, each_tenant) {
            (None, false) => store.set_limit(&queue, tokens).await?,
            (tenant, _) => store.set_quota(&queue, tenant.as_ref(), tokens).await?,
        }
        Ok(())
    })?;
    let scope = match tenant {
        Some(Tenant(name)) => format!("{queue}: tenant {name}"),
        None if each_tenant => format!("{queue}: each tenant"),
        None => queue.to_string(),
    };
    match tokens {
        Some(tokens) => note!("{scope} is limited to {tokens} tokens"),
        None => note!("{scope} has no limit now"),
    }
    Ok(())
}

fn print_queues(queues: &[QueueOverview], as_json: bool) -> anyhow::Result<()> {
    if !as_json {
        output::line(format_args!(
            "{:<32} {:>7} {:>9} {:>9} {:>10} {:>7} {:>9}  state",
            "queue", "workers", "queued", "running", "completed", "failed", "oldest s"
        ))?;
    }
    for QueueOverview { settings, progress, oldest_queued, overdue, workers } in queues {
        let name = settings.queue.to_string();
        if as_json {
            output::json(json!({
                "queue": name, "paused": settings.paused, "limit_tokens": settings.limit_tokens,
                "max_wait_s": settings.max_wait.map(|wait| wait.as_secs_f64()),
                "numerics_class": settings.class, "allowed_classes": settings.allowed_classes,
                "scheduled": progress.scheduled,
                "queued": progress.queued, "running": progress.running,
                "retrying": progress.retrying, "completed": progress.completed,
                "failed": progress.failed, "cancelled": progress.cancelled,
                "expired": progress.expired, "prompt_tokens": progress.prompt_tokens,
                "completion_tokens": progress.completion_tokens,
                "oldest_queued_s": oldest_queued.map(|age| age.as_secs_f64()),
                "overdue": overdue, "workers": workers,
            }))?;
            continue;
        }
        let pending = progress.queued + progress.scheduled + progress.retrying;
        output::line(format_args!(
            "{name:<32} {workers:>7} {pending:>9} {:>9} {:>10} {:>7} {:>9}  {}",
            progress.running,
            progress.completed,
            progress.failed,
            oldest_queued.map_or("-".to_owned(), |age| age.as_secs().to_string()),
            condition(settings, pending > 0 && *workers == 0, *overdue)
        ))?;
    }
    Ok(())
}

/// Describes the state of a queue.
fn condition(settings: &QueueState, is_unserved: bool, overdue: u64) -> String {
    let mut text = if settings.paused { "paused" } else { "open" }.to_owned();
    if !settings.allowed_classes.is_empty() {
        text += &format!(", {} numerics classes", 1 + settings.allowed_classes.len());
    }
    if is_unserved {
        text += ", no worker serves it";
    }
    if overdue > 0 {
        text += &format!(", {overdue} past their deadline");
    }
    text
}

/// Runs `dlq …`.
pub fn dlq(command: DlqCommand) -> anyhow::Result<ExitCode> {
    match command {
        DlqCommand::List(DlqListArguments {
            queue: QueueArguments { queue, servers },
            limit,
            after,
        }) => {
            with_store(&servers, async |store| {
                for letter in store.dead_letters(&queue, limit, after).await? {
                    let mut job = jobs::as_json(&letter.record);
                    job["replay_of"] = json!(letter.replay_of.map(|id| id.to_string()));
                    output::json(job)?;
                }
                Ok(())
            })?;
        }
        DlqCommand::Show(DlqArguments { ids, servers }) => with_store(&servers, async |store| {
            use tritmill_queue::Store as _;
            for id in &ids {
                let record = store.job(*id).await?.with_context(|| format!("no job {id}"))?;
                let mut job = jobs::as_json(&record);
                job["job"] = json!(record.job);
                output::json(job)?;
            }
            Ok(())
        })?,
        DlqCommand::Replay(DlqArguments { ids, servers }) => {
            let replays = with_store(&servers, async |store| {
                record(&store, "dead_letters.replay", "jobs", json!({ "ids": ids })).await?;
                Ok(store.replay(&ids, None).await?)
            })?;
            for replay in &replays {
                let (id, of) = (replay.job.id.to_string(), replay.replay_of.to_string());
                output::json(json!({ "id": id, "replay_of": of }))?;
            }
            // Workers would find them in the store, only later.
            if let Ok(Some(given)) = servers.given() {
                let entries: Vec<Entry> =
                    replays.iter().map(|replay| Job::entry(&replay.job)).collect();
                let runtime = tokio::runtime::Runtime::new()?;
                runtime.block_on(async {
                    let _ = given.dispatcher().await?.enqueue(&entries).await;
                    anyhow::Ok(())
                })?;
            }
            let of = |id: &&JobId| !replays.iter().any(|replay| replay.replay_of == **id);
            let others: Vec<&JobId> = ids.iter().filter(of).collect();
            for id in &others {
                note!("{id}: not replayed: not a dead letter, or it cannot be read");
            }
            if !others.is_empty() {
                return Ok(ExitCode::from(EXIT_INCOMPLETE));
            }
        }
        DlqCommand::Purge(DlqArguments { ids, servers }) => {
            let count = with_store(&servers, async |store| {
                record(&store, "dead_letters.purge", "jobs", json!({ "ids": ids })).await?;
                Ok(store.purge(&ids).await?)
            })?;
            note!("{count} dead letters deleted");
            let wanted: HashSet<&JobId> = ids.iter().collect();
            if usize::try_from(count) != Ok(wanted.len()) {
                note!("the other ids are not dead letters");
                return Ok(ExitCode::from(EXIT_INCOMPLETE));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
