//! An answer in pieces: server-sent events.
//!
//! Text comes from the job's events, which are no record: they may be late, come twice (a second
//! attempt starts over, with the same tokens) or not at all. So what was sent is counted by choice,
//! only what goes beyond it is sent, and the end, which comes from the store, brings the rest: text that
//! is missing, log probabilities, usage.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use axum::response::{
    IntoResponse as _, Response,
    sse::{Event, KeepAlive, Sse},
};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc, oneshot},
    time::{Instant, sleep, timeout},
};
use tritmill_client::{Endpoint, answer};
use tritmill_queue::{EventId, FinishReason, FinishedJob, JobEvent};

use super::completions::{Answered, Awaited, Streaming, completed};
use crate::{app::App, error::ApiError};

/// Between two looks at the job's events: grows from the first to the last while nothing comes.
const POLL_FIRST: Duration = Duration::from_millis(20);
const POLL_LAST: Duration = Duration::from_millis(200);
/// And is no less than this for each answer that streams: so many ask 5,000 times a second together.
const POLL_EACH: Duration = Duration::from_micros(200);
/// Pieces that wait for the caller's connection.
const PIECES: usize = 16;
/// How long the head of the response waits for the first piece: an error that comes before it is a
/// status, not a piece.
const HEAD_WAIT: Duration = Duration::from_secs(10);
/// Between two signs of life while nothing comes.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// A job whose text is sent on.
pub(super) struct Follow {
    pub app: App,
    pub awaited: Awaited,
    pub of: Answered,
    pub streaming: Streaming,
    /// Choices that were asked for.
    pub choices: u32,
    /// Told when the job is over.
    pub end: oneshot::Receiver<FinishedJob>,
    /// Held while it streams.
    pub permit: Option<OwnedSemaphorePermit>,
}

/// What the caller is told.
enum Piece {
    Data(Value),
    Failed(ApiError),
    Done,
}

impl Piece {
    fn event(self) -> Event {
        match self {
            Self::Data(value) => Event::default().data(value.to_string()),
            Self::Failed(error) => Event::default().data(error.body().to_string()),
            Self::Done => Event::default().data("[DONE]"),
        }
    }
}

impl Follow {
    /// The response: its first pieces are there, or an error that came before any.
    pub async fn respond(self) -> Result<Response, ApiError> {
        let (tell, mut told) = mpsc::channel(PIECES);
        tokio::spawn(self.run(tell));
        // Dropping this side, here or with the response, ends the task, which cancels the job.
        let first = match timeout(HEAD_WAIT, told.recv()).await {
            Ok(Some(Piece::Failed(error))) => return Err(error),
            Ok(Some(piece)) => Some(piece),
            Ok(None) => return Err(ApiError::late()),
            Err(_) => None,
        };
        let events = stream::unfold((first, told), async |(first, mut told)| {
            let piece = match first {
                Some(piece) => piece,
                None => told.recv().await?,
            };
            Some((Ok::<_, Infallible>(piece.event()), (None, told)))
        });
        let alive = KeepAlive::new().interval(KEEP_ALIVE);
        Ok(Sse::new(events).keep_alive(alive).into_response())
    }

    /// Tells what happens until the end, or until nobody listens.
    async fn run(mut self, tell: mpsc::Sender<Piece>) {
        let (streams, permit) = (self.app.metrics().streams.clone(), self.permit.take());
        streams.inc();
        self.tell_all(tell).await;
        streams.dec();
        drop(permit);
    }

    async fn tell_all(mut self, tell: mpsc::Sender<Piece>) {
        let until = Instant::now() + self.app.limits().answer_within;
        let (mut text, mut last) = (Text::default(), EventId::default());
        let mut wait = POLL_FIRST;
        loop {
            let pieces = tokio::select! {
                biased;
                () = tell.closed() => return,
                ended = &mut self.end => {
                    self.awaited.over();
                    self.ended(ended.map_err(|_| ApiError::late()), &mut text)
                }
                () = sleep(wait) => {
                    let events = self.app.client().events_after(self.of.id, last).await;
                    last = events.last().map_or(last, |(id, _)| *id);
                    wait = match events.is_empty() {
                        true => (wait * 2).min(POLL_LAST),
                        false => POLL_FIRST,
                    };
                    let streams = self.app.metrics().streams.get();
                    wait = wait.max(POLL_EACH * u32::try_from(streams).unwrap_or_default());
                    let heard = events.into_iter().map(|(_, event)| event);
                    heard.flat_map(|event| self.heard(event, &mut text)).collect()
                }
                () = tokio::time::sleep_until(until) => vec![Piece::Failed(ApiError::late())],
            };
            for piece in pieces {
                let is_last = matches!(piece, Piece::Done | Piece::Failed(_));
                // Gone while it was sent: the next turn would see it too.
                if tell.send(piece).await.is_err() || is_last {
                    return;
                }
            }
        }
    }

