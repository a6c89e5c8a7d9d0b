//! The dashboard: pages for people, made here and sent as they are.
//!
//! A page is a struct of what it shows and a template for it ([`page::View`]), put into the frame with
//! the navigation. Whoever asks for the same address as an event stream gets the page's content
//! whenever it changes ([`live`]): the one script puts it in place, and without it a reload does. A
//! form posts, something happens, and the browser is sent on to where it can be seen.
//!
//! Invariants: every page and every action has its role in the router's table; what a visitor sees, it
//! sees as its tenant, and an operator sees all. A form of another site does nothing
//! ([`session::require`]). No page has inline script or style.

use std::sync::Arc;

use tokio::sync::Semaphore;

use self::throttle::Throttle;

pub(crate) mod assets;
pub(crate) mod batches;
mod chart;
pub(crate) mod dead_letters;
mod filters;
mod history;
pub(crate) mod integrity;
pub(crate) mod job;
pub(crate) mod jobs;
pub(crate) mod keys;
mod live;
pub(crate) mod login;
pub(crate) mod overview;
pub(crate) mod page;
pub(crate) mod queues;
pub(crate) mod session;
mod throttle;
pub(crate) mod upload;
pub(crate) mod workers;

/// Pages that are kept up to date at once.
const LIVE_MAX: usize = 512;

/// What the dashboard keeps between requests.
pub(crate) struct Dashboard {
    logins: Throttle,
    live: Arc<Semaphore>,
}

impl Default for Dashboard {
    fn default() -> Self {
        Self { logins: Throttle::default(), live: Arc::new(Semaphore::new(LIVE_MAX)) }
    }
}
