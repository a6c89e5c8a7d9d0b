//! Page of API keys: create, show the secret once, revoke.

use std::cmp::Reverse;

use askama::Template;
use axum::{extract::Path, http::StatusCode};
use serde::Deserialize;
use tritmill_queue::Timestamp;
use uuid::Uuid;

use super::{Content, PageError, PageForm, PageResult, Visit, filters};
use crate::{
    ApiError, App,
    operator::keys::{create_key, revoke_key},
    store::ApiKey,
};

/// Most characters of a tenant's or a key's name.
const NAME_MAX: usize = 64;

#[derive(Template)]
#[template(path = "keys.html")]
struct KeysView {
    now: Timestamp,
    keys: Vec<ApiKey>,
    /// The visitor's own key.
    own: Uuid,
    /// A key that was just created, and its secret.
    created: Option<(ApiKey, String)>,
}

async fn load(
    app: &App,
    own: Uuid,
    created: Option<(ApiKey, String)>,
) -> Result<Content, PageError> {
    let mut keys = app.store.keys().await?;
    // Active keys first, the latest first.
    keys.sort_by_key(|key| (key.revoked_at.is_some(), Reverse(key.created_at)));
    Ok(Content::new("API keys", &KeysView { now: app.client.now().await?, keys, own, created }))
}

/// Shows all keys.
pub(crate) async fn list(visit: Visit) -> PageResult {
    visit.show(|app, caller| async move { load(&app, caller.key, None).await }).await
}

/// The form to create a key.
#[derive(Deserialize)]
pub(crate) struct KeyForm {
    tenant: String,
    role: String,
    #[serde(default)]
    name: String,
}

/// Creates a key and shows its secret once.
pub(crate) async fn create(visit: Visit, PageForm(form): PageForm<KeyForm>) -> PageResult {
    let tenant = checked_name("tenant", &form.tenant)?;
    let name = match form.name.as_str() {
        "" => String::new(),
        name => checked_name("name", name)?,
    };
    let (key, secret) = create_key(&visit.app, &visit.caller, tenant, &form.role, &name).await?;
    let created = Some((key, secret.reveal().to_owned()));
    let view = load(&visit.app, visit.caller.key, created).await?;
    Ok(visit.page(StatusCode::CREATED, &view))
}

/// Checks that a name is short and printable.
fn checked_name(param: &'static str, text: &str) -> Result<String, ApiError> {
    let text = text.trim();
    let fits = (1..=NAME_MAX).contains(&text.chars().count());
    if !fits || text.chars().any(char::is_control) {
        let message = format!("{param} must have 1 to {NAME_MAX} characters");
        return Err(ApiError::invalid_value(param, message));
    }
    Ok(text.to_owned())
}

/// Revokes a key.
pub(crate) async fn revoke(visit: Visit, Path(id): Path<String>) -> PageResult {
    revoke_key(&visit.app, &visit.caller, &id).await?;
    Ok(visit.done("/dashboard/keys", "The key is revoked. Its dashboard sessions are closed."))
}
