//! `/v1/batches`: files that are answered line by line.

mod after;
mod asked;
mod changes;
mod data_urls;
mod escalation;
pub(crate) mod estimate;
mod open;
mod request;
pub(crate) mod results;

use axum::{Json, extract::Path, http::HeaderMap};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tritmill_client::answer;
use tritmill_queue::{Charge, Timestamp, Usage, store::Page};
use utoipa::ToSchema;

pub(crate) use self::changes::{
    __path_cancel, __path_pause, __path_resume, __path_retry, cancel, change_of_tenant, change_own,
    pause, pause_of, resume, retry,
};
pub(crate) use self::escalation::EscalationView;
pub(crate) use self::open::{__path_add_lines, __path_seal, add_lines, seal};
pub(crate) use self::request::NewBatch;
use self::{after::AfterView, asked::Asked};
use super::{
    idempotency,
    list::{List, ListQuery},
    schemas::BatchRequest,
    webhook::WebhookView,
};
use crate::{
    ApiError, App, Call, Caller, JsonBody, JsonResult, QueryParams,
    batch_conditions::{self, BatchConditions},
    error::ErrorResponse,
    extract::from_query,
    store::{
        Batch, BatchId, BatchState, FileId,
        batches::{BatchDeletion, Creation},
        files::{FilePurpose, StoredFile},
        step_state::BatchError,
    },
    tenant_limits,
};

/// Batches of a list by default, and at most.
const LIST_DEFAULT: u32 = 20;
const LIST_MAX: u32 = 100;

/// A batch.
#[derive(Serialize, ToSchema)]
#[schema(as = Batch)]
pub(crate) struct BatchView {
    id: String,
    object: &'static str,
    /// The endpoint of all lines, or `mixed`.
    endpoint: String,
    /// The model of all lines.
    model: Option<String>,
    errors: Option<BatchErrors>,
    /// Null before the lines of a batch after another one are made, or those of an `input_url` are read.
    input_file_id: Option<String>,
    /// Where its lines were read, without the query.
    input_url: Option<String>,
    #[schema(value_type = Option<Object>)]
    input_options: Option<Value>,
    /// The earlier batch of a batch after another one.
    after: Option<AfterView>,
    completion_window: String,
    escalation: Option<EscalationView>,
    /// `validating`, `in_progress`, `paused` (a state that OpenAI does not have), `finalizing`, `cancelling`; finally
    /// `completed`, `failed`, `expired` or `cancelled`.
    status: &'static str,
    output_file_id: Option<String>,
    error_file_id: Option<String>,
    /// Where the answers are written, too, when the batch ends.
    output_url: Option<String>,
    output_format: Option<String>,
    /// Why they could not be written there. The files have them in any case.
    output_url_error: Option<String>,
    created_at: i64,
    in_progress_at: Option<i64>,
    /// The deadline. While the batch is paused it does not count: a resume moves it by the time of the pause.
    expires_at: i64,
    /// Since when it is paused, while it is.
    paused_at: Option<i64>,
    finalizing_at: Option<i64>,
    completed_at: Option<i64>,
    failed_at: Option<i64>,
    expired_at: Option<i64>,
    cancelling_at: Option<i64>,
    cancelled_at: Option<i64>,
    request_counts: RequestCounts,
    /// Tokens of all answers, when the output is written.
    usage: Option<BatchUsage>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
    webhook: Option<WebhookView>,
    /// Time since which it is archived.
    archived_at: Option<i64>,
    /// Whether lines may be added to it.
    open: bool,
    /// When a batch that was open took its last lines.
    sealed_at: Option<i64>,
}

/// Errors of a rejected input file.
#[derive(Serialize, ToSchema)]
pub(crate) struct BatchErrors {
    object: &'static str,
    #[schema(value_type = Vec<Object>)]
    data: Vec<BatchError>,
}

/// Numbers of lines.
#[derive(Serialize, ToSchema)]
pub(crate) struct RequestCounts {
    total: u64,
    completed: u64,
    failed: u64,
}