    /// What an event adds.
    fn heard(&self, event: JobEvent, text: &mut Text) -> Vec<Piece> {
        match event {
            JobEvent::Started => {
                text.start_over();
                Vec::new()
            }
            JobEvent::Delta { choice, text: piece } if choice < self.choices => {
                let more = text.add(choice, &piece).map(str::to_owned);
                more.map_or_else(Vec::new, |more| self.add(choice, &more, text))
            }
            _ => Vec::new(),
        }
    }

    /// More text of a choice; the first piece of a conversation's says who speaks.
    fn add(&self, choice: u32, more: &str, text: &mut Text) -> Vec<Piece> {
        let is_first = text.is_first(choice);
        let delta = match self.of.endpoint {
            Endpoint::Chat if is_first => json!({ "role": "assistant", "content": more }),
            Endpoint::Chat => json!({ "content": more }),
            Endpoint::Completions | Endpoint::Plain => json!(more),
        };
        vec![self.piece(choice, delta, Value::Null, None)]
    }

    /// The rest: text that no event brought, why each choice ended, what it took.
    fn ended(&self, ended: Result<FinishedJob, ApiError>, text: &mut Text) -> Vec<Piece> {
        let completion = match ended.and_then(completed) {
            Ok(completion) => completion,
            Err(error) => return vec![Piece::Failed(error)],
        };
        let mut pieces = Vec::new();
        for choice in &completion.choices {
            let rest = text.rest(choice.index, &choice.text);
            if !rest.is_empty() || text.is_silent(choice.index) {
                pieces.extend(self.add(choice.index, rest, text));
            }
            let nothing = match self.of.endpoint {
                Endpoint::Chat => json!({}),
                Endpoint::Completions | Endpoint::Plain => json!(""),
            };
            let logprobs = answer::logprobs(self.of.endpoint.shape(), choice);
            let finish = Some(choice.finish_reason);
            pieces.push(self.piece(choice.index, nothing, json!(logprobs), finish));
        }
        if self.streaming.include_usage {
            pieces.push(self.frame(json!([]), answer::usage(&completion)));
        }
        pieces.push(Piece::Done);
        pieces
    }

    /// One choice's piece.
    fn piece(
        &self,
        choice: u32,
        delta: Value,
        logprobs: Value,
        finish: Option<FinishReason>,
    ) -> Piece {
        let name = if self.of.endpoint == Endpoint::Chat { "delta" } else { "text" };
        let finish = finish.map(FinishReason::as_str);
        let choice = json!([
            { "index": choice, name: delta, "logprobs": logprobs, "finish_reason": finish },
        ]);
        self.frame(choice, Value::Null)
    }

    /// What all pieces have.
    fn frame(&self, choices: Value, usage: Value) -> Piece {
        let shape = self.of.endpoint.shape();
        let object = match self.of.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions | Endpoint::Plain => "text_completion",
        };
        let mut frame = json!({
            "id": answer::id(self.of.id.as_bytes(), shape),
            "object": object,
            "created": self.of.created.seconds(),
            "model": self.of.queue.model,
            "choices": choices,
        });
        if self.streaming.include_usage {
            frame["usage"] = usage;
        }
        Piece::Data(frame)
    }
}

/// How much of each choice's text came, in this attempt, and was sent, ever.
#[derive(Debug, Default)]
struct Text(BTreeMap<u32, Sent>);

#[derive(Debug, Default)]
struct Sent {
    came_bytes: usize,
    sent_bytes: usize,
    spoke: bool,
}

impl Text {
    /// An attempt begins: its text comes from the start, and is the same.
    fn start_over(&mut self) {
        self.0.values_mut().for_each(|sent| sent.came_bytes = 0);
    }

    /// The part of a piece that was not sent, if there is any; it counts as sent.
    fn add<'a>(&mut self, choice: u32, piece: &'a str) -> Option<&'a str> {
        let sent = self.0.entry(choice).or_default();
        let known = sent.sent_bytes.saturating_sub(sent.came_bytes).min(piece.len());
        sent.came_bytes += piece.len();
        let more = piece.get(known..).filter(|more| !more.is_empty())?;
        sent.sent_bytes = sent.came_bytes;
        Some(more)
    }

    /// What of the whole text was not sent; it counts as sent.
    fn rest<'a>(&mut self, choice: u32, whole: &'a str) -> &'a str {
        let sent = self.0.entry(choice).or_default();
        let rest = whole.get(sent.sent_bytes..).unwrap_or_default();
        sent.sent_bytes = whole.len();
        rest
    }

    /// Whether nothing was said yet of a choice.
    fn is_silent(&self, choice: u32) -> bool {
        self.0.get(&choice).is_none_or(|sent| !sent.spoke)
    }

    /// As [`is_silent`](Self::is_silent), and from now on it is not.
    fn is_first(&mut self, choice: u32) -> bool {
        !std::mem::replace(&mut self.0.entry(choice).or_default().spoke, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_comes_again_is_not_sent_again() {
        let mut text = Text::default();
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
