//! [`NewBatch`]: parses and validates a request to create a batch.

use std::time::Duration;

use serde_json::{Map, Value};
use tritmill_client::{Endpoint, Fields, http::AddressPolicy};
use tritmill_data::AllowedAddresses;
use tritmill_queue::{Priority, Tenant, Tier};

use super::{
    data_urls::{take_input, take_output},
    escalation::NewEscalation,
};
use crate::{
    ApiError, App,
    data_urls::{InputUrl, OutputUrl},
    line_template::LineTemplate,
    openai::{
        files::{EXPIRES_S, invalid_expiry},
        webhook::{WebhookOf, parse_webhook},
    },
    store::{
        batches::{BACKGROUND, MIXED, parse_window, tier_of},
        webhooks::Webhook,
    },
};

/// Most pairs of metadata, and characters of a name and a value.
const PAIRS_MAX: usize = 16;
const KEY_MAX: usize = 64;
const VALUE_MAX: usize = 512;

/// A validated request to create a batch.
pub(crate) struct NewBatch {
    /// Input file, which may not exist. An open batch needs none, and one after another or of a source has none.
    pub input: Option<String>,
    /// The source of its lines.
    pub input_url: Option<InputUrl>,
    /// Where its answers go.
    pub output_url: Option<OutputUrl>,
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

/// What a service allows to a tenant.
struct Allowed<'a> {
    webhooks: AddressPolicy,
    /// Completion windows; empty: any.
    windows: &'a [String],
    /// Addresses to read and write.
    urls: &'a AllowedAddresses,
    tenant: &'a Tenant,
}

impl NewBatch {
    /// Parses a body of a tenant for a service, of which the settings say what there may be.
    ///
    /// # Errors
    /// Names the first invalid field.
    pub fn parse(map: Map<String, Value>, app: &App, tenant: &Tenant) -> Result<Self, ApiError> {
        let (webhooks, windows, urls) = (app.limits.webhook_addresses, &app.windows, &app.urls);
        Self::parse_with(map, &Allowed { webhooks, windows, urls, tenant })
    }