/// Tokens of a batch's answers.
#[derive(Serialize, ToSchema)]
pub(crate) struct BatchUsage {
    input_tokens: u64,
    input_tokens_details: InputTokens,
    output_tokens: u64,
    output_tokens_details: OutputTokens,
    total_tokens: u64,
    /// What the answers cost, by currency; empty without prices.
    cost: Vec<CostView>,
}

/// An amount of money.
#[derive(Serialize, ToSchema)]
#[schema(as = Cost)]
pub(crate) struct CostView {
    currency: String,
    #[schema(value_type = f64)]
    amount: Value,
}

impl From<&Charge> for CostView {
    fn from(charge: &Charge) -> Self {
        let currency = charge.currency.as_str().to_owned();
        Self { currency, amount: answer::cost(charge) }
    }
}

/// Tokens of the prompts by how they were computed.
#[derive(Serialize, ToSchema)]
pub(crate) struct InputTokens {
    /// Those that were not computed, because an earlier prompt began in the same way.
    cached_tokens: u64,
}

/// Generated tokens by what they are for.
#[derive(Serialize, ToSchema)]
pub(crate) struct OutputTokens {
    /// Always 0: answers have no separate reasoning.
    reasoning_tokens: u64,
}

impl BatchUsage {
    fn new(usage: Usage, cost: &[Charge]) -> Self {
        Self {
            cost: cost.iter().map(CostView::from).collect(),
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputTokens { cached_tokens: usage.cached_tokens },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokens { reasoning_tokens: 0 },
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
        }
    }
}

impl From<Batch> for BatchView {
    fn from(batch: Batch) -> Self {
        let at = |time: Option<Timestamp>| time.map(Timestamp::seconds);
        let (has_errors, total) = (!batch.errors.is_empty(), batch.total_lines());
        let input_file_id = batch.has_input().then(|| batch.input.to_string());
        Self {
            id: batch.id.to_string(),
            object: "batch",
            endpoint: batch.endpoint,
            model: batch.queue.map(|queue| queue.to_string()),
            errors: has_errors.then_some(BatchErrors { object: "list", data: batch.errors }),
            input_file_id,
            input_url: batch.input_url.as_ref().map(|input| input.shown()),
            input_options: batch.input_url.as_ref().map(|input| input.options.to_json()),
            after: batch.after.as_deref().map(AfterView::from),
            completion_window: batch.completion_window,
            escalation: batch.escalation.map(EscalationView::from),
            status: batch.state.as_str(),
            output_file_id: batch.output.map(|id| id.to_string()),
            error_file_id: batch.error_file.map(|id| id.to_string()),
            output_url: batch.output_url.as_ref().map(|output| output.shown()),
            output_format: batch.output_url.as_ref().and_then(|output| output.format.clone()),
            output_url_error: batch.output_url.and_then(|output| output.error),
            created_at: batch.created_at.seconds(),
            in_progress_at: at(batch.at.in_progress),
            expires_at: batch.expires_at.seconds(),
            paused_at: at(batch.at.paused),
            finalizing_at: at(batch.at.finalizing),
            completed_at: at(batch.at.completed),
            failed_at: at(batch.at.failed),
            expired_at: at(batch.at.expired),
            cancelling_at: at(batch.at.cancelling),
            cancelled_at: at(batch.at.cancelled),
            request_counts: RequestCounts {
                total,
                completed: batch.completed,
                failed: batch.failed,
            },
            usage: batch.output.and(batch.usage).map(|usage| BatchUsage::new(usage, &batch.cost)),
            metadata: batch.metadata,
            webhook: batch.webhook.map(|webhook| WebhookView::new(webhook, batch.told)),
            archived_at: at(batch.archived_at),
            open: batch.is_open && !batch.state.is_terminal(),
            sealed_at: at(batch.at.sealed),
        }
    }
}

/// Creates a batch.
#[utoipa::path(post, path = "/v1/batches", tag = "batches",
    request_body = BatchRequest,
    params(("Idempotency-Key" = Option<String>, Header,
        description = "Requests with the same key create one batch")),
    responses((status = 200, description = "The batch, which is validating", body = BatchView)))]
