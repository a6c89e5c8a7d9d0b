//! A response as JSON, by OpenAI's definition.

use serde_json::{Map, Value, json};
use tritmill_client::{REPEATED, answer};
use tritmill_queue::{
    Choice, Completion, Content, Conversation, FinishReason, Job, JobError, JobId, JobState,
    Message, Outcome, Prompt, Role,
};

use super::response_id;

/// How far a response is.
pub(super) enum Status {
    Unfinished(JobState),
    /// With its outcome; none if it was cancelled.
    Finished(Option<Outcome>),
}

/// Returns a response.
pub(super) fn response(job: &Job, status: &Status) -> Value {
    let (word, completion, error) = match status {
        Status::Unfinished(JobState::Running) => ("in_progress", None, None),
        Status::Unfinished(_) => ("queued", None, None),
        Status::Finished(None) => ("cancelled", None, None),
        Status::Finished(Some(Outcome::Completed(completion))) => {
            (completed(completion), Some(completion), None)
        }
        Status::Finished(Some(Outcome::Expired)) => {
            let message = "there was no answer within the time limit".to_owned();
            ("failed", None, Some(json!({ "code": "server_error", "message": message })))
        }
        Status::Finished(Some(Outcome::Error(error))) => ("failed", None, Some(failure(error))),
    };
    let choice = completion.and_then(|completion| completion.choices.first());
    let incomplete = (word == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
    let mut response = json!({
        "id": response_id(job.id),
        "object": "response",
        "created_at": job.id.generated_at().seconds(),
        "status": word,
        "error": error,
        "incomplete_details": incomplete,
        "model": job.queue.model,
        "output": choice.map_or_else(Vec::new, |choice| output(job.id, choice)),
        "usage": completion.map(usage),
    });
    repeat(&mut response, &job.echo);
    response
}

/// Adds the parameters that a response repeats, with the defaults of those that were not sent.
fn repeat(response: &mut Value, given: &Map<String, Value>) {
    for name in REPEATED {
        response[name] = match given.get(name) {
            Some(value) => value.clone(),
            None => match name {
                "background" => json!(false),
                "metadata" => json!({}),
                "parallel_tool_calls" | "store" => json!(true),
                "reasoning" => json!({ "effort": null, "summary": null }),
                "service_tier" => json!("default"),
                "temperature" | "top_p" => json!(1.0),
                "text" => json!({ "format": { "type": "text" } }),
                "tool_choice" => json!("auto"),
                "tools" => json!([]),
                "top_logprobs" => json!(0),
                "truncation" => json!("disabled"),
                _ => Value::Null,
            },
        };
    }
}

/// Returns the status of a response with an answer.
pub(super) fn completed(completion: &Completion) -> &'static str {
    let cut = |choice: &Choice| choice.finish_reason == FinishReason::Length;
    if completion.choices.iter().any(cut) { "incomplete" } else { "completed" }
}

/// Returns an error as responses have it.
fn failure(error: &JobError) -> Value {
    json!({ "code": error.code, "message": error.message })
}

fn usage(completion: &Completion) -> Value {
    let usage = completion.usage;
    let mut counts = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    });
    answer::add_cost(&mut counts, completion);
    counts
}

/// Returns the id of a call.
pub(super) fn call_id(job: JobId, call: u32) -> String {
    answer::call_id(job.as_bytes(), 0, call)
}

/// Returns the id of an item of the output.
pub(super) fn item_id(prefix: &str, job: JobId, index: u32) -> String {
    format!("{prefix}_{}{index:04x}", job.to_string().replace('-', ""))
}

/// Returns the job that an item of an output belongs to, by the item's id.
pub(super) fn job_of_item(id: &str) -> Option<JobId> {
    let (_, rest) = id.split_once('_')?;
    rest.get(..32)?.parse().ok()
}

/// Returns the items of an answer: reasoning, text, calls.
fn output(job: JobId, choice: &Choice) -> Vec<Value> {
    let mut items = Vec::new();
    if let Some(text) = &choice.reasoning {
        items.push(reasoning_item(job, text, "completed"));
    }
    let cut = choice.finish_reason == FinishReason::Length;
    let status = if cut { "incomplete" } else { "completed" };
    if !choice.text.is_empty() || choice.tool_calls.is_empty() {
        let logprobs = choice.logprobs.as_ref().map(|tokens| answer::logprobs("chat", tokens, 0));
        let logprobs = logprobs.map_or_else(|| json!([]), |mut all| all["content"].take());
        items.push(message_item(job, &choice.text, logprobs, status));
    }
    for (index, call) in (0..).zip(&choice.tool_calls) {
        items.push(call_item(job, index, (&call.name, &call.arguments), status));
    }
    items
}

/// Returns an item with what the model thought.
pub(super) fn reasoning_item(job: JobId, text: &str, status: &str) -> Value {
    let content: Vec<Value> = match text {
        "" => Vec::new(),
        text => vec![json!({ "type": "reasoning_text", "text": text })],
    };
    json!({
        "id": item_id("rs", job, 0), "type": "reasoning", "summary": [], "content": content, "status": status,
    })
}

/// Returns an item with the text of an answer.
pub(super) fn message_item(job: JobId, text: &str, logprobs: Value, status: &str) -> Value {
    let content: Vec<Value> = match status {
        "in_progress" => Vec::new(),
        _ => vec![text_part(text, logprobs)],
    };
    json!({
        "id": item_id("msg", job, 0), "type": "message", "role": "assistant", "status": status, "content": content,
    })
}

/// Returns the part of an item that is its text.
pub(super) fn text_part(text: &str, logprobs: Value) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs })
}

/// Returns an item with a call, by its index, name and arguments.
pub(super) fn call_item(
    job: JobId,
    index: u32,
    (name, arguments): (&str, &str),
    status: &str,
) -> Value {
    json!({
        "id": item_id("fc", job, index), "type": "function_call", "call_id": call_id(job, index), "name": name,
        "arguments": arguments, "status": status,
    })
}

/// Returns the messages of a response's job without its instructions.
pub(super) fn input(job: &Job) -> &[Message] {
    let Prompt::Messages(Conversation { messages, .. }) = &job.prompt else { return &[] };
    let instructions = usize::from(job.echo.contains_key("instructions"));
    messages.get(instructions..).unwrap_or_default()
}

/// Returns the input of a response as a list of items, the newest first.
pub(super) fn input_items(job: &Job) -> Value {
    let mut items = Vec::new();
    for (index, message) in (0..).zip(input(job)) {
        let id = item_id("in", job.id, index);
        let text = message.content.texts().concat();
        if message.role == Role::Tool {
            items.push(json!({
                "id": id, "type": "function_call_output", "call_id": message.tool_call_id, "output": text,
                "status": "completed",
            }));
            continue;
        }
        let is_answer = message.role == Role::Assistant;
        if !text.is_empty() || !is_answer {
            let kind = if is_answer { "output_text" } else { "input_text" };
            let part = |text: &String| json!({ "type": kind, "text": text });
            let content: Vec<Value> = match &message.content {
                Content::Text(text) => vec![part(text)],
                Content::Parts(texts) => texts.iter().map(part).collect(),
            };
            items.push(json!({
                "id": id, "type": "message", "role": message.role.as_str(), "content": content, "status": "completed",
            }));
        }
        for call in &message.tool_calls {
            items.push(json!({
                "id": format!("{id}_{}", call.id), "type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": call.arguments, "status": "completed",
            }));
        }
    }
    items.reverse();
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    json!({
        "object": "list", "first_id": id(items.first()), "last_id": id(items.last()), "has_more": false,
        "data": items,
    })
}