    fn parse_with(map: Map<String, Value>, allowed: &Allowed<'_>) -> Result<Self, ApiError> {
        let Allowed { windows, .. } = *allowed;
        let mut fields = Fields::new(map, "");
        let open = fields.boolean("open")?.unwrap_or(false);
        let input = fields.text("input_file_id")?;
        let after = fields.take("after");
        let has_url = fields.has("input_url");
        check_inputs(
            open,
            [
                ("after", after.is_some()),
                ("input_url", has_url),
                ("input_file_id", input.is_some()),
            ],
        )?;
        let mut required =
            |name: &str| fields.text(name)?.ok_or_else(|| ApiError::missing_field(name));
        let (endpoint, window) = (required("endpoint")?, required("completion_window")?);
        if Endpoint::of_batch(&endpoint).is_none() && endpoint != MIXED {
            let message = format!("endpoint must be {}, or '{MIXED}'", Endpoint::batch_paths());
            return Err(ApiError::invalid_value("endpoint", message));
        }
        let after = after.map(|after| parse_after(after, &endpoint)).transpose()?;
        let input_url = take_input(&mut fields, &endpoint, (allowed.urls, allowed.tenant))?;
        let output_url = take_output(&mut fields, (allowed.urls, allowed.tenant))?;
        let within = parse_window(&window).ok_or_else(|| {
            let message = "completion_window must be 'background', or a number and one of s, m, h, d, at most 365d";
            ApiError::invalid_value("completion_window", message)
        })?;
        if !windows.is_empty() && !windows.contains(&window) {
            let message = format!("completion_window must be one of {}", windows.join(", "));
            return Err(ApiError::invalid_value("completion_window", message));
        }
        let priority = parse_priority(fields.text("priority")?.as_deref(), &window)?;
        let metadata = fields.take("metadata").map(metadata).transpose()?;
        let output_expires_s = fields.take("output_expires_after").map(expiry).transpose()?;
        let webhook = fields
            .take("webhook")
            .map(|value| parse_webhook(value, allowed.webhooks, WebhookOf::Batch))
            .transpose()?;
        let escalation = fields
            .take("escalation")
            .map(|value| NewEscalation::parse(value, &endpoint, within))
            .transpose()?;
        fields.finish()?;
        Ok(Self {
            input,
            input_url,
            output_url,
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

/// Checks that a batch has one input, or is open. // inputs: name of the field, whether it is given
fn check_inputs(open: bool, inputs: [(&str, bool); 3]) -> Result<(), ApiError> {
    let mut given = inputs.into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name);
    match (given.next(), given.next()) {
        (None, _) if !open => Err(ApiError::missing_field("input_file_id")),
        (Some(all @ ("after" | "input_url")), None) if open => {
            let message = format!("open is not possible with {all}, which gives all lines");
            Err(ApiError::invalid_value("open", message))
        }
        (Some(all), Some(other)) => {
            let message = format!("{other} is not possible with {all}, which gives all lines");
            Err(ApiError::invalid_value(other, message))
        }
        _ => Ok(()),
    }
}

/// Returns the priority of the lines of a batch with a completion window.
fn parse_priority(given: Option<&str>, window: &str) -> Result<Priority, ApiError> {
    let message = match given.map(str::parse) {
        None if window == BACKGROUND => return Ok(Priority::Low),
        None => return Ok(Priority::Normal),
        Some(Ok(Priority::Normal)) if window == BACKGROUND => {
            "priority must be 'low' with the completion window 'background'"
        }
        Some(Ok(priority @ (Priority::Normal | Priority::Low))) => return Ok(priority),
        Some(_) => "priority must be 'normal' or 'low'; 'high' is for completion requests",
    };
    Err(ApiError::invalid_value("priority", message))
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
            let prefix = "s3://data/{tenant}/".parse().expect("a prefix");
            let allowed = Allowed {
                webhooks: AddressPolicy::PublicOnly,
                windows: &windows,
                urls: &AllowedAddresses::new(vec![prefix]),
                tenant: &Tenant("acme".to_owned()),
            };
            let error = NewBatch::parse_with(map, &allowed).err()?;
            Some(error.param().expect("a field").to_owned())
        };
        assert_eq!(invalid(json!({ "metadata": { "a": "b" }, "priority": "low" })), None);
        let hook = |url: &str| json!({ "webhook": { "url": url } });
        assert_eq!(invalid(hook("https://hooks.example/x")), None);
        let events = |events: Value| json!({ "webhook": { "url": "https://hooks.example/x", "events": events } });
        assert_eq!(invalid(json!({ "output_url": "s3://data/acme/a.csv.gz" })), None);
        assert_eq!(invalid(events(json!(["batch.failed", "batch.failed"]))), None);
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
        let from = |url: &str, options: Value| json!({ "input_file_id": null, "input_url": url, "input_options": options });
        let of_table = |options: Value| from("s3://data/acme/a.csv", options);
        let body = json!({ "model": "m", "max_tokens": 5 });
        assert_eq!(invalid(from("s3://data/acme/a.jsonl.gz", Value::Null)), None);
        assert_eq!(invalid(of_table(json!({ "body": body, "prompt_column": "q" }))), None);
        let wrong =
            json!({ "batch_id": "batch_0", "lines": { "url": "/v1/messages", "body": {} } });
        let many: Map<String, Value> = (0..17).map(|n| (n.to_string(), json!("x"))).collect();
        for (wrong, param) in [
            (json!({ "endpoint": "/v1/moderations" }), "endpoint"),
            (json!({ "input_file_id": null }), "input_file_id"),
            (json!({ "open": "yes" }), "open"),
            (json!({ "after": behind }), "input_file_id"),
            (json!({ "input_url": "s3://data/acme/a" }), "input_file_id"),
            (json!({ "input_file_id": null, "after": behind, "input_url": "x" }), "input_url"),
            (json!({ "input_file_id": null, "input_url": "x", "open": true }), "open"),
            (json!({ "input_options": {} }), "input_url"),
            (from("s3://data/other/a.jsonl", Value::Null), "input_url"),
            (from("s3://data/acme/../other/a.jsonl", Value::Null), "input_url"),
            (from("a.jsonl", Value::Null), "input_url"),
            (from("ftp://h/a.jsonl", Value::Null), "input_url"),
            (of_table(Value::Null), "input_options.body.model"),
            (of_table(json!({ "format": "xml" })), "input_options.format"),
            (of_table(json!({ "id_column": "" })), "input_options.id_column"),
            (of_table(json!({ "columns": "q" })), "input_options.columns"),
            (of_table(json!({ "body": "m" })), "input_options.body"),
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
            (json!({ "output_url": "s3://data/other/a.csv" }), "output_url"),
            (json!({ "output_url": "s3://data/acme/" }), "output_url"),
            (json!({ "output_url": "s3://data/acme/a.parquet.gz" }), "output_url"),
            (json!({ "output_url": "https://data/acme/a.csv" }), "output_url"),
            (json!({ "output_url": "s3://data/acme/a", "output_format": "x" }), "output_format"),
            (json!({ "output_format": "csv" }), "output_url"),
            (events(json!("batch.completed")), "webhook.events"),
            (events(json!([])), "webhook.events"),
            (events(json!(["batch.completed", "batch.ended"])), "webhook.events[1]"),
            (events(json!(["budget.spent"])), "webhook.events[0]"),
            (json!({ "color": "red" }), "color"),
        ] {
            assert_eq!(invalid(wrong.clone()).as_deref(), Some(param), "{wrong}");
        }
    }
}