pub(crate) async fn create(
    Call { app, caller }: Call,
    headers: HeaderMap,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<BatchView> {
    let batch = create_batch(&app, &caller, body, idempotency::key(&headers)?).await?;
    // Who creates a batch need not know the secret of the tenant's webhook.
    let own = batch.webhook.clone().filter(|webhook| !webhook.is_of_tenant);
    let mut view = BatchView::from(batch);
    view.webhook = view.webhook.map(|webhook| webhook.with_secret(own));
    Ok(Json(view))
}

/// Checks a request to create a batch, without creating it.
pub(crate) async fn check_request(
    app: &App,
    caller: &Caller,
    body: Map<String, Value>,
) -> Result<(), ApiError> {
    let new = NewBatch::parse(body, app, &caller.tenant)?;
    if new.after.is_some() {
        let message =
            "after is not possible in a schedule: each run would have the same earlier batch";
        return Err(ApiError::invalid_value("after", message));
    }
    if let Some(input) = &new.input {
        input_file(app, caller, input).await?;
    }
    if let Some(asked) = new.escalation {
        asked.find(app).await?;
    }
    Ok(())
}

/// Creates a batch, or returns the one that was created with the same idempotency key.
pub(crate) async fn create_batch(
    app: &App,
    caller: &Caller,
    body: Map<String, Value>,
    idempotency_key: Option<String>,
) -> Result<Batch, ApiError> {
    let new = NewBatch::parse(body, app, &caller.tenant)?;
    if let Some(key) = &idempotency_key
        && let Some(known) = app.store.keyed_batch(&caller.tenant, key).await?
    {
        return same(known, &Asked::by(&new, None));
    }
    let given = match &new.input {
        Some(id) => Some(input_file(app, caller, id).await?),
        None => None,
    };
    submit(app, caller, new, given.as_ref().map(|file| (file, 0)), idempotency_key).await
}

/// Creates a batch of the lines of a file that was just written, and has so many of them.
pub(crate) async fn create_with_file(
    app: &App,
    caller: &Caller,
    new: NewBatch,
    file: (&StoredFile, u64),
    idempotency_key: Option<String>,
) -> Result<Batch, ApiError> {
    submit(app, caller, new, Some(file), idempotency_key).await
}

async fn submit(
    app: &App,
    caller: &Caller,
    new: NewBatch,
    given: Option<(&StoredFile, u64)>,
    idempotency_key: Option<String>,
) -> Result<Batch, ApiError> {
    let (given, lines) = given.unzip();
    let asked = Asked::by(&new, given.map(|file| file.id));
    let (tokens, refused) = match admit(app, caller, &new, given).await {
        Ok(tokens) => (tokens, None),
        Err(refused) => (None, Some(refused)),
    };
    let webhook = match new.webhook {
        Some(own) => Some(own),
        None => app.store.tenant_webhook(&caller.tenant).await?,
    };
    let escalation = match new.escalation {
        Some(asked) => Some(asked.find(app).await?),
        None => None,
    };
    let created_at = app.client.now().await?;
    let after = match new.after {
        Some((earlier, lines)) => Some(after::check(app, caller, &earlier, lines).await?),
        None => None,
    };
    // An open batch has a file of its own, to which lines are added.
    let input = match given {
        Some(file) if !new.open => file.id,
        _ => FileId::generate(),
    };
    let batch = Batch {
        key: Some(caller.key),
        input,
        priority: new.priority,
        metadata: new.metadata,
        output_expires_s: new.output_expires_s,
        expires_at: created_at.after(new.within),
        is_open: new.open,
        after: after.map(Box::new),
        input_url: new.input_url.map(Box::new),
        output_url: new.output_url.map(Box::new),
        began_with: given.filter(|_| new.open).map(|file| file.id),
        lines: lines.unwrap_or_default(),
        tokens,
        idempotency_key,
        escalation,
        webhook,
        mail_to: app.mail_receivers(&caller.tenant),
        ..Batch::new(caller.tenant.clone(), new.endpoint, new.window, created_at)
    };
    // The request of a batch that is there is answered, though its budget was spent or its window filled meanwhile.
    let max = match refused {
        None => tenant_limits::open_batches(app, &caller.tenant).await?,
        Some(_) => 0,
    };
    if new.open && refused.is_none() {
        open::own_input(app, &batch, given).await?;
    }
    match store(app, &batch, max).await? {
        Creation::New => {
            tracing::info!(key = %caller.key, batch = %batch.id, %input, "batch created");
            Ok(batch)
        }
        Creation::Known(known) => same(*known, &asked),
        Creation::Full => Err(refused.unwrap_or_else(|| ApiError::too_many_batches(max))),
        Creation::NoEarlier => Err(after::deleted_meanwhile(&batch)),
    }
}

/// Stores a new batch if fewer than `max` are open. The file of an open one stays only with it.
async fn store(app: &App, batch: &Batch, max: u32) -> Result<Creation, ApiError> {
    let created = app.store.create_batch(batch, max).await?;
    if created == Creation::New {
        app.batch_changed.notify_one();
    } else if batch.is_open {
        app.store.delete_file(&batch.tenant, batch.input).await?;
    }
    Ok(created)
}

/// Returns the batch that has the key of a request, if it was created by the same request.
fn same(known: Batch, asked: &Asked) -> Result<Batch, ApiError> {
    match Asked::of(&known) == *asked {
        true => Ok(known),
        false => Err(idempotency::conflict("batch")),
    }
}

/// Checks the budgets and the capacity for a new batch; returns its tokens, if they count already.
async fn admit(
    app: &App,
    caller: &Caller,
    new: &NewBatch,
    file: Option<&StoredFile>,
) -> Result<Option<u64>, ApiError> {
    app.budget_checks.check(app, caller).await?;
    estimate::check_capacity(app, file, new.within, new.tier()).await
}

/// Returns the file with the lines of a new batch.
async fn input_file(app: &App, caller: &Caller, id: &str) -> Result<StoredFile, ApiError> {
    let no_file = || ApiError::not_found("file", id).at("input_file_id");
    let input: FileId = id.parse().map_err(|_| no_file())?;
    let file = app.store.file(&caller.tenant, input).await?.ok_or_else(no_file)?;
    if file.purpose != FilePurpose::Batch {
        let message = "input_file_id must be a file of purpose 'batch'";
        return Err(ApiError::invalid_value("input_file_id", message));
    }
    Ok(file)
}

/// Conditions on the batches of a list. All given conditions must hold.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct BatchListQuery {
    /// Status of the batch.
    #[param(nullable = false)]
    status: Option<String>,
    /// A model of its lines, with or without a format (`MODEL@FORMAT`).
    #[param(nullable = false)]
    model: Option<String>,
    /// Text in its id or in the name of its input file. The latest 10,000 batches are searched for it, for the model and for
    /// metadata.
    #[param(nullable = false)]
    search: Option<String>,
    /// `true`: archived batches, and no others.
    #[param(nullable = false, value_type = Option<bool>)]
    archived: Option<String>,
    /// Earliest creation time, in milliseconds since 1970.
    #[param(nullable = false, value_type = Option<i64>)]
    from_ms: Option<String>,
    /// End of the creation times (exclusive), in milliseconds since 1970.
    #[param(nullable = false, value_type = Option<i64>)]
    to_ms: Option<String>,
}

