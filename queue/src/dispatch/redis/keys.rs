//! Keys in Redis: `tm:{MODEL:FORMAT}:PRIORITY:TENANT`, in shards above 0 `tm:{MODEL:FORMAT:SHARD}:…`, and receipts:
//! such a key and an entry id.
//!
//! The braces are the hash tag of Redis Cluster: all keys of a shard share a slot. Models, formats and
//! tenants are free text, so characters with a meaning in a key are percent-encoded.

use std::fmt::Write as _;

use crate::job::{Priority, QueueName, Tenant};

/// Encodes free text as a part of a key.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '{' | '}' | ':' | '%') || c.is_control() {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                write!(escaped, "%{byte:02X}").expect("text can always grow");
            }
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// Returns the prefix of all keys of a queue's shard 0, and so of a queue without shards.
pub(super) fn prefix(queue: &QueueName) -> String {
    format!("tm:{{{}:{}}}", escape(&queue.model), escape(&queue.format))
}

/// Returns the prefix of all keys of a queue's shard.
pub(super) fn shard_prefix(queue: &QueueName, shard: u16) -> String {
    match shard {
        0 => prefix(queue),
        shard => format!("tm:{{{}:{}:{shard}}}", escape(&queue.model), escape(&queue.format)),
    }
}

/// Returns the prefix of shard 0 of the queue with this shard.
pub(super) fn first_shard(prefix: &str) -> String {
    let parts = prefix.trim_end_matches('}').splitn(3, ':').collect::<Vec<_>>();
    let format = parts.last().and_then(|rest| rest.split(':').next());
    format!(
        "{}:{}:{}}}",
        parts[0],
        parts.get(1).copied().unwrap_or_default(),
        format.unwrap_or_default()
    )
}

/// Returns the place of an entry in its queue: `PRIORITY:TENANT`.
pub(super) fn place(priority: Priority, tenant: &Tenant) -> String {
    format!("{}:{}", priority.as_str(), escape(&tenant.0))
}

/// Returns the receipt of a delivery: the key of its stream and the entry id.
pub(super) fn receipt(prefix: &str, place_and_entry: &str) -> String {
    format!("{prefix}:{place_and_entry}")
}

/// Splits a receipt into the prefix of its queue and `PRIORITY:TENANT:ENTRY`; `None` for receipts of
/// other dispatchers.
pub(super) fn split(receipt: &str) -> Option<(&str, &str)> {
    let end = receipt.strip_prefix("tm:{")?.find("}:")? + "tm:{}".len();
    let (prefix, rest) = (receipt.get(..end)?, receipt.get(end + 1..)?);
    let (place, entry) = rest.rsplit_once(':')?;
    let (ms, sequence) = entry.split_once('-')?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let known = place.split_once(':')?.0.parse::<Priority>().is_ok();
    (known && number(ms) && number(sequence)).then_some((prefix, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_has_no_separators() {
        let queue = QueueName { model: "a}:{b\n%".into(), format: "i2_s".into() };
        assert_eq!(prefix(&queue), "tm:{a%7D%3A%7Bb%0A%25:i2_s}");
        assert_eq!(shard_prefix(&queue, 0), prefix(&queue));
        assert_eq!(shard_prefix(&queue, 7), "tm:{a%7D%3A%7Bb%0A%25:i2_s:7}");
        assert_eq!(escape("größe/7B"), "größe/7B");
        assert_eq!(escape("\u{85}"), "%C2%85");
    }

    #[test]
    fn receipts_are_split_and_foreign_ones_rejected() {
        let made = receipt("tm:{m:i2_s}", "high:t:12-3");
        assert_eq!(split(&made), Some(("tm:{m:i2_s}", "high:t:12-3")));
        assert_eq!(split("tm:{m:f}:low::1-0"), Some(("tm:{m:f}", "low::1-0")));
        for other in ["", "17", "tm:{m", "tm:{m:f}:ids:x:1-0", "tm:{m:f}:high:t:x", "tm:{é}:"] {
            assert_eq!(split(other), None, "{other}");
        }
    }
}
