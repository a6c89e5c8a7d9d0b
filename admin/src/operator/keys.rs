//! API keys and tenants.

use std::time::Duration;

use axum::{Json, extract::Path};
use serde::{Deserialize, Serialize};
use serde_json::json;
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
    /// Time from which it is not valid any more.
    expires_at_ms: Option<i64>,
    /// Time of its last use, which may be up to an hour later; null if it was never used.
    last_used_at_ms: Option<i64>,
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
            expires_at_ms: key.expires_at.map(|at| at.0),
            last_used_at_ms: key.last_used_at.map(|at| at.0),
        }
    }
}

/// API keys.
#[derive(Serialize, ToSchema)]
pub(crate) struct KeyList {
    /// Keys, the oldest first.
    data: Vec<KeyView>,
}

/// Returns the keys that a caller may see: those of its tenant; for operators, of all tenants.
pub(crate) async fn visible(app: &App, caller: &Caller) -> Result<Vec<ApiKey>, ApiError> {
    Ok(match caller.may_operate() {
        true => app.store.keys().await?,
        false => app.store.keys_of(&caller.tenant).await?,
    })
}

/// Lists the API keys of the caller's tenant; for operators, of all tenants.
#[utoipa::path(get, path = "/admin/v1/keys", tag = "keys",
    responses((status = 200, description = "The oldest first", body = KeyList)))]
pub(crate) async fn list(Call { app, caller }: Call) -> JsonResult<KeyList> {
    let keys = visible(&app, &caller).await?;
    Ok(Json(KeyList { data: keys.into_iter().map(KeyView::from).collect() }))
}

/// An API key to create.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyRequest {
    /// Tenant that the key belongs to.
    #[schema(min_length = 1)]
    tenant: String,
    /// `read`, `submit`, `manage` or `operate`, of which each includes the ones before it, or `metrics`. Only operators
    /// create keys of other tenants, and those with `operate` and `metrics`.
    role: String,
    /// Name of the key, for people.
    #[serde(default)]
    name: String,
    /// Seconds until it expires; null: never.
    #[schema(minimum = 1, maximum = 3153600000u64)]
    expires_after_s: Option<u64>,
}

/// An API key to create, for the caller.
pub(crate) struct KeyWish<'a> {
    pub tenant: String,
    pub role: &'a str,
    pub name: &'a str,
    pub expires_after_s: Option<u64>,
}

/// Longest lifetime of a key that expires: a hundred years.
const LIFETIME_MAX_S: u64 = 100 * 365 * 86_400;

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
    JsonBody(KeyRequest { tenant, role, name, expires_after_s }): JsonBody<KeyRequest>,
) -> JsonResult<NewKey> {
    let wish = KeyWish { tenant, role: &role, name: &name, expires_after_s };
    let (key, secret) = create_key(&app, &caller, wish).await?;
    Ok(Json(NewKey { id: key.id.to_string(), secret: secret.reveal().to_owned() }))
}

/// Creates an API key and records it in the audit log.
pub(crate) async fn create_key(
    app: &App,
    caller: &Caller,
    wish: KeyWish<'_>,
) -> Result<(ApiKey, Secret), ApiError> {
    let KeyWish { tenant, role, name, expires_after_s } = wish;
    let tenant = params::tenant(&tenant)?;
    let role: KeyRole = role.parse().map_err(|_| {
        let message = "role must be 'metrics', 'read', 'submit', 'manage' or 'operate'";
        ApiError::invalid_value("role", message)
    })?;
    if !caller.role.grants(role) || !(caller.may_operate() || tenant == caller.tenant) {
        return Err(ApiError::forbidden(KeyRole::Operate));
    }
    if name.contains('\0') {
        let message = "name must not contain NUL characters";
        return Err(ApiError::invalid_value("name", message));
    }
    if expires_after_s.is_some_and(|lifetime| !(1..=LIFETIME_MAX_S).contains(&lifetime)) {
        let message = format!("expires_after_s must be between 1 and {LIFETIME_MAX_S}");
        return Err(ApiError::invalid_value("expires_after_s", message));
    }
    let (mut key, secret) = new_key(tenant, role, name);
    tenant_limits::check_keys(app, &key.tenant).await?;
    if let Some(lifetime) = expires_after_s.map(Duration::from_secs) {
        key.expires_at = Some(app.client.now().await?.after(lifetime));
    }
    let detail = json!({
        "tenant": key.tenant, "role": role.as_str(), "name": name,
        "expires_after_s": expires_after_s,
    });
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
    if !caller.may_operate() {
        let own = app.store.keys_of(&caller.tenant).await?.into_iter().find(|own| own.id == key);
        let own = own.ok_or_else(unknown)?;
        if !caller.role.grants(own.role) {
            return Err(ApiError::forbidden(KeyRole::Operate));
        }
    }
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
    let erased = erase_tenant(&app, &caller, &tenant, &confirm).await?;
    let Erased { keys, batches, files, jobs, done } = erased;
    Ok(Json(EraseResult { keys, batches, files, jobs, done }))
}

/// Deletes everything of a tenant, as far as one call does, and records it in the audit log.
pub(crate) async fn erase_tenant(
    app: &App,
    caller: &Caller,
    tenant: &str,
    confirm: &str,
) -> Result<Erased, ApiError> {
    if tenant != confirm {
        return Err(ApiError::invalid_value("confirm", "confirm must repeat the tenant"));
    }
    let tenant = params::tenant(tenant)?;
    if tenant == caller.tenant {
        return Err(ApiError::invalid_value("tenant", "tenant must not be the caller's own"));
    }
    audit::record(app, caller, "tenant.erase", &tenant.0, json!({})).await?;
    Ok(app.store.erase_tenant(&tenant).await?)
}
