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

/// The navigation, in groups.
const LINKS: [&[Link]; 2] = [
    &[Link {
        href: "/dashboard/batches",
        name: "Batches",
        role: KeyRole::Read,
        icon: "M2.5 4.5 8 2l5.5 2.5L8 7 2.5 4.5Zm0 3.5L8 10.5 13.5 8m-11 3.5L8 14l5.5-2.5",
    }],
    &[Link {
        href: "/dashboard/keys",
        name: "API keys",
        role: KeyRole::Operate,
        icon: "M6 10a3.5 3.5 0 1 0-1.5 2.9L6 11.5h2V10h1.5V8.5l4-4v-2h-2L6 8.1",
    }],
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
        let below = path.strip_prefix(link.href);
        let is_current = below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
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
