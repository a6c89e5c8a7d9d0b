//! Streamed answers: server-sent events.
//!
//! Text comes from the job's events, which are not durable: they may be late, come twice (a second
//! attempt starts over, with the same tokens) or not at all. The stream therefore counts the text it sent
//! for each choice and sends only what goes beyond it. When the job finishes, the store's result provides
//! the rest: missing text, log probabilities and usage.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use axum::response::{Response, sse::Event};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, oneshot},
    time::{Instant, timeout},
};
use tritmill_client::{Endpoint, answer, json_line};
use tritmill_queue::{EventId, FinishReason, FinishedJob, JobEvent};

use super::answer::{AnswerHead, AwaitedJob, Streaming, completion};
use crate::{ApiError, App, sse};

/// Minimum pause per streaming answer, so that all of them together read 5,000 times per second.
const POLL_EACH: Duration = Duration::from_micros(200);
/// Chunks that may wait for the caller's connection.
const CHUNKS_MAX: usize = 16;
/// How long the response head waits for the first chunk. An error before then becomes a status instead of
/// a chunk.
const HEAD_WAIT: Duration = Duration::from_secs(10);

/// A job and the answer that streams from it.
pub(super) struct AnswerStream {
    pub app: App,
    pub awaited: AwaitedJob,
    pub head: AnswerHead,
    pub streaming: Streaming,
    /// Number of requested choices.
    pub choices: u32,
    /// Receives the job's result.
    pub end: oneshot::Receiver<FinishedJob>,
    /// Time limit of the answer.
    pub limit: Duration,
    /// Held while the answer streams.
    pub permit: Option<OwnedSemaphorePermit>,
}

/// A part of the streamed answer.
enum Chunk {
    Data(Value),
    Failed(ApiError),
    Done,
}

impl Chunk {
    fn event(self) -> Event {
        match self {
            Self::Data(value) => Event::default().data(json_line(&value)),
            Self::Failed(error) => Event::default().data(json_line(&json!(error.body()))),
            Self::Done => Event::default().data("[DONE]"),
        }
    }
}

impl AnswerStream {
    /// Returns the response once its first chunk is there, or an error that occurred before it.
    pub async fn respond(self) -> Result<Response, ApiError> {
        let (sender, mut receiver) = mpsc::channel(CHUNKS_MAX);
        tokio::spawn(self.run(sender));
        // Dropping the receiver, here or with the response, ends the task, which cancels the job.
        let first = match timeout(HEAD_WAIT, receiver.recv()).await {
            Ok(Some(Chunk::Failed(error))) => return Err(error),
            Ok(Some(chunk)) => Some(chunk),
            Ok(None) => return Err(ApiError::answer_timeout()),
            Err(_) => None,
        };
        let events = stream::unfold((first, receiver), async |(first, mut receiver)| {
            let chunk = match first {
                Some(chunk) => chunk,
                None => receiver.recv().await?,
            };
            Some((Ok::<_, Infallible>(chunk.event()), (None, receiver)))
        });
        Ok(sse::response(events))
    }

    /// Sends chunks until the answer is complete or the receiver is dropped.
    async fn run(mut self, sender: mpsc::Sender<Chunk>) {
        let (streams, permit) = (self.app.metrics.streams.clone(), self.permit.take());
        streams.inc();
        self.send_chunks(sender).await;
        streams.dec();
        drop(permit);
    }

    async fn send_chunks(mut self, sender: mpsc::Sender<Chunk>) {
        let until = Instant::now() + self.limit;
        let mut text = SentText::default();
        let mut events = self.app.client.follow(self.head.id, EventId::default());
        loop {
            let streams = u32::try_from(self.app.metrics.streams.get()).unwrap_or_default();
            let chunks = tokio::select! {
                biased;
                () = sender.closed() => return,
                ended = &mut self.end => {
                    self.awaited.is_finished = true;
                    self.finish(ended.map_err(|_| ApiError::answer_timeout()), &mut text)
                }
                events = events.next(POLL_EACH * streams) => {
                    let events = events.into_iter().map(|(_, event)| event);
                    events.flat_map(|event| self.event_chunks(event, &mut text)).collect()
                }
                () = tokio::time::sleep_until(until) => vec![Chunk::Failed(ApiError::answer_timeout())],
            };
            for chunk in chunks {
                let is_last = matches!(chunk, Chunk::Done | Chunk::Failed(_));
                if sender.send(chunk).await.is_err() || is_last {
                    return;
                }
            }
        }
    }

    /// Returns the chunks that follow from an event.
    fn event_chunks(&self, event: JobEvent, text: &mut SentText) -> Vec<Chunk> {
        match event {
            JobEvent::Started => {
                text.start_over();
                Vec::new()
            }
            JobEvent::Delta { choice, text: delta } if choice < self.choices => {
                let new = text.add(choice, &delta).map(str::to_owned);
                new.map_or_else(Vec::new, |new| self.text_chunks(choice, &new, text))
            }
            _ => Vec::new(),
        }
    }

