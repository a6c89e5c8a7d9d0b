//! Webhooks in the API: what is known of a batch's, and `/v1/webhook`, which is that of a tenant's batches that have none of
//! their own.

use axum::Json;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tritmill_client::{
    Fields,
    http::{AddressPolicy, check_target},
};
use tritmill_queue::Timestamp;
use utoipa::ToSchema;

use super::schemas::NewWebhook;
use crate::{
    ApiError, App, Call, Caller, JsonBody, JsonResult,
    notices::signature,
    operator::audit,
    store::{
        events::NoticeKind,
        notices::Delivery,
        webhooks::{Webhook, WebhookSecret},
    },
};

/// Most bytes of a URL.
const URL_BYTES_MAX: usize = 2048;

/// Of what a webhook is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WebhookOf {
    /// Of a batch; it is the field `webhook` of a request.
    Batch,
    /// Of what its tenant has; it is the request itself.
    Tenant,
}

impl WebhookOf {
    fn field(self, name: &str) -> String {
        match self {
            Self::Batch => format!("webhook.{name}"),
            Self::Tenant => name.to_owned(),
        }
    }

    fn events(self) -> impl Iterator<Item = NoticeKind> {
        NoticeKind::ALL.into_iter().filter(move |kind| self == Self::Tenant || kind.is_of_batch())
    }
}

/// Validates a webhook; generates a secret if none is given.
pub(super) fn parse_webhook(
    value: Value,
    allowed: AddressPolicy,
    of: WebhookOf,
) -> Result<Webhook, ApiError> {
    let invalid =
        |param: &str, problem: &str| ApiError::invalid_value(param, format!("{param} {problem}"));
    let Value::Object(map) = value else {
        return Err(invalid("webhook", "must be an object"));
    };
    let mut fields = Fields::new(map, of.field(""));
    let (url_field, secret_field) = (of.field("url"), of.field("secret"));
    let url = fields.text("url")?.ok_or_else(|| ApiError::missing_field(&url_field))?;
    if url.len() > URL_BYTES_MAX {
        return Err(invalid(&url_field, &format!("is longer than {URL_BYTES_MAX} bytes")));
    }
    check_target(&url, allowed)
        .map_err(|error| invalid(&url_field, &format!("cannot be called: {error}")))?;
    let secret = fields.text("secret")?.map_or_else(signature::generate, WebhookSecret);
    if signature::key(&secret).is_none() {
        return Err(invalid(&secret_field, "must be whsec_ and the base64 of 24 to 64 bytes"));
    }
    let events = fields.list("events")?.map(|names| parse_events(names, of)).transpose()?;
    fields.finish()?;
    Ok(Webhook { events: events.unwrap_or_default(), ..Webhook::new(url, secret) })
}

/// Parses the names of the events that a webhook is told of.
fn parse_events(names: Vec<Value>, of: WebhookOf) -> Result<Vec<NoticeKind>, ApiError> {
    let invalid = |param: String, problem: &str| {
        let known: Vec<&str> = of.events().map(NoticeKind::as_str).collect();
        let message = format!("{param} {problem} {}", known.join(", "));
        ApiError::invalid_value(param, message)
    };
    if names.is_empty() {
        return Err(invalid(of.field("events"), "must name one or more of"));
    }
    let mut events = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let found = of.events().find(|kind| name.as_str() == Some(kind.as_str()));
        let place = || of.field(&format!("events[{index}]"));
        let kind = found.ok_or_else(|| invalid(place(), "must be one of"))?;
        if !events.contains(&kind) {
            events.push(kind);
        }
    }
    Ok(events)
}

/// Returns the names of the events that a webhook is told of; `None` for all.
fn names(events: &[NoticeKind]) -> Option<Vec<&'static str>> {
    (!events.is_empty()).then(|| events.iter().map(|kind| kind.as_str()).collect())
}

/// The webhook of a batch, and how far the latest event is delivered to it.
#[derive(Serialize, ToSchema)]
#[schema(as = Webhook)]
pub(crate) struct WebhookView {
    url: String,
    /// The events that it is told of; null: all.
    events: Option<Vec<&'static str>>,
    /// `pending`; finally `delivered` or `failed`.
    status: &'static str,
    /// Number of calls.
    attempts: u32,
    /// Error of the last call.
    error: Option<String>,
    /// Time of the next call; null before an event and after the delivery.
    next_attempt_at: Option<i64>,
    /// Present only in the response that creates the batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
}

