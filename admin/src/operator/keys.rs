//! Keys and tenants.

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tritmill_queue::{
    Tenant,
    store::{ApiKey, KeyRole, maintenance::Erased},
};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{log, queues::Done, request};
use crate::{access::Caller, app::App, error::ApiError, json, openapi::Refused, secret::new_key};

/// A key, without its secret.
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

/// Keys.
#[derive(Serialize, ToSchema)]
pub(crate) struct KeyList {
    /// The oldest first.
    data: Vec<KeyView>,
}

/// Every key of every tenant.
#[utoipa::path(get, path = "/admin/v1/keys", tag = "keys",
    responses((status = 200, description = "The oldest first", body = KeyList),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<KeyList>, ApiError> {
    let keys = app.store().keys().await?;
    Ok(Json(KeyList { data: keys.into_iter().map(KeyView::from).collect() }))
}

/// A key to be made.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyRequest {
    /// Whose requests it makes.
    #[schema(min_length = 1)]
    tenant: String,
    /// `read`, `submit` or `operate`: each allows what the one before it does, and more.
    role: String,
    /// What people call it.
    #[serde(default)]
    name: String,
}

/// A key that was made.
#[derive(Serialize, ToSchema)]
pub(crate) struct NewKey {
    id: String,
    /// Shown this once.
    secret: String,
}

/// Makes a key.
#[utoipa::path(post, path = "/admin/v1/keys", tag = "keys", request_body = KeyRequest,
    responses((status = 200, description = "Its secret, which is shown this once", body = NewKey),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<NewKey>, ApiError> {
    let KeyRequest { tenant, role, name } = request::body(json::object(body).await?)?;
    if tenant.is_empty() {
        let message = "tenant must not be empty";
        return Err(ApiError::invalid("invalid_value", message).at("tenant"));
    }
    let role: KeyRole = role.parse().map_err(|_| {
        let message = "role must be 'read', 'submit' or 'operate'";
        ApiError::invalid("invalid_value", message).at("role")
    })?;
    let (key, secret) = new_key(Tenant(tenant.clone()), role, &name);
    // First: it also says whether these texts can be kept.
    app.store().add_key(&key, &secret.hash()).await?;
    let detail = json!({ "tenant": tenant, "role": role.as_str(), "name": name });
    log::note(&app, &caller, "key.create", &key.id.to_string(), detail).await?;
    Ok(Json(NewKey { id: key.id.to_string(), secret: secret.reveal().to_owned() }))
}

/// Revokes a key: it opens nothing from now on.
#[utoipa::path(delete, path = "/admin/v1/keys/{id}", tag = "keys", params(("id" = String, Path)),
    responses((status = 200, description = "It opens nothing any more", body = Done),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn revoke(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Done>, ApiError> {
    let unknown = || ApiError::not_found("key", &id);
    let key: Uuid = id.parse().map_err(|_| unknown())?;
    log::note(&app, &caller, "key.revoke", &key.to_string(), json!({})).await?;
    match app.store().revoke_key(key).await? {
        true => Ok(Done::YES),
        false => Err(unknown()),
    }
}

/// A tenant that is to leave nothing behind.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EraseRequest {
    tenant: String,
    /// The same once more.
    confirm: String,
}

/// What was deleted.
#[derive(Serialize, ToSchema)]
pub(crate) struct ErasedView {
    keys: u64,
    batches: u64,
    files: u64,
    jobs: u64,
    /// Whether nothing is left; else the same call goes on.
    done: bool,
}

/// Deletes all that a tenant has: keys, batches, files, quotas, jobs and their results.
#[utoipa::path(post, path = "/admin/v1/tenants/erase", tag = "keys", request_body = EraseRequest,
    responses((status = 200, description = "What was deleted", body = ErasedView),
        (status = "4XX", description = "Refused", body = Refused),
        (status = "5XX", description = "Try again", body = Refused),))]
pub(crate) async fn erase(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<ErasedView>, ApiError> {
    let EraseRequest { tenant, confirm } = request::body(json::object(body).await?)?;
    if tenant != confirm {
        let message = "confirm must be the tenant once more";
        return Err(ApiError::invalid("invalid_value", message).at("confirm"));
    }
    let tenant = request::tenant(&tenant)?;
    if tenant == caller.tenant {
        let message = "tenant must not be the caller's own";
        return Err(ApiError::invalid("invalid_value", message).at("tenant"));
    }
    log::note(&app, &caller, "tenant.erase", &tenant.0, json!({})).await?;
    let Erased { keys, batches, files, jobs, done } = app.store().erase_tenant(&tenant).await?;
    Ok(Json(ErasedView { keys, batches, files, jobs, done }))
}
