//! Keys in Redis: `tm:{MODEL:FORMAT}:PRIORITY:TENANT`, in shards above 0 `tm:{MODEL:FORMAT:SHARD}:…`, and receipts:
//! such a key and an entry id.
//!
//! The braces are the hash tag of Redis Cluster: all keys of a shard share a slot. Models, formats and
//! tenants are free text, so characters with a meaning in a key are percent-encoded.

use std::fmt::Write as _;

use crate::{
    dispatch::Delivery,
    job::{Priority, QueueName, Tenant},
};

/// Encodes free text as a part of a key.
pub(crate) fn escape(text: &str) -> String {
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

/// Decodes the result of [`escape`]; `None` for other text.
pub(crate) fn unescape(escaped: &str) -> Option<String> {
    let mut parts = escaped.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(code, 16).ok()?);
        bytes.extend(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Returns the prefix of all keys of a queue's shard 0, and so of a queue without shards.
pub(crate) fn prefix(queue: &QueueName) -> String {
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
pub(crate) fn place(priority: Priority, tenant: &Tenant) -> String {
    format!("{}:{}", priority.as_str(), escape(&tenant.0))
}

/// Parses a place.
pub(crate) fn parse_place(place: &str) -> Option<(Priority, String)> {
    let (priority, tenant) = place.split_once(':')?;
    Some((priority.parse().ok()?, unescape(tenant)?))
}

/// Returns the receipt of a delivery: the key of its stream and the entry id.
pub(super) fn receipt(prefix: &str, here: &str) -> String {
    format!("{prefix}:{here}")
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

/// Deliveries of one queue as a script's arguments `id place entry deliveries`, with their positions.
pub(super) struct Group<'a> {
    pub prefix: &'a str,
    pub arguments: Vec<String>,
    /// Positions in the caller's list.
    pub positions: Vec<usize>,
}

/// Groups deliveries by queue; also returns the positions of deliveries of other dispatchers. The
/// arguments begin with the consumer.
pub(super) fn group<'a>(
    consumer: &str,
    deliveries: &'a [Delivery],
) -> (Vec<Group<'a>>, Vec<usize>) {
    let (mut groups, mut others): (Vec<Group<'a>>, _) = (Vec::new(), Vec::new());
    for (position, delivery) in deliveries.iter().enumerate() {
        let parts = split(&delivery.receipt)
            .and_then(|(prefix, rest)| rest.rsplit_once(':').map(|parts| (prefix, parts)));
        let Some((prefix, (place, entry))) = parts else {
            others.push(position);
            continue;
        };
        let index = groups.iter().position(|group| group.prefix == prefix).unwrap_or_else(|| {
            let arguments = vec![escape(consumer)];
            groups.push(Group { prefix, arguments, positions: Vec::new() });
            groups.len() - 1
        });
        let (id, deliveries) = (delivery.id.to_string(), delivery.deliveries.to_string());
        groups[index].arguments.extend([id, place.to_owned(), entry.to_owned(), deliveries]);
        groups[index].positions.push(position);
    }
    (groups, others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_text_has_no_separators_and_is_decoded_again() {
        let queue = QueueName { model: "a}:{b\n%".into(), format: "i2_s".into() };
        assert_eq!(prefix(&queue), "tm:{a%7D%3A%7Bb%0A%25:i2_s}");
        assert_eq!(shard_prefix(&queue, 0), prefix(&queue));
        assert_eq!(shard_prefix(&queue, 7), "tm:{a%7D%3A%7Bb%0A%25:i2_s:7}");
        assert_eq!(escape("größe/7B"), "größe/7B");
        assert_eq!(escape("\u{85}"), "%C2%85");
        for text in ["", "a}:{b\n%", "größe/7B", "\u{85}"] {
            assert_eq!(unescape(&escape(text)).as_deref(), Some(text));
        }
        assert_eq!(["%", "%4", "%zz", "%FF"].map(unescape), [const { None }; 4]);
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
