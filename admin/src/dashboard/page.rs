//! What a page is: a view in the frame, for a visit.

use askama::Template;
use axum::{
    extract::FromRequestParts,
    http::{
        HeaderValue, StatusCode,
        header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, SET_COOKIE, VARY},
        request::Parts,
    },
    response::{IntoResponse, Redirect, Response},
};
use tritmill_queue::store::KeyRole;

use super::{
    assets, live,
    session::{self, Visitor},
};
use crate::{access::Caller, app::App, error::ApiError, serve::Peer};

/// What a page may load, and who may frame it or be sent its forms: itself, itself and nobody.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; \
    img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; \
    base-uri 'none'";

/// What a page shows: its template makes its content.
pub(crate) trait View: Template + Send + Sync + 'static {
    /// Of its window, and above its content.
    fn title(&self) -> String;
}

/// An entry of the navigation.
struct Link {
    href: &'static str,
    name: &'static str,
    /// Who sees it.
    role: KeyRole,
    /// Strokes of its icon, in a square of sixteen.
    icon: &'static str,
}

const OVERVIEW: &str = "/dashboard/overview";

const fn link(href: &'static str, name: &'static str, role: KeyRole, icon: &'static str) -> Link {
    Link { href, name, role, icon }
}

/// The navigation, in groups.
#[rustfmt::skip]
const LINKS: [&[Link]; 3] = [
    &[
        link(OVERVIEW, "Overview", KeyRole::Operate, "M2.5 13.5v-5m3.7 5v-11m3.6 11v-7m3.7 7v-3"),
        link("/dashboard/batches", "Batches", KeyRole::Read, "M2.5 4.5 8 2l5.5 2.5L8 7 2.5 4.5Zm0 3.5L8 10.5 13.5 8m-11 3.5L8 14l5.5-2.5"),
        link("/dashboard/jobs", "Jobs", KeyRole::Read, "M2.5 4h1m-1 4h1m-1 4h1m3-8h7m-7 4h7m-7 4h7"),
    ],
    &[
        link("/dashboard/workers", "Workers", KeyRole::Operate, "M4.5 4.5h7v7h-7zM6.5 2v2.5m3-2.5v2.5m-3 7V14m3-2.5V14M2 6.5h2.5m-2.5 3h2.5m7-3H14m-2.5 3H14"),
        link("/dashboard/dead-letters", "Dead letters", KeyRole::Operate, "M2.5 4h11v8h-11zm0 .5L8 9l5.5-4.5"),
        link("/dashboard/integrity", "Integrity", KeyRole::Operate, "M8 2 3 4v4c0 3 2.2 5 5 6 2.8-1 5-3 5-6V4L8 2ZM5.8 8l1.6 1.6L10.4 6.5"),
    ],
    &[
        link("/dashboard/keys", "API keys", KeyRole::Operate, "M7 9.5a3 3 0 1 1-1-1l6-6 1.5 1.5-1.2 1.2m-2 2L9 6"),
    ],
];

/// An entry as a visitor sees it.
struct ShownLink {
    link: &'static Link,
    is_current: bool,
}

#[derive(Template)]
#[template(path = "frame.html")]
struct Frame<'a> {
    title: &'a str,
    content: &'a str,
    groups: Vec<Vec<ShownLink>>,
    caller: &'a Caller,
    notice: Option<&'a str>,
    version: &'a str,
}

/// A frame without anybody in it.
#[derive(Template)]
#[template(path = "plain.html")]
pub(super) struct Plain<'a> {
    pub title: &'a str,
    pub content: &'a str,
    pub version: &'a str,
}

#[derive(Template)]
#[template(path = "error.html")]
struct Failed<'a> {
    status: StatusCode,
    message: &'a str,
}

/// A page that cannot be shown, or an action that was not done. The frame is put around it where it
/// is known who asked.
pub(crate) struct PageError(ApiError);

impl<E: Into<ApiError>> From<E> for PageError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let mut response = self.0.status().into_response();
        response.extensions_mut().insert(self.0);
        response
    }
}

/// A visitor who asks for a page or does something.
pub(crate) struct Visit {
    pub app: App,
    pub caller: Caller,
    pub(super) visitor: Visitor,
    pub(super) peer: Peer,
    path: String,
    is_live: bool,
    notice: Option<(String, HeaderValue)>,
}

