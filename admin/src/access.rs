//! Who calls, and whether it may.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::Response,
};
use tritmill_queue::{Tenant, store::KeyRole};
use uuid::Uuid;

use crate::{app::App, error::ApiError, secret::Secret};

/// What a route asks of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing.
    Public,
    /// A key with this role, or one that allows more.
    Key(KeyRole),
    /// A browser's session, of a key with this role, or of one that allows more.
    Page(KeyRole),
}

/// Who calls: whatever it asks for, it asks for as this tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Its key, for the log.
    pub key: Uuid,
    /// Whose request it is.
    pub tenant: Tenant,
    /// What its key allows.
    pub role: KeyRole,
}

/// Lets a request pass whose key has the role, with its [`Caller`] among the extensions.
pub(crate) async fn require(
    State((app, role)): State<(App, KeyRole)>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let caller = caller(&app, request.headers()).await?;
    if caller.role < role {
        return Err(ApiError::forbidden(role.as_str()));
    }
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

async fn caller(app: &App, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let sent = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let secret = sent
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        // What cannot be a secret is no question for the store.
        .and_then(|(_, secret)| Secret::parse(secret.trim()))
        .ok_or_else(ApiError::no_key)?;
    let key = app.store().key(&secret.hash()).await?.ok_or_else(ApiError::no_key)?;
    Ok(Caller { key: key.id, tenant: key.tenant, role: key.role })
}
