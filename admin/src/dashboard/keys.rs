//! Page of API keys: create, show the secret once, revoke.

use std::cmp::Reverse;

use askama::Template;
use axum::{extract::Path, http::StatusCode};
use serde::Deserialize;
use tritmill_queue::Timestamp;
use uuid::Uuid;

use super::{Content, PageError, PageForm, PageResult, Visit, filters};
use crate::{
    ApiError, App, Caller,
    operator::keys::{KeyWish, create_key, revoke_key, visible},
    store::ApiKey,
};

/// Most characters of a tenant's or a key's name.
const NAME_MAX: usize = 64;

#[derive(Template)]
#[template(path = "keys.html")]
struct KeysView {
    now: Timestamp,
    keys: Vec<ApiKey>,
    /// The visitor, and its own key.
    caller: Caller,
    own: Uuid,
    /// A key that was just created, and its secret.
    created: Option<(ApiKey, String)>,
}

async fn load(
    app: &App,
    caller: Caller,
    created: Option<(ApiKey, String)>,
) -> Result<Content, PageError> {
    let (mut keys, now) = (visible(app, &caller).await?, app.client.now().await?);
    // Active keys first, the latest first.
    keys.sort_by_key(|key| (!is_active(key, now), Reverse(key.created_at)));
    let own = caller.key;
    Ok(Content::new("API keys", &KeysView { now, keys, caller, own, created }))
}

fn is_active(key: &ApiKey, now: Timestamp) -> bool {
    key.revoked_at.is_none() && key.expires_at.is_none_or(|at| at > now)
}

impl KeysView {
    fn is_active(&self, key: &ApiKey) -> bool {
        is_active(key, self.now)
    }

    /// Whether the visitor may revoke a key.
    fn may_revoke(&self, key: &ApiKey) -> bool {
        self.is_active(key) && self.caller.role.grants(key.role)
    }
}

/// Shows the keys of the visitor's tenant; to operators, all keys.
pub(crate) async fn list(visit: Visit) -> PageResult {
    visit.show(|app, caller| async move { load(&app, caller, None).await }).await
}

/// The form to create a key.
#[derive(Deserialize)]
pub(crate) struct KeyForm {
    tenant: String,
    role: String,
    #[serde(default)]
    name: String,
    /// Days until it expires; empty: never.
    #[serde(default)]
    days: String,
}

/// Creates a key and shows its secret once.
pub(crate) async fn create(visit: Visit, PageForm(form): PageForm<KeyForm>) -> PageResult {
    let tenant = checked_name("tenant", &form.tenant)?;
    let name = match form.name.as_str() {
        "" => String::new(),
        name => checked_name("name", name)?,
    };
    let days = match form.days.trim() {
        "" => None,
        days => Some(days.parse::<u64>().map_err(|_| {
            ApiError::invalid_value("days", "days must be a number, or empty for no expiry")
        })?),
    };
    let expires_after_s = days.map(|days| days.saturating_mul(86_400));
    let wish = KeyWish { tenant, role: &form.role, name: &name, expires_after_s };
    let (key, secret) = create_key(&visit.app, &visit.caller, wish).await?;
    let created = Some((key, secret.reveal().to_owned()));
    let view = load(&visit.app, visit.caller.clone(), created).await?;
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
