//! Webhook signatures according to Standard Webhooks: HMAC-SHA256 over id, time and body.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::store::webhooks::WebhookSecret;

/// Prefix of every secret.
const PREFIX: &str = "whsec_";
/// Allowed lengths of a key, in bytes.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Generates a random secret.
pub(crate) fn generate() -> WebhookSecret {
    let mut random = [0_u8; 32];
    getrandom::fill(&mut random).expect("the system has a source of randomness");
    WebhookSecret(format!("{PREFIX}{}", STANDARD.encode(random)))
}

/// Decodes the key of a secret; `None` if the secret is malformed.
pub(crate) fn key(secret: &WebhookSecret) -> Option<Vec<u8>> {
    let key = STANDARD.decode(secret.0.strip_prefix(PREFIX)?).ok()?;
    KEY_BYTES.contains(&key.len()).then_some(key)
}

/// Returns the value of the `webhook-signature` header.
pub(super) fn sign(key: &[u8], id: &str, seconds: i64, body: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(format!("{id}.{seconds}.{body}").as_bytes());
    format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signature_equals_the_published_example() {
        // From the reference libraries of the specification.
        let secret = WebhookSecret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned());
        let key = key(&secret).expect("a secret");
        let signed =
            sign(&key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn malformed_secrets_have_no_key() {
        assert_eq!(key(&generate()).map(|key| key.len()), Some(32));
        let short = format!("whsec_{}", STANDARD.encode([1; 23]));
        for wrong in ["", "whsec_", "whsec_%%%%", &short, "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"] {
            assert_eq!(key(&WebhookSecret(wrong.to_owned())), None, "{wrong}");
        }
    }
}
