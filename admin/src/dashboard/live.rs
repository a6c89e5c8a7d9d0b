//! Pages that are kept up to date: the page's own address, asked for as an event stream, sends its
//! content whenever it has changed.

use std::{convert::Infallible, time::Duration};

use axum::{
    http::{HeaderMap, header::ACCEPT},
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::{StreamExt as _, stream};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep},
};

use super::{
    page::{PageError, View, rendered},
    session::{self, Visitor},
};
use crate::{access::Caller, app::App, error::ApiError};

/// Between two looks; no less than so many times what a look takes.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_SHARE: u32 = 20;
/// Between two signs of life while nothing changes.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Whether the request is for an event stream.
pub(super) fn is_asked_for(headers: &HeaderMap) -> bool {
    let accepted = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    accepted.is_some_and(|accept| accept.starts_with("text/event-stream"))
}

/// A page that somebody looks at.
struct Watched<L> {
    app: App,
    visitor: Visitor,
    look: L,
    /// What was sent last.
    sent: String,
    wait: Duration,
    /// Held while it streams.
    _permit: OwnedSemaphorePermit,
}

/// The content of what `look` sees, whenever it has changed, while the session lasts.
pub(super) fn stream<L, F, V>(app: App, visitor: Visitor, look: L) -> Result<Response, PageError>
where
    L: Fn(App, Caller) -> F + Send + Sync + 'static,
    F: Future<Output = Result<V, PageError>> + Send + 'static,
    V: View,
{
    let permit = app.dashboard().live.clone().try_acquire_owned();
    let permit = permit.map_err(|_| ApiError::crowded("too many pages are kept up to date"))?;
    let stopped = app.clone();
    let watched =
        Watched { app, visitor, look, sent: String::new(), wait: LOOK_EVERY, _permit: permit };
    let changes = stream::unfold(watched, Watched::next);
    let changes = changes.take_until(async move { stopped.stopped().await });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Ok(Sse::new(changes).keep_alive(keep_alive).into_response())
}

impl<L, F, V> Watched<L>
where
    L: Fn(App, Caller) -> F + Send + Sync + 'static,
    F: Future<Output = Result<V, PageError>> + Send + 'static,
    V: View,
{
    /// The next change, if there is one before the session ends or the page is no more.
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        loop {
            sleep(self.wait).await;
            let started = Instant::now();
            let visitor = session::of_session(&self.app, self.visitor.session).await.ok()??;
            let view = (self.look)(self.app.clone(), visitor.caller).await.ok()?;
            let content = rendered(&view);
            self.wait = LOOK_EVERY.max(started.elapsed() * LOOK_SHARE);
            if content != self.sent {
                let event = Event::default().data(content.replace('\r', ""));
                self.sent = content;
                return Some((Ok(event), self));
            }
        }
    }
}
