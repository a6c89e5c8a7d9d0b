//! Limits of tenants.

use axum::Json;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::{DONE, Done, audit, params};
use crate::{
    Call, JsonBody, JsonResult, QueryParams,
    store::tenants::{TenantAccount, TenantLimits},
};

/// The tenant to list the limits of.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TenantQuery {
    /// One tenant, also without limits of its own; by default all that have some.
    #[param(nullable = false)]
    tenant: Option<String>,
}

/// A limit and what is used of it.
#[derive(Serialize, ToSchema)]
pub(crate) struct LimitView {
    /// Null: the service's own limit, or none.
    limit: Option<u64>,
    used: u64,
}

/// A tenant with its limits.
#[derive(Serialize, ToSchema)]
pub(crate) struct TenantView {
    tenant: String,
    /// Bytes of all its files together.
    file_bytes: LimitView,
    /// Unfinished batches.
    open_batches: LimitView,
    /// API keys that are not revoked.
    keys: LimitView,
}

impl From<TenantAccount> for TenantView {
    fn from(TenantAccount { tenant, limits, used }: TenantAccount) -> Self {
        let small = |limit: Option<u32>, used| LimitView { limit: limit.map(u64::from), used };
        Self {
            tenant: tenant.0,
            file_bytes: LimitView { limit: limits.file_bytes, used: used.file_bytes },
            open_batches: small(limits.open_batches, used.open_batches),
            keys: small(limits.keys, used.keys),
        }
    }
}

/// Tenants.
#[derive(Serialize, ToSchema)]
pub(crate) struct TenantList {
    /// Tenants by name.
    data: Vec<TenantView>,
}

/// Lists the tenants for which limits are set, with what they use.
#[utoipa::path(get, path = "/admin/v1/tenants/limits", tag = "keys", params(TenantQuery),
    responses((status = 200, description = "By name", body = TenantList)))]
pub(crate) async fn list(
    Call { app, .. }: Call,
    QueryParams(TenantQuery { tenant }): QueryParams<TenantQuery>,
) -> JsonResult<TenantList> {
    let found = match tenant.as_deref().map(params::tenant).transpose()? {
        Some(tenant) => vec![app.store.tenant_account(&tenant).await?],
        None => app.store.limited_tenants().await?,
    };
    Ok(Json(TenantList { data: found.into_iter().map(TenantView::from).collect() }))
}

/// Limits of a tenant.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TenantLimitsRequest {
    #[schema(min_length = 1)]
    tenant: String,
    /// Bytes of all its files together; null removes the limit.
    file_bytes: Option<u64>,
    /// Unfinished batches; null restores the service's own limit.
    open_batches: Option<u32>,
    /// API keys that are not revoked; null removes the limit.
    keys: Option<u32>,
}

/// Sets all limits of a tenant. What it has above them stays.
#[utoipa::path(post, path = "/admin/v1/tenants/limits", tag = "keys",
    request_body = TenantLimitsRequest,
    responses((status = 200, description = "Its next requests are held to them", body = Done)))]
pub(crate) async fn limit(
    Call { app, caller }: Call,
    JsonBody(request): JsonBody<TenantLimitsRequest>,
) -> JsonResult<Done> {
    let TenantLimitsRequest { tenant, file_bytes, open_batches, keys } = request;
    let tenant = params::tenant(&tenant)?;
    let detail = json!({ "file_bytes": file_bytes, "open_batches": open_batches, "keys": keys });
    audit::record(&app, &caller, "tenant.limit", &tenant.0, detail).await?;
    let limits = TenantLimits { file_bytes, open_batches, keys };
    app.store.set_tenant_limits(&tenant, limits).await?;
    Ok(DONE)
}
