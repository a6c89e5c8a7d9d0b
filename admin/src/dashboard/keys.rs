//! API keys: made, shown once, revoked.

use askama::Template;
use axum::{
    Form,
    extract::{Path, rejection::FormRejection},
    http::StatusCode,
    response::Response,
};
use serde::Deserialize;
use tritmill_queue::{
    Tenant, Timestamp,
    store::{ApiKey, KeyRole},
};
use uuid::Uuid;

use super::{
    filters,
    page::{PageError, View, Visit},
};
use crate::{app::App, error::ApiError, secret::new_key};

/// Characters of a tenant's or a key's name.
const NAME_MAX: usize = 64;

#[derive(Template)]
#[template(path = "keys.html")]
struct List {
    now: Timestamp,
    keys: Vec<ApiKey>,
    /// Of the visitor's own key.
    own: Uuid,
    /// The secret of a key that was made just now.
    fresh: Option<(ApiKey, String)>,
}

impl View for List {
    fn title(&self) -> String {
        "API keys".to_owned()
    }
}

async fn look(app: &App, own: Uuid, fresh: Option<(ApiKey, String)>) -> Result<List, PageError> {
    let mut keys = app.store().keys().await?;
    // Those that open something first, the latest first.
    keys.sort_by_key(|key| (key.revoked_at.is_some(), std::cmp::Reverse(key.created_at)));
    Ok(List { now: app.client().now().await?, keys, own, fresh })
}

/// Every key.
pub(crate) async fn list(visit: Visit) -> Result<Response, PageError> {
    visit.show(|app, caller| async move { look(&app, caller.key, None).await }).await
}

/// A key that is wished for.
#[derive(Deserialize)]
pub(crate) struct Wish {
    tenant: String,
    role: String,
    #[serde(default)]
    name: String,
}

/// Makes a key and shows its secret, this once.
pub(crate) async fn create(
    visit: Visit,
    wish: Result<Form<Wish>, FormRejection>,
) -> Result<Response, PageError> {
    let Form(wish) = wish.map_err(|error| ApiError::invalid("invalid_form", error.body_text()))?;
    let tenant = named("tenant", &wish.tenant)?;
    let name = if wish.name.is_empty() { String::new() } else { named("name", &wish.name)? };
    let role: KeyRole = wish
        .role
        .parse()
        .map_err(|_| ApiError::invalid("invalid_value", "role must be read, submit or operate"))?;
    let (key, secret) = new_key(Tenant(tenant), role, &name);
    visit.app.store().add_key(&key, &secret.hash()).await?;
    tracing::info!(by = %visit.caller.key, key = %key.id, role = role.as_str(), "key made");
    let secret = secret.reveal().to_owned();
    let view = look(&visit.app, visit.caller.key, Some((key, secret))).await?;
    Ok(visit.page(StatusCode::CREATED, &view))
}

/// A name that can be stored and shown.
fn named(what: &'static str, text: &str) -> Result<String, ApiError> {
    let text = text.trim();
    let fits = (1..=NAME_MAX).contains(&text.chars().count());
    if !fits || text.chars().any(char::is_control) {
        let message = format!("{what} must have 1 to {NAME_MAX} characters");
        return Err(ApiError::invalid("invalid_value", message).at(what));
    }
    Ok(text.to_owned())
}

/// Revokes a key.
pub(crate) async fn revoke(visit: Visit, Path(id): Path<String>) -> Result<Response, PageError> {
    let unknown = || ApiError::not_found("key", &id);
    let key: Uuid = id.parse().map_err(|_| unknown())?;
    if !visit.app.store().revoke_key(key).await? {
        return Err(unknown().into());
    }
    tracing::info!(by = %visit.caller.key, %key, "key revoked");
    Ok(visit
        .done("/dashboard/keys", "The key is revoked, and whoever was logged in with it is out."))
}
