//! Days and months of the calendar, in UTC, as numbers of days since 1970.

use time::{Date, Month};
use tritmill_queue::store::charges::Day;

/// The Julian day of the first of January 1970.
const EPOCH: i64 = 2_440_588;

/// Returns the date of a day; the last one that can be written if it is later.
fn date(day: Day) -> Date {
    let julian = i32::try_from(day.saturating_add(EPOCH)).unwrap_or(i32::MAX);
    Date::from_julian_day(julian).unwrap_or(Date::MAX)
}

fn number(date: Date) -> Day {
    i64::from(date.to_julian_day()) - EPOCH
}

/// Writes a day as `2026-11-30`.
pub fn day_text(day: Day) -> String {
    let date = date(day);
    format!("{:04}-{:02}-{:02}", date.year(), u8::from(date.month()), date.day())
}

/// Parses `2026-11-30`.
pub fn parse_day(text: &str) -> Option<Day> {
    let [year, month, day] = parts(text)?;
    Date::from_calendar_date(year, month_of(month)?, u8::try_from(day).ok()?).ok().map(number)
}

/// Parses `2026-11` into its first day, and the first day after it.
pub fn parse_month(text: &str) -> Option<(Day, Day)> {
    let [year, month] = parts(text)?;
    let first = Date::from_calendar_date(year, month_of(month)?, 1).ok()?;
    Some(month_of_day(number(first)))
}

/// Returns the first day of the month of a day, and the first day after it.
pub fn month_of_day(day: Day) -> (Day, Day) {
    let date = date(day);
    let first = number(date) - i64::from(date.day()) + 1;
    (first, first + i64::from(date.month().length(date.year())))
}

/// Returns the numbers of a date: four digits, then groups of two.
fn parts<const N: usize>(text: &str) -> Option<[i32; N]> {
    let mut parts = [0; N];
    let mut words = text.split('-');
    for (index, part) in parts.iter_mut().enumerate() {
        let word = words.next()?;
        let digits = if index == 0 { 4 } else { 2 };
        if word.len() != digits || !word.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *part = word.parse().ok()?;
    }
    words.next().is_none().then_some(parts)
}

fn month_of(number: i32) -> Option<Month> {
    u8::try_from(number).ok().and_then(|number| Month::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_months_are_read_and_written() {
        assert_eq!(parse_day("1970-01-01"), Some(0));
        assert_eq!(parse_day("2026-11-30"), Some(20_787));
        assert_eq!(day_text(20_787), "2026-11-30");
        let (first, next) = parse_month("2024-02").expect("a month");
        assert_eq!((day_text(first), day_text(next)), ("2024-02-01".into(), "2024-03-01".into()));
        assert_eq!(month_of_day(first + 28), (first, next));
        for wrong in
            ["", "2026", "2026-2-01", "2026-13-01", "2026-02-30", "2026-02-01-", "26-02-01"]
        {
            assert_eq!(parse_day(wrong), None, "{wrong}");
        }
        assert_eq!(parse_month("2026-00"), None);
        assert!(!day_text(i64::MAX).is_empty());
    }
}
