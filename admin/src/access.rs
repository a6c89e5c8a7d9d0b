//! Authentication of API requests by key.

use std::net::IpAddr;

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{Extensions, HeaderMap, HeaderName, header, request::Parts},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use tritmill_queue::Tenant;
use uuid::Uuid;

use crate::{
    ApiError, App, Exchange, Peer, Secret,
    store::{ApiKey, KeyHash, KeyRole},
};

/// The header in which Anthropic's clients send the key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

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
    /// Address that the request came from.
    pub address: Option<IpAddr>,
}

impl Caller {
    /// Whether the caller may act on all tenants.
    pub fn may_operate(&self) -> bool {
        self.role.includes(KeyRole::Operate)
    }

    /// Whether the caller may submit work for its tenant.
    pub fn may_submit(&self) -> bool {
        self.role.includes(KeyRole::Submit)
    }
}

impl From<ApiKey> for Caller {
    fn from(key: ApiKey) -> Self {
        let ApiKey { id: key, name, tenant, role, .. } = key;
        Self { key, name, tenant, role, address: None }
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
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (secret, key) = key(&app, request.headers(), request.extensions()).await?;
    let (id, tenant) = (key.id, key.tenant.clone());
    let mut response = match admit(&app, secret, key, role, &request) {
        Ok(caller) => pass_on(caller, request, next).await,
        Err(error) => error.into_response(),
    };
    app.metrics.refusals.count_response(&response, &tenant);
    app.rate_limiter.describe(id, response.headers_mut());
    Ok(response)
}

async fn pass_on(caller: Caller, mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// Returns the caller with this key, if the key has the role and is within its limits.
fn admit(
    app: &App,
    secret: KeyHash,
    key: ApiKey,
    role: KeyRole,
    request: &Request,
) -> Result<Caller, ApiError> {
    let exchange = request.extensions().get::<Exchange>().ok_or_else(ApiError::unauthorized)?;
    app.rate_limiter.admit(secret, key.id, exchange)?;
    app.key_uses.note(app, key.id);
    match key.role.includes(role) {
        true => {
            let address = request.extensions().get().map(|peer: &Peer| peer.ip);
            Ok(Caller { address, ..key.into() })
        }
        false => Err(ApiError::forbidden(role)),
    }
}

/// Returns the key of a request and the hash of its secret, if it is valid.
async fn key(
    app: &App,
    headers: &HeaderMap,
    extensions: &Extensions,
) -> Result<(KeyHash, ApiKey), ApiError> {
    let peer = *extensions.get::<Peer>().ok_or_else(ApiError::unauthorized)?;
    let header = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = header(header::AUTHORIZATION)
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    let sent = bearer.map(|(_, secret)| secret).or_else(|| header(API_KEY));
    // A malformed secret is rejected without a query to the store.
    let Some(secret) = sent.and_then(|secret| Secret::parse(secret.trim())) else {
        app.rate_limiter.admit_stranger(peer)?;
        return Err(ApiError::unauthorized());
    };
    let secret = secret.hash();
    app.rate_limiter.admit_secret(&secret, peer)?;
    let read = async || Ok(app.store.key(&secret).await?);
    match app.key_reads.key(&secret, read).await? {
        Some(key) => Ok((secret, key)),
        None => {
            app.rate_limiter.forget(&secret);
            Err(ApiError::unauthorized())
        }
    }
}
