//! Webhooks: a batch's creator hears that it is over.
//!
//! What is to be told is part of the batch, so it is due with the transaction that ends the batch.
//! Whoever tells claims the batch again, by the same lease and epoch as whoever drove it, and writes
//! what came of it: told at least once, under one name.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::batches::Batch;
use crate::job::Timestamp;

/// Who wants to hear, and how far that is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// Whom to call.
    pub url: String,
    /// Proves who calls.
    pub secret: WebhookSecret,
    /// Calls so far.
    #[serde(default)]
    pub attempts: u32,
    /// When to call next; none before the first call.
    #[serde(default)]
    pub next_at: Option<Timestamp>,
    /// Set when there are no more calls.
    #[serde(default)]
    pub ended_at: Option<Timestamp>,
    /// Why the last call was none that counts.
    #[serde(default)]
    pub error: Option<String>,
}

/// The key of the calls' signatures, as their receiver writes it. It is not shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WebhookSecret(pub String);

impl fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

impl Batch {
    /// Since when somebody is to be told of its end; none while it is not over, and if nobody is, or
    /// is any more.
    pub fn webhook_due(&self) -> Option<Timestamp> {
        let webhook = self.webhook.as_ref().filter(|webhook| webhook.ended_at.is_none())?;
        self.state.is_terminal().then(|| webhook.next_at.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_in_what_is_logged() {
        let secret = WebhookSecret("whsec_aHVudGVyMg==".to_owned());
        assert!(!format!("{secret:?}").contains("aHVu"));
        assert_eq!(serde_json::json!(secret), "whsec_aHVudGVyMg==");
    }
}