/// Lists the tenant's batches. `metadata[NAME]=VALUE` is a condition, too, and may come several times.
#[utoipa::path(get, path = "/v1/batches", tag = "batches", params(ListQuery, BatchListQuery,
        ("metadata" = Option<HashMap<String, String>>, Query, style = DeepObject, explode, nullable = false,
            description = "Pairs of its metadata")),
    responses((status = 200, description = "The latest first", body = List<BatchView>)))]
pub(crate) async fn list(
    Call { app, caller }: Call,
    QueryParams(params): QueryParams<Vec<(String, String)>>,
) -> JsonResult<List<BatchView>> {
    let (metadata, mut query) = batch_conditions::split(params)?;
    let of_page: Map<String, Value> = ["limit", "after", "order"]
        .into_iter()
        .filter_map(|param| query.swap_remove(param).map(|value| (param.to_owned(), value)))
        .collect();
    let page: ListQuery = from_query(of_page)?;
    let page: Page<BatchId> = page.page(LIST_DEFAULT, LIST_MAX)?;
    let query: BatchListQuery = from_query(query)?;
    let conditions = BatchConditions {
        tenant: Some(caller.tenant),
        state: ("status", query.status.as_deref()),
        metadata,
        model: query.model.as_deref(),
        search: query.search.as_deref(),
        archived: query.archived.as_deref(),
        from_ms: query.from_ms.as_deref(),
        to_ms: query.to_ms.as_deref(),
    };
    let batches = app.store.find_batches(&conditions.filter()?, page).await?;
    let batches = batches.into_iter().map(BatchView::from).collect();
    Ok(Json(List::new(&page, batches, |batch| &batch.id)))
}