    /// Returns the chunks for new text of a choice. The first chunk of a chat choice carries the role.
    fn text_chunks(&self, choice: u32, new: &str, text: &mut SentText) -> Vec<Chunk> {
        let is_first = text.begin(choice);
        let delta = match self.head.endpoint {
            Endpoint::Chat if is_first => json!({ "role": "assistant", "content": new }),
            Endpoint::Chat => json!({ "content": new }),
            Endpoint::Completions | Endpoint::Plain => json!(new),
        };
        vec![self.choice_chunk(choice, delta, Value::Null, None)]
    }

    /// Returns the last chunks: text that no event brought, the finish reason of each choice, and usage.
    fn finish(&self, ended: Result<FinishedJob, ApiError>, text: &mut SentText) -> Vec<Chunk> {
        let completion = match ended.and_then(completion) {
            Ok(completion) => completion,
            Err(error) => return vec![Chunk::Failed(error)],
        };
        let mut chunks = Vec::new();
        for choice in &completion.choices {
            let rest = text.rest(choice.index, &choice.text);
            if !rest.is_empty() || !text.has_begun(choice.index) {
                chunks.extend(self.text_chunks(choice.index, rest, text));
            }
            let empty = match self.head.endpoint {
                Endpoint::Chat => json!({}),
                Endpoint::Completions | Endpoint::Plain => json!(""),
            };
            let logprobs = answer::logprobs(self.head.endpoint.shape(), choice);
            let finish = Some(choice.finish_reason);
            chunks.push(self.choice_chunk(choice.index, empty, json!(logprobs), finish));
        }
        if self.streaming.include_usage {
            chunks.push(self.chunk(json!([]), answer::usage(&completion)));
        }
        chunks.push(Chunk::Done);
        chunks
    }

    /// Returns a chunk of one choice.
    fn choice_chunk(
        &self,
        choice: u32,
        delta: Value,
        logprobs: Value,
        finish: Option<FinishReason>,
    ) -> Chunk {
        let name = if self.head.endpoint == Endpoint::Chat { "delta" } else { "text" };
        let finish = finish.map(FinishReason::as_str);
        let choice = json!([
            { "index": choice, name: delta, "logprobs": logprobs, "finish_reason": finish },
        ]);
        self.chunk(choice, Value::Null)
    }

    /// Returns a chunk with the fields that all chunks have.
    fn chunk(&self, choices: Value, usage: Value) -> Chunk {
        let shape = self.head.endpoint.shape();
        let object = match self.head.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions | Endpoint::Plain => "text_completion",
        };
        let mut chunk = json!({
            "id": answer::id(self.head.id.as_bytes(), shape),
            "object": object,
            "created": self.head.created.seconds(),
            "model": self.head.queue.model,
            "choices": choices,
        });
        if self.streaming.include_usage {
            chunk["usage"] = usage;
        }
        Chunk::Data(chunk)
    }
}

/// How much text of each choice arrived in the current attempt, and how much was ever sent.
#[derive(Debug, Default)]
struct SentText(BTreeMap<u32, ChoiceText>);

#[derive(Debug, Default)]
struct ChoiceText {
    arrived_bytes: usize,
    sent_bytes: usize,
    has_begun: bool,
}

impl SentText {
    /// Starts a new attempt, which generates the same text from the start.
    fn start_over(&mut self) {
        self.0.values_mut().for_each(|text| text.arrived_bytes = 0);
    }

    /// Returns the part of a delta that was not sent yet, if any, and counts it as sent.
    fn add<'a>(&mut self, choice: u32, delta: &'a str) -> Option<&'a str> {
        let text = self.0.entry(choice).or_default();
        let known = text.sent_bytes.saturating_sub(text.arrived_bytes).min(delta.len());
        text.arrived_bytes += delta.len();
        let new = delta.get(known..).filter(|new| !new.is_empty())?;
        text.sent_bytes = text.arrived_bytes;
        Some(new)
    }

    /// Returns the part of the complete text that was not sent yet, and counts it as sent.
    fn rest<'a>(&mut self, choice: u32, complete: &'a str) -> &'a str {
        let text = self.0.entry(choice).or_default();
        let rest = complete.get(text.sent_bytes..).unwrap_or_default();
        text.sent_bytes = complete.len();
        rest
    }

    /// Returns whether a chunk of the choice was sent.
    fn has_begun(&self, choice: u32) -> bool {
        self.0.get(&choice).is_some_and(|text| text.has_begun)
    }

    /// Marks the choice as begun; returns whether this is its first chunk.
    fn begin(&mut self, choice: u32) -> bool {
        !std::mem::replace(&mut self.0.entry(choice).or_default().has_begun, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_text_is_sent_once() {
        let mut text = SentText::default();
        assert_eq!(text.add(0, "2024-"), Some("2024-"));
        text.start_over();
        assert_eq!(text.add(0, "20"), None);
        assert_eq!(text.add(0, "24-03"), Some("03"));
        assert_eq!(text.add(1, "x"), Some("x"));
        assert_eq!(text.rest(0, "2024-03-03"), "-03");
        assert_eq!(text.rest(1, "x"), "");
        assert_eq!(text.rest(2, "whole"), "whole");
    }
}
