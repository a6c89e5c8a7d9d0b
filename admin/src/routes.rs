//! [`ROUTES`]: every route with its required access.

use axum::{
    extract::DefaultBodyLimit,
    http::Method,
    routing::{MethodRouter, delete, get, post},
};

use crate::{
    Access, App,
    access::is_health_check,
    anthropic::{self, batches as messages},
    costs,
    dashboard::{self as pages, session},
    health,
    openai::{
        batches, completions, files, models, notices, responses, schedules, tokenize, webhook,
    },
    openapi,
    operator::{
        audit, batches as all_batches, dead_letters, events, history, job, jobs, keys, prices,
        queues, tenants, workers,
    },
    sign_on,
    store::KeyRole::{Manage, Metrics, Operate, Read, Submit},
};

/// A route.
pub struct Route {
    /// HTTP method.
    pub method: Method,
    /// Path, in axum's syntax.
    pub path: &'static str,
    /// Access that the route requires.
    pub access: Access,
    pub(crate) handler: fn() -> MethodRouter<App>,
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
const MANAGE: Access = Access::Key(Manage);
const METRICS: Access = Access::Key(Metrics);
const OPERATE: Access = Access::Key(Operate);
const READ_PAGE: Access = Access::Page(Read);
const SUBMIT_PAGE: Access = Access::Page(Submit);
const MANAGE_PAGE: Access = Access::Page(Manage);
const OPERATE_PAGE: Access = Access::Page(Operate);

/// Bounds the form that strangers may send.
fn login_form() -> DefaultBodyLimit {
    DefaultBodyLimit::max(pages::login::FORM_BYTES_MAX)
}

/// Every route of the service.
#[rustfmt::skip]
pub const ROUTES: &[Route] = &[
    route(Method::GET,    "/healthz",                   Access::Public, || get(health::alive)),
    route(Method::GET,    "/readyz",                    Access::Public, || get(health::ready)),
    route(Method::GET,    "/metrics",                   METRICS, || get(health::metrics)),
    route(Method::GET,    "/openapi.json",              Access::Public, || get(openapi::document)),
    route(Method::GET,    "/v1/models",                 READ,    || get(models::list)),
    route(Method::GET,    "/v1/models/{*model}",        READ,    || get(models::one)),
    route(Method::POST,   "/v1/chat/completions",       SUBMIT,  || post(completions::chat)),
    route(Method::POST,   "/v1/completions",            SUBMIT,  || post(completions::text)),
    route(Method::POST,   "/v1/embeddings",             SUBMIT,  || post(completions::embeddings)),
    route(Method::POST,   "/tokenize",                  SUBMIT,  || post(tokenize::tokenize)),
    route(Method::POST,   "/detokenize",                SUBMIT,  || post(tokenize::detokenize)),
    route(Method::POST,   "/v1/responses",              SUBMIT,  || post(responses::create)),
    route(Method::POST,   "/v1/responses/input_tokens", SUBMIT,  || post(responses::input_tokens)),
    route(Method::GET,    "/v1/responses/{id}",         READ,    || get(responses::one)),
    route(Method::DELETE, "/v1/responses/{id}",         SUBMIT,  || delete(responses::remove)),
    route(Method::POST,   "/v1/responses/{id}/cancel",  SUBMIT,  || post(responses::cancel)),
    route(Method::GET,    "/v1/responses/{id}/input_items", READ, || get(responses::input_items)),
    route(Method::POST,   "/v1/messages",               SUBMIT,  || post(anthropic::create)),
    route(Method::POST,   "/v1/messages/count_tokens",  SUBMIT,  || post(anthropic::count_tokens)),
    route(Method::POST,   "/v1/messages/batches",       SUBMIT,  || post(messages::create)),
    route(Method::GET,    "/v1/messages/batches",       READ,    || get(messages::list)),
    route(Method::GET,    "/v1/messages/batches/{id}",  READ,    || get(messages::one)),
    route(Method::DELETE, "/v1/messages/batches/{id}",  SUBMIT,  || delete(messages::remove)),
    route(Method::POST,   "/v1/messages/batches/{id}/cancel", SUBMIT, || post(messages::cancel)),
    route(Method::GET,    "/v1/messages/batches/{id}/results", READ, || get(messages::results)),
    route(Method::GET,    "/v1/files",                  READ,    || get(files::list)),
    route(Method::POST,   "/v1/files",                  SUBMIT,  || post(files::upload)),
    route(Method::GET,    "/v1/files/{id}",             READ,    || get(files::one)),
    route(Method::DELETE, "/v1/files/{id}",             SUBMIT,  || delete(files::remove)),
    route(Method::GET,    "/v1/files/{id}/content",     READ,    || get(files::content)),
    route(Method::GET,    "/v1/batches",                READ,    || get(batches::list)),
    route(Method::POST,   "/v1/batches",                SUBMIT,  || post(batches::create)),
    route(Method::GET,    "/v1/batches/{id}",           READ,    || get(batches::one)),
    route(Method::POST,   "/v1/batches/{id}/cancel",    SUBMIT,  || post(batches::cancel)),
    route(Method::POST,   "/v1/batches/{id}/pause",     SUBMIT,  || post(batches::pause)),
    route(Method::POST,   "/v1/batches/{id}/resume",    SUBMIT,  || post(batches::resume)),
    route(Method::POST,   "/v1/batches/{id}/retry",     SUBMIT,  || post(batches::retry)),
    route(Method::POST,   "/v1/batches/{id}/lines",     SUBMIT,  || post(batches::add_lines)),
    route(Method::POST,   "/v1/batches/{id}/seal",      SUBMIT,  || post(batches::seal)),
    route(Method::DELETE, "/v1/batches/{id}",           SUBMIT,  || delete(batches::remove)),
    route(Method::POST,   "/v1/batches/{id}/archive",   SUBMIT,  || post(batches::archive)),
    route(Method::POST,   "/v1/batches/{id}/unarchive", SUBMIT,  || post(batches::unarchive)),
    route(Method::GET,    "/v1/batches/{id}/results",   READ,    || get(batches::results::read)),
    route(Method::POST,   "/v1/batches/estimate",       READ,    || post(batches::estimate::estimate)),
    route(Method::GET,    "/v1/webhook",                READ,    || get(webhook::show)),
    route(Method::POST,   "/v1/webhook",                MANAGE,  || post(webhook::set)),
    route(Method::DELETE, "/v1/webhook",                MANAGE,  || delete(webhook::remove)),
    route(Method::GET,    "/v1/notices",                READ,    || get(notices::list)),
    route(Method::POST,   "/v1/notices/{id}/redeliver", MANAGE,  || post(notices::redeliver)),
    route(Method::GET,    "/v1/schedules",              READ,    || get(schedules::list)),
    route(Method::POST,   "/v1/schedules",              SUBMIT,  || post(schedules::create)),
    route(Method::GET,    "/v1/schedules/{id}",         READ,    || get(schedules::one)),
    route(Method::DELETE, "/v1/schedules/{id}",         SUBMIT,  || delete(schedules::remove)),
    route(Method::POST,   "/v1/schedules/{id}/pause",   SUBMIT,  || post(schedules::pause)),
    route(Method::POST,   "/v1/schedules/{id}/resume",  SUBMIT,  || post(schedules::resume)),
    route(Method::GET,    "/v1/costs",                  READ,    || get(costs::list)),
    route(Method::GET,    "/v1/prices",                 READ,    || get(prices::list)),
    route(Method::GET,    "/v1/budgets",                READ,    || get(prices::budgets)),
    route(Method::POST,   "/admin/v1/prices",           OPERATE, || post(prices::set)),
    route(Method::DELETE, "/admin/v1/prices",           OPERATE, || delete(prices::remove)),
    route(Method::POST,   "/admin/v1/budgets",          OPERATE, || post(prices::set_budget)),
    route(Method::GET,    "/admin/v1/batches",          OPERATE, || get(all_batches::list)),
    route(Method::POST,   "/admin/v1/batches/{id}/cancel", OPERATE, || post(all_batches::cancel)),
    route(Method::POST,   "/admin/v1/batches/{id}/pause", OPERATE, || post(all_batches::pause)),
    route(Method::POST,   "/admin/v1/batches/{id}/resume", OPERATE, || post(all_batches::resume)),
    route(Method::POST,   "/admin/v1/batches/{id}/retry", OPERATE, || post(all_batches::retry)),
    route(Method::GET,    "/admin/v1/jobs",             READ,    || get(jobs::list)),
    route(Method::GET,    "/admin/v1/jobs/count",       READ,    || get(jobs::count)),
    route(Method::GET,    "/admin/v1/jobs/{id}",        READ,    || get(job::one)),
    route(Method::POST,   "/admin/v1/jobs/{id}/run-now", OPERATE, || post(job::run_now)),
    route(Method::POST,   "/admin/v1/jobs/{id}/priority", OPERATE, || post(job::priority)),
    route(Method::POST,   "/admin/v1/jobs/cancel",      OPERATE, || post(jobs::cancel)),
    route(Method::GET,    "/admin/v1/dead-letters",     OPERATE, || get(dead_letters::list)),
    route(Method::POST,   "/admin/v1/dead-letters/replay", OPERATE, || post(dead_letters::replay)),
    route(Method::POST,   "/admin/v1/dead-letters/purge",  OPERATE, || post(dead_letters::purge)),
    route(Method::GET,    "/admin/v1/queues",           OPERATE, || get(queues::list)),
    route(Method::POST,   "/admin/v1/queues/pause",     OPERATE, || post(queues::pause)),
    route(Method::POST,   "/admin/v1/queues/resume",    OPERATE, || post(queues::resume)),
    route(Method::POST,   "/admin/v1/queues/limit",     OPERATE, || post(queues::limit)),
    route(Method::POST,   "/admin/v1/queues/max-wait",  OPERATE, || post(queues::max_wait)),
    route(Method::POST,   "/admin/v1/queues/allow-class", OPERATE, || post(queues::allow_class)),
    route(Method::POST,   "/admin/v1/queues/withdraw-class", OPERATE, || post(queues::withdraw_class)),
    route(Method::GET,    "/admin/v1/history",          OPERATE, || get(history::list)),
    route(Method::GET,    "/admin/v1/integrity",        OPERATE, || get(history::integrity)),
    route(Method::GET,    "/admin/v1/workers",          OPERATE, || get(workers::list)),
    route(Method::POST,   "/admin/v1/workers/drain",    OPERATE, || post(workers::drain)),
    route(Method::GET,    "/admin/v1/keys",             MANAGE,  || get(keys::list)),
    route(Method::POST,   "/admin/v1/keys",             MANAGE,  || post(keys::create)),
    route(Method::DELETE, "/admin/v1/keys/{id}",        MANAGE,  || delete(keys::revoke)),
    route(Method::GET,    "/admin/v1/tenants/limits",   OPERATE, || get(tenants::list)),
    route(Method::POST,   "/admin/v1/tenants/limits",   OPERATE, || post(tenants::limit)),
    route(Method::POST,   "/admin/v1/tenants/erase",    OPERATE, || post(keys::erase)),
    route(Method::GET,    "/admin/v1/events",           OPERATE, || get(events::changes)),
    route(Method::GET,    "/v1/jobs/{id}/events",       READ,    || get(events::of_job)),
    route(Method::GET,    "/admin/v1/audit",            OPERATE, || get(audit::list)),

    route(Method::GET,    "/",                          Access::Public, || get(pages::login::root)),
    route(Method::GET,    "/dashboard/login",           Access::Public, || get(pages::login::show)),
    route(Method::POST,   "/dashboard/login",           Access::Public, || post(pages::login::log_in).layer(login_form())),
    route(Method::GET,    "/dashboard/login/sign-on",   Access::Public, || get(pages::sign_on::begin)),
    route(Method::GET,    sign_on::CALLBACK,            Access::Public, || get(pages::sign_on::finish)),
    route(Method::GET,    "/dashboard/assets/{version}/{name}", Access::Public, || get(pages::assets::asset)),
    route(Method::POST,   "/dashboard/logout",          READ_PAGE, || post(pages::login::log_out)),
    route(Method::GET,    "/dashboard",                 READ_PAGE, || get(pages::page::home)),
    route(Method::GET,    "/dashboard/overview",        OPERATE_PAGE, || get(pages::overview::show)),
    route(Method::GET,    "/dashboard/queues/{queue}",  OPERATE_PAGE, || get(pages::queues::one)),
    route(Method::POST,   "/dashboard/queues/{queue}",  OPERATE_PAGE, || post(pages::queues::update)),
    route(Method::GET,    "/dashboard/workers",         OPERATE_PAGE, || get(pages::workers::list)),
    route(Method::POST,   "/dashboard/workers",         OPERATE_PAGE, || post(pages::workers::drain)),
    route(Method::GET,    "/dashboard/workers/{owner}", OPERATE_PAGE, || get(pages::worker::one)),
    route(Method::GET,    "/dashboard/tenants",         OPERATE_PAGE, || get(pages::tenants::list)),
    route(Method::GET,    "/dashboard/tenants/{tenant}", OPERATE_PAGE, || get(pages::tenant::one)),
    route(Method::POST,   "/dashboard/tenants/{tenant}/erase", OPERATE_PAGE, || post(pages::tenant::erase)),
    route(Method::GET,    "/dashboard/jobs",            READ_PAGE, || get(pages::jobs::list)),
    route(Method::GET,    "/dashboard/jobs/matching/{action}", OPERATE_PAGE, || get(pages::bulk::confirm)),
    route(Method::POST,   "/dashboard/jobs/matching/{action}", OPERATE_PAGE, || post(pages::bulk::act)),
    route(Method::GET,    "/dashboard/jobs/{id}",       READ_PAGE, || get(pages::job::one)),
    route(Method::POST,   "/dashboard/jobs/{id}/cancel", SUBMIT_PAGE, || post(pages::job::cancel)),
    route(Method::GET,    "/dashboard/jobs/{id}/edit", SUBMIT_PAGE, || get(pages::rerun::edit)),
    route(Method::POST,   "/dashboard/jobs/{id}/rerun", SUBMIT_PAGE, || post(pages::rerun::rerun)),
    route(Method::POST,   "/dashboard/jobs/{id}/run-now", OPERATE_PAGE, || post(pages::job::run_now)),
    route(Method::POST,   "/dashboard/jobs/{id}/priority", OPERATE_PAGE, || post(pages::job::set_priority)),
    route(Method::POST,   "/dashboard/jobs/{id}/replay", OPERATE_PAGE, || post(pages::job::replay)),
    route(Method::GET,    "/dashboard/dead-letters",    OPERATE_PAGE, || get(pages::dead_letters::list)),
    route(Method::POST,   "/dashboard/dead-letters/replay", OPERATE_PAGE, || post(pages::dead_letters::replay)),
    route(Method::POST,   "/dashboard/dead-letters/purge", OPERATE_PAGE, || post(pages::dead_letters::purge)),
    route(Method::GET,    "/dashboard/integrity",       OPERATE_PAGE, || get(pages::integrity::show)),
    route(Method::GET,    "/dashboard/batches",         READ_PAGE, || get(pages::batches::list)),
    route(Method::POST,   "/dashboard/batches",         SUBMIT_PAGE, || post(pages::upload::upload)),
    route(Method::GET,    "/dashboard/batches/{id}",    READ_PAGE, || get(pages::batches::one)),
    route(Method::POST,   "/dashboard/batches/{id}/cancel", SUBMIT_PAGE, || post(pages::batches::cancel)),
    route(Method::POST,   "/dashboard/batches/{id}/pause", SUBMIT_PAGE, || post(pages::batches::pause)),
    route(Method::POST,   "/dashboard/batches/{id}/resume", SUBMIT_PAGE, || post(pages::batches::resume)),
    route(Method::POST,   "/dashboard/batches/{id}/retry", SUBMIT_PAGE, || post(pages::batches::retry)),
    route(Method::POST,   "/dashboard/batches/{id}/archive", SUBMIT_PAGE, || post(pages::batches::archive)),
    route(Method::POST,   "/dashboard/batches/{id}/unarchive", SUBMIT_PAGE, || post(pages::batches::unarchive)),
    route(Method::POST,   "/dashboard/batches/{id}/delete", SUBMIT_PAGE, || post(pages::batches::delete)),
    route(Method::POST,   "/dashboard/batches/{id}/seal", SUBMIT_PAGE, || post(pages::batches::seal)),
    route(Method::GET,    "/dashboard/batches/{id}/results", READ_PAGE, || get(pages::batches::results)),
    route(Method::GET,    "/dashboard/schedules",       READ_PAGE, || get(pages::schedules::list)),
    route(Method::POST,   "/dashboard/schedules/{id}/pause", SUBMIT_PAGE, || post(pages::schedules::pause)),
    route(Method::POST,   "/dashboard/schedules/{id}/resume", SUBMIT_PAGE, || post(pages::schedules::resume)),
    route(Method::POST,   "/dashboard/schedules/{id}/delete", SUBMIT_PAGE, || post(pages::schedules::delete)),
    route(Method::GET,    "/dashboard/notices",         READ_PAGE, || get(pages::notices::list)),
    route(Method::POST,   "/dashboard/notices/{id}/redeliver", MANAGE_PAGE, || post(pages::notices::redeliver)),
    route(Method::GET,    "/dashboard/playground",      SUBMIT_PAGE, || get(pages::playground::show)),
    route(Method::POST,   "/dashboard/playground",      SUBMIT_PAGE, || post(pages::playground::ask)),
    route(Method::GET,    "/dashboard/files",           READ_PAGE, || get(pages::files::list)),
    route(Method::GET,    "/dashboard/files/{id}",      READ_PAGE, || get(pages::files::download)),
    route(Method::POST,   "/dashboard/files/{id}/delete", SUBMIT_PAGE, || post(pages::files::delete)),
    route(Method::GET,    "/dashboard/costs",           READ_PAGE, || get(pages::costs::show)),
    route(Method::GET,    "/dashboard/costs/csv",       READ_PAGE, || get(pages::costs::csv)),
    route(Method::GET,    "/dashboard/audit",           OPERATE_PAGE, || get(pages::audit::list)),
    route(Method::GET,    "/dashboard/keys",            MANAGE_PAGE, || get(pages::keys::list)),
    route(Method::POST,   "/dashboard/keys",            MANAGE_PAGE, || post(pages::keys::create)),
    route(Method::POST,   "/dashboard/keys/{id}/revoke", MANAGE_PAGE, || post(pages::keys::revoke)),
];

impl Route {
    /// Whether the route is a health check, which is never limited.
    pub fn is_health_check(&self) -> bool {
        is_health_check(self.path)
    }

    /// Whether the route belongs to the dashboard, not to the API.
    pub fn is_page(&self) -> bool {
        self.path == "/" || self.path.starts_with(session::HOME)
    }
}
