//! A single call: a request that becomes a job with a caller who waits for the answer.
//!
//! The job has priority high, and the time limit as its deadline: if it would miss that, it is
//! refused at once. If the caller disconnects or the time limit passes, the job is cancelled.

use std::time::Duration;

use serde_json::{Map, Value};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};
use tritmill_client::{Body, ClientError};
use tritmill_queue::{
    Completion, FinishedJob, Job, JobId, Priority, QueueName, Task, Timestamp, TraceParent,
};

use super::{
    answer::{AwaitedJob, completion},
    follow::Follower,
};
use crate::{ApiError, App, Caller};

/// What a call needs besides its body.
pub(super) struct CallContext {
    pub caller: Caller,
    pub traceparent: Option<TraceParent>,
    /// Time limit of the answer.
    pub limit: Duration,
    /// Whether the text is published while it is generated.
    pub stream: bool,
    /// What is asked for.
    pub task: Task,
    /// What the answer repeats of the request.
    pub echo: Map<String, Value>,
}

/// A call with a job that was accepted.
pub(super) struct AcceptedCall {
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
pub(super) async fn queue_of(app: &App, body: &Body) -> Result<QueueName, ApiError> {
    let name = body.model.as_deref().ok_or_else(|| ApiError::missing_field("model"))?;
    app.models.find(name).await?.ok_or_else(|| ApiError::model_not_found(name))
}

/// Submits the job of a call.
pub(super) async fn submit(
    app: App,
    context: CallContext,
    body: Body,
) -> Result<AcceptedCall, ApiError> {
    let CallContext { caller, traceparent, limit, stream, task, echo } = context;
    let queue = queue_of(&app, &body).await?;
    let created = app.client.now().await?;
    let id = JobId::generate();
    let job = Job {
        tenant: caller.tenant,
        priority: Priority::High,
        stream,
        expires_at: Some(created.after(limit)),
        traceparent,
        task,
        echo,
        ..body.job(id, queue)
    };
    let (choices, submitted) = (job.choice_count(), job.clone());
    // Created before the submission, which may succeed even if it breaks off.
    let expires = Instant::now() + limit;
    let mut awaited = AwaitedJob { app: app.clone(), id, expires, is_finished: false };
    if let Err(error) = app.client.submit(job).await {
        // What was refused is in no store: there is nothing to cancel.
        awaited.is_finished = matches!(error, ClientError::Busy { .. });
        return Err(error.into());
    }
    let end = app.job_waiter.wait_for(id);
    Ok(AcceptedCall { app, awaited, end, limit, job: submitted, created, choices })
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
