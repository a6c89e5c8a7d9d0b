//! [`NewBatch`]: parses and validates a request to create a batch.

use std::time::Duration;

use serde_json::{Map, Value};
use tritmill_client::{
    Endpoint, Fields,
    http::{AddressPolicy, check_target},
};
use tritmill_queue::{Priority, Tier};

use super::escalation::NewEscalation;
use crate::{
    ApiError, App,
    line_template::LineTemplate,
    notices::signature,
    openai::files::{EXPIRES_S, invalid_expiry},
    store::{
        batches::{BACKGROUND, MIXED, parse_window, tier_of},
        webhooks::{Webhook, WebhookSecret},
    },
};

/// Most pairs of metadata, and characters of a name and a value.
const PAIRS_MAX: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 512;
/// Most bytes of a webhook's URL.
const URL_BYTES_MAX: usize = 2048;

/// A validated request to create a batch.
pub(crate) struct NewBatch {
    /// Input file, which may not exist. An open batch needs none, and one after another has none.
    pub input: Option<String>,
    /// The id of an earlier batch, and the template of the lines.
    pub after: Option<(String, LineTemplate)>,
    /// Whether lines are added later.
    pub open: bool,
    pub endpoint: String,
    /// Completion window as text, and as a duration.
    pub window: String,
    pub within: Duration,
    pub priority: Priority,
    pub metadata: Option<Map<String, Value>>,
    pub output_expires_s: Option<u64>,
    pub webhook: Option<Webhook>,
    pub escalation: Option<NewEscalation>,
}

impl NewBatch {
    /// Parses a body for a service, of which the settings say which windows and webhooks there may be.
    ///
    /// # Errors
    /// Names the first invalid field.
    pub fn parse(map: Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        Self::parse_with(map, app.limits.webhook_addresses, &app.windows)
    }

    fn parse_with(
        map: Map<String, Value>,
        allowed: AddressPolicy,
        windows: &[String],
    ) -> Result<Self, ApiError> {
        let mut fields = Fields::new(map, "");
        let open = fields.boolean("open")?.unwrap_or(false);
        let input = fields.text("input_file_id")?;
        let after = fields.take("after");
        for (name, is_given) in [("input_file_id", input.is_some()), ("open", open)] {
            if after.is_some() && is_given {
                let message = format!("{name} is not possible with after, which makes all lines");
                return Err(ApiError::invalid_value(name, message));
            }
        }
        if input.is_none() && after.is_none() && !open {
            return Err(ApiError::missing_field("input_file_id"));
        }
        let mut required =
            |name: &str| fields.text(name)?.ok_or_else(|| ApiError::missing_field(name));
        let (endpoint, window) = (required("endpoint")?, required("completion_window")?);
        if Endpoint::of_batch(&endpoint).is_none() && endpoint != MIXED {
            let message = format!("endpoint must be {}, or '{MIXED}'", Endpoint::batch_paths());
            return Err(ApiError::invalid_value("endpoint", message));
        }
        let after = after.map(|after| parse_after(after, &endpoint)).transpose()?;
        let within = parse_window(&window).ok_or_else(|| {
            let message = "completion_window must be 'background', or a number and one of s, m, h, d, at most 365d";
            ApiError::invalid_value("completion_window", message)
        })?;
        if !windows.is_empty() && !windows.contains(&window) {
            let message = format!("completion_window must be one of {}", windows.join(", "));
            return Err(ApiError::invalid_value("completion_window", message));
        }
        let priority = match fields.text("priority")?.as_deref().map(str::parse) {
            None if window == BACKGROUND => Priority::Low,
            None => Priority::Normal,
            Some(Ok(Priority::Normal)) if window == BACKGROUND => {
                let message = "priority must be 'low' with the completion window 'background'";
                return Err(ApiError::invalid_value("priority", message));
            }
            Some(Ok(priority @ (Priority::Normal | Priority::Low))) => priority,
            Some(_) => {
                let message =
                    "priority must be 'normal' or 'low'; 'high' is for completion requests";
                return Err(ApiError::invalid_value("priority", message));
            }
        };
        let metadata = fields.take("metadata").map(metadata).transpose()?;
        let output_expires_s = fields.take("output_expires_after").map(expiry).transpose()?;
        let webhook = fields
            .take("webhook")
            .map(|value| parse_webhook(value, allowed, "webhook."))
            .transpose()?;
        let escalation = fields
            .take("escalation")
            .map(|value| NewEscalation::parse(value, &endpoint, within))
            .transpose()?;
        fields.finish()?;
        Ok(Self {
            input,
            after,
            open,
            endpoint,
            window,
            within,
            priority,
            metadata,
            output_expires_s,
            webhook,
            escalation,
        })
    }