impl FromRequestParts<App> for Visit {
    type Rejection = PageError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, PageError> {
        let visitor = parts.extensions.get::<Visitor>().cloned().ok_or_else(ApiError::no_key)?;
        let peer = parts.extensions.get::<Peer>().copied().ok_or_else(ApiError::no_key)?;
        Ok(Self {
            app: app.clone(),
            caller: visitor.caller.clone(),
            visitor,
            peer,
            path: parts.uri.path().to_owned(),
            is_live: live::is_asked_for(&parts.headers),
            notice: session::notice(&parts.headers, peer),
        })
    }
}

impl Visit {
    /// The page of what `look` sees, or that page as it changes.
    pub async fn show<V, F>(
        self,
        look: impl Fn(App, Caller) -> F + Send + Sync + 'static,
    ) -> Result<Response, PageError>
    where
        V: View,
        F: Future<Output = Result<V, PageError>> + Send + 'static,
    {
        if self.is_live {
            return live::stream(self.app, self.visitor, look);
        }
        let view = look(self.app.clone(), self.caller.clone()).await?;
        Ok(self.page(StatusCode::OK, &view))
    }

    /// A page.
    pub fn page(self, status: StatusCode, view: &impl View) -> Response {
        let content = rendered(view);
        let (notice, forget) = self.notice.unzip();
        let frame = framed(&self.caller, &self.path, &view.title(), &content, notice);
        let mut response = html(status, frame);
        if let Some(cookie) = forget {
            response.headers_mut().insert(SET_COOKIE, cookie);
        }
        response
    }

    /// Sends the visitor to a page that tells it what was done.
    pub fn done(&self, to: &str, what: &str) -> Response {
        session::done(to, what, self.peer)
    }
}

/// The dashboard's door: the first page that a visitor may see.
pub(crate) async fn home(visit: Visit) -> Redirect {
    let mut links = LINKS.iter().copied().flatten();
    let first = links.find(|link| link.role <= visit.caller.role);
    Redirect::to(first.map_or(session::LOGIN, |link| link.href))
}

/// A template's text. Templates are checked when they are compiled; what is left to fail is the
/// formatting of a value, and none of ours does.
pub(super) fn rendered(template: &impl Template) -> String {
    template.render().unwrap_or_else(|error| {
        tracing::error!(%error, "a page cannot be written");
        String::new()
    })
}

fn framed(
    caller: &Caller,
    path: &str,
    title: &str,
    content: &str,
    notice: Option<String>,
) -> String {
    let shown = |link: &'static Link| {
        let is_of = |href| {
            path.strip_prefix(href)
                .is_some_and(|rest: &str| rest.is_empty() || rest.starts_with('/'))
        };
        // A queue is a row of the overview.
        let is_queue = link.href == OVERVIEW && is_of("/dashboard/queues");
        let is_current = is_of(link.href) || is_queue;
        (link.role <= caller.role).then_some(ShownLink { link, is_current })
    };
    let groups = LINKS.iter().map(|group| group.iter().filter_map(shown).collect::<Vec<_>>());
    let groups = groups.filter(|group| !group.is_empty()).collect();
    let version = assets::version();
    rendered(&Frame { title, content, groups, caller, notice: notice.as_deref(), version })
}

/// A page that says what went wrong, to somebody who is logged in.
pub(super) fn error(caller: &Caller, error: &ApiError) -> Response {
    let content = rendered(&Failed { status: error.status(), message: error.message() });
    let title = error.status().canonical_reason().unwrap_or("Error");
    html(error.status(), framed(caller, "", title, &content, None))
}

/// The same to anybody.
pub(super) fn plain_error(error: &ApiError) -> Response {
    let content = rendered(&Failed { status: error.status(), message: error.message() });
    let title = error.status().canonical_reason().unwrap_or("Error");
    plain(error.status(), title, &content)
}

/// A page for who is not logged in.
pub(super) fn plain(status: StatusCode, title: &str, content: &str) -> Response {
    html(status, rendered(&Plain { title, content, version: assets::version() }))
}

fn html(status: StatusCode, text: String) -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        // Forms say where they come from, and nobody else hears of it.
        (REFERRER_POLICY, "same-origin"),
        (VARY, "Accept"),
    ];
    (status, headers, text).into_response()
}
