//! `tritmill batches`: the batches of all tenants.

use std::{
    fs::File,
    io::{self, Read as _},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_admin::{
    FileContents, Models,
    added_lines::{self, BYTES_MAX, LineBounds},
    chosen_lines::{check_complete, chosen_lines},
    store::{
        Batch, BatchId, BatchState, FrontStore,
        audit::AuditEntry,
        batch_changes::{BatchChange, Changed},
        batches::{BatchDeletion, BatchFilter, BatchSearch},
    },
};
use tritmill_queue::{QueueName, Tenant, store::Page};

use super::{
    EXIT_INCOMPLETE,
    batch_results::ResultArguments,
    block_on,
    new_batch::NewBatchArguments,
    queue_name,
    schedules::{self, ScheduleArguments},
};
use crate::{keys::StoreOptions, output};

/// Create, list, read, cancel, pause, resume, retry, archive and delete batches of the HTTP API, of all tenants.
#[derive(Debug, Subcommand)]
pub enum BatchesCommand {
    /// List batches, the latest first
    List(BatchListArguments),
    /// Create a batch after another one, made of its lines and answers, or one of lines that are read at a URL
    Create(NewBatchArguments),
    /// Cancel batches: their jobs are cancelled, and their answers so far are kept
    #[command(after_help = CANCEL_HELP)]
    Cancel(BatchArguments),
    /// Pause batches: no line starts, and the deadline does not come nearer
    #[command(after_help = PAUSE_HELP)]
    Pause(PauseArguments),
    /// Resume paused batches, and run the cancelled lines of cancelled ones
    #[command(after_help = RESUME_HELP)]
    Resume(SelectedBatches),
    /// Run lines of a batch again: all that failed, expired or were cancelled, or those named
    #[command(after_help = RETRY_HELP)]
    Retry(RetryArguments),
    /// Add lines to an open batch: all lines of a file, or none of them
    #[command(name = "add-lines", after_help = ADD_HELP)]
    AddLines(AddArguments),
    /// Seal open batches: no more lines are added, and they end when their lines have
    #[command(after_help = "Examples:\n  tritmill batches seal batch_0199f3c2…")]
    Seal(BatchArguments),
    /// List or delete schedules, which create batches again and again
    Schedules(ScheduleArguments),
    /// Archive batches that have ended: lists leave them out, except with --archived
    #[command(after_help = "Examples:\n  tritmill batches archive batch_0199f3c2…")]
    Archive(EndedArguments),
    /// Take batches back from the archive
    #[command(after_help = "Examples:\n  tritmill batches unarchive batch_0199f3c2…")]
    Unarchive(EndedArguments),
    /// Delete batches that have ended, with their results and files
    #[command(after_help = "Examples:\n  tritmill batches delete batch_0199f3c2…")]
    Delete(EndedArguments),
    /// Print the lines of a batch that ended, also while it runs
    Results(ResultArguments),
}

const CANCEL_HELP: &str = "\
Examples:
  tritmill batches cancel batch_0199f3c2…

Exit codes:
  0 all are cancelled, 1 failure, 2 some are unknown or were finished";
const PAUSE_HELP: &str = "\
Examples:
  tritmill batches pause batch_0199f3c2…
  tritmill batches pause --now batch_0199f3c2…
  tritmill batches pause --tenant acme --model demo@i2_s

Exit codes:
  0 all are paused, 1 failure, 2 some are unknown or were finished";
const RESUME_HELP: &str = "\
Examples:
  tritmill batches resume batch_0199f3c2…
  tritmill batches resume --tenant acme

Exit codes:
  0 all are resumed, 1 failure, 2 some are unknown or neither paused nor cancelled";
const RETRY_HELP: &str = "\
Examples:
  tritmill batches retry batch_0199f3c2…
  tritmill batches retry batch_0199f3c2… --custom-id q17 --custom-id q18
  tritmill batches retry batch_0199f3c2… --custom-id q17 --force

Exit codes:
  0 the lines run again, 1 failure, 2 the batch is unknown, or its state does not allow it";

const ADD_HELP: &str = "\
Examples:
  tritmill batches add-lines batch_0199f3c2… more.jsonl
  jq -c … | tritmill batches add-lines batch_0199f3c2… -

Exit codes:
  0 all lines are in the batch, 1 none was added";

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
    /// List batches in this state only: validating, in_progress, paused, finalizing, completed, failed, expired,
    /// cancelling or cancelled
    #[arg(long, value_name = "STATE")]
    state: Option<BatchState>,
    /// List batches with this model only
    #[arg(long, value_name = "MODEL[@FORMAT]")]
    model: Option<String>,
    /// List batches with this text in their id or in the name of their input file only
    #[arg(long, value_name = "TEXT")]
    search: Option<String>,
    /// List batches with this pair of metadata only; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// List archived batches, and no others
    #[arg(long)]
    archived: bool,
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
pub struct BatchArguments {
    /// Ids, as printed by `tritmill batches list`
    #[arg(value_name = "ID", required = true)]
    ids: Vec<BatchId>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Batches by id, or all of a tenant or model.
#[derive(Debug, Args)]
pub struct SelectedBatches {
    /// Ids, as printed by `tritmill batches list`
    #[arg(value_name = "ID", required_unless_present_any = ["tenant", "model"],
          conflicts_with_all = ["tenant", "model"])]
    ids: Vec<BatchId>,
    /// All batches of this tenant that are open now: a pause takes those that wait or run, a resume paused ones
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// All batches of this queue, as MODEL@FORMAT; with --tenant, of both
    #[arg(long, value_name = "QUEUE", value_parser = queue_name)]
    model: Option<QueueName>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Batches that have ended.
#[derive(Debug, Args)]
pub struct EndedArguments {
    /// Ids, as printed by `tritmill batches list`
    #[arg(value_name = "ID", required = true)]
    ids: Vec<BatchId>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// A batch, and lines for it.
#[derive(Debug, Args)]
pub struct AddArguments {
    /// Id, as printed by `tritmill batches list`
    #[arg(value_name = "ID")]
    id: BatchId,
    /// File of lines, at most 10,000 and 8 MiB; - reads standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Batches, and how they are paused.
#[derive(Debug, Args)]
pub struct PauseArguments {
    /// Stop running lines at once; they go on from their latest checkpoint. By default they go to their end
    #[arg(long)]
    now: bool,
    #[command(flatten)]
    batches: SelectedBatches,
}

/// A batch, and which of its lines run again.
#[derive(Debug, Args)]
pub struct RetryArguments {
    /// Id, as printed by `tritmill batches list`
    #[arg(value_name = "ID")]
    id: BatchId,
    /// Run this line again; may be repeated
    #[arg(long = "custom-id", value_name = "NAME")]
    custom_ids: Vec<String>,
    /// Run named lines again that have an answer, which is deleted
    #[arg(long, requires = "custom_ids")]
    force: bool,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Parses NAME=VALUE.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// Runs `batches …`.
pub fn run(command: BatchesCommand) -> anyhow::Result<ExitCode> {
    match command {
        BatchesCommand::List(arguments) => block_on(list(arguments)),
        BatchesCommand::Create(arguments) => block_on(arguments.run()),
        BatchesCommand::Cancel(BatchArguments { ids, store_options }) => block_on(async {
            change(&Arc::from(store_options.open().await?), &ids, BatchChange::Cancel).await
        }),
        BatchesCommand::Pause(PauseArguments { now, batches }) => {
            const OPEN: [BatchState; 2] = [BatchState::Validating, BatchState::InProgress];
            block_on(batches.change(&OPEN, BatchChange::Pause { now }))
        }
        BatchesCommand::Resume(batches) => {
            block_on(batches.change(&[BatchState::Paused], BatchChange::Resume))
        }
        BatchesCommand::Retry(arguments) => block_on(retry(arguments)),
        BatchesCommand::AddLines(arguments) => block_on(add_lines(arguments)),
        BatchesCommand::Seal(BatchArguments { ids, store_options }) => block_on(async {
            change(&Arc::from(store_options.open().await?), &ids, BatchChange::Seal).await
        }),
        BatchesCommand::Schedules(arguments) => block_on(schedules::run(arguments)),
        BatchesCommand::Archive(arguments) => {
            block_on(of_each(arguments, "batch.archive", async |store, batch| {
                archive(store, batch, true).await
            }))
        }
        BatchesCommand::Unarchive(arguments) => {
            block_on(of_each(arguments, "batch.unarchive", async |store, batch| {
                archive(store, batch, false).await
            }))
        }
        BatchesCommand::Delete(arguments) => block_on(of_each(arguments, "batch.delete", delete)),
        BatchesCommand::Results(arguments) => block_on(arguments.run()),
    }
}

async fn list(arguments: BatchListArguments) -> anyhow::Result<ExitCode> {
    let BatchListArguments { tenant, state, limit, after, json, archived, .. } = arguments;
    let store = arguments.store_options.open().await?;
    let (metadata, model, text) = (arguments.metadata, arguments.model, arguments.search);
    let filter = BatchFilter {
        tenant: tenant.map(Tenant),
        state,
        archived: Some(archived),
        created: (None, None),
        search: BatchSearch { metadata, model, text, endpoint: None },
    };
    let page = Page { after, limit, ascending: false };
    for batch in store.find_batches(&filter, page).await? {
        print(&batch, json)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(batch: &Batch, as_json: bool) -> anyhow::Result<()> {
    let Batch { id, tenant, state, completed, failed, .. } = batch;
    let lines = batch.total_lines();
    let queue = batch.queue.as_ref().map(ToString::to_string);
    if as_json {
        output::json(json!({
            "id": id.to_string(), "tenant": tenant, "state": state.as_str(), "queue": queue,
            "lines": lines, "completed": completed, "failed": failed,
            "after": batch.after.as_ref().map(|after| after.batch.to_string()),
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

impl SelectedBatches {
    /// Changes the named batches, or all of a tenant or model that are in one of these states.
    async fn change(self, states: &[BatchState], what: BatchChange) -> anyhow::Result<ExitCode> {
        let Self { mut ids, tenant, model, store_options } = self;
        let store: Arc<dyn FrontStore> = Arc::from(store_options.open().await?);
        if ids.is_empty() {
            ids = find(&store, tenant.map(Tenant), model.as_ref(), states).await?;
        }
        change(&store, &ids, what).await
    }
}

/// Returns the batches of a tenant and a queue in these states.
async fn find(
    store: &Arc<dyn FrontStore>,
    tenant: Option<Tenant>,
    queue: Option<&QueueName>,
    states: &[BatchState],
) -> anyhow::Result<Vec<BatchId>> {
    const PAGE: u32 = 1000;
    let mut ids = Vec::new();
    for state in states {
        let filter =
            BatchFilter { tenant: tenant.clone(), state: Some(*state), ..BatchFilter::default() };
        let mut page = Page { after: None, limit: PAGE, ascending: false };
        loop {
            let found = store.find_batches(&filter, page).await?;
            page.after = found.last().map(|batch| batch.id);
            let is_last = found.len() < PAGE as usize;
            let is_of = |batch: &Batch| queue.is_none() || batch.queue.as_ref() == queue;
            ids.extend(found.into_iter().filter(is_of).map(|batch| batch.id));
            if is_last {
                break;
            }
        }
    }
    Ok(ids)
}

/// Changes batches. Goes on after one that cannot be changed.
async fn change(
    store: &Arc<dyn FrontStore>,
    ids: &[BatchId],
    change: BatchChange,
) -> anyhow::Result<ExitCode> {
    let mut all = true;
    for id in ids {
        let batch = store.batch_of_any_tenant(*id).await?;
        all &= match batch {
            Some(batch) => change_one(store, &batch, &change).await?,
            None => is_unknown(*id),
        };
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
}

async fn retry(arguments: RetryArguments) -> anyhow::Result<ExitCode> {
    let RetryArguments { id, custom_ids, force, store_options } = arguments;
    let store: Arc<dyn FrontStore> = Arc::from(store_options.open().await?);
    // Content in an object store is the admin's to read.
    let files = FileContents::new(store.clone(), None);
    let done = match store.batch_of_any_tenant(id).await? {
        None => is_unknown(id),
        Some(batch) => {
            let change = match custom_ids.as_slice() {
                [] => BatchChange::retry_all(),
                names => BatchChange::Retry {
                    lines: chosen_lines(&files, &batch, names, force).await?,
                    key: None,
                },
            };
            change_one(&store, &batch, &change).await?
        }
    };
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
}

async fn add_lines(arguments: AddArguments) -> anyhow::Result<ExitCode> {
    let AddArguments { id, file, store_options } = arguments;
    let mut bytes = Vec::new();
    // One byte more than allowed tells that there are too many.
    let most = BYTES_MAX as u64 + 1;
    match file.as_os_str() == "-" {
        true => io::stdin().lock().take(most).read_to_end(&mut bytes),
        false => File::open(&file).and_then(|file| file.take(most).read_to_end(&mut bytes)),
    }
    .with_context(|| format!("cannot read {}", file.display()))?;
    ensure!(bytes.len() <= BYTES_MAX, "there are more than {BYTES_MAX} bytes: add them in parts");
    let store: Arc<dyn FrontStore> = Arc::from(store_options.open().await?);
    let Some(batch) = store.batch_of_any_tenant(id).await? else {
        bail!("no batch {id}: see tritmill batches list");
    };
    let detail = json!({ "tenant": batch.tenant, "bytes": bytes.len() });
    let line = AuditEntry::from_command_line("batch.add_lines", &id.to_string(), detail);
    store.record_audit(&line).await.context("cannot write the audit log")?;
    let models = Models::registered(store.clone());
    // Operators add lines beyond the limits of the service.
    let bounds = LineBounds { lines_max: u32::MAX.into(), bytes_max: u64::MAX };
    let added = added_lines::add(&*store, &models, &batch, &bytes, bounds).await?;
    let added = added.context("the batch was deleted meanwhile")?;
    let total = added.batch.total_lines();
    note!("{id}: {} lines added, {} known, {total} in all", added.added, added.known);
    Ok(ExitCode::SUCCESS)
}

/// Says that a batch is unknown.
fn is_unknown(id: BatchId) -> bool {
    note!("no batch {id}: see tritmill batches list");
    false
}

/// Changes a batch. Returns whether its state allowed it.
async fn change_one(
    store: &Arc<dyn FrontStore>,
    batch: &Batch,
    change: &BatchChange,
) -> anyhow::Result<bool> {
    let (id, done) = (batch.id, change.done());
    if matches!(change, BatchChange::Resume | BatchChange::Retry { .. }) {
        check_complete(store, batch).await?;
    }
    let detail = json!({ "tenant": batch.tenant });
    let line = AuditEntry::from_command_line(change.action(), &id.to_string(), detail);
    store.record_audit(&line).await.context("cannot write the audit log")?;
    // Operators open batches of a tenant beyond its limit.
    let problem = match store.change_batch(&batch.tenant, id, change, u32::MAX).await? {
        Some(Changed::Done(_)) => {
            note!("{id}: {done}");
            return Ok(true);
        }
        Some(Changed::Refused(batch)) => format!("it is {}", batch.state.as_str()),
        Some(Changed::ManyRetries) => "too many retries wait for their turn".to_owned(),
        Some(Changed::Full | Changed::KeyConflict) => "the store refuses it".to_owned(),
        None => "it was deleted meanwhile".to_owned(),
    };
    note!("{id}: not {done}, {problem}");
    Ok(false)
}

/// Does something to each of some batches, which says whether it was done, and in words what was.
async fn of_each(
    arguments: EndedArguments,
    action: &str,
    act: impl AsyncFn(&dyn FrontStore, &Batch) -> anyhow::Result<(bool, String)>,
) -> anyhow::Result<ExitCode> {
    let store = arguments.store_options.open().await?;
    let mut all = true;
    for id in &arguments.ids {
        let Some(batch) = store.batch_of_any_tenant(*id).await? else {
            note!("no batch {id}: see tritmill batches list");
            all = false;
            continue;
        };
        let detail = json!({ "tenant": batch.tenant });
        let line = AuditEntry::from_command_line(action, &id.to_string(), detail);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        let (is_done, what) = act(&*store, &batch).await?;
        note!("{id}: {what}");
        all &= is_done;
    }
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(EXIT_INCOMPLETE) })
}

async fn archive(
    store: &dyn FrontStore,
    batch: &Batch,
    archived: bool,
) -> anyhow::Result<(bool, String)> {
    let done = if archived { "archived" } else { "listed again" };
    Ok(match store.archive_batch(&batch.tenant, batch.id, archived).await? {
        Some(batch) if batch.state.is_terminal() => (true, done.to_owned()),
        Some(batch) => (false, format!("not {done}, it is {}", batch.state.as_str())),
        None => (false, "deleted meanwhile".to_owned()),
    })
}

async fn delete(store: &dyn FrontStore, batch: &Batch) -> anyhow::Result<(bool, String)> {
    Ok(match store.delete_batch(&batch.tenant, batch.id).await? {
        BatchDeletion::Deleted => (true, "deleted".to_owned()),
        BatchDeletion::Unfinished(state) => {
            (false, format!("not deleted, it is {}", state.as_str()))
        }
        BatchDeletion::Awaited(by) => (false, format!("not deleted, {by} waits for its answers")),
        BatchDeletion::NotFound => (false, "deleted meanwhile".to_owned()),
    })
}