/// Archives a batch that has ended: lists leave it out, except with `archived=true`.
#[utoipa::path(post, path = "/v1/batches/{id}/archive", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = BatchView)))]
pub(crate) async fn archive(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(archive_batch(&app, &caller, &id, true).await?.into()))
}

/// Takes a batch back from the archive.
#[utoipa::path(post, path = "/v1/batches/{id}/unarchive", tag = "batches",
    params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = BatchView)))]
pub(crate) async fn unarchive(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(archive_batch(&app, &caller, &id, false).await?.into()))
}

/// Archives a batch of the caller's tenant, or takes it back.
pub(crate) async fn archive_batch(
    app: &App,
    caller: &Caller,
    id: &str,
    archived: bool,
) -> Result<Batch, ApiError> {
    let unknown = || ApiError::not_found("batch", id);
    let batch: BatchId = id.parse().map_err(|_| unknown())?;
    let batch = app.store.archive_batch(&caller.tenant, batch, archived).await?;
    let batch = batch.ok_or_else(unknown)?;
    match batch.state.is_terminal() {
        true => Ok(batch),
        false => Err(unfinished(batch.state, "archived")),
    }
}

fn unfinished(state: BatchState, done: &str) -> ApiError {
    let state = state.as_str();
    let message =
        format!("a batch in state '{state}' cannot be {done}: cancel it, or wait for its end");
    ApiError::conflict("batch_unfinished", &message)
}

/// A deleted batch.
#[derive(Serialize, ToSchema)]
pub(crate) struct BatchDeleted {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Deletes a batch that has ended, with its results and output files, and its input file if no other batch has it.
#[utoipa::path(delete, path = "/v1/batches/{id}", tag = "batches", params(("id" = String, Path)),
    responses((status = 200, description = "The batch is deleted", body = BatchDeleted),
        (status = 409, description = "The batch runs, or another one waits for it", body = ErrorResponse)))]
pub(crate) async fn remove(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchDeleted> {
    delete_batch(&app, &caller, &id).await?;
    Ok(Json(BatchDeleted { id, object: "batch", deleted: true }))
}

/// Deletes a batch of the caller's tenant that has ended.
pub(crate) async fn delete_batch(app: &App, caller: &Caller, id: &str) -> Result<(), ApiError> {
    let unknown = || ApiError::not_found("batch", id);
    let batch: BatchId = id.parse().map_err(|_| unknown())?;
    match app.store.delete_batch(&caller.tenant, batch).await? {
        BatchDeletion::NotFound => Err(unknown()),
        BatchDeletion::Unfinished(state) => Err(unfinished(state, "deleted")),
        BatchDeletion::Awaited(by) => Err(after::awaited(by)),
        BatchDeletion::Deleted => {
            app.batch_deleted.notify_one();
            tracing::info!(key = %caller.key, %batch, "batch deleted");
            Ok(())
        }
    }
}

/// Returns a batch.
#[utoipa::path(get, path = "/v1/batches/{id}", tag = "batches", params(("id" = String, Path)),
    responses((status = 200, description = "The batch", body = BatchView)))]
pub(crate) async fn one(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<BatchView> {
    Ok(Json(find(&app, &caller, &id).await?.into()))
}

/// Finds a batch of the caller's tenant.
pub(crate) async fn find(app: &App, caller: &Caller, id: &str) -> Result<Batch, ApiError> {
    let unknown = || ApiError::not_found("batch", id);
    let batch: BatchId = id.parse().map_err(|_| unknown())?;
    app.store.batch(&caller.tenant, batch).await?.ok_or_else(unknown)
}
