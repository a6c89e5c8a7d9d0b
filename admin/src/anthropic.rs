//! Anthropic's Messages API, `/v1/messages`: a message is a job of its own, as a chat completion is. On these paths errors have
//! Anthropic's shape, and the key may be in the header `x-api-key`.

pub(crate) mod batches;
mod events;
pub(crate) mod schemas;
pub(crate) mod shape;

use axum::{
    Json,
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};
use serde_json::{Map, Value, json};
use tritmill_client::{
    Fields,
    anthropic::{Purpose, answer, parse_message},
};

use self::{
    events::MessageEvents,
    schemas::{MessageObject, MessageTokens, MessagesErrorResponse, MessagesRequest},
};
use crate::{
    ApiError, Call, JsonBody, JsonResult,
    extract::parsed,
    openai::{
        call::{self, CallContext},
        schemas::CallHeaders,
        stream,
        time_limit::TimeLimit,
        tokenize,
    },
    request_trace::JobParent,
};

/// Path of the API.
pub(crate) const PATH: &str = "/v1/messages";

/// Creates a message, by Anthropic's definition.
#[utoipa::path(post, path = "/v1/messages", tag = "messages",
    request_body = MessagesRequest,
    params(CallHeaders),
    responses((status = 200, description = "The message, whole or streamed", body = MessageObject),
        (status = 429, body = MessagesErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached. `Retry-After` says when to \
                        try again")))]
pub(crate) async fn create(
    Call { app, caller }: Call,
    JobParent(traceparent): JobParent,
    TimeLimit(limit): TimeLimit,
    headers: HeaderMap,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let key = call::key_of(&headers, PATH, &body)?;
    let mut fields = Fields::new(body, "");
    let stream = fields.boolean("stream")? == Some(true);
    let body = parsed(move || parse_message(fields.rest(), Purpose::Answer)).await?;
    let permit = stream.then(|| app.stream_permit()).transpose()?;
    let context = CallContext { caller, traceparent, limit, stream, echo: Map::new(), key };
    let call = call::submit(app, context, body).await?;
    let (id, model) = (call.job.id, call.job.queue.model.clone());
    if let Some(permit) = permit {
        return stream::respond(call.follow(), permit, MessageEvents::new(id, model)).await;
    }
    let completion = call.completion().await?;
    let usage = answer::usage(&completion);
    Ok(Json(answer::message(usage, id.as_bytes(), &completion)).into_response())
}

/// Counts the tokens of a message's input.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "messages",
    request_body = MessagesRequest,
    responses((status = 200, description = "The number of tokens", body = MessageTokens)))]
pub(crate) async fn count_tokens(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<Value> {
    let body = parsed(move || parse_message(body, Purpose::Count)).await?;
    let tokens = tokenize::tokens(app, caller, (parent, limit), body).await?;
    Ok(Json(json!({ "input_tokens": tokens.tokens.len() })))
}
