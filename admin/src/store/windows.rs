//! Completion windows: the times in which batches are answered.

use std::time::Duration;

use tritmill_queue::Tier;

/// Longest completion window.
pub(super) const WINDOW_MAX: Duration = Duration::from_secs(365 * 86_400);

/// The completion window without a promise: its lines run with priority low.
pub const BACKGROUND: &str = "background";

/// Returns the tier of the lines of a batch with a completion window.
pub fn tier_of(window: &str) -> Tier {
    if window == BACKGROUND { Tier::Background } else { Tier::Batch }
}

/// Parses a completion window such as `24h`, `90s` or `7d`, or [`BACKGROUND`].
pub fn parse_window(text: &str) -> Option<Duration> {
    if text == BACKGROUND {
        return Some(WINDOW_MAX);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_is_a_number_with_a_unit() {
        let check = |text: &str, seconds: Option<u64>| {
            assert_eq!(parse_window(text), seconds.map(Duration::from_secs), "{text}");
        };
        check("24h", Some(86_400));
        check("90s", Some(90));
        check("7d", Some(604_800));
        let too_long = "99999999999999999999d";
        for wrong in ["", "h", "0h", "24", "-1h", "+1h", "1.5h", "24 h", "366d", "1é", too_long] {
            check(wrong, None);
        }
    }
}
