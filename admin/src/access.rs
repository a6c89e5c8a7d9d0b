//! Authentication of API requests by key.

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{Extensions, HeaderMap, header, request::Parts},
    middleware::Next,
    response::Response,
};
use tritmill_queue::Tenant;
use uuid::Uuid;

use crate::{
    ApiError, App, Exchange, Peer, Secret,
    store::{ApiKey, KeyRole},
};

/// What a route requires of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing.
    Public,
    /// An API key with at least this role.
    Key(KeyRole),
    /// A dashboard session of a key with at least this role.
    Page(KeyRole),
}

/// Returns whether this is the path of a health check, which is public and never limited.
pub(crate) fn is_health_check(path: &str) -> bool {
    ["/healthz", "/readyz"].contains(&path)
}

/// The authenticated caller. Requests act on behalf of its tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Identifier of the API key.
    pub key: Uuid,
    /// Name of the API key.
    pub name: String,
    /// Tenant that the key belongs to.
    pub tenant: Tenant,
    /// Role of the key.
    pub role: KeyRole,
}

impl Caller {
    /// Whether the caller may act on all tenants.
    pub fn may_operate(&self) -> bool {
        self.role >= KeyRole::Operate
    }

    /// Whether the caller may submit work for its tenant.
    pub fn may_submit(&self) -> bool {
        self.role >= KeyRole::Submit
    }
}

impl From<ApiKey> for Caller {
    fn from(key: ApiKey) -> Self {
        Self { key: key.id, name: key.name, tenant: key.tenant, role: key.role }
    }
}

/// An authenticated request of the API.
pub(crate) struct Call {
    pub app: App,
    pub caller: Caller,
}

impl FromRequestParts<App> for Call {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let caller = parts.extensions.get().cloned().ok_or_else(ApiError::unauthorized)?;
        Ok(Self { app: app.clone(), caller })
    }
}

/// Passes a request on if its key has the role, with the [`Caller`] in its extensions.
pub(crate) async fn require_key(
    State((app, role)): State<(App, KeyRole)>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let caller = caller(&app, request.headers(), request.extensions()).await?;
    if caller.role < role {
        return Err(ApiError::forbidden(role));
    }
    let tenant = caller.tenant.clone();
    request.extensions_mut().insert(caller);
    let response = next.run(request).await;
    app.metrics.refusals.count_response(&response, &tenant);
    Ok(response)
}

/// Returns the caller of a request, if its key is valid and within its limits.
async fn caller(
    app: &App,
    headers: &HeaderMap,
    extensions: &Extensions,
) -> Result<Caller, ApiError> {
    let of_server = ApiError::unauthorized;
    let peer = *extensions.get::<Peer>().ok_or_else(of_server)?;
    let exchange = extensions.get::<Exchange>().ok_or_else(of_server)?;
    let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let secret = header
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        // A malformed secret is rejected without a query to the store.
        .and_then(|(_, secret)| Secret::parse(secret.trim()));
    let Some(secret) = secret else {
        app.rate_limiter.admit_stranger(peer)?;
        return Err(ApiError::unauthorized());
    };
    let secret = secret.hash();
    app.rate_limiter.admit_secret(&secret, peer)?;
    let read = async || Ok(app.store.key(&secret).await?);
    let Some(key) = app.key_reads.key(&secret, read).await? else {
        app.rate_limiter.forget(&secret);
        return Err(ApiError::unauthorized());
    };
    let admitted = app.rate_limiter.admit(secret, key.id, exchange);
    admitted.inspect_err(|error| app.metrics.refusals.count_error(error, &key.tenant))?;
    Ok(key.into())
}
