//! Live pages: the address of a page, requested as an event stream, sends the page's content whenever it
//! changes.

use std::{convert::Infallible, time::Duration};

use axum::{
    http::{HeaderMap, header::ACCEPT},
    response::sse::Event,
};
use futures_util::stream;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep},
};

use super::{
    Content, PageError, PageResult,
    session::{self, Visitor},
};
use crate::{ApiError, App, Caller, refusals::Limit, sse};

/// Pause between two renderings, and its minimum as a multiple of a rendering's duration.
const INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL_SHARE: u32 = 20;

/// Whether the request is for an event stream.
pub(super) fn is_requested(headers: &HeaderMap) -> bool {
    let accepted = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    accepted.is_some_and(|accept| accept.starts_with("text/event-stream"))
}

/// A page that is shown live.
struct LivePage<L> {
    app: App,
    visitor: Visitor,
    load: L,
    /// Content that was sent last.
    sent: String,
    wait: Duration,
    /// Held while the page is live.
    _permit: OwnedSemaphorePermit,
}

/// Streams the content of the page that `load` returns whenever it changes, while the session is valid.
pub(super) fn stream<L, F>(app: App, visitor: Visitor, load: L) -> PageResult
where
    L: Fn(App, Caller) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Content, PageError>> + Send + 'static,
{
    let permit = app.live_pages.clone().try_acquire_owned();
    let permit = permit
        .map_err(|_| ApiError::busy("too many live pages: try again later").by(Limit::LivePages))?;
    let service = app.clone();
    let page =
        LivePage { app, visitor, load, sent: String::new(), wait: INTERVAL, _permit: permit };
    Ok(sse::until_stopped(service, stream::unfold(page, LivePage::next)))
}

impl<L, F> LivePage<L>
where
    L: Fn(App, Caller) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Content, PageError>> + Send + 'static,
{
    /// Returns the next change; `None` when the session is no longer valid or the page fails.
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        loop {
            sleep(self.wait).await;
            let started = Instant::now();
            let visitor = session::of_session(&self.app, self.visitor.session).await.ok()??;
            let Content { html: content, .. } =
                (self.load)(self.app.clone(), visitor.caller).await.ok()?;
            self.wait = INTERVAL.max(started.elapsed() * INTERVAL_SHARE);
            if content != self.sent {
                let event = Event::default().data(content.replace('\r', ""));
                self.sent = content;
                return Some((Ok(event), self));
            }
        }
    }
}
