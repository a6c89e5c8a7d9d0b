//! `/v1/responses`: a response is a job with a conversation. Its id is the job's, and it is kept as long as the job.

mod events;
mod view;

use axum::{
    Json,
    extract::Path,
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};
use serde::Deserialize;
use serde_json::{Map, Value};
use tritmill_client::{
    Body, ResponseRequest, answer_message, parse_response, responses::answer as response,
};
use tritmill_queue::{
    Billing, Conversation, Job, JobId, JobState, Message, Outcome, Prompt, Role, Task,
    store::JobRecord,
};

use self::{events::ResponseEvents, view::Status};
use super::{
    answer::Streaming,
    call::{self, CallContext},
    schemas::{CallHeaders, InputTokens, ResponseBody, ResponseDeleted, ResponseObject},
    stream,
    time_limit::TimeLimit,
    tokenize,
};
use crate::{
    ApiError, App, Call, Caller, JsonBody, JsonResult, QueryParams, error::ErrorResponse,
    extract::parsed, request_trace::JobParent,
};

/// Begin of the ids of responses.
const PREFIX: &str = "resp_";
/// Marks the jobs of responses among the parameters that an answer repeats.
const MARK: &str = "object";

/// Returns the id of a job's response.
fn response_id(id: JobId) -> String {
    response::id(id.as_bytes())
}

/// Creates a response: whole, streamed, or in the background.
#[utoipa::path(post, path = "/v1/responses", tag = "responses",
    request_body = ResponseBody,
    params(CallHeaders),
    responses((status = 200, description = "The response, whole or streamed", body = ResponseObject),
        (status = 429, body = ErrorResponse,
         description = "No answer within the time limit is possible now, or a limit is reached. The code says why; \
                        `Retry-After` when to try again")))]
pub(crate) async fn create(
    Call { app, caller }: Call,
    JobParent(traceparent): JobParent,
    TimeLimit(limit): TimeLimit,
    headers: HeaderMap,
    JsonBody(mut body): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let key = call::key_of(&headers, "/v1/responses", &body)?;
    let streaming = Streaming::take(&mut body)?;
    resolve_references(&app, &caller, &mut body).await?;
    let ResponseRequest { mut body, previous, background, store: _ } =
        parsed(move || parse_response(body)).await?;
    let mut repeated = std::mem::take(&mut body.repeated);
    repeated.insert(MARK.to_owned(), "response".into());
    if let Some(previous) = &previous {
        let before = conversation_of(&app, &caller, previous).await?;
        continue_from(&mut body.prompt, before);
    }
    if background {
        if streaming.is_some() {
            let message = "stream cannot be combined with background: follow the job's events";
            return Err(ApiError::invalid("unsupported_value", message).at("stream"));
        }
        let queue = call::queue_of(&app, &body).await?;
        app.budget_checks.check(&app, &caller).await?;
        let id = JobId::generate();
        let billing = Billing { tier: body.tier.unwrap_or_default(), key: Some(caller.key) };
        let job = Job {
            tenant: caller.tenant,
            traceparent,
            echo: repeated,
            billing,
            ..body.job(id, queue)
        };
        app.client.submit(job.clone()).await?;
        return Ok(
            Json(view::response(&job, &Status::Unfinished(JobState::Queued))).into_response()
        );
    }
    let permit = streaming.map(|_| app.stream_permit()).transpose()?;
    let stream = streaming.is_some();
    let context = CallContext { caller, traceparent, limit, stream, echo: repeated, key };
    let call = call::submit(app, context, body).await?;
    let job = call.job.clone();
    if let Some(permit) = permit {
        let events = ResponseEvents::new(job);
        return stream::respond(call.follow(), permit, events).await;
    }
    let completion = call.completion().await?;
    let status = Status::Finished(Some(Outcome::Completed(completion)));
    Ok(Json(view::response(&job, &status)).into_response())
}

/// How a response is read.
#[derive(Deserialize)]
pub(crate) struct ResponseQuery {
    stream: Option<bool>,
}

/// Counts the tokens of a response's input.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "responses",
    request_body = ResponseBody,
    responses((status = 200, description = "The number of tokens", body = InputTokens)))]
pub(crate) async fn input_tokens(
    Call { app, caller }: Call,
    parent: JobParent,
    limit: TimeLimit,
    JsonBody(mut body): JsonBody<Map<String, Value>>,
) -> JsonResult<InputTokens> {
    resolve_references(&app, &caller, &mut body).await?;
    let ResponseRequest { mut body, previous, .. } = parsed(move || parse_response(body)).await?;
    if let Some(previous) = &previous {
        let before = conversation_of(&app, &caller, previous).await?;
        continue_from(&mut body.prompt, before);
    }
    let task = Task::Tokenize { special: true, generation_prompt: true };
    let tokens = tokenize::tokens(app, caller, (parent, limit), Body { task, ..body }).await?;
    let input_tokens = tokens.tokens.len();
    Ok(Json(InputTokens { object: "response.input_tokens", input_tokens }))
}

/// Returns a response.
#[utoipa::path(get, path = "/v1/responses/{id}", tag = "responses",
    params(("id" = String, Path), ("stream" = Option<bool>, Query, description = "Refused if true")),
    responses((status = 200, description = "The response", body = ResponseObject)))]
