//! Streamed answers: server-sent events.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use axum::response::{Response, sse::Event};
use futures_util::stream;
use serde_json::{Map, Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout,
};
use tritmill_client::{Endpoint, answer, json_line};
use tritmill_queue::{Completion, Part, TokenLogprob};

use super::{
    answer::{AnswerHead, Streaming},
    completions::repeat,
    follow::{Follower, Update},
};
use crate::{ApiError, sse};

/// News that may wait for the caller's connection.
const UPDATES_MAX: usize = 16;
/// How long the response head waits for the first news. An error before then becomes a status instead of
/// an event.
const HEAD_WAIT: Duration = Duration::from_secs(10);

/// Writes an answer as events.
pub(crate) trait Render: Send + 'static {
    /// Returns the events of the begin, before any news.
    fn begin(&mut self) -> Vec<Event> {
        Vec::new()
    }

    /// Returns the events of news.
    fn render(&mut self, update: Update) -> Vec<Event>;
}

/// Returns the response that streams an answer once there is news, or an error that occurred before. `permit` is held while
/// it streams.
pub(crate) async fn respond(
    follower: Follower,
    permit: OwnedSemaphorePermit,
    mut render: impl Render,
) -> Result<Response, ApiError> {
    let (sender, mut receiver) = mpsc::channel(UPDATES_MAX);
    let streams = follower.app.metrics.streams.clone();
    tokio::spawn(async move {
        streams.inc();
        follower.run(sender).await;
        streams.dec();
        drop(permit);
    });
    // Dropping the receiver, here or with the response, ends the task, which cancels the job.
    let first = match timeout(HEAD_WAIT, receiver.recv()).await {
        Ok(Some(Update::Failed(error))) => return Err(error),
        Ok(Some(update)) => Some(update),
        Ok(None) => return Err(ApiError::answer_timeout()),
        Err(_) => None,
    };
    let mut ready = render.begin();
    ready.extend(first.into_iter().flat_map(|update| render.render(update)));
    ready.reverse();
    let events =
        stream::unfold((ready, receiver, render), async |(mut ready, mut receiver, mut render)| {
            loop {
                if let Some(event) = ready.pop() {
                    return Some((Ok::<_, Infallible>(event), (ready, receiver, render)));
                }
                let update = receiver.recv().await?;
                ready = render.render(update);
                ready.reverse();
            }
        });
    Ok(sse::response(events))
}

/// Writes the chunks of `/v1/chat/completions` and `/v1/completions`.
pub(crate) struct Chunks {
    pub head: AnswerHead,
    pub streaming: Streaming,
    /// What each chunk repeats of the request.
    pub echo: Map<String, Value>,
    /// Characters of the tokens with log probabilities, of each choice that has begun.
    pub begun: BTreeMap<u32, usize>,
}

impl Render for Chunks {
    fn render(&mut self, update: Update) -> Vec<Event> {
        match update {
            Update::Call { choice, call, name } => {
                let id = answer::call_id(self.head.id.as_bytes(), choice, call);
                let function = json!({ "name": name, "arguments": "" });
                let call =
                    json!({ "index": call, "id": id, "type": "function", "function": function });
                vec![self.delta(choice, json!({ "tool_calls": [call] }), &[])]
            }
            Update::Text { choice, part, text, logprobs } => {
                let delta = match part {
                    Part::Content => json!({ "content": text }),
                    Part::Reasoning => json!({ "reasoning_content": text }),
                    Part::Arguments(call) => {
                        let function = json!({ "arguments": text });
                        json!({ "tool_calls": [{ "index": call, "function": function }] })
                    }
                };
                vec![self.delta(choice, delta, &logprobs)]
            }
            Update::Completed(completion) => self.end(&completion),
            Update::Failed(error) => vec![event(&json!(error.body()))],
        }
    }
}

impl Chunks {
    fn is_chat(&self) -> bool {
        self.head.endpoint == Endpoint::Chat
    }

    /// Returns the chunk with news of a choice. The first chunk of a chat choice carries the role.
    fn delta(&mut self, choice: u32, mut delta: Value, tokens: &[TokenLogprob]) -> Event {
        let is_first = !self.begun.contains_key(&choice);
        let written = self.begun.entry(choice).or_default();
        let logprobs = (!tokens.is_empty())
            .then(|| answer::logprobs(self.head.endpoint.shape(), tokens, *written));
        let letters = |token: &TokenLogprob| String::from_utf8_lossy(&token.bytes).chars().count();
        *written += tokens.iter().map(letters).sum::<usize>();
        if !self.is_chat() {
            let text = delta["content"].take();
            return self.choice(choice, json!(text.as_str().unwrap_or_default()), &logprobs, None);
        }
        if is_first {
            delta["role"] = json!("assistant");
        }
        self.choice(choice, delta, &logprobs, None)
    }

    /// Returns the last chunks: the finish reason of each choice, and usage.
    fn end(&mut self, completion: &Completion) -> Vec<Event> {
        let mut events = Vec::new();
        for choice in &completion.choices {
            if !self.begun.contains_key(&choice.index) {
                events.push(self.delta(choice.index, json!({ "content": "" }), &[]));
            }
            let empty = if self.is_chat() { json!({}) } else { json!("") };
            events.push(self.choice(
                choice.index,
                empty,
                &None,
                Some((choice.finish_reason.as_str(), completion)),
            ));
        }
        if self.streaming.include_usage {
            events.push(self.chunk(json!([]), answer::usage(completion), Some(completion)));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }

    /// Returns a chunk of one choice.
    fn choice(
        &self,
        choice: u32,
        delta: Value,
        logprobs: &Option<Value>,
        finish: Option<(&str, &Completion)>,
    ) -> Event {
        let name = if self.is_chat() { "delta" } else { "text" };
        let reason = finish.map(|(reason, _)| reason);
        let choice = json!([
            { "index": choice, name: delta, "logprobs": logprobs, "finish_reason": reason },
        ]);
        self.chunk(choice, Value::Null, finish.map(|(_, completion)| completion))
    }

    /// Returns a chunk with the fields that all chunks have. What the tokens depended on is known at the end.
    fn chunk(&self, choices: Value, usage: Value, completion: Option<&Completion>) -> Event {
        let shape = self.head.endpoint.shape();
        let object = if self.is_chat() { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = json!({
            "id": answer::id(self.head.id.as_bytes(), shape),
            "object": object,
            "created": self.head.created.seconds(),
            "model": self.head.queue.model,
            "choices": choices,
        });
        if let Some(completion) = completion {
            chunk["system_fingerprint"] = json!(answer::system_fingerprint(completion));
        }
        repeat(&mut chunk, &self.echo);
        if self.streaming.include_usage {
            chunk["usage"] = usage;
        }
        event(&chunk)
    }
}

/// Returns an event with a JSON text.
fn event(value: &Value) -> Event {
    Event::default().data(json_line(value))
}
