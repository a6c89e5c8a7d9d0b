//! Responses of server-sent events.

use std::{convert::Infallible, time::Duration};

use axum::response::{
    IntoResponse as _, Response,
    sse::{Event, KeepAlive, Sse},
};
use futures_util::{Stream, StreamExt as _};

use crate::App;

/// Pause between two keep-alive comments while no event is sent.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// A response of `events`, as long as they last.
pub(crate) fn response(
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> Response {
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// A response of `events` that also ends when the service stops.
pub(crate) fn until_stopped(
    app: App,
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> Response {
    response(events.take_until(Box::pin(async move { app.stopped().await })))
}