    /// Returns the tier of its lines.
    pub fn tier(&self) -> Tier {
        tier_of(&self.window)
    }
}

/// Parses an earlier batch, and the template of the lines of a batch with an endpoint.
fn parse_after(value: Value, endpoint: &str) -> Result<(String, LineTemplate), ApiError> {
    let Value::Object(map) = value else {
        return Err(ApiError::invalid_value("after", "after must be an object"));
    };
    let mut fields = Fields::new(map, "after.");
    let missing = |name: &str| ApiError::missing_field(name);
    let batch = fields.text("batch_id")?.ok_or_else(|| missing("after.batch_id"))?;
    let lines = fields.take("lines").ok_or_else(|| missing("after.lines"))?;
    fields.finish()?;
    Ok((batch, LineTemplate::parse(lines, endpoint, "after.lines.")?))
}

fn metadata(value: Value) -> Result<Map<String, Value>, ApiError> {
    let invalid = |message: String| ApiError::invalid_value("metadata", message);
    let Value::Object(map) = value else {
        return Err(invalid("metadata must be an object".to_owned()));
    };
    if map.len() > PAIRS_MAX {
        return Err(invalid(format!(
            "metadata has {} pairs; at most {PAIRS_MAX} are allowed",
            map.len()
        )));
    }
    for (key, value) in &map {
        let fits = value.as_str().is_some_and(|value| value.chars().count() <= VALUE_MAX);
        if key.chars().count() > KEY_MAX || !fits || key.contains('\0') {
            return Err(invalid(format!(
                "metadata values must be strings of at most {VALUE_MAX} characters, with names of at \
                 most {KEY_MAX}"
            )));
        }
        if value.as_str().is_some_and(|value| value.contains('\0')) {
            return Err(invalid("metadata must not contain NUL characters".to_owned()));
        }
    }
    Ok(map)
}

fn expiry(value: Value) -> Result<u64, ApiError> {
    let invalid = || invalid_expiry("output_expires_after");
    let Value::Object(map) = value else { return Err(invalid()) };
    let mut fields = Fields::new(map, "output_expires_after.");
    let is_known = fields.text("anchor")?.as_deref() == Some("created_at");
    let seconds = fields.count("seconds")?.map(u64::from);
    fields.finish()?;
    seconds.filter(|seconds| is_known && EXPIRES_S.contains(seconds)).ok_or_else(invalid)
}

