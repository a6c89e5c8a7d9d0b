//! A streamed response: typed events, each with its number.

use axum::response::sse::Event;
use serde_json::{Value, json};
use tritmill_client::{json_line, responses::answer};
use tritmill_queue::{Completion, Job, JobState, Outcome, Part, TokenLogprob};

use super::view::{self, Status};
use crate::{
    ApiError,
    openai::{follow::Update, stream::Render},
};

/// Writes the events of a response.
pub(super) struct ResponseEvents {
    job: Job,
    sequence: u64,
    /// Items that were finished.
    finished: u32,
    open: Option<OpenItem>,
}

/// The item that is being written.
struct OpenItem {
    part: Part,
    name: String,
    text: String,
    logprobs: Vec<Value>,
}

impl ResponseEvents {
    /// Begins the response of a job.
    pub fn new(job: Job) -> Self {
        Self { job, sequence: 0, finished: 0, open: None }
    }

    /// Returns an event: its fields, its type and its number.
    fn event(&mut self, kind: &str, mut data: Value) -> Event {
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        Event::default().event(kind).data(json_line(&data))
    }

    /// Returns an event about the open item.
    fn item_event(&mut self, kind: &str, mut data: Value) -> Event {
        data["output_index"] = json!(self.finished);
        data["item_id"] = self.item("in_progress")["id"].take();
        self.event(kind, data)
    }

    /// Returns the open item.
    fn item(&self, status: &str) -> Value {
        let Some(OpenItem { part, name, text, logprobs }) = &self.open else { return Value::Null };
        let key = self.job.id.as_bytes();
        match part {
            Part::Content => answer::message_item(key, text, json!(logprobs), status),
            Part::Reasoning => answer::reasoning_item(key, text, status),
            Part::Arguments(call) => answer::call_item(key, *call, (name, text), status),
        }
    }

    /// Begins an item, unless it is open.
    fn begin_item(&mut self, part: Part, name: String, events: &mut Vec<Event>) {
        if self.open.as_ref().is_some_and(|open| open.part == part) {
            return;
        }
        self.end_item("completed", events);
        self.open = Some(OpenItem { part, name, text: String::new(), logprobs: Vec::new() });
        let data = json!({ "output_index": self.finished, "item": self.item("in_progress") });
        events.push(self.event("response.output_item.added", data));
        let empty = match part {
            Part::Content => answer::text_part("", json!([])),
            Part::Reasoning => json!({ "type": "reasoning_text", "text": "" }),
            Part::Arguments(_) => return,
        };
        let data = json!({ "content_index": 0, "part": empty });
        events.push(self.item_event("response.content_part.added", data));
    }

    /// Ends the open item.
    fn end_item(&mut self, status: &str, events: &mut Vec<Event>) {
        let Some(OpenItem { part, name, text, logprobs }) = &self.open else { return };
        let (part, name, text) = (*part, name.clone(), text.clone());
        let whole = match part {
            Part::Content => {
                let logprobs = json!(logprobs);
                let part = answer::text_part(&text, logprobs.clone());
                let data = json!({ "content_index": 0, "text": text, "logprobs": logprobs });
                events.push(self.item_event("response.output_text.done", data));
                Some(part)
            }
            Part::Reasoning => {
                let data = json!({ "content_index": 0, "text": text });
                events.push(self.item_event("response.reasoning_text.done", data));
                Some(json!({ "type": "reasoning_text", "text": text }))
            }
            Part::Arguments(_) => {
                let data = json!({ "name": name, "arguments": text });
                events.push(self.item_event("response.function_call_arguments.done", data));
                None
            }
        };
        if let Some(part) = whole {
            let data = json!({ "content_index": 0, "part": part });
            events.push(self.item_event("response.content_part.done", data));
        }
        let data = json!({ "output_index": self.finished, "item": self.item(status) });
        events.push(self.event("response.output_item.done", data));
        self.open = None;
        self.finished += 1;
    }

    fn text(&mut self, part: Part, text: &str, tokens: &[TokenLogprob]) -> Vec<Event> {
        let mut events = Vec::new();
        self.begin_item(part, String::new(), &mut events);
        let mut logprobs = tritmill_client::answer::logprobs("chat", tokens, 0)["content"].take();
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
            open.logprobs.extend(logprobs.as_array().into_iter().flatten().cloned());
        }
        let (kind, data) = match part {
            Part::Content => (
                "response.output_text.delta",
                json!({ "content_index": 0, "delta": text, "logprobs": logprobs.take() }),
            ),
            Part::Reasoning => {
                ("response.reasoning_text.delta", json!({ "content_index": 0, "delta": text }))
            }
            Part::Arguments(_) => {
                ("response.function_call_arguments.delta", json!({ "delta": text }))
            }
        };
        events.push(self.item_event(kind, data));
        events
    }

    fn completed(&mut self, completion: Completion) -> Vec<Event> {
        let word = answer::status(&completion);
        let mut events = Vec::new();
        let is_empty = self.open.is_none() && self.finished == 0;
        if is_empty {
            self.begin_item(Part::Content, String::new(), &mut events);
        }
        self.end_item(word, &mut events);
        let status = Status::Finished(Some(Outcome::Completed(completion)));
        let data = json!({ "response": view::response(&self.job, &status) });
        events.push(self.event(&format!("response.{word}"), data));
        events
    }

    fn failed(&mut self, error: ApiError) -> Event {
        let status = Status::Unfinished(JobState::Running);
        let mut response = view::response(&self.job, &status);
        let body = json!(error.body());
        let error = &body["error"];
        response["status"] = json!("failed");
        response["error"] = json!({ "code": error["code"], "message": error["message"] });
        self.event("response.failed", json!({ "response": response }))
    }
}

impl Render for ResponseEvents {
    fn begin(&mut self) -> Vec<Event> {
        let status = Status::Unfinished(JobState::Running);
        let response = view::response(&self.job, &status);
        ["response.created", "response.in_progress"]
            .map(|kind| self.event(kind, json!({ "response": response })))
            .into()
    }

    fn render(&mut self, update: Update) -> Vec<Event> {
        match update {
            Update::Call { call, name, .. } => {
                let mut events = Vec::new();
                self.begin_item(Part::Arguments(call), name, &mut events);
                events
            }
            Update::Text { part, text, logprobs, .. } => self.text(part, &text, &logprobs),
            Update::Completed(completion) => self.completed(completion),
            Update::Failed(error) => vec![self.failed(error)],
        }
    }
}
