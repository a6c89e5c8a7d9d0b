//! Webhooks: calls to a batch's creator when the batch has finished.
//!
//! A webhook is part of its batch, so it is due with the transaction that finishes the batch. The process
//! that calls it claims the batch again, with the same kind of lease and epoch as for driving it, calls once,
//! and writes the result with the time of the next call: delivered at least once, under one id.

use std::fmt;

use serde::{Deserialize, Serialize};
use tritmill_queue::Timestamp;

/// A webhook and the progress of its delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// URL to call.
    pub url: String,
    /// Key of the signatures.
    pub secret: WebhookSecret,
    /// Whether it is its tenant's, and not the batch's own.
    #[serde(default)]
    pub is_of_tenant: bool,
    /// Calls so far.
    #[serde(default)]
    pub attempts: u32,
    /// Time of the next call; `None` before the first.
    #[serde(default)]
    pub next_at: Option<Timestamp>,
    /// Time at which delivery ended, successfully or not.
    #[serde(default)]
    pub ended_at: Option<Timestamp>,
    /// Error of the last call.
    #[serde(default)]
    pub error: Option<String>,
}

impl Webhook {
    /// Returns a webhook that was not called yet.
    pub fn new(url: String, secret: WebhookSecret) -> Self {
        let (next_at, ended_at, error) = (None, None, None);
        Self { url, secret, is_of_tenant: false, attempts: 0, next_at, ended_at, error }
    }

    /// Returns the webhook as it was before its first call, for a batch that ends once more.
    pub fn again(self) -> Self {
        Self { attempts: 0, next_at: None, ended_at: None, error: None, ..self }
    }

    /// Returns host and port of the URL, in lower case: webhooks of the same host share their slots.
    pub fn host(&self) -> String {
        let rest = self.url.split_once("://").map_or(self.url.as_str(), |(_, rest)| rest);
        let end = rest.find(['/', '\\', '?', '#']).unwrap_or(rest.len());
        rest[..end].to_lowercase()
    }
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
        let host = |url: &str| {
            let secret = WebhookSecret(String::new());
            let url = url.to_owned();
            Webhook::new(url, secret).host()
        };
        for url in
            ["https://A.example:8443/x?y=/z", "http://a.example:8443", "http://a.EXAMPLE:8443?q"]
        {
            assert_eq!(host(url), "a.example:8443", "{url}");
        }
        assert_eq!(host("https://[::1]/"), "[::1]");
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let secret = WebhookSecret("whsec_aHVudGVyMg==".to_owned());
        assert!(!format!("{secret:?}").contains("aHVu"));
        assert_eq!(serde_json::json!(secret), "whsec_aHVudGVyMg==");
    }
}
