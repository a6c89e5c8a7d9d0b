//! `/v1/chat/completions` and `/v1/completions`.
//!
//! A request becomes a job of priority high, with the time limit as its deadline: if it would miss that, it is
//! refused at once. If the caller disconnects or the time limit passes, the job is cancelled.

use axum::{
    Json,
    response::{IntoResponse as _, Response},
};
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout};
use tritmill_client::{ClientError, Endpoint, answer, parse_body};
use tritmill_queue::{Job, JobId, Priority};

use super::{
    answer::{AnswerHead, AwaitedJob, Streaming, completion},
    schemas::{ChatRequest, Completion, TextRequest},
    stream::AnswerStream,
    time_limit::TimeLimit,
};
use crate::{
    ApiError, App, Call, Caller, JsonBody, error::ErrorResponse, request_trace::JobParent,
};

/// Creates a chat completion.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "completions",
    request_body = ChatRequest,
    params(("x-request-timeout" = Option<f64>, Header,
            description = "Seconds within which the caller needs the whole answer; the service has a longest time")),
    responses((status = 200, description = "The answer, whole or streamed", body = Completion),
        (status = 429, body = ErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached. The code says why: \
                        `cpu_busy`, `gpu_busy`, `memory_full`, `no_worker`, `queue_full`, …; `Retry-After` when \
                        to try again")))]
pub(crate) async fn chat(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    Request { caller, parent, limit, endpoint: Endpoint::Chat, body }.answer(app).await
}

/// Creates a text completion.
#[utoipa::path(post, path = "/v1/completions", tag = "completions",
    request_body = TextRequest,
    params(("x-request-timeout" = Option<f64>, Header,
            description = "Seconds within which the caller needs the whole answer; the service has a longest time")),
    responses((status = 200, description = "The answer, whole or streamed", body = Completion),
        (status = 429, body = ErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached. The code says why: \
                        `cpu_busy`, `gpu_busy`, `memory_full`, `no_worker`, `queue_full`, …; `Retry-After` when \
                        to try again")))]
pub(crate) async fn text(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    Request { caller, parent, limit, endpoint: Endpoint::Completions, body }.answer(app).await
}

/// A request for a completion.
struct Request {
    caller: Caller,
    parent: JobParent,
    limit: TimeLimit,
    endpoint: Endpoint,
    body: Map<String, Value>,
}

impl Request {
    /// Submits a job and answers with its result.
    async fn answer(self, app: App) -> Result<Response, ApiError> {
        let Self { caller, parent, limit: TimeLimit(limit), endpoint, body: mut map } = self;
        let JobParent(traceparent) = parent;
        let streaming = Streaming::take(&mut map)?;
        let body = parse_body(endpoint, map)?;
        let name = body.model.clone().ok_or_else(|| ApiError::missing_field("model"))?;
        let queue =
            app.models.find(&name).await?.ok_or_else(|| ApiError::model_not_found(&name))?;
        let permit = streaming.map(|_| app.stream_permit()).transpose()?;
        let created = app.client.now().await?;
        let id = JobId::generate();
        let job = Job {
            tenant: caller.tenant,
            priority: Priority::High,
            stream: streaming.is_some(),
            expires_at: Some(created.after(limit)),
            traceparent,
            ..body.job(id, queue.clone())
        };
        let choices = job.choice_count();
        // Created before the submission, which may succeed even if it breaks off.
        let expires = Instant::now() + limit;
        let mut awaited = AwaitedJob { app: app.clone(), id, expires, is_finished: false };
        if let Err(error) = app.client.submit(job).await {
            // What was refused is in no store: there is nothing to cancel.
            awaited.is_finished = matches!(error, ClientError::Busy { .. });
            return Err(error.into());
        }
        let end = app.job_waiter.wait_for(id);
        let head = AnswerHead { id, endpoint, queue, created };
        if let Some(streaming) = streaming {
            return AnswerStream { app, awaited, head, streaming, choices, end, limit, permit }
                .respond()
                .await;
        }
        let Ok(Ok(ended)) = timeout(limit, end).await else {
            return Err(ApiError::answer_timeout());
        };
        awaited.is_finished = true;
        let completion = completion(ended)?;
        let body = answer::body(id.as_bytes(), endpoint.shape(), head.created, &completion);
        Ok(Json(body).into_response())
    }
}
