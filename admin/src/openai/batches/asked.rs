//! What a caller asks of a batch, field by field.

use std::time::Duration;

use serde_json::{Map, Value};
use tritmill_client::{
    Endpoint, Fields,
    http::{AddressPolicy, check_target},
};
use tritmill_queue::{
    Priority,
    store::webhooks::{Webhook, WebhookSecret},
};

use crate::{
    error::ApiError,
    openai::files::{EXPIRES_S, bad_expiry},
    webhooks::signature,
};

/// Pairs of metadata, and characters of a key and a value.
const PAIRS_MAX: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 512;
/// Longest window.
const WINDOW_MAX: Duration = Duration::from_secs(365 * 86_400);
/// Bytes of a webhook's address.
const URL_BYTES_MAX: usize = 2048;

/// What a caller asks for.
pub(super) struct Asked {
    pub input: String,
    pub endpoint: String,
    pub window: String,
    pub within: Duration,
    pub priority: Priority,
    pub metadata: Option<Map<String, Value>>,
    pub output_expires_s: Option<u64>,
    pub webhook: Option<Webhook>,
}

impl Asked {
    /// Reads a body; `allowed` limits the addresses of webhooks.
    ///
    /// # Errors
    /// The first field that cannot be used.
    pub fn read(map: Map<String, Value>, allowed: AddressPolicy) -> Result<Self, ApiError> {
        let mut fields = Fields::new(map, "");
        let mut needed = |name: &str| {
            let missing =
                || ApiError::invalid("missing_field", format!("{name} is missing")).at(name);
            fields.text(name)?.ok_or_else(missing)
        };
        let (input, endpoint) = (needed("input_file_id")?, needed("endpoint")?);
        let window = needed("completion_window")?;
        if ![Endpoint::Chat, Endpoint::Completions].map(Endpoint::as_str).contains(&&*endpoint) {
            let message = "endpoint must be '/v1/chat/completions' or '/v1/completions'";
            return Err(ApiError::invalid("invalid_value", message).at("endpoint"));
        }
        let within = duration(&window).ok_or_else(|| {
            let message = "completion_window must be a number and one of s, m, h, d, at most 365d";
            ApiError::invalid("invalid_value", message).at("completion_window")
        })?;
        let priority = match fields.text("priority")?.as_deref().map(str::parse) {
            None => Priority::Normal,
            Some(Ok(priority @ (Priority::Normal | Priority::Low))) => priority,
            Some(_) => {
                let message = "priority must be 'normal' or 'low': high is for who waits";
                return Err(ApiError::invalid("invalid_value", message).at("priority"));
            }
        };
        let metadata = fields.take("metadata").map(metadata).transpose()?;
        let output_expires_s = fields.take("output_expires_after").map(expiry).transpose()?;
        let webhook = fields.take("webhook").map(|value| webhook(value, allowed)).transpose()?;
        fields.finish()?;
        Ok(Self { input, endpoint, window, within, priority, metadata, output_expires_s, webhook })
    }
}

/// `24h`, `90s`, `7d`.
fn duration(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let count: u64 = is_number.then(|| digits.parse().ok()).flatten()?;
    let window = Duration::from_secs(count.checked_mul(seconds)?);
    (!window.is_zero() && window <= WINDOW_MAX).then_some(window)
}

fn metadata(value: Value) -> Result<Map<String, Value>, ApiError> {
    let refuse = |message: String| ApiError::invalid("invalid_value", message).at("metadata");
    let Value::Object(map) = value else {
        return Err(refuse("metadata must be an object".to_owned()));
    };
    if map.len() > PAIRS_MAX {
        return Err(refuse(format!("metadata has {} pairs, at most {PAIRS_MAX}", map.len())));
    }
    for (key, value) in &map {
        let fits = value.as_str().is_some_and(|value| value.chars().count() <= VALUE_MAX);
        if key.chars().count() > KEY_MAX || !fits || key.contains('\0') {
            return Err(refuse(format!(
                "metadata must be strings of at most {VALUE_MAX} characters under names of at most \
                 {KEY_MAX}"
            )));
        }
        if value.as_str().is_some_and(|value| value.contains('\0')) {
            return Err(refuse("metadata must not have NUL characters".to_owned()));
        }
    }
    Ok(map)
}