impl WebhookView {
    /// Returns a webhook, and the delivery of the latest event to it, if there was one.
    pub fn new(webhook: Webhook, told: Option<Delivery>) -> Self {
        let told = told.unwrap_or_default();
        let next_attempt_at = next_attempt(&told);
        let (status, Delivery { attempts, error, .. }) = (told.state(), told);
        let events = names(&webhook.events);
        Self { url: webhook.url, events, status, attempts, error, next_attempt_at, secret: None }
    }

    /// Returns it with the secret of a webhook, if there is one.
    pub fn with_secret(self, of: Option<Webhook>) -> Self {
        Self { secret: of.map(|webhook| webhook.secret.0), ..self }
    }
}

/// Returns the time of the next attempt. One that was never made is due at any time.
pub(super) fn next_attempt(delivery: &Delivery) -> Option<i64> {
    delivery.due_at.filter(|at| at.0 > 0).map(Timestamp::seconds)
}

/// The webhook of a tenant.
#[derive(Serialize, ToSchema)]
pub(crate) struct TenantWebhook {
    object: &'static str,
    /// Null if the tenant has none.
    url: Option<String>,
    /// The events that it is told of; null: all.
    events: Option<Vec<&'static str>>,
    /// `active`; `resting` while it is left alone, because calls failed again and again; `gone` if it answered 410 and gets no
    /// more. Null if the tenant has none.
    status: Option<&'static str>,
    /// Failed calls in a row.
    failures: u32,
    /// Error of the last call, if that failed.
    error: Option<String>,
    /// Time until which it is left alone.
    rests_until: Option<i64>,
    /// Present only in the response that sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
}

impl TenantWebhook {
    fn none() -> Self {
        Self {
            object: "webhook",
            url: None,
            events: None,
            status: None,
            failures: 0,
            error: None,
            rests_until: None,
            secret: None,
        }
    }

    async fn load(app: &App, caller: &Caller) -> Result<Self, ApiError> {
        let Some(webhook) = app.store.tenant_webhook(&caller.tenant).await? else {
            return Ok(Self::none());
        };
        let failing = app.store.failing_receiver(&caller.tenant, &webhook.url).await?;
        let now = app.store.now().await?;
        let rests_until = failing.as_ref().and_then(|it| it.rests_until).filter(|at| *at > now);
        let is_gone = failing.as_ref().is_some_and(|it| it.gone_at.is_some());
        Ok(Self {
            events: names(&webhook.events),
            url: Some(webhook.url),
            status: Some(match (is_gone, rests_until) {
                (true, _) => "gone",
                (false, Some(_)) => "resting",
                (false, None) => "active",
            }),
            failures: failing.as_ref().map_or(0, |it| it.failures),
            error: failing.map(|it| it.error),
            rests_until: rests_until.map(Timestamp::seconds),
            ..Self::none()
        })
    }
}

/// Returns the webhook of the tenant's batches that have none of their own, without its secret.
#[utoipa::path(get, path = "/v1/webhook", tag = "batches",
    responses((status = 200, description = "The webhook", body = TenantWebhook)))]
pub(crate) async fn show(Call { app, caller }: Call) -> JsonResult<TenantWebhook> {
    Ok(Json(TenantWebhook::load(&app, &caller).await?))
}

/// Sets the webhook of the tenant's budgets, and of its batches that have none of their own, from now on. One that was left
/// alone or gone is called again.
#[utoipa::path(post, path = "/v1/webhook", tag = "batches", request_body = NewWebhook,
    responses((status = 200, description = "The webhook with its secret", body = TenantWebhook)))]
pub(crate) async fn set(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<TenantWebhook> {
    let webhook =
        parse_webhook(Value::Object(body), app.limits.webhook_addresses, WebhookOf::Tenant)?;
    // Without the URL, which may have a password.
    audit::record(&app, &caller, "webhook.set", &caller.tenant.0, json!({})).await?;
    app.store.set_tenant_webhook(&caller.tenant, Some(&webhook)).await?;
    let set = TenantWebhook::load(&app, &caller).await?;
    Ok(Json(TenantWebhook { secret: Some(webhook.secret.0), ..set }))
}

/// Removes the webhook of the tenant. Batches that have it keep it.
#[utoipa::path(delete, path = "/v1/webhook", tag = "batches",
    responses((status = 200, description = "It is removed", body = TenantWebhook)))]
pub(crate) async fn remove(Call { app, caller }: Call) -> JsonResult<TenantWebhook> {
    if app.store.tenant_webhook(&caller.tenant).await?.is_none() {
        return Err(ApiError::not_found("webhook", &caller.tenant.0));
    }
    audit::record(&app, &caller, "webhook.delete", &caller.tenant.0, json!({})).await?;
    app.store.set_tenant_webhook(&caller.tenant, None).await?;
    Ok(Json(TenantWebhook::none()))
}
