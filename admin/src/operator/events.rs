//! Event streams: changes in the service, and the events of one job.
//!
//! Server-sent events carry ids. A client that reconnects with `Last-Event-ID` gets the events it missed,
//! as far as they are kept.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    extract::{Path, State},
    http::HeaderMap,
    response::{Response, sse::Event},
};
use futures_util::stream;
use serde_json::json;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, timeout},
};
use tritmill_client::{EventFollower, json_line};
use tritmill_queue::{JobEvent, JobId, Part};

use super::job;
use crate::{ApiError, App, Call, changes::ChangeId, sse};

/// Longest time that a stream stays open; reconnecting checks the key again.
const OPEN_MAX: Duration = Duration::from_secs(3600);
/// Pause between two queries to the store whether a job is finished.
const STATE_POLL: Duration = Duration::from_secs(1);

fn last_event_id<T: std::str::FromStr>(headers: &HeaderMap) -> Result<Option<T>, ApiError> {
    let Some(text) = headers.get("last-event-id") else { return Ok(None) };
    let id = text.to_str().ok().and_then(|text| text.parse().ok());
    let message = "Last-Event-ID must be the id of an event";
    id.map(Some).ok_or_else(|| ApiError::invalid_value("Last-Event-ID", message))
}

/// Streams changes of queues, workers and batches, and jobs that start or fail permanently. An event
/// `reset` says that changes were missed: read the lists again.
#[utoipa::path(get, path = "/admin/v1/events", tag = "service",
    params(("Last-Event-ID" = Option<String>, Header, nullable = false)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream",
            body = String)))]
pub(crate) async fn changes(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let permit = app.stream_permit()?;
    // Subscribes before it reads, so that no change is missed in between.
    let latest = app.changes.subscribe();
    let after = last_event_id::<ChangeId>(&headers)?.unwrap_or(*latest.borrow());
    let until = Instant::now() + OPEN_MAX;
    let service = app.clone();
    let start = (app, latest, after, VecDeque::<Event>::new(), permit);
    let events =
        stream::unfold(start, move |(app, mut latest, mut after, mut ready, permit)| async move {
            loop {
                if let Some(event) = ready.pop_front() {
                    return Some((Ok(event), (app, latest, after, ready, permit)));
                }
                latest.borrow_and_update();
                let (changes, missed) = app.changes.after(after);
                if missed {
                    ready.push_back(Event::default().event("reset").data("{}"));
                }
                for change in changes {
                    after = change.id;
                    let event = Event::default().id(after.to_string()).event(change.kind);
                    ready.push_back(event.data(json_line(&change.data)));
                }
                if ready.is_empty() {
                    let left = until.saturating_duration_since(Instant::now());
                    // Ends the stream when time is up or the service ends.
                    timeout(left, latest.changed()).await.ok()?.ok()?;
                }
            }
        });
    Ok(sse::until_stopped(service, events))
}

/// State of a stream of a job's events.
struct JobStream {
    app: App,
    id: JobId,
    events: EventFollower,
    ready: VecDeque<Event>,
    state_read_at: Instant,
    until: Instant,
    is_finished: bool,
    _permit: OwnedSemaphorePermit,
}

impl JobStream {
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some((Ok(event), self));
            }
            if self.is_finished || Instant::now() >= self.until {
                return None;
            }
            let events = self.events.next(Duration::ZERO).await;
            for (id, event) in events {
                self.is_finished |= matches!(event, JobEvent::Finished { .. });
                self.ready.extend(sse_event(&event).map(|event| event.id(id.to_string())));
            }
            if self.ready.is_empty() && self.state_read_at.elapsed() >= STATE_POLL {
                self.read_state().await;
            }
        }
    }

    /// Asks the store whether the job is finished, because its events may be lost.
    async fn read_state(&mut self) {
        self.state_read_at = Instant::now();
        match self.app.client.finished(&[self.id]).await {
            Ok(ended) => {
                if let Some(ended) = ended.first() {
                    self.is_finished = true;
                    self.ready.extend(sse_event(&JobEvent::Finished { state: ended.state }));
                }
            }
            Err(error) => tracing::debug!(%error, "cannot read the state of a job"),
        }
    }
}

fn sse_event(event: &JobEvent) -> Option<Event> {
    let (kind, data) = match event {
        JobEvent::Queued => ("queued", json!({})),
        JobEvent::Started => ("started", json!({})),
        JobEvent::Call { choice, call, name } => {
            ("call", json!({ "choice": choice, "call": call, "name": name }))
        }
        JobEvent::Delta { text, .. } if text.is_empty() => return None,
        JobEvent::Delta { choice, part, offset, text, .. } => {
            let mut data = json!({ "choice": choice, "offset": offset, "text": text });
            match part {
                Part::Content => {}
                Part::Reasoning => data["part"] = json!("reasoning"),
                Part::Arguments(call) => data["call"] = json!(call),
            }
            ("delta", data)
        }
        JobEvent::Finished { state } => ("finished", json!({ "state": state.as_str() })),
        // An event of a later release.
        _ => return None,
    };
    Some(Event::default().event(kind).data(json_line(&data)))
}

/// Streams the events of a job from its first one on: `queued`, `started`, `delta` (text of a job that
/// streams, with the bytes of the text before it: after a gap, the result has the rest), `call` (the model begins to call a tool) and
/// `finished`. Discard text when another `started` follows.
#[utoipa::path(get, path = "/v1/jobs/{id}/events", tag = "jobs",
    params(("id" = String, Path), ("Last-Event-ID" = Option<String>, Header, nullable = false)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream",
            body = String)))]
pub(crate) async fn of_job(
    Call { app, caller }: Call,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let after = last_event_id(&headers)?.unwrap_or_default();
    let history = job::find(&app, &caller, &id).await?;
    let now = Instant::now();
    let stream = JobStream {
        _permit: app.stream_permit()?,
        id: history.record.job.id,
        events: app.client.follow(history.record.job.id, after),
        ready: VecDeque::new(),
        // The state is read as soon as there are no events.
        state_read_at: now.checked_sub(STATE_POLL).unwrap_or(now),
        until: now + OPEN_MAX,
        is_finished: false,
        app: app.clone(),
    };
    Ok(sse::until_stopped(app, stream::unfold(stream, JobStream::next)))
}
