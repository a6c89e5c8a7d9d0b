//! Askama filters that format values on pages.

use std::time::Duration;

use askama::{Values, filter_fn};
use time::{Date, Month, OffsetDateTime, Time, UtcDateTime};
use tritmill_queue::Timestamp;

use crate::ApiError;

/// A number with thousands separators: `1,234,567`.
#[filter_fn]
pub(super) fn count(value: &u64, _: &dyn Values) -> askama::Result<String> {
    Ok(grouped(*value))
}

/// A size with at most three digits: `1.2 MB`.
#[filter_fn]
pub(super) fn bytes(value: &u64, _: &dyn Values) -> askama::Result<String> {
    Ok(format!("{}B", scaled(*value as f64, " ")))
}

/// A duration in its two largest units: `3 min 12 s`.
#[filter_fn]
pub(super) fn duration(value: &Duration, _: &dyn Values) -> askama::Result<String> {
    Ok(duration_text(*value))
}

/// A time as `2026-11-21 22:03:11 UTC`.
#[filter_fn]
pub(super) fn utc(value: &Timestamp, _: &dyn Values) -> askama::Result<String> {
    let (date, time) = date_and_time(*value);
    Ok(format!("{date} {time} UTC"))
}

/// A time as `2026-11-21T22:03:11Z`, for programs.
#[filter_fn]
pub(super) fn iso(value: &Timestamp, _: &dyn Values) -> askama::Result<String> {
    let (date, time) = date_and_time(*value);
    Ok(format!("{date}T{time}Z"))
}

/// The time since `value`: `5 min ago`.
#[filter_fn]
pub(super) fn ago(value: &Timestamp, _: &dyn Values, now: &Timestamp) -> askama::Result<String> {
    let since = now.since(*value);
    if since < Duration::from_secs(5) {
        return Ok("just now".to_owned());
    }
    Ok(format!("{} ago", largest(since)))
}

/// Formats a number with thousands separators.
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

/// Formats a number with at most three digits, `gap` and a unit prefix: `12k`.
pub(super) fn scaled(value: f64, gap: &str) -> String {
    let steps = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // A value that would round to 1000 gets the next prefix.
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

/// Formats a duration in its two largest units; below a second, in milliseconds.
pub(super) fn duration_text(duration: Duration) -> String {
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

/// Returns date and time of day in UTC.
pub(crate) fn date_and_time(at: Timestamp) -> (String, String) {
    let at = OffsetDateTime::from_unix_timestamp(at.seconds());
    let at = at.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (hour, minute, second) = at.to_hms();
    (at.date().to_string(), format!("{hour:02}:{minute:02}:{second:02}"))
}

/// Parses a minute as browsers send it, `2026-11-21T22:03`; seconds may follow. The time is in UTC.
fn parse_minute(text: &str) -> Option<Timestamp> {
    let (date, time) = text.split_once('T')?;
    let mut date = date.split('-');
    let year = date.next()?.parse().ok()?;
    let month = Month::try_from(date.next()?.parse::<u8>().ok()?).ok()?;
    let date = match (date.next()?.parse().ok()?, date.next()) {
        (day, None) => Date::from_calendar_date(year, month, day).ok()?,
        _ => return None,
    };
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let second = time.next().map_or(Some(0), |second| second.parse().ok())?;
    let at = UtcDateTime::new(date, Time::from_hms(hour, minute, second).ok()?);
    Some(Timestamp(at.unix_timestamp().checked_mul(1000)?))
}

/// Parses a minute of a form, in UTC.
pub(super) fn minute(param: &'static str, text: &str) -> Result<Timestamp, ApiError> {
    let message = "must be a time in UTC such as 2026-11-21T22:03";
    parse_minute(text).ok_or_else(|| ApiError::invalid_value(param, format!("{param} {message}")))
}

/// A minute as forms have it, in UTC.
pub(super) fn minute_text(at: Timestamp) -> String {
    let (date, time) = date_and_time(at);
    format!("{date}T{}", &time[..5])
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
    fn durations_have_at_most_two_units() {
        for (ms, text) in [
            (0, "0 ms"),
            (450, "450 ms"),
            (1234, "1.2 s"),
            (60_000, "1 min"),
            (192_000, "3 min 12 s"),
            (7_260_000, "2 h 1 min"),
            (90_000_000, "1 d 1 h"),
        ] {
            assert_eq!(duration_text(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn minutes_of_forms_are_read_in_utc() {
        for (text, seconds) in [
            ("1970-01-01T00:00", Some(0)),
            ("2025-12-31T23:59:59", Some(1_767_225_599)),
            ("2025-02-30T00:00", None),
            ("2025-12-31", None),
            ("2025-12-31T24:00", None),
            ("2025-12-31-01T00:00", None),
            ("yesterday", None),
            ("", None),
        ] {
            assert_eq!(parse_minute(text), seconds.map(|at| Timestamp(at * 1000)), "{text}");
        }
    }

    #[test]
    fn dates_are_in_utc() {
        for (seconds, date) in
            [(0, "1970-01-01"), (951_782_400, "2000-02-29"), (1_767_225_599, "2025-12-31")]
        {
            assert_eq!(date_and_time(Timestamp(seconds * 1000)).0, date);
        }
        assert_eq!(date_and_time(Timestamp(1_767_225_599_000)).1, "23:59:59");
    }
}
