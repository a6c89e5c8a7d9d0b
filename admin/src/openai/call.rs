//! A single call: a request that becomes a job with a caller who waits for the answer.
//!
//! The job has priority high, unless its tier is `flex`, and the time limit as its deadline: if it would miss that, it is
//! refused at once. If the caller disconnects or the time limit passes, the job is cancelled. With an idempotency key it goes on:
//! the same call again gets its answer.

use std::time::Duration;

use axum::http::HeaderMap;
use serde_json::{Map, Value};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};
use tritmill_client::{Body, ClientError};
use tritmill_queue::{
    Billing, Completion, FinishedJob, Job, JobId, JobState, QueueName, Tenant, Timestamp,
    TraceParent,
};

use super::{
    answer::{AwaitedJob, completion},
    follow::Follower,
    idempotency,
};
use crate::{ApiError, App, Caller, store::call_keys::CallKey};

/// What a call needs besides its body.
pub(crate) struct CallContext {
    pub caller: Caller,
    pub traceparent: Option<TraceParent>,
    /// Time limit of the answer.
    pub limit: Duration,
    /// Whether the text is published while it is generated.
    pub stream: bool,
    /// What the answer repeats of the request.
    pub echo: Map<String, Value>,
    /// The idempotency key, and a hash of the request.
    pub key: Option<(String, [u8; 32])>,
}

/// Returns the idempotency key of a request, with a hash of its body.
pub(crate) fn key_of(
    headers: &HeaderMap,
    path: &str,
    body: &Map<String, Value>,
) -> Result<Option<(String, [u8; 32])>, ApiError> {
    let key = idempotency::key(headers)?;
    Ok(key.map(|key| {
        let body = Value::Object(body.clone()).to_string();
        let hash = idempotency::hash([path.as_bytes(), body.as_bytes()]);
        (key, hash)
    }))
}

/// A call with a job that was accepted.
pub(crate) struct AcceptedCall {
    app: App,
    awaited: AwaitedJob,
    end: oneshot::Receiver<FinishedJob>,
    limit: Duration,
    /// The job as it was submitted.
    pub job: Job,
    /// Time of the request.
    pub created: Timestamp,
    /// Number of requested choices.
    pub choices: u32,
}

/// Returns the queue of the model that a body names.
pub(crate) async fn queue_of(app: &App, body: &Body) -> Result<QueueName, ApiError> {
    let name = body.model.as_deref().ok_or_else(|| ApiError::missing_field("model"))?;
    app.models.find(name).await?.ok_or_else(|| ApiError::model_not_found(name))
}

/// Submits the job of a call.
pub(crate) async fn submit(
    app: App,
    context: CallContext,
    body: Body,
) -> Result<AcceptedCall, ApiError> {
    let CallContext { caller, traceparent, limit, stream, echo, key } = context;
    let queue = queue_of(&app, &body).await?;
    if let Err(refused) = app.budget_checks.check(&app, &caller).await {
        // A call that comes again gets its answer, though its budget was spent meanwhile.
        let is_known = match &key {
            Some((key, hash)) => {
                app.store.has_call(&caller.tenant, CallKey { key, request_hash: hash }).await?
            }
            None => false,
        };
        if !is_known {
            return Err(refused);
        }
    }
    let created = app.client.now().await?;
    let id = match &key {
        Some((key, hash)) => {
            keyed_job(&app, &caller.tenant, CallKey { key, request_hash: hash }).await?
        }
        None => JobId::generate(),
    };
    let tier = body.tier.unwrap_or_default();
    let job = Job {
        tenant: caller.tenant,
        priority: tier.priority(),
        billing: Billing { tier, key: Some(caller.key) },
        stream,
        expires_at: Some(created.after(limit)),
        traceparent,
        echo,
        ..body.job(id, queue)
    };
    let (choices, submitted) = (job.choice_count(), job.clone());
    // Created before the submission, which may succeed even if it breaks off.
    let expires = Instant::now() + limit;
    // A caller with a key comes back for the answer.
    let is_kept = key.is_some();
    let mut awaited = AwaitedJob { app: app.clone(), id, expires, is_finished: is_kept };
    if let Err(error) = app.client.submit(job).await {
        // What was refused is in no store: there is nothing to cancel.
        awaited.is_finished |= matches!(error, ClientError::Busy { .. });
        return Err(error.into());
    }
    let end = app.job_waiter.wait_for(id);
    Ok(AcceptedCall { app, awaited, end, limit, job: submitted, created, choices })
}

/// Returns the job of a key: that of an earlier call, unless it ended without an answer, or a new one. Submitting a job that the store
/// has changes nothing.
async fn keyed_job(app: &App, tenant: &Tenant, key: CallKey<'_>) -> Result<JobId, ApiError> {
    let new = JobId::generate();
    let known = app.store.claim_call(tenant, key, new).await?;
    if !known.is_same {
        return Err(idempotency::conflict("request"));
    }
    let has_failed = match app.store.state(known.job).await? {
        Some(state) => state.is_terminal() && state != JobState::Completed,
        None => false,
    };
    if !has_failed {
        return Ok(known.job);
    }
    match app.store.replace_call(tenant, key.key, (known.job, new)).await? {
        true => Ok(new),
        // Another call was first.
        false => Ok(app.store.claim_call(tenant, key, new).await?.job),
    }
}

impl AcceptedCall {
    /// Waits for the answer.
    pub async fn completion(mut self) -> Result<Completion, ApiError> {
        let Ok(Ok(ended)) = timeout(self.limit, self.end).await else {
            return Err(ApiError::answer_timeout());
        };
        self.awaited.is_finished = true;
        completion(ended)
    }

    /// Returns what follows the answer while it is generated.
    pub fn follow(self) -> Follower {
        let Self { app, awaited, end, limit, job, choices, .. } = self;
        Follower { app, awaited, id: job.id, choices, end, limit }
    }
}
