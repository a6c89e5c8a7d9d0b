//! `/v1/webhook`: the webhook of a tenant's batches that have none of their own.

use axum::Json;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{batches::parse_webhook, schemas::NewWebhook};
use crate::{ApiError, Call, JsonBody, JsonResult, operator::audit};

/// The webhook of a tenant.
#[derive(Serialize, ToSchema)]
pub(crate) struct TenantWebhook {
    object: &'static str,
    /// Null if the tenant has none.
    url: Option<String>,
    /// Present only in the response that sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
}

/// Returns the webhook of the tenant's batches that have none of their own, without its secret.
#[utoipa::path(get, path = "/v1/webhook", tag = "batches",
    responses((status = 200, description = "The webhook", body = TenantWebhook)))]
pub(crate) async fn show(Call { app, caller }: Call) -> JsonResult<TenantWebhook> {
    let webhook = app.store.tenant_webhook(&caller.tenant).await?;
    let url = webhook.map(|webhook| webhook.url);
    Ok(Json(TenantWebhook { object: "webhook", url, secret: None }))
}

/// Sets the webhook of the tenant's batches that have none of their own, from now on.
#[utoipa::path(post, path = "/v1/webhook", tag = "batches", request_body = NewWebhook,
    responses((status = 200, description = "The webhook with its secret", body = TenantWebhook)))]
pub(crate) async fn set(
    Call { app, caller }: Call,
    JsonBody(body): JsonBody<Map<String, Value>>,
) -> JsonResult<TenantWebhook> {
    let webhook = parse_webhook(Value::Object(body), app.limits.webhook_addresses, "")?;
    // Without the URL, which may have a password.
    audit::record(&app, &caller, "webhook.set", &caller.tenant.0, json!({})).await?;
    app.store.set_tenant_webhook(&caller.tenant, Some(&webhook)).await?;
    let (url, secret) = (Some(webhook.url), Some(webhook.secret.0));
    Ok(Json(TenantWebhook { object: "webhook", url, secret }))
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
    Ok(Json(TenantWebhook { object: "webhook", url: None, secret: None }))
}
