//! [`Content`]: the content of a page; and the frames around it.

use askama::Template;
use axum::{
    extract::{Form, FromRequest, Request},
    http::{
        StatusCode,
        header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER, VARY},
    },
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;

use super::assets;
use crate::{ApiError, Caller, store::KeyRole};

/// Pages load only from this service, cannot be framed, and their forms post only to it.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; \
    img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; \
    base-uri 'none'";

/// What handlers of pages and actions return.
pub(crate) type PageResult = Result<Response, PageError>;

/// The rendered content of a page.
pub(crate) struct Content {
    /// Title of the window.
    pub title: String,
    pub html: String,
}

impl Content {
    /// Renders the content from a template with its data.
    pub fn new(title: impl Into<String>, view: &impl Template) -> Self {
        Self { title: title.into(), html: render(view) }
    }
}

/// An entry of the navigation.
pub(super) struct Link {
    pub href: &'static str,
    name: &'static str,
    /// Role that sees the entry.
    pub role: KeyRole,
    /// SVG path of the icon, in a square of 16.
    icon: &'static str,
}

const OVERVIEW: &str = "/dashboard/overview";

const fn link(href: &'static str, name: &'static str, role: KeyRole, icon: &'static str) -> Link {
    Link { href, name, role, icon }
}

/// The navigation, in groups.
#[rustfmt::skip]
pub(super) const LINKS: [&[Link]; 3] = [
    &[
        link(OVERVIEW, "Overview", KeyRole::Operate, "M2.5 13.5v-5m3.7 5v-11m3.6 11v-7m3.7 7v-3"),
        link("/dashboard/batches", "Batches", KeyRole::Read, "M2.5 4.5 8 2l5.5 2.5L8 7 2.5 4.5Zm0 3.5L8 10.5 13.5 8m-11 3.5L8 14l5.5-2.5"),
        link("/dashboard/jobs", "Jobs", KeyRole::Read, "M2.5 4h1m-1 4h1m-1 4h1m3-8h7m-7 4h7m-7 4h7"),
        link("/dashboard/schedules", "Schedules", KeyRole::Read, "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11ZM8 5v3.2l2.2 1.5"),
        link("/dashboard/notices", "Notices", KeyRole::Read, "M4 11.5V7a4 4 0 1 1 8 0v4.5l1 1H3l1-1Zm2.7 2.5h2.6"),
        link("/dashboard/playground", "Playground", KeyRole::Submit, "M5 3.5v9l7-4.5-7-4.5Z"),
        link("/dashboard/files", "Files", KeyRole::Read, "M4 2.5h5.5L12 5v8.5H4zM9.5 2.5V5H12"),
    ],
    &[
        link("/dashboard/workers", "Workers", KeyRole::Operate, "M4.5 4.5h7v7h-7zM6.5 2v2.5m3-2.5v2.5m-3 7V14m3-2.5V14M2 6.5h2.5m-2.5 3h2.5m7-3H14m-2.5 3H14"),
        link("/dashboard/costs", "Costs", KeyRole::Read, "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11Zm1.8 3.6C9.3 5.5 8.7 5.3 8 5.3c-1 0-1.8.5-1.8 1.3 0 1.9 3.7.9 3.7 2.8 0 .8-.8 1.3-1.9 1.3-.8 0-1.5-.3-2-.9M8 4.3v7.4"),
        link("/dashboard/tenants", "Tenants", KeyRole::Operate, "M8 7.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5Zm-5.5 6c.6-2.6 2.8-4 5.5-4s4.9 1.4 5.5 4"),
        link("/dashboard/dead-letters", "Dead letters", KeyRole::Operate, "M2.5 4h11v8h-11zm0 .5L8 9l5.5-4.5"),
        link("/dashboard/integrity", "Integrity", KeyRole::Operate, "M8 2 3 4v4c0 3 2.2 5 5 6 2.8-1 5-3 5-6V4L8 2ZM5.8 8l1.6 1.6L10.4 6.5"),
    ],
    &[
        link("/dashboard/keys", "API keys", KeyRole::Manage, "M7 9.5a3 3 0 1 1-1-1l6-6 1.5 1.5-1.2 1.2m-2 2L9 6"),
        link("/dashboard/audit", "Audit log", KeyRole::Operate, "M4 2.5h5.5L12 5v8.5H4zM9.5 2.5V5H12M6 8h4m-4 2.5h4"),
    ],
];

