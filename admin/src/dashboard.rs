//! The dashboard: pages rendered on the server.
//!
//! A page is a struct with its data and a template ([`view::View`]), rendered into a frame with the
//! navigation. A request for the same address as an event stream receives the page's content whenever it
//! changes ([`live`]); the script puts it in place. Without the script, a reload does the same. A form
//! posts, the action is done, and the browser is redirected to a page that shows the result.
//!
//! Invariants: every page and every action has its role in [`ROUTES`](crate::ROUTES). A visitor sees the
//! data of its tenant; an operator sees all. A form sent from another site has no effect
//! ([`guard::require_session`]). Pages have no inline script or style.

pub(crate) mod assets;
pub(crate) mod audit;
pub(crate) mod batches;
pub(crate) mod bulk;
mod chart;
pub(crate) mod costs;
pub(crate) mod dead_letters;
pub(crate) mod files;
pub(crate) mod filters;
pub(crate) mod guard;
mod history;
pub(crate) mod integrity;
pub(crate) mod job;
pub(crate) mod jobs;
pub(crate) mod keys;
mod live;
pub(crate) mod login;
pub(crate) mod notices;
pub(crate) mod overview;
pub(crate) mod page;
mod pager;
pub(crate) mod playground;
pub(crate) mod queues;
pub(crate) mod rerun;
pub(crate) mod schedules;
pub(crate) mod session;
pub(crate) mod sign_on;
pub(crate) mod tenant;
pub(crate) mod tenants;
pub(crate) mod upload;
pub(crate) mod view;
pub(crate) mod worker;
pub(crate) mod workers;

use self::{
    page::Visit,
    session::percent_encoded,
    view::{Content, PageError, PageForm, PageResult},
};
