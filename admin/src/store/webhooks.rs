//! Webhooks: URLs that are called with events, and the keys that sign the calls. How far the calls got is in
//! [`notices`](super::notices).

use std::fmt;

use serde::{Deserialize, Serialize};

use super::events::NoticeKind;

/// A webhook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// URL to call.
    pub url: String,
    /// Key of the signatures.
    pub secret: WebhookSecret,
    /// Whether it is its tenant's, and not the batch's own.
    #[serde(default)]
    pub is_of_tenant: bool,
    /// The events that it is told of; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<NoticeKind>,
}

impl Webhook {
    /// Returns a batch's own webhook, which is told of all events.
    pub fn new(url: String, secret: WebhookSecret) -> Self {
        Self { url, secret, is_of_tenant: false, events: Vec::new() }
    }

    /// Whether it is told of an event.
    pub fn wants(&self, kind: NoticeKind) -> bool {
        self.events.is_empty() || self.events.contains(&kind)
    }
}

/// Returns host and port of a URL, in lower case: calls of the same host share their slots.
pub fn host_of(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let end = rest.find(['/', '\\', '?', '#']).unwrap_or(rest.len());
    rest[..end].to_lowercase()
}

/// The key of the signatures, in the form that the receiver uses. Debug output hides it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WebhookSecret(pub String);

impl fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn webhooks_of_one_host_have_one_name() {
        for url in
            ["https://A.example:8443/x?y=/z", "http://a.example:8443", "http://a.EXAMPLE:8443?q"]
        {
            assert_eq!(host_of(url), "a.example:8443", "{url}");
        }
        assert_eq!(host_of("https://[::1]/"), "[::1]");
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let secret = WebhookSecret("whsec_aHVudGVyMg==".to_owned());
        assert!(!format!("{secret:?}").contains("aHVu"));
        assert_eq!(serde_json::json!(secret), "whsec_aHVudGVyMg==");
    }
}