pub(crate) async fn one(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    QueryParams(query): QueryParams<ResponseQuery>,
) -> JsonResult<Value> {
    if query.stream == Some(true) {
        let message = "a response is streamed while it is created only: read it without stream";
        return Err(ApiError::invalid("unsupported_value", message).at("stream"));
    }
    let record = find(&app, &caller, &id).await?;
    Ok(Json(of_record(&record)))
}

/// Cancels a response in the background.
#[utoipa::path(post, path = "/v1/responses/{id}/cancel", tag = "responses", params(("id" = String, Path)),
    responses((status = 200, description = "The response", body = ResponseObject)))]
pub(crate) async fn cancel(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<Value> {
    let record = find(&app, &caller, &id).await?;
    if record.job.echo.get("background") != Some(&Value::Bool(true)) {
        let message = "only a response in the background can be cancelled";
        return Err(ApiError::invalid("not_in_background", message).at("id"));
    }
    app.client.cancel(&[record.job.id]).await?;
    Ok(Json(of_record(&find(&app, &caller, &id).await?)))
}

/// Deletes a response, and cancels it if it is not finished.
#[utoipa::path(delete, path = "/v1/responses/{id}", tag = "responses", params(("id" = String, Path)),
    responses((status = 200, description = "It is deleted", body = ResponseDeleted)))]
pub(crate) async fn remove(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<ResponseDeleted> {
    let record = find(&app, &caller, &id).await?;
    app.client.cancel(&[record.job.id]).await?;
    app.store.delete_jobs(&[record.job.id]).await?;
    Ok(Json(ResponseDeleted { id: response_id(record.job.id), object: "response", deleted: true }))
}

/// Returns the input of a response, without the instructions.
#[utoipa::path(get, path = "/v1/responses/{id}/input_items", tag = "responses", params(("id" = String, Path)),
    responses((status = 200, description = "The items, the newest first", body = Value)))]
pub(crate) async fn input_items(
    Call { app, caller }: Call,
    Path(id): Path<String>,
) -> JsonResult<Value> {
    let record = find(&app, &caller, &id).await?;
    Ok(Json(view::input_items(&record.job)))
}

/// Replaces references to items of earlier responses by these items.
async fn resolve_references(
    app: &App,
    caller: &Caller,
    body: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let Some(Value::Array(items)) = body.get_mut("input") else { return Ok(()) };
    for (index, item) in items.iter_mut().enumerate().filter(|(_, i)| i["type"] == "item_reference")
    {
        let path = format!("input[{index}].id");
        let id = item["id"].as_str().unwrap_or_default();
        let unknown = || ApiError::not_found("item", id).at(path.as_str());
        let job = view::job_of_item(id).ok_or_else(unknown)?;
        let record = find(app, caller, &response_id(job)).await.map_err(|_| unknown())?;
        let mut response = of_record(&record);
        let output = response["output"].as_array_mut().ok_or_else(unknown)?;
        let found = output.iter_mut().find(|known| known["id"] == id).ok_or_else(unknown)?;
        *item = found.take();
    }
    Ok(())
}

/// Finds a response of the caller's tenant that may be read.
async fn find(app: &App, caller: &Caller, id: &str) -> Result<JobRecord, ApiError> {
    let unknown = || ApiError::not_found("response", id);
    let job = id.strip_prefix(PREFIX).and_then(|id| id.parse().ok()).ok_or_else(unknown)?;
    let record = app.store.job(job).await?.ok_or_else(unknown)?;
    let echo = &record.job.echo;
    let is_response = echo.get(MARK).is_some_and(|mark| mark == "response");
    let is_stored = echo.get("store") != Some(&Value::Bool(false));
    let is_own = caller.may_operate() || record.job.tenant == caller.tenant;
    if is_response && is_stored && is_own { Ok(record) } else { Err(unknown()) }
}

fn of_record(record: &JobRecord) -> Value {
    let status = match record.state.is_terminal() {
        true => Status::Finished(record.outcome.clone()),
        false => Status::Unfinished(record.state),
    };
    view::response(&record.job, &status)
}

/// Returns the messages of a response with its answer, without its instructions.
async fn conversation_of(app: &App, caller: &Caller, id: &str) -> Result<Vec<Message>, ApiError> {
    let unusable = |message: String| ApiError::invalid_value("previous_response_id", message);
    let record = find(app, caller, id).await.map_err(|error| error.at("previous_response_id"))?;
    let Some(Outcome::Completed(completion)) = &record.outcome else {
        return Err(unusable(format!("response '{id}' has no answer")));
    };
    let mut messages = view::input(&record.job).to_vec();
    let answer = completion.choices.first();
    let job = record.job.id;
    messages.extend(
        answer.map(|choice| answer_message(choice, |call| response::call_id(job.as_bytes(), call))),
    );
    Ok(messages)
}

/// Puts earlier messages behind the instructions of a prompt.
fn continue_from(prompt: &mut Prompt, before: Vec<Message>) {
    let Prompt::Messages(Conversation { messages, .. }) = prompt else { return };
    let instructions = usize::from(messages.first().is_some_and(|m| m.role == Role::System));
    messages.splice(instructions..instructions, before);
}
