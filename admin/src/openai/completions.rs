//! `/v1/chat/completions` and `/v1/completions`: somebody waits for the answer.
//!
//! The request becomes a job at priority high. Whoever stops waiting, by hanging up or by the limit,
//! cancels it.

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    response::{IntoResponse as _, Response},
};
use serde_json::{Map, Value};
use tokio::time::timeout;
use tritmill_client::{Endpoint, Fields, answer, parse_body};
use tritmill_queue::{FinishedJob, Job, JobId, Outcome, Priority, QueueName, Timestamp};

use super::stream;
use crate::{
    access::Caller,
    app::App,
    error::ApiError,
    json,
    openapi::{ChatRequest, Completion, Refused, TextRequest},
};

/// A conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "completions",
    request_body = ChatRequest,
    responses((status = 200, description = "An answer, or its pieces", body = Completion),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn chat(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    answer_to(app, caller, Endpoint::Chat, json::object(body).await?).await
}

/// Text to go on with.
#[utoipa::path(post, path = "/v1/completions", tag = "completions",
    request_body = TextRequest,
    responses((status = 200, description = "An answer, or its pieces", body = Completion),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn text(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    answer_to(app, caller, Endpoint::Completions, json::object(body).await?).await
}

/// How a caller wants to be answered in pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Streaming {
    /// A last piece says how many tokens it took.
    pub include_usage: bool,
}

impl Streaming {
    /// Takes `stream` and `stream_options` out of a body.
    fn take(map: &mut Map<String, Value>) -> Result<Option<Self>, ApiError> {
        // Order decides only which of several unknown parameters is named first.
        let mut take = |name: &str| map.swap_remove(name).map(|value| (name.to_owned(), value));
        let asked: Map<String, Value> =
            [take("stream"), take("stream_options")].into_iter().flatten().collect();
        let mut fields = Fields::new(asked, "");
        let streams = fields.boolean("stream")? == Some(true);
        let include_usage = match fields.take("stream_options") {
            None => false,
            Some(_) if !streams => {
                let message = "stream_options needs stream to be true";
                return Err(ApiError::invalid("invalid_value", message).at("stream_options"));
            }
            Some(Value::Object(options)) => {
                let mut options = Fields::new(options, "stream_options.");
                let include_usage = options.boolean("include_usage")?.unwrap_or(false);
                // Pads pieces to hide their lengths; there is nothing to hide them from.
                options.boolean("include_obfuscation")?;
                options.finish()?;
                include_usage
            }
            Some(_) => {
                let message = "stream_options must be an object";
                return Err(ApiError::invalid("invalid_type", message).at("stream_options"));
            }
        };
        Ok(streams.then_some(Self { include_usage }))
    }
}

/// A job that somebody waits for: cancelled if they stop.
pub(super) struct Awaited {
    app: App,
    /// The job.
    pub id: JobId,
    over: bool,
}

impl Awaited {
    /// It ended: there is nothing to cancel.
    pub fn over(&mut self) {
        self.over = true;
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let (app, id) = (self.app.clone(), self.id);
        // A runtime that shuts down takes nothing: the job's own deadline ends it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = app.client().cancel(&[id]).await {
                    tracing::warn!(job = %id, %error, "a job that nobody waits for not cancelled");
                }
            });
        }
    }
}

/// Submits the job and answers with what comes of it.
async fn answer_to(
    app: App,
    caller: Caller,
    endpoint: Endpoint,
    mut map: Map<String, Value>,
) -> Result<Response, ApiError> {
    let streaming = Streaming::take(&mut map)?;
    let body = parse_body(endpoint, map)?;
    let missing = || ApiError::invalid("missing_field", "model is missing").at("model");
    let name = body.model.clone().ok_or_else(missing)?;
    let queue = app.models().find(&name).await?.ok_or_else(|| ApiError::no_model(&name))?;
    let permit = match streaming {
        None => None,
        Some(_) => Some(
            app.streams()
                .clone()
                .try_acquire_owned()
                .map_err(|_| ApiError::crowded("too many answers stream at once"))?,
        ),
    };
    let now = app.client().now().await?;
    let limit = app.limits().answer_within;
    let (id, choices) = (JobId::generate(), body.sampling.n);
    let job = Job {
        tenant: caller.tenant,
        priority: Priority::High,
        stream: streaming.is_some(),
        expires_at: Some(now.after(limit)),
        ..body.job(id, queue.clone())
    };
    let end = app.ends().of_job(id);
    // From here on: a submission that broke off may have been accepted.
    let mut awaited = Awaited { app: app.clone(), id, over: false };
    app.client().submit(job).await?;
    let of = Answered { id, endpoint, queue, created: now };
    if let Some(streaming) = streaming {
        let follow = stream::Follow { app, awaited, of, streaming, choices, end, permit };
        return follow.respond().await;
    }
    let Ok(Ok(ended)) = timeout(limit, end).await else { return Err(ApiError::late()) };
    awaited.over();
    of.whole(ended).map(|body| Json(body).into_response())
}

/// What is to be answered.
pub(super) struct Answered {
    /// The job.
    pub id: JobId,
    /// Which form the answer has.
    pub endpoint: Endpoint,
    /// Who answers.
    pub queue: QueueName,
    /// When it was asked.
    pub created: Timestamp,
}

impl Answered {
    /// The whole answer.
    fn whole(&self, ended: FinishedJob) -> Result<Value, ApiError> {
        let completion = completed(ended)?;
        Ok(answer::body(self.id.as_bytes(), self.endpoint.shape(), self.created, &completion))
    }
}

/// What a job ended with, if it was answered.
pub(super) fn completed(ended: FinishedJob) -> Result<tritmill_queue::Completion, ApiError> {
    match ended.outcome {
        Some(Outcome::Completed(completion)) => Ok(completion),
        Some(Outcome::Error(error)) => Err(ApiError::job(&error)),
        Some(Outcome::Expired) => Err(ApiError::late()),
        None => Err(ApiError::cancelled()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(body: Value) -> Result<Option<Streaming>, ApiError> {
        let Value::Object(mut map) = body else { panic!("an object") };
        let streaming = Streaming::take(&mut map);
        assert!(!map.contains_key("stream") && !map.contains_key("stream_options"));
        streaming
    }

    #[test]
    fn how_to_stream_is_asked_for_by_name() {
        assert_eq!(taken(json!({})), Ok(None));
        assert_eq!(taken(json!({ "stream": false })), Ok(None));
        let plain = Some(Streaming { include_usage: false });
        assert_eq!(taken(json!({ "stream": true })), Ok(plain));
        let usage = json!({ "stream": true, "stream_options": { "include_usage": true } });
        assert_eq!(taken(usage), Ok(Some(Streaming { include_usage: true })));
        for wrong in [
            json!({ "stream": "yes" }),
            json!({ "stream_options": { "include_usage": true } }),
            json!({ "stream": true, "stream_options": [] }),
            json!({ "stream": true, "stream_options": { "shape": 1 } }),
        ] {
            let error = taken(wrong).expect_err("refused");
            assert!(error.body()["error"]["param"].is_string());
        }
    }
}
