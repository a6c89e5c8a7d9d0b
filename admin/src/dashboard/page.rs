//! [`Visit`]: a request of a logged-in visitor for a page or an action.

use axum::{
    extract::FromRequestParts,
    http::{StatusCode, request::Parts},
    response::{IntoResponse as _, Redirect, Response},
};
use axum_extra::extract::CookieJar;

use super::{
    Content, PageError, PageResult, live,
    session::{self, Visitor},
    view::{LINKS, framed},
};
use crate::{ApiError, App, Caller, Peer};

/// A request of a logged-in visitor.
pub(crate) struct Visit {
    pub app: App,
    pub caller: Caller,
    pub(super) visitor: Visitor,
    pub(super) peer: Peer,
    pub(super) cookies: CookieJar,
    path: String,
    is_live: bool,
}

impl FromRequestParts<App> for Visit {
    type Rejection = PageError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, PageError> {
        let visitor: &Visitor = parts.extensions.get().ok_or_else(ApiError::unauthorized)?;
        let peer: &Peer = parts.extensions.get().ok_or_else(ApiError::unauthorized)?;
        Ok(Self {
            app: app.clone(),
            caller: visitor.caller.clone(),
            visitor: visitor.clone(),
            peer: *peer,
            cookies: CookieJar::from_headers(&parts.headers),
            path: parts.uri.path().to_owned(),
            is_live: live::is_requested(&parts.headers),
        })
    }
}

impl Visit {
    /// Returns the page that `load` returns, or a stream of its changes.
    pub async fn show<F>(
        self,
        load: impl Fn(App, Caller) -> F + Send + Sync + 'static,
    ) -> PageResult
    where
        F: Future<Output = Result<Content, PageError>> + Send + 'static,
    {
        if self.is_live {
            return live::stream(self.app, self.visitor, load);
        }
        let page = load(self.app.clone(), self.caller.clone()).await?;
        Ok(self.page(StatusCode::OK, &page))
    }

    /// Returns a page in its frame, with the notice of the previous action.
    pub fn page(self, status: StatusCode, page: &Content) -> Response {
        let notice = session::notice(&self.cookies);
        let page = framed(status, &self.caller, &self.path, page, notice.as_deref());
        match notice {
            Some(_) => (session::without_notice(self.cookies, self.peer), page).into_response(),
            None => page,
        }
    }

    /// Redirects to a page that shows a notice of what was done.
    pub fn done(self, to: &str, notice: &str) -> Response {
        (session::with_notice(self.cookies, notice, self.peer), Redirect::to(to)).into_response()
    }
}

/// Redirects to the first page that the visitor may see.
pub(crate) async fn home(visit: Visit) -> Redirect {
    let mut links = LINKS.iter().copied().flatten();
    let first = links.find(|link| visit.caller.role.includes(link.role));
    Redirect::to(first.map_or(session::LOGIN, |link| link.href))
}