fn expiry(value: Value) -> Result<u64, ApiError> {
    let bad = || bad_expiry("output_expires_after");
    let Value::Object(map) = value else { return Err(bad()) };
    let mut fields = Fields::new(map, "output_expires_after.");
    let is_known = fields.text("anchor")?.as_deref() == Some("created_at");
    let seconds = fields.count("seconds")?.map(u64::from);
    fields.finish()?;
    seconds.filter(|seconds| is_known && EXPIRES_S.contains(seconds)).ok_or_else(bad)
}

/// Whom to tell. Without a secret of the caller's there is one of ours.
fn webhook(value: Value, allowed: AddressPolicy) -> Result<Webhook, ApiError> {
    let refuse = |field: &str, message: &str| {
        ApiError::invalid("invalid_value", format!("{field} {message}")).at(field)
    };
    let Value::Object(map) = value else {
        return Err(refuse("webhook", "must be an object"));
    };
    let mut fields = Fields::new(map, "webhook.");
    let url = fields.text("url")?.ok_or_else(|| {
        ApiError::invalid("missing_field", "webhook.url is missing").at("webhook.url")
    })?;
    if url.len() > URL_BYTES_MAX {
        return Err(refuse("webhook.url", &format!("is longer than {URL_BYTES_MAX} bytes")));
    }
    check_target(&url, allowed)
        .map_err(|error| refuse("webhook.url", &format!("cannot be called: {error}")))?;
    let secret = match fields.text("secret")? {
        None => signature::generate(),
        Some(text) => WebhookSecret(text),
    };
    if signature::key(&secret).is_none() {
        return Err(refuse("webhook.secret", "must be whsec_ and the base64 of 24 to 64 bytes"));
    }
    fields.finish()?;
    Ok(Webhook { url, secret, attempts: 0, next_at: None, ended_at: None, error: None })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_window_is_any_duration() {
        let check = |text: &str, seconds: Option<u64>| {
            assert_eq!(duration(text), seconds.map(Duration::from_secs), "{text}");
        };
        check("24h", Some(86_400));
        check("90s", Some(90));
        check("7d", Some(604_800));
        for wrong in [
            "",
            "h",
            "0h",
            "24",
            "-1h",
            "+1h",
            "1.5h",
            "24 h",
            "366d",
            "1é",
            "99999999999999999999d",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn what_is_asked_is_refused_by_the_name_of_the_field() {
        let fault = |change: Value| {
            let mut map = Map::new();
            map.insert("input_file_id".to_owned(), json!("file-0"));
            map.insert("endpoint".to_owned(), json!("/v1/completions"));
            map.insert("completion_window".to_owned(), json!("24h"));
            let Value::Object(change) = change else { panic!("an object") };
            map.extend(change);
            Asked::read(map, AddressPolicy::PublicOnly)
                .map(|_| ())
                .map_err(|error| error.body()["error"]["param"].clone())
        };
        assert_eq!(fault(json!({ "metadata": { "a": "b" }, "priority": "low" })), Ok(()));
        let hook = |url: &str| json!({ "webhook": { "url": url } });
        assert_eq!(fault(hook("https://hooks.example/x")), Ok(()));
        let many: Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("x"))).collect();
        for (wrong, param) in [
            (json!({ "endpoint": "/v1/embeddings" }), "endpoint"),
            (json!({ "completion_window": "soon" }), "completion_window"),
            (json!({ "metadata": [] }), "metadata"),
            (json!({ "metadata": many }), "metadata"),
            (json!({ "metadata": { "a": "x".repeat(513) } }), "metadata"),
            (json!({ "metadata": { "k".repeat(65): "x" } }), "metadata"),
            (json!({ "metadata": { "a": 1 } }), "metadata"),
            (json!({ "priority": "high" }), "priority"),
            (
                json!({ "output_expires_after": { "anchor": "created_at", "seconds": 1 } }),
                "output_expires_after",
            ),
            (json!({ "webhook": "https://hooks.example/x" }), "webhook"),
            (json!({ "webhook": {} }), "webhook.url"),
            (hook("ftp://hooks.example/x"), "webhook.url"),
            (hook("http://127.0.0.1:6379/"), "webhook.url"),
            (hook(&format!("https://hooks.example/{}", "x".repeat(2048))), "webhook.url"),
            (
                json!({ "webhook": { "url": "https://hooks.example/", "secret": "hunter2" } }),
                "webhook.secret",
            ),
            (json!({ "color": "red" }), "color"),
        ] {
            assert_eq!(fault(wrong.clone()), Err(json!(param)), "{wrong}");
        }
    }
}
