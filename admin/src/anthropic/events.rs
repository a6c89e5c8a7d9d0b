//! A streamed message: blocks of content that begin, grow and end one after another.

use axum::response::sse::Event;
use serde_json::{Value, json};
use tritmill_client::{anthropic::answer, json_line};
use tritmill_queue::{Completion, JobId, Part};

use super::shape;
use crate::openai::{follow::Update, stream::Render};

/// Writes the events of a message.
pub(super) struct MessageEvents {
    id: JobId,
    model: String,
    /// Index of the block that is open, or of the next one.
    index: u32,
    /// The part that the open block is of.
    open: Option<Part>,
}

impl MessageEvents {
    /// Begins the message of a job.
    pub fn new(id: JobId, model: String) -> Self {
        Self { id, model, index: 0, open: None }
    }

    /// Begins a block, unless one of the same part is open.
    fn begin_block(&mut self, part: Part, name: &str, events: &mut Vec<Event>) {
        if self.open == Some(part) {
            return;
        }
        self.end_block(events);
        self.open = Some(part);
        let block = match part {
            Part::Content => answer::text_block(""),
            Part::Reasoning => answer::thinking_block(""),
            Part::Arguments(call) => {
                let id = answer::call_id(self.id.as_bytes(), call);
                answer::call_block(&id, name, json!({}))
            }
        };
        let data = json!({ "index": self.index, "content_block": block });
        events.push(event("content_block_start", data));
    }

    /// Ends the open block.
    fn end_block(&mut self, events: &mut Vec<Event>) {
        if self.open.take().is_some() {
            events.push(event("content_block_stop", json!({ "index": self.index })));
            self.index += 1;
        }
    }

    fn text(&mut self, part: Part, text: &str) -> Vec<Event> {
        let mut events = Vec::new();
        self.begin_block(part, "", &mut events);
        let delta = match part {
            Part::Content => json!({ "type": "text_delta", "text": text }),
            Part::Reasoning => json!({ "type": "thinking_delta", "thinking": text }),
            Part::Arguments(_) => json!({ "type": "input_json_delta", "partial_json": text }),
        };
        events.push(event("content_block_delta", json!({ "index": self.index, "delta": delta })));
        events
    }

    fn completed(&mut self, completion: &Completion) -> Vec<Event> {
        let mut events = Vec::new();
        self.end_block(&mut events);
        let choice = completion.choices.first();
        let (reason, sequence) = choice.map_or(("end_turn", None), answer::stop);
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        let data = json!({ "delta": delta, "usage": answer::usage(completion) });
        events.push(event("message_delta", data));
        events.push(event("message_stop", json!({})));
        events
    }
}

/// Returns an event with its type among its data.
fn event(kind: &str, data: Value) -> Event {
    let mut typed = json!({ "type": kind });
    if let (Value::Object(typed), Value::Object(data)) = (&mut typed, data) {
        typed.extend(data);
    }
    Event::default().event(kind).data(json_line(&typed))
}

impl Render for MessageEvents {
    fn begin(&mut self) -> Vec<Event> {
        // The tokens of the input are counted by the worker: the end of the message has them.
        let message = json!({
            "id": answer::id(self.id.as_bytes()),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": { "input_tokens": 0, "output_tokens": 0 },
        });
        let start = event("message_start", json!({ "message": message }));
        vec![start, event("ping", json!({}))]
    }

    fn render(&mut self, update: Update) -> Vec<Event> {
        match update {
            Update::Call { call, name, .. } => {
                let mut events = Vec::new();
                self.begin_block(Part::Arguments(call), &name, &mut events);
                events
            }
            Update::Text { text, .. } if text.is_empty() => Vec::new(),
            Update::Text { part, text, .. } => self.text(part, &text),
            Update::Completed(completion) => self.completed(&completion),
            Update::Failed(error) => {
                let body = shape::body(error.status().as_u16(), error.message(), None);
                vec![Event::default().event("error").data(json_line(&body))]
            }
        }
    }
}
