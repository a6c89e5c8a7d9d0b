//! API keys and tenants.

use axum::{
    Json,
    extract::{Path, State},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::Tenant;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{DONE, Done, audit, params};
use crate::{
    ApiError, App, Call, Caller, JsonBody, JsonResult, Secret, new_key,
    store::{ApiKey, KeyRole, tenants::Erased},
    tenant_limits,
};

/// An API key, without its secret.
#[derive(Serialize, ToSchema)]
pub(crate) struct KeyView {
    id: String,
    tenant: String,
    role: &'static str,
    name: String,
    created_at_ms: i64,
    revoked_at_ms: Option<i64>,
}

impl From<ApiKey> for KeyView {
    fn from(key: ApiKey) -> Self {
        Self {
            id: key.id.to_string(),
            tenant: key.tenant.0,
            role: key.role.as_str(),
            name: key.name,
            created_at_ms: key.created_at.0,
            revoked_at_ms: key.revoked_at.map(|at| at.0),
        }
    }
}

/// API keys.
#[derive(Serialize, ToSchema)]
pub(crate) struct KeyList {
    /// Keys, the oldest first.
    data: Vec<KeyView>,
}

/// Lists the API keys of all tenants.
#[utoipa::path(get, path = "/admin/v1/keys", tag = "keys",
    responses((status = 200, description = "The oldest first", body = KeyList)))]
pub(crate) async fn list(State(app): State<App>) -> JsonResult<KeyList> {
    let keys = app.store.keys().await?;
    Ok(Json(KeyList { data: keys.into_iter().map(KeyView::from).collect() }))
}

/// An API key to create.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyRequest {
    /// Tenant that the key belongs to.
    #[schema(min_length = 1)]
    tenant: String,
    /// `read`, `submit` or `operate`; each role includes the ones before it.
    role: String,
    /// Name of the key, for people.
    #[serde(default)]
    name: String,
}

/// A created API key.
#[derive(Serialize, ToSchema)]
pub(crate) struct NewKey {
    id: String,
    /// The secret. It is not shown again.
    secret: String,
}

/// Creates an API key.
#[utoipa::path(post, path = "/admin/v1/keys", tag = "keys", request_body = KeyRequest,
    responses((status = 200, description = "The key with its secret", body = NewKey)))]
pub(crate) async fn create(
    Call { app, caller }: Call,
    JsonBody(KeyRequest { tenant, role, name }): JsonBody<KeyRequest>,
) -> JsonResult<NewKey> {
    if tenant.is_empty() {
        return Err(ApiError::invalid_value("tenant", "tenant must not be empty"));
    }
    let (key, secret) = create_key(&app, &caller, tenant, &role, &name).await?;
    Ok(Json(NewKey { id: key.id.to_string(), secret: secret.reveal().to_owned() }))
}

/// Creates an API key and records it in the audit log.
pub(crate) async fn create_key(
    app: &App,
    caller: &Caller,
    tenant: String,
    role: &str,
    name: &str,
) -> Result<(ApiKey, Secret), ApiError> {
    let role: KeyRole = role.parse().map_err(|_| {
        ApiError::invalid_value("role", "role must be 'read', 'submit' or 'operate'")
    })?;
    for (field, text) in [("tenant", &*tenant), ("name", name)] {
        if text.contains('\0') {
            let message = format!("{field} must not contain NUL characters");
            return Err(ApiError::invalid_value(field, message));
        }
    }
    let (key, secret) = new_key(Tenant(tenant), role, name);
    tenant_limits::check_keys(app, &key.tenant).await?;
    let detail = json!({ "tenant": key.tenant, "role": role.as_str(), "name": name });
    audit::record(app, caller, "key.create", &key.id.to_string(), detail).await?;
    app.store.add_key(&key, &secret.hash()).await?;
    Ok((key, secret))
}

/// Revokes an API key, which is rejected from then on.
#[utoipa::path(delete, path = "/admin/v1/keys/{id}", tag = "keys", params(("id" = String, Path)),
    responses((status = 200, description = "The key is revoked", body = Done)))]
pub(crate) async fn revoke(Call { app, caller }: Call, Path(id): Path<String>) -> JsonResult<Done> {
    revoke_key(&app, &caller, &id).await?;
    Ok(DONE)
}

/// Revokes an API key and records it in the audit log.
pub(crate) async fn revoke_key(app: &App, caller: &Caller, id: &str) -> Result<(), ApiError> {
    let unknown = || ApiError::not_found("key", id);
    let key: Uuid = id.parse().map_err(|_| unknown())?;
    audit::record(app, caller, "key.revoke", &key.to_string(), json!({})).await?;
    if !app.store.revoke_key(key).await? {
        return Err(unknown());
    }
    Ok(())
}

/// A tenant to erase.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EraseRequest {
    tenant: String,
    /// The tenant again.
    confirm: String,
}

/// Numbers of deleted items.
#[derive(Serialize, ToSchema)]
pub(crate) struct EraseResult {
    keys: u64,
    batches: u64,
    files: u64,
    jobs: u64,
    /// True when nothing is left; otherwise repeat the call.
    done: bool,
}

/// Deletes everything of a tenant: keys, batches, files, quotas, jobs and their results.
#[utoipa::path(post, path = "/admin/v1/tenants/erase", tag = "keys", request_body = EraseRequest,
    responses((status = 200, description = "Numbers of deleted items", body = EraseResult)))]
pub(crate) async fn erase(
    Call { app, caller }: Call,
    JsonBody(EraseRequest { tenant, confirm }): JsonBody<EraseRequest>,
) -> JsonResult<EraseResult> {
    if tenant != confirm {
        return Err(ApiError::invalid_value("confirm", "confirm must repeat the tenant"));
    }
    let tenant = params::tenant(&tenant)?;
    if tenant == caller.tenant {
        return Err(ApiError::invalid_value("tenant", "tenant must not be the caller's own"));
    }
    audit::record(&app, &caller, "tenant.erase", &tenant.0, json!({})).await?;
    let Erased { keys, batches, files, jobs, done } = app.store.erase_tenant(&tenant).await?;
    Ok(Json(EraseResult { keys, batches, files, jobs, done }))
}
