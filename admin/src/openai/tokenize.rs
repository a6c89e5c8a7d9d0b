//! `/tokenize` and `/detokenize`, vLLM's: a worker has the model's tokenizer, so that they are jobs, too.

use axum::Json;
use serde_json::{Map, Value, json};
use tritmill_client::{Body, Endpoint, Fields, parse_body};
use tritmill_queue::{Completion, Task, Tokenized};

use super::{
    call::{self, CallContext},
    schemas::{DetokenizeRequest, Detokenized, TokenizeRequest, TokenizedText},
    time_limit::TimeLimit,
};
use crate::{
    ApiError, App, Call, Caller, JsonBody, JsonResult, extract::parsed, request_trace::JobParent,
};

/// Returns the tokens of a text or of a conversation.
#[utoipa::path(post, path = "/tokenize", tag = "completions", request_body = TokenizeRequest,
    responses((status = 200, description = "The tokens", body = TokenizedText)))]
pub(crate) async fn tokenize(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<Value> {
    let endpoint =
        if body.contains_key("messages") { Endpoint::Chat } else { Endpoint::Completions };
    let mut fields = Fields::new(body, "");
    let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let has_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let task = Task::Tokenize { special, generation_prompt };
    let body = parsed(move || parse_body(endpoint, fields.rest())).await?;
    let body = Body { task, ..body };
    let tokenized = tokens(app, caller, (parent, limit), body).await?;
    Ok(Json(json!({
        "count": tokenized.tokens.len(),
        "max_model_len": tokenized.context_length,
        "tokens": tokenized.tokens,
        "token_strs": has_texts.then_some(tokenized.texts),
    })))
}

/// Returns the tokens of a prompt: the answer to a request with such a task.
pub(crate) async fn tokens(
    app: App,
    caller: Caller,
    (parent, limit): (JobParent, TimeLimit),
    body: Body,
) -> Result<Tokenized, ApiError> {
    let completion = ask(app, caller, (parent, limit), body).await?;
    // A worker of an earlier release answers every job with text.
    completion
        .tokenized
        .ok_or_else(|| ApiError::conflict("not_supported", "the model's worker cannot tokenize"))
}

/// Returns the text of tokens.
#[utoipa::path(post, path = "/detokenize", tag = "completions", request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = Detokenized)))]
pub(crate) async fn detokenize(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<Value> {
    let mut fields = Fields::new(body, "");
    let tokens = fields.take("tokens").ok_or_else(|| ApiError::missing_field("tokens"))?;
    let is_list = |items: &Vec<Value>| items.iter().all(Value::is_number);
    if !tokens.as_array().is_some_and(is_list) {
        return Err(
            ApiError::invalid("invalid_type", "tokens must be an array of token ids").at("tokens")
        );
    }
    fields.put("prompt", tokens);
    let parse = move || {
        parse_body(Endpoint::Completions, fields.rest()).map_err(|mut error| {
            error.path = error.path.replacen("prompt", "tokens", 1);
            error
        })
    };
    let body = parsed(parse).await?;
    let body = Body { task: Task::Detokenize, ..body };
    let completion = ask(app, caller, (parent, limit), body).await?;
    let text = completion.choices.first().map(|choice| choice.text.as_str());
    Ok(Json(json!({ "prompt": text.unwrap_or_default() })))
}

async fn ask(
    app: App,
    caller: Caller,
    (JobParent(traceparent), TimeLimit(limit)): (JobParent, TimeLimit),
    body: Body,
) -> Result<Completion, ApiError> {
    let echo = Map::new();
    let (stream, key) = (false, None);
    let context = CallContext { caller, traceparent, limit, stream, echo, key };
    call::submit(app, context, body).await?.completion().await
}
