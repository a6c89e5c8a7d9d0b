//! How values are written on pages.

use std::time::Duration;

use askama::{Values, filter_fn};
use tritmill_queue::Timestamp;

/// Thousands apart: `1,234,567`.
#[filter_fn]
pub(super) fn count(value: &u64, _: &dyn Values) -> askama::Result<String> {
    Ok(grouped(*value))
}

/// At most three digits: `1.2 MB`.
#[filter_fn]
pub(super) fn bytes(value: &u64, _: &dyn Values) -> askama::Result<String> {
    Ok(format!("{}B", scaled(*value as f64, " ")))
}

/// The two largest units: `3 min 12 s`.
#[filter_fn]
pub(super) fn duration(value: &Duration, _: &dyn Values) -> askama::Result<String> {
    Ok(lasting(*value))
}

/// `2026-11-21 22:03:11 UTC`.
#[filter_fn]
pub(super) fn utc(value: &Timestamp, _: &dyn Values) -> askama::Result<String> {
    let (date, time) = civil(*value);
    Ok(format!("{date} {time} UTC"))
}

/// `2026-11-21T22:03:11Z`, for programs.
#[filter_fn]
pub(super) fn iso(value: &Timestamp, _: &dyn Values) -> askama::Result<String> {
    let (date, time) = civil(*value);
    Ok(format!("{date}T{time}Z"))
}

/// How long before `now` it was: `5 min ago`.
#[filter_fn]
pub(super) fn ago(value: &Timestamp, _: &dyn Values, now: &Timestamp) -> askama::Result<String> {
    let since = now.since(*value);
    if since < Duration::from_secs(5) {
        return Ok("just now".to_owned());
    }
    Ok(format!("{} ago", largest(since)))
}

/// The number with commas.
pub(super) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number in at most four characters, `gap` and a letter for its thousands: `12.3k`.
pub(super) fn scaled(value: f64, gap: &str) -> String {
    let steps = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // What would be written as a thousand of the step below belongs to this one.
    let (unit, letter) =
        steps.into_iter().find(|(unit, _)| value.abs() >= unit * 0.9995).unwrap_or((1.0, ""));
    let value = value / unit;
    let digits = match value.abs() {
        small if small == 0.0 || small.fract() == 0.0 && unit == 1.0 => format!("{value:.0}"),
        small if small < 9.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    };
    format!("{digits}{gap}{letter}")
}

const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];

/// A duration in its two largest units, and short ones to the millisecond.
pub(super) fn lasting(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 1 {
        return format!("{} ms", duration.as_millis());
    }
    if seconds < 10 {
        return format!("{:.1} s", duration.as_secs_f64());
    }
    let first = UNITS.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(UNITS.len() - 1);
    let (unit, name) = UNITS[first];
    let rest = UNITS.get(first + 1).map(|(below, name)| (seconds % unit / below, name));
    match rest {
        Some((count, below)) if count > 0 => format!("{} {name} {count} {below}", seconds / unit),
        _ => format!("{} {name}", seconds / unit),
    }
}

fn largest(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (unit, name) = UNITS.into_iter().find(|(unit, _)| seconds >= *unit).unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

/// Date and time of day in UTC.
pub(super) fn civil(at: Timestamp) -> (String, String) {
    let seconds = at.seconds();
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = date(days);
    let time = format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60);
    (format!("{year:04}-{month:02}-{day:02}"), time)
}

/// The date so many days after 1970-01-01: years of the Gregorian calendar that begin in March, so
/// that the day that may be missing is their last.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(value), text);
        }
        for (value, text) in [
            (0.0, "0"),
            (7.0, "7"),
            (0.25, "0.2"),
            (12.34, "12"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (12_345.0, "12k"),
            (1_000_000.0, "1.0M"),
        ] {
            assert_eq!(scaled(value, ""), text, "{value}");
        }
    }

    #[test]
    fn durations_have_two_units() {
        for (ms, text) in [
            (0, "0 ms"),
            (450, "450 ms"),
            (1234, "1.2 s"),
            (60_000, "1 min"),
            (192_000, "3 min 12 s"),
            (7_260_000, "2 h 1 min"),
            (90_000_000, "1 d 1 h"),
        ] {
            assert_eq!(lasting(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn dates_are_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (4_107_542_400, "2100-03-01"),
            (1_767_225_599, "2025-12-31"),
        ] {
            assert_eq!(civil(Timestamp(seconds * 1000)).0, date);
        }
        assert_eq!(civil(Timestamp(1_767_225_599_000)).1, "23:59:59");
    }
}