impl Link {
    /// Whether the page at `path` belongs to this entry.
    fn is_current(&self, path: &str) -> bool {
        let is_below = |href| {
            path.strip_prefix(href)
                .is_some_and(|rest: &str| rest.is_empty() || rest.starts_with('/'))
        };
        // Queues are listed on the overview.
        is_below(self.href) || self.href == OVERVIEW && is_below("/dashboard/queues")
    }
}

#[derive(Template)]
#[template(path = "frame.html")]
struct Frame<'a> {
    title: &'a str,
    content: &'a str,
    path: &'a str,
    groups: Vec<Vec<&'static Link>>,
    caller: &'a Caller,
    notice: Option<&'a str>,
    version: &'a str,
}

/// The frame of pages that need no login.
#[derive(Template)]
#[template(path = "plain.html")]
struct PlainFrame<'a> {
    title: &'a str,
    content: &'a str,
    version: &'a str,
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorView<'a> {
    status: StatusCode,
    message: &'a str,
}

/// A page or an action that failed. [`guard::require_session`](super::guard::require_session) renders it
/// in the visitor's frame.
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

/// A form that was sent from a page.
pub(crate) struct PageForm<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for PageForm<T> {
    type Rejection = PageError;

    async fn from_request(request: Request, state: &S) -> Result<Self, PageError> {
        match Form::from_request(request, state).await {
            Ok(Form(form)) => Ok(Self(form)),
            Err(error) => {
                let invalid = || ApiError::invalid("invalid_form", error.body_text());
                Err(ApiError::of_body(&error).unwrap_or_else(invalid).into())
            }
        }
    }
}

/// Renders a template. Templates are checked at compile time, so only formatting a value could fail, and
/// none of the values here does.
pub(super) fn render(template: &impl Template) -> String {
    template.render().unwrap_or_else(|error| {
        tracing::error!(%error, "cannot render a page");
        String::new()
    })
}

/// Renders content into the frame of a visitor.
pub(super) fn framed(
    status: StatusCode,
    caller: &Caller,
    path: &str,
    page: &Content,
    notice: Option<&str>,
) -> Response {
    let Content { title, html: content } = page;
    let visible = |group: &&'static [Link]| -> Vec<_> {
        group.iter().filter(|link| caller.role.includes(link.role)).collect()
    };
    let groups = LINKS.iter().map(visible).filter(|group| !group.is_empty()).collect();
    let version = assets::version();
    html(status, render(&Frame { title, content, path, groups, caller, notice, version }))
}

/// An error page; in the frame of `caller`, if there is one.
pub(crate) fn error(caller: Option<&Caller>, error: &ApiError) -> Response {
    let status = error.status();
    let title = status.canonical_reason().unwrap_or("Error");
    let page = Content::new(title, &ErrorView { status, message: error.message() });
    let mut response = match caller {
        Some(caller) => framed(status, caller, "", &page, None),
        None => plain(status, &page),
    };
    if let Some(wait) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, wait);
    }
    response
}

/// A page without navigation, for visitors who are not logged in.
pub(super) fn plain(status: StatusCode, Content { title, html: content }: &Content) -> Response {
    html(status, render(&PlainFrame { title, content, version: assets::version() }))
}

fn html(status: StatusCode, text: String) -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        // Forms of this site need the header; other sites do not get it.
        (REFERRER_POLICY, "same-origin"),
        (VARY, "Accept"),
    ];
    (status, headers, text).into_response()
}
