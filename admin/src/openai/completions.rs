//! `/v1/chat/completions`, `/v1/completions` and `/v1/embeddings`.

use std::collections::BTreeMap;

use axum::{
    Json,
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};
use serde_json::{Map, Value};
use tritmill_client::{Endpoint, answer, parse_body};

use super::{
    answer::{AnswerHead, Streaming},
    call::{self, CallContext},
    schemas::{CallHeaders, ChatRequest, Completion, Embeddings, EmbeddingsRequest, TextRequest},
    stream::{self, Chunks},
    time_limit::TimeLimit,
};
use crate::{
    ApiError, App, Call, Caller, JsonBody, error::ErrorResponse, extract::parsed,
    request_trace::JobParent,
};

/// Creates a chat completion.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "completions",
    request_body = ChatRequest,
    params(CallHeaders),
    responses((status = 200, description = "The answer, whole or streamed", body = Completion),
        (status = 429, body = ErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached. The code says why: \
                        `cpu_busy`, `gpu_busy`, `memory_full`, `no_worker`, `queue_full`, …; `Retry-After` when \
                        to try again")))]
pub(crate) async fn chat(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    headers: HeaderMap,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    Request { caller, parent, limit, headers, endpoint: Endpoint::Chat, body }.answer(app).await
}

/// Creates a text completion.
#[utoipa::path(post, path = "/v1/completions", tag = "completions",
    request_body = TextRequest,
    params(CallHeaders),
    responses((status = 200, description = "The answer, whole or streamed", body = Completion),
        (status = 429, body = ErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached. The code says why: \
                        `cpu_busy`, `gpu_busy`, `memory_full`, `no_worker`, `queue_full`, …; `Retry-After` when \
                        to try again")))]
pub(crate) async fn text(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    headers: HeaderMap,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let endpoint = Endpoint::Completions;
    Request { caller, parent, limit, headers, endpoint, body }.answer(app).await
}

/// Embeds texts.
#[utoipa::path(post, path = "/v1/embeddings", tag = "completions",
    request_body = EmbeddingsRequest,
    params(CallHeaders),
    responses((status = 200, description = "The vectors", body = Embeddings),
        (status = 429, body = ErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached, as for completions")))]
pub(crate) async fn embeddings(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    headers: HeaderMap,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let endpoint = Endpoint::Embeddings;
    Request { caller, parent, limit, headers, endpoint, body }.answer(app).await
}

/// Answers the body of a request that did not come as a call of the API.
pub(crate) async fn answer_body(
    app: App,
    caller: Caller,
    parent: JobParent,
    (endpoint, body): (Endpoint, Map<String, Value>),
) -> Result<Response, ApiError> {
    let limit = TimeLimit(app.limits.answer_within);
    let headers = HeaderMap::new();
    Request { caller, parent, limit, headers, endpoint, body }.answer(app).await
}

/// A request for a completion.
struct Request {
    caller: Caller,
    parent: JobParent,
    limit: TimeLimit,
    headers: HeaderMap,
    endpoint: Endpoint,
    body: Map<String, Value>,
}

impl Request {
    /// Submits a job and answers with its result.
    async fn answer(self, app: App) -> Result<Response, ApiError> {
        let Self { caller, parent: JobParent(traceparent), limit: TimeLimit(limit), .. } = self;
        let (endpoint, mut map) = (self.endpoint, self.body);
        let key = call::key_of(&self.headers, endpoint.as_str(), &map)?;
        // Vectors are not streamed: the parser refuses it.
        let streaming = match endpoint {
            Endpoint::Embeddings => None,
            _ => Streaming::take(&mut map)?,
        };
        let mut echo = echo(&map);
        let body = parsed(move || parse_body(endpoint, map)).await?;
        if let Some(tier) = echo.get_mut("service_tier") {
            *tier = body.tier.unwrap_or_default().as_str().into();
        }
        let permit = streaming.map(|_| app.stream_permit()).transpose()?;
        let stream = streaming.is_some();
        let context = CallContext { caller, traceparent, limit, stream, echo: echo.clone(), key };
        let call = call::submit(app, context, body).await?;
        let (id, created) = (call.job.id, call.created);
        if let Some((streaming, permit)) = streaming.zip(permit) {
            let head = AnswerHead { id, endpoint, queue: call.job.queue.clone(), created };
            let chunks = Chunks { head, streaming, echo, begun: BTreeMap::new() };
            return stream::respond(call.follow(), permit, chunks).await;
        }
        let completion = call.completion().await?;
        let mut body = answer::body(id.as_bytes(), endpoint.shape(), created, &completion);
        repeat(&mut body, &echo);
        Ok(Json(body).into_response())
    }
}

/// Returns what a completion repeats of its request.
fn echo(body: &Map<String, Value>) -> Map<String, Value> {
    const REPEATED: [&str; 2] = ["metadata", "service_tier"];
    let given = |name: &str| Some((name.to_owned(), body.get(name)?.clone()));
    let mut echo: Map<String, Value> = REPEATED.into_iter().filter_map(given).collect();
    echo.retain(|_, value| !value.is_null());
    echo
}

/// Adds what an answer repeats of its request.
pub(super) fn repeat(body: &mut Value, echo: &Map<String, Value>) {
    for (name, value) in echo {
        body[name] = value.clone();
    }
}
