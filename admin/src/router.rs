//! Every route, with what it asks of its caller.

use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, Method, header},
    middleware::{self, Next},
    response::Response,
    routing::{MethodRouter, delete, get, post},
};
use tritmill_queue::store::KeyRole::{Operate, Read, Submit};

use crate::{
    access::{self, Access},
    app::App,
    dashboard as pages,
    error::ApiError,
    health,
    openai::{batches, completions, files, models},
    openapi,
    operator::{dead_letters, events, history, jobs, keys, log, queues, story, workers},
};

/// A route.
pub struct Route {
    /// Its method.
    pub method: Method,
    /// Its path, as axum writes it.
    pub path: &'static str,
    /// Who may.
    pub access: Access,
    handler: fn() -> MethodRouter<App>,
}

const fn route(
    method: Method,
    path: &'static str,
    access: Access,
    handler: fn() -> MethodRouter<App>,
) -> Route {
    Route { method, path, access, handler }
}

const READ: Access = Access::Key(Read);
const SUBMIT: Access = Access::Key(Submit);
const OPERATE: Access = Access::Key(Operate);
const SEE: Access = Access::Page(Read);
const ASK: Access = Access::Page(Submit);
const RUN: Access = Access::Page(Operate);

/// All of them. What is not here is not there.
#[rustfmt::skip]
pub const ROUTES: &[Route] = &[
    route(Method::GET,    "/healthz",                   Access::Public, || get(health::alive)),
    route(Method::GET,    "/readyz",                    Access::Public, || get(health::ready)),
    route(Method::GET,    "/metrics",                   OPERATE, || get(health::metrics)),
    route(Method::GET,    "/openapi.json",              Access::Public, || get(openapi::document)),
    route(Method::GET,    "/v1/models",                 READ,    || get(models::list)),
    route(Method::GET,    "/v1/models/{*model}",        READ,    || get(models::one)),
    route(Method::POST,   "/v1/chat/completions",       SUBMIT,  || post(completions::chat)),
    route(Method::POST,   "/v1/completions",            SUBMIT,  || post(completions::text)),
    route(Method::GET,    "/v1/files",                  READ,    || get(files::list)),
    route(Method::POST,   "/v1/files",                  SUBMIT,  || post(files::upload)),
    route(Method::GET,    "/v1/files/{id}",             READ,    || get(files::one)),
    route(Method::DELETE, "/v1/files/{id}",             SUBMIT,  || delete(files::remove)),
    route(Method::GET,    "/v1/files/{id}/content",     READ,    || get(files::content)),
    route(Method::GET,    "/v1/batches",                READ,    || get(batches::list)),
    route(Method::POST,   "/v1/batches",                SUBMIT,  || post(batches::create)),
    route(Method::GET,    "/v1/batches/{id}",           READ,    || get(batches::one)),
    route(Method::POST,   "/v1/batches/{id}/cancel",    SUBMIT,  || post(batches::cancel)),
    route(Method::GET,    "/admin/v1/jobs",             READ,    || get(jobs::list)),
    route(Method::GET,    "/admin/v1/jobs/count",       READ,    || get(jobs::count)),
    route(Method::GET,    "/admin/v1/jobs/{id}",        READ,    || get(story::one)),
    route(Method::POST,   "/admin/v1/jobs/cancel",      OPERATE, || post(jobs::cancel)),
    route(Method::GET,    "/admin/v1/dead-letters",     OPERATE, || get(dead_letters::list)),
    route(Method::POST,   "/admin/v1/dead-letters/replay", OPERATE, || post(dead_letters::replay)),
    route(Method::POST,   "/admin/v1/dead-letters/purge",  OPERATE, || post(dead_letters::purge)),
    route(Method::GET,    "/admin/v1/queues",           OPERATE, || get(queues::list)),
    route(Method::POST,   "/admin/v1/queues/pause",     OPERATE, || post(queues::pause)),
    route(Method::POST,   "/admin/v1/queues/resume",    OPERATE, || post(queues::resume)),
    route(Method::POST,   "/admin/v1/queues/limit",     OPERATE, || post(queues::limit)),
    route(Method::POST,   "/admin/v1/queues/allow-class", OPERATE, || post(queues::allow_class)),
    route(Method::POST,   "/admin/v1/queues/withdraw-class", OPERATE, || post(queues::withdraw_class)),
    route(Method::GET,    "/admin/v1/history",          OPERATE, || get(history::list)),
    route(Method::GET,    "/admin/v1/integrity",        OPERATE, || get(history::integrity)),
    route(Method::GET,    "/admin/v1/workers",          OPERATE, || get(workers::list)),
    route(Method::POST,   "/admin/v1/workers/drain",    OPERATE, || post(workers::drain)),
    route(Method::GET,    "/admin/v1/keys",             OPERATE, || get(keys::list)),
    route(Method::POST,   "/admin/v1/keys",             OPERATE, || post(keys::create)),
    route(Method::DELETE, "/admin/v1/keys/{id}",        OPERATE, || delete(keys::revoke)),
    route(Method::POST,   "/admin/v1/tenants/erase",    OPERATE, || post(keys::erase)),
    route(Method::GET,    "/admin/v1/events",           OPERATE, || get(events::changes)),
    route(Method::GET,    "/v1/jobs/{id}/events",       READ,    || get(events::of_job)),
    route(Method::GET,    "/admin/v1/audit",            OPERATE, || get(log::list)),

    route(Method::GET,    "/",                          Access::Public, || get(pages::login::door)),
    route(Method::GET,    "/dashboard/login",           Access::Public, || get(pages::login::ask)),
    route(Method::POST,   "/dashboard/login",           Access::Public, || post(pages::login::open)),
    route(Method::GET,    "/dashboard/assets/{version}/{name}", Access::Public, || get(pages::assets::asset)),
    route(Method::POST,   "/dashboard/logout",          SEE,     || post(pages::login::close)),
    route(Method::GET,    "/dashboard",                 SEE,     || get(pages::page::home)),
    route(Method::GET,    "/dashboard/overview",        RUN,     || get(pages::overview::show)),
    route(Method::GET,    "/dashboard/queues/{queue}",  RUN,     || get(pages::queues::one)),
    route(Method::POST,   "/dashboard/queues/{queue}",  RUN,     || post(pages::queues::set)),
    route(Method::GET,    "/dashboard/workers",         RUN,     || get(pages::workers::list)),
    route(Method::POST,   "/dashboard/workers",         RUN,     || post(pages::workers::drain)),
    route(Method::GET,    "/dashboard/jobs",            SEE,     || get(pages::jobs::list)),
    route(Method::GET,    "/dashboard/jobs/{id}",       SEE,     || get(pages::job::one)),
    route(Method::POST,   "/dashboard/jobs/{id}/cancel", ASK,    || post(pages::job::cancel)),
    route(Method::POST,   "/dashboard/jobs/{id}/replay", RUN,    || post(pages::job::replay)),
    route(Method::GET,    "/dashboard/dead-letters",    RUN,     || get(pages::dead_letters::list)),
    route(Method::POST,   "/dashboard/dead-letters/replay", RUN, || post(pages::dead_letters::replay)),
    route(Method::POST,   "/dashboard/dead-letters/purge", RUN,  || post(pages::dead_letters::purge)),
    route(Method::GET,    "/dashboard/integrity",       RUN,     || get(pages::integrity::show)),
    route(Method::GET,    "/dashboard/batches",         SEE,     || get(pages::batches::list)),
    route(Method::POST,   "/dashboard/batches",         ASK,     || post(pages::upload::upload)),
    route(Method::GET,    "/dashboard/batches/{id}",    SEE,     || get(pages::batches::one)),
    route(Method::POST,   "/dashboard/batches/{id}/cancel", ASK, || post(pages::batches::cancel)),
    route(Method::GET,    "/dashboard/files/{id}",      SEE,     || get(pages::batches::download)),
    route(Method::GET,    "/dashboard/audit",           RUN,     || get(pages::audit::list)),
    route(Method::GET,    "/dashboard/keys",            RUN,     || get(pages::keys::list)),
    route(Method::POST,   "/dashboard/keys",            RUN,     || post(pages::keys::create)),
    route(Method::POST,   "/dashboard/keys/{id}/revoke", RUN,    || post(pages::keys::revoke)),
];

impl Route {
    /// Whether it is of the dashboard, for people, and not of the API.
    pub fn is_of_pages(&self) -> bool {
        self.path == "/" || self.path.starts_with(pages::session::HOME)
    }
}

/// The service.
pub fn router(app: App) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let mut handler = (route.handler)();
        handler = match route.access {
            Access::Public => handler,
            Access::Key(role) => {
                let state = (app.clone(), role);
                handler.route_layer(middleware::from_fn_with_state(state, access::require))
            }
            Access::Page(role) => {
                let state = (app.clone(), role);
                handler.route_layer(middleware::from_fn_with_state(state, pages::session::require))
            }
        };
        router = router.route(route.path, handler);
    }
    router
        .fallback(async || ApiError::no_route())
        .method_not_allowed_fallback(async || ApiError::no_route())
        .layer(middleware::from_fn(secure))
        .layer(middleware::from_fn_with_state(app.clone(), health::count))
        .with_state(app)
}

/// What browsers are told about every answer: it is data, nobody's but the caller's.
async fn secure(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    let said = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    ];
    for (name, value) in said {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}
