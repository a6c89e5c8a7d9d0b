//! Events, as they come: what changes in the service, and what happens to one job.
//!
//! Server-sent events with ids: who comes back with `Last-Event-ID` hears what it missed, as far as it
//! is kept.

use std::{collections::VecDeque, convert::Infallible, time::Duration};

use axum::{
    Extension,
    extract::{Path, State},
    http::HeaderMap,
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::json;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep, timeout},
};
use tritmill_queue::{EventId, JobEvent, JobId};

use super::story;
use crate::{access::Caller, app::App, error::ApiError, openapi::Refused, watch::ChangeId};

/// Between two signs of life while nothing comes.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// After this a subscriber has to come back: its key may have been revoked.
const OPEN_MAX: Duration = Duration::from_secs(3600);
/// Between two looks at a job's events: grows from the first to the last while nothing comes.
const POLL_FIRST: Duration = Duration::from_millis(25);
const POLL_LAST: Duration = Duration::from_millis(500);
/// Between two questions to the store whether a job is over.
const ASK: Duration = Duration::from_secs(1);

/// Room for one more subscriber.
fn permit(app: &App) -> Result<OwnedSemaphorePermit, ApiError> {
    let crowded = |_| ApiError::crowded("too many answers stream at once");
    app.streams().clone().try_acquire_owned().map_err(crowded)
}

/// The events as an answer, which ends when the service stops.
fn respond(
    app: App,
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> Response {
    let events = events.take_until(Box::pin(async move { app.stopped().await }));
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

fn last_id<T: std::str::FromStr>(headers: &HeaderMap) -> Result<Option<T>, ApiError> {
    let Some(text) = headers.get("last-event-id") else { return Ok(None) };
    let id = text.to_str().ok().and_then(|text| text.parse().ok());
    let bad = || {
        let message = "Last-Event-ID must be the id of an event";
        ApiError::invalid("invalid_value", message).at("Last-Event-ID")
    };
    id.map(Some).ok_or_else(bad)
}

/// What changes: queues, workers, batches, and jobs that start or fail for good. `reset` says that
/// some changes were missed: read the lists again.
#[utoipa::path(get, path = "/admin/v1/events", tag = "service",
    params(("Last-Event-ID" = Option<String>, Header, nullable = false)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream",
            body = String),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn changes(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let permit = permit(&app)?;
    // Subscribed before anything is read, so that nothing is missed in between.
    let told = app.changes().subscribe();
    let after = last_id::<ChangeId>(&headers)?.unwrap_or(*told.borrow());
    let until = Instant::now() + OPEN_MAX;
    let service = app.clone();
    let start = (app, told, after, VecDeque::<Event>::new(), permit);
    let events =
        stream::unfold(start, move |(app, mut told, mut after, mut ready, permit)| async move {
            loop {
                if let Some(event) = ready.pop_front() {
                    return Some((Ok(event), (app, told, after, ready, permit)));
                }
                told.borrow_and_update();
                let (changes, missed) = app.changes().after(after);
                if missed {
                    ready.push_back(Event::default().event("reset").data("{}"));
                }
                for change in changes {
                    after = change.id;
                    let event = Event::default().id(after.to_string()).event(change.kind);
                    ready.push_back(event.data(change.data.to_string()));
                }
                if ready.is_empty() {
                    let left = until.saturating_duration_since(Instant::now());
                    // Time is up, or the service ends.
                    timeout(left, told.changed()).await.ok()?.ok()?;
                }
            }
        });
    Ok(respond(service, events))
}

/// Where a subscriber of a job is.
struct Following {
    app: App,
    id: JobId,
    after: EventId,
    ready: VecDeque<Event>,
    wait: Duration,
    asked: Instant,
    until: Instant,
    is_over: bool,
    _permit: OwnedSemaphorePermit,
}

impl Following {
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some((Ok(event), self));
            }
            if self.is_over || Instant::now() >= self.until {
                return None;
            }
            let events = self.app.client().events_after(self.id, self.after).await;
            self.wait = match events.is_empty() {
                true => (self.wait * 2).min(POLL_LAST),
                false => POLL_FIRST,
            };
            for (id, event) in events {
                self.after = id;
                self.is_over |= matches!(event, JobEvent::Finished { .. });
                self.ready.extend(shown(&event).map(|shown| shown.id(id.to_string())));
            }
            if self.ready.is_empty() && self.asked.elapsed() >= ASK {
                self.ask().await;
            }
            if self.ready.is_empty() && !self.is_over {
                sleep(self.wait).await;
            }
        }
    }

    /// Events are no record: the store knows whether the job is over.
    async fn ask(&mut self) {
        self.asked = Instant::now();
        match self.app.client().finished(&[self.id]).await {
            Ok(ended) => {
                if let Some(ended) = ended.first() {
                    self.is_over = true;
                    self.ready.extend(shown(&JobEvent::Finished { state: ended.state }));
                }
            }
            Err(error) => tracing::debug!(%error, "the end of a job not asked for"),
        }
    }
}

fn shown(event: &JobEvent) -> Option<Event> {
    let (kind, data) = match event {
        JobEvent::Queued => ("queued", json!({})),
        JobEvent::Started => ("started", json!({})),
        JobEvent::Delta { choice, text } => ("delta", json!({ "choice": choice, "text": text })),
        JobEvent::Finished { state } => ("finished", json!({ "state": state.as_str() })),
        // Of a later release.
        _ => return None,
    };
    Some(Event::default().event(kind).data(data.to_string()))
}

/// What happens to a job, from its first event on: `queued`, `started`, `delta` (its text, if the job
/// streams; what came before a `started` is void) and `finished`.
#[utoipa::path(get, path = "/v1/jobs/{id}/events", tag = "jobs",
    params(("id" = String, Path), ("Last-Event-ID" = Option<String>, Header, nullable = false)),
    responses((status = 200, description = "Server-sent events", content_type = "text/event-stream",
            body = String),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn of_job(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let after = last_id(&headers)?.unwrap_or_default();
    let story = story::find(&app, &caller, &id).await?;
    let now = Instant::now();
    let following = Following {
        _permit: permit(&app)?,
        id: story.record.job.id,
        after,
        ready: VecDeque::new(),
        wait: POLL_FIRST,
        // The end is asked for as soon as there are no events.
        asked: now.checked_sub(ASK).unwrap_or(now),
        until: now + OPEN_MAX,
        is_over: false,
        app: app.clone(),
    };
    Ok(respond(app, stream::unfold(following, Following::next)))
}