/// Validates a webhook; generates a secret if none is given. The names of its fields begin with `prefix` in errors.
pub(crate) fn parse_webhook(
    value: Value,
    allowed: AddressPolicy,
    prefix: &str,
) -> Result<Webhook, ApiError> {
    let invalid =
        |param: &str, problem: &str| ApiError::invalid_value(param, format!("{param} {problem}"));
    let Value::Object(map) = value else {
        return Err(invalid("webhook", "must be an object"));
    };
    let mut fields = Fields::new(map, prefix);
    let (url_field, secret_field) = (format!("{prefix}url"), format!("{prefix}secret"));
    let url = fields.text("url")?.ok_or_else(|| ApiError::missing_field(&url_field))?;
    if url.len() > URL_BYTES_MAX {
        return Err(invalid(&url_field, &format!("is longer than {URL_BYTES_MAX} bytes")));
    }
    check_target(&url, allowed)
        .map_err(|error| invalid(&url_field, &format!("cannot be called: {error}")))?;
    let secret = fields.text("secret")?.map_or_else(signature::generate, WebhookSecret);
    if signature::key(&secret).is_none() {
        return Err(invalid(&secret_field, "must be whsec_ and the base64 of 24 to 64 bytes"));
    }
    fields.finish()?;
    Ok(Webhook::new(url, secret))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_name_the_invalid_field() {
        let invalid = |change: Value| {
            let valid = json!({
                "input_file_id": "file-0",
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            });
            let (Value::Object(mut map), Value::Object(change)) = (valid, change) else {
                panic!("objects")
            };
            map.extend(change);
            let windows = ["1h", "24h", "background"].map(str::to_owned);
            let error = NewBatch::parse_with(map, AddressPolicy::PublicOnly, &windows).err()?;
            Some(error.param().expect("a field").to_owned())
        };
        assert_eq!(invalid(json!({ "metadata": { "a": "b" }, "priority": "low" })), None);
        let hook = |url: &str| json!({ "webhook": { "url": url } });
        assert_eq!(invalid(hook("https://hooks.example/x")), None);
        assert_eq!(invalid(json!({ "endpoint": "mixed" })), None);
        let escalation = json!({ "escalation": { "model": "small", "after": "20h" } });
        assert_eq!(invalid(escalation), None);
        assert_eq!(invalid(json!({ "open": true, "input_file_id": null })), None);
        let lines = json!({ "url": "/v1/completions", "body": {
            "model": "m", "prompt": "{{ previous.content }}",
        } });
        let after = |after: Value| json!({ "input_file_id": null, "after": after });
        let behind = json!({ "batch_id": "batch_0", "lines": lines });
        assert_eq!(invalid(after(behind.clone())), None);
        let wrong =
            json!({ "batch_id": "batch_0", "lines": { "url": "/v1/messages", "body": {} } });
        let many: Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("x"))).collect();
        for (wrong, param) in [
            (json!({ "endpoint": "/v1/moderations" }), "endpoint"),
            (json!({ "input_file_id": null }), "input_file_id"),
            (json!({ "open": "yes" }), "open"),
            (json!({ "after": behind }), "input_file_id"),
            (json!({ "input_file_id": null, "open": true, "after": behind }), "open"),
            (after(json!("batch_0")), "after"),
            (after(json!({ "lines": lines })), "after.batch_id"),
            (after(json!({ "batch_id": "batch_0" })), "after.lines"),
            (after(wrong), "after.lines.url"),
            (json!({ "completion_window": "soon" }), "completion_window"),
            (json!({ "completion_window": "2h" }), "completion_window"),
            (json!({ "completion_window": "background", "priority": "normal" }), "priority"),
            (json!({ "metadata": [] }), "metadata"),
            (json!({ "metadata": many }), "metadata"),
            (json!({ "metadata": { "a": "x".repeat(513) } }), "metadata"),
            (json!({ "metadata": { "k".repeat(65): "x" } }), "metadata"),
            (json!({ "metadata": { "a": 1 } }), "metadata"),
            (json!({ "priority": "high" }), "priority"),
            (json!({ "escalation": "small" }), "escalation"),
            (json!({ "escalation": { "after": "20h" } }), "escalation.model"),
            (json!({ "escalation": { "model": "small", "after": "24h" } }), "escalation.after"),
            (json!({ "escalation": { "model": "small", "after": "soon" } }), "escalation.after"),
            (json!({ "escalation": { "model": "a", "after": "1h", "to": 1 } }), "escalation.to"),
            (
                json!({ "endpoint": "mixed", "escalation": { "model": "a", "after": "1h" } }),
                "escalation",
            ),
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
            assert_eq!(invalid(wrong.clone()).as_deref(), Some(param), "{wrong}");
        }
    }
}
