//! A response as JSON, by OpenAI's definition.

use serde_json::{Value, json};
use tritmill_client::responses::answer;
use tritmill_queue::{
    Content, Conversation, Job, JobError, JobId, JobState, Message, Outcome, Prompt, Role,
};

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
            (answer::status(completion), Some(completion), None)
        }
        Status::Finished(Some(Outcome::Expired)) => {
            let message = "there was no answer within the time limit".to_owned();
            ("failed", None, Some(json!({ "code": "server_error", "message": message })))
        }
        Status::Finished(Some(Outcome::Error(error))) => ("failed", None, Some(failure(error))),
    };
    let shown = answer::Shown {
        key: job.id.as_bytes(),
        created: job.id.generated_at(),
        model: &job.queue.model,
        repeated: &job.echo,
    };
    let answer = completion.map(|completion| (completion, answer::usage(completion)));
    answer::object(&shown, word, answer, error)
}

/// Returns an error as responses have it.
fn failure(error: &JobError) -> Value {
    json!({ "code": error.code, "message": error.message })
}

/// Returns the job that an item of an output belongs to, by the item's id.
pub(super) fn job_of_item(id: &str) -> Option<JobId> {
    let (_, rest) = id.split_once('_')?;
    rest.get(..32)?.parse().ok()
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
        let id = answer::item_id("in", job.id.as_bytes(), index);
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
