//! Charts over time as SVG: lines on a linear or logarithmic scale, or stacked areas. Colours come from the
//! stylesheet, by class, so that charts are legible in the dark and the light scheme.

use std::{fmt::Write as _, time::Duration};

use askama::Template;
use tritmill_queue::Timestamp;

use super::filters::{date_and_time, duration_text, scaled};

/// Size of the drawing, and margins of the plot, in SVG units.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 180.0;
const LEFT: f64 = 44.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 24.0;
/// Most labels of the time axis.
const LABELS_MAX: usize = 5;

/// Unit of the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Number per second.
    PerSecond,
    /// Share between 0 and 1.
    Share,
    /// Seconds, on a logarithmic scale.
    Latency,
    /// Number.
    Count,
}

impl Unit {
    fn text(self, value: f64) -> String {
        match self {
            Self::PerSecond => format!("{}/s", scaled(value, "")),
            Self::Share => format!("{:.0} %", value * 100.0),
            Self::Latency => duration_text(Duration::try_from_secs_f64(value).unwrap_or_default()),
            Self::Count => scaled(value, ""),
        }
    }
}

/// Values over time.
pub(super) struct Series {
    /// Name in the legend.
    pub name: &'static str,
    /// A value for each of the chart's times; `None` where there is no data.
    pub values: Vec<Option<f64>>,
}

/// A chart.
pub(super) struct Chart {
    /// Title.
    pub title: &'static str,
    /// Unit of the values.
    pub unit: Unit,
    /// Whether the series are stacked areas.
    pub is_stacked: bool,
    /// Start of each value's time, in order.
    pub times: Vec<Timestamp>,
    /// End of the last value's time.
    pub end: Timestamp,
    /// Series, the most important first.
    pub series: Vec<Series>,
}

#[derive(Template)]
#[template(path = "chart.html")]
struct Drawing {
    title: &'static str,
    summary: String,
    legend: Vec<(usize, &'static str, String)>,
    /// Positions and labels along the axes.
    rows: Vec<(f64, String)>,
    /// Positions, labels, times in milliseconds and forms (`time` or `date`) of the time axis.
    columns: Vec<(f64, String, i64, &'static str)>,
    areas: Vec<(usize, String)>,
    lines: Vec<(usize, String)>,
    /// Values with gaps on both sides, as paths.
    dots: Vec<(usize, String)>,
    is_stacked: bool,
    /// Areas that show their values as a tooltip: position, width, time in milliseconds, text.
    strips: Vec<(f64, f64, i64, String)>,
    /// Ends of the time axis, in milliseconds.
    ends: [i64; 2],
    is_empty: bool,
}

impl Drawing {
    const SIZE: [f64; 2] = [WIDTH, HEIGHT];
    const PLOT: [f64; 4] = [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM];
}

impl Chart {
    /// Returns the chart as HTML.
    pub fn draw(&self) -> String {
        let tops = self.tops();
        let known = tops.iter().flatten().flatten().copied();
        let (low, high) = known.fold((f64::INFINITY, 0.0_f64), |(low, high), value| {
            (if value > 0.0 { low.min(value) } else { low }, high.max(value))
        });
        let scale = match self.unit {
            Unit::Latency => Scale::logarithmic(low, high),
            Unit::Share => Scale { low: 0.0, high: 1.0, is_log: false, ticks: vec![0.0, 0.5, 1.0] },
            Unit::PerSecond => Scale::linear(high, 0.0),
            Unit::Count => Scale::linear(high, 1.0),
        };
        let lines: Vec<_> = tops.iter().map(|top| self.path(top, &scale)).collect();
        let areas = match self.is_stacked {
            true => self.areas(&tops, &scale),
            false => Vec::new(),
        };
        super::view::render(&Drawing {
            title: self.title,
            summary: self.summary(),
            legend: self.legend(),
            rows: scale.ticks.iter().map(|tick| (scale.y(*tick), self.unit.text(*tick))).collect(),
            columns: self.columns(),
            areas: areas.into_iter().enumerate().collect(),
            // The first series is the most important: it is drawn last, on top.
            lines: lines.into_iter().enumerate().rev().collect(),
            dots: tops.iter().map(|top| self.dots(top, &scale)).enumerate().collect(),
            is_stacked: self.is_stacked,
            strips: self.strips(),
            ends: [self.begin().0, self.end.0],
            is_empty: tops.iter().flatten().all(Option::is_none),
        })
    }

    /// Returns the values of each series' line; stacked series add up.
    fn tops(&self) -> Vec<Vec<Option<f64>>> {
        let mut below = vec![0.0; self.times.len()];
        let mut top = |series: &Series| -> Vec<Option<f64>> {
            let values = series.values.iter().zip(&mut below);
            let on_top = values.map(|(value, below)| {
                *below += value.unwrap_or(0.0);
                value.map(|_| *below)
            });
            on_top.collect()
        };
        match self.is_stacked {
            true => self.series.iter().map(&mut top).collect(),
            false => self.series.iter().map(|series| series.values.clone()).collect(),
        }
    }

    fn begin(&self) -> Timestamp {
        self.times.first().copied().unwrap_or(self.end)
    }

    fn x(&self, at: Timestamp) -> f64 {
        let whole = self.end.since(self.begin()).as_secs_f64().max(1.0);
        LEFT + (WIDTH - LEFT - RIGHT) * at.since(self.begin()).as_secs_f64() / whole
    }

    /// Returns the x of a value: the middle of its time.
    fn middle(&self, index: usize) -> f64 {
        let next = self.times.get(index + 1).copied().unwrap_or(self.end);
        (self.x(self.times[index]) + self.x(next)) / 2.0
    }

    fn path(&self, values: &[Option<f64>], scale: &Scale) -> String {
        let (mut path, mut is_drawing) = (String::new(), false);
        for (index, value) in values.iter().enumerate() {
            let Some(value) = value else {
                is_drawing = false;
                continue;
            };
            let step = if is_drawing { 'L' } else { 'M' };
            point(&mut path, step, self.middle(index), scale.y(*value));
            is_drawing = true;
        }
        path
    }

    /// Returns lines of no length at values with gaps on both sides; their round caps are dots.
    fn dots(&self, values: &[Option<f64>], scale: &Scale) -> String {
        let mut path = String::new();
        let is_gap = |index: Option<usize>| {
            index.and_then(|index| values.get(index)).is_none_or(Option::is_none)
        };
        for (index, value) in values.iter().enumerate() {
            let is_alone = is_gap(index.checked_sub(1)) && is_gap(Some(index + 1));
            if let Some(value) = value.filter(|_| is_alone) {
                point(&mut path, 'M', self.middle(index), scale.y(value));
                path.push_str("h0");
            }
        }
        path
    }

    /// Returns the areas between each line and the line below it; missing values count as zero.
    fn areas(&self, tops: &[Vec<Option<f64>>], scale: &Scale) -> Vec<String> {
        let mut floor = vec![0.0; self.times.len()];
        let mut areas = Vec::new();
        for top in tops {
            let mut path = String::new();
            let ceiling: Vec<f64> =
                top.iter().zip(&floor).map(|(top, floor)| top.unwrap_or(*floor)).collect();
            for (index, value) in ceiling.iter().enumerate() {
                let step = if index == 0 { 'M' } else { 'L' };
                point(&mut path, step, self.middle(index), scale.y(*value));
            }
            for (index, value) in floor.iter().enumerate().rev() {
                point(&mut path, 'L', self.middle(index), scale.y(*value));
            }
            path.push('Z');
            areas.push(path);
            floor = ceiling;
        }
        areas
    }

    /// Returns labels of the time axis at whole minutes, hours or days.
    fn columns(&self) -> Vec<(f64, String, i64, &'static str)> {
        const STEPS_S: [i64; 13] =
            [60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 604_800];
        let (begin, end) = (self.begin().seconds(), self.end.seconds());
        let fits = |step: &&i64| (end - begin) / **step <= LABELS_MAX as i64;
        let step = STEPS_S.iter().find(fits).copied().unwrap_or((end - begin) / 5 + 1);
        let first = (begin.div_euclid(step) + 1) * step;
        let times = (0..).map(|index| first + index * step).take_while(|at| *at < end);
        times
            .map(|at| {
                let at = Timestamp(at * 1000);
                let (date, time) = date_and_time(at);
                let (text, form) =
                    if step >= 86_400 { (&date[5..], "date") } else { (&time[..5], "time") };
                (self.x(at), text.to_owned(), at.0, form)
            })
            // Leaves out labels that would cross the right edge.
            .filter(|(x, ..)| *x < WIDTH - RIGHT - 10.0)
            .collect()
    }

    fn legend(&self) -> Vec<(usize, &'static str, String)> {
        let latest = |series: &Series| {
            let value = series.values.iter().rev().copied().flatten().next();
            value.map_or_else(|| "–".to_owned(), |value| self.unit.text(value))
        };
        let named = self.series.iter().enumerate();
        named.map(|(index, series)| (index, series.name, latest(series))).collect()
    }

    /// Returns a description for screen readers.
    fn summary(&self) -> String {
        let (date, time) = date_and_time(self.begin());
        let mut text = format!("From {date} {time} UTC to {} UTC.", date_and_time(self.end).1);
        for series in &self.series {
            let known = series.values.iter().copied().flatten();
            let (low, high) = known
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                    (low.min(value), high.max(value))
                });
            if low <= high {
                let (low, high) = (self.unit.text(low), self.unit.text(high));
                // Writing to a string does not fail.
                let _ = write!(text, " {}: between {low} and {high}.", series.name);
            }
        }
        text
    }

    fn strips(&self) -> Vec<(f64, f64, i64, String)> {
        let strip = |index: usize| {
            let at = self.x(self.times[index]);
            let next = self.times.get(index + 1).copied().unwrap_or(self.end);
            let mut text = date_and_time(self.times[index]).1[..5].to_owned();
            let mut is_known = false;
            for series in &self.series {
                if let Some(value) = series.values.get(index).copied().flatten() {
                    // Writing to a string does not fail.
                    let _ = write!(text, "\n{}: {}", series.name, self.unit.text(value));
                    is_known = true;
                }
            }
            is_known.then(|| (at, self.x(next) - at, self.times[index].0, text))
        };
        (0..self.times.len()).filter_map(strip).collect()
    }
}

fn point(path: &mut String, step: char, x: f64, y: f64) {
    // Writing to a string does not fail.
    let _ = write!(path, "{step}{x:.1} {y:.1}");
}

/// The value axis.
struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
}

impl Scale {
    /// An axis from zero to a round number of at least `high`, in steps of at least `step_min`.
    fn linear(high: f64, step_min: f64) -> Self {
        let rough = (high / 4.0).max(step_min).max(1e-9);
        let decade = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|of| of * decade);
        let step = step.into_iter().find(|step| *step >= rough * 0.999).unwrap_or(decade * 10.0);
        // A series of zeros gets an axis too.
        let step = if high > 0.0 { step } else { 1.0 };
        let count = (high / step * 0.999).ceil().max(1.0) as u32;
        let ticks: Vec<f64> = (0..=count).map(|tick| f64::from(tick) * step).collect();
        Self { low: 0.0, high: f64::from(count) * step, is_log: false, ticks }
    }

    /// An axis between the round durations around `low` and `high`.
    fn logarithmic(low: f64, high: f64) -> Self {
        const ROUND_S: [f64; 11] =
            [0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0, 86_400.0, 864_000.0];
        let (low, high) = if low <= high { (low, high) } else { (0.01, 1.0) };
        let first = ROUND_S.iter().rposition(|tick| *tick <= low).unwrap_or(0);
        let last = ROUND_S.iter().position(|tick| *tick >= high).unwrap_or(ROUND_S.len() - 1);
        let (first, last) = (first.min(ROUND_S.len() - 2), last.max(first + 1));
        let last = last.min(ROUND_S.len() - 1);
        let ticks = ROUND_S[first..=last].to_vec();
        Self { low: ROUND_S[first], high: ROUND_S[last], is_log: true, ticks }
    }

    fn y(&self, value: f64) -> f64 {
        let share = match self.is_log {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share.clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(unit: Unit, is_stacked: bool, values: &[&[Option<f64>]]) -> String {
        let times = (0..values[0].len() as i64).map(|at| Timestamp(at * 60_000)).collect();
        let end = Timestamp(values[0].len() as i64 * 60_000);
        let names = ["one", "two"];
        let series = names.into_iter().zip(values);
        let series = series.map(|(name, values)| Series { name, values: values.to_vec() });
        Chart { title: "Rates", unit, is_stacked, times, end, series: series.collect() }.draw()
    }

    #[test]
    fn axes_end_at_round_numbers() {
        for (high, ticks) in [
            (0.0, &[0.0, 1.0][..]),
            (7.0, &[0.0, 2.0, 4.0, 6.0, 8.0]),
            (100.0, &[0.0, 25.0, 50.0, 75.0, 100.0]),
            (0.3, &[0.0, 0.1, 0.2, 0.3]),
        ] {
            let scale = Scale::linear(high, 0.0);
            assert_eq!(scale.ticks.len(), ticks.len(), "{high}: {:?}", scale.ticks);
            for (is, expect) in scale.ticks.iter().zip(ticks) {
                assert!((is - expect).abs() < 1e-9, "{high}: {:?}", scale.ticks);
            }
        }
        assert_eq!(Scale::linear(2.0, 1.0).ticks, [0.0, 1.0, 2.0], "jobs have no fractions");
        assert_eq!(Scale::logarithmic(0.02, 3.0).ticks, [0.01, 0.1, 1.0, 10.0]);
        assert_eq!(Scale::logarithmic(f64::INFINITY, 0.0).ticks.len(), 3);
        assert_eq!(Scale::logarithmic(1e9, 1e9).ticks.len(), 2);
        assert!(Scale::logarithmic(1e-9, 1e-9).ticks.len() >= 2);
    }

    #[test]
    fn missing_values_are_gaps_in_the_line() {
        let drawn = chart(Unit::PerSecond, false, &[&[Some(1.0), Some(2.0), None, Some(3.0)]]);
        let path = drawn.split("class=\"line s0\" d=\"").nth(1).expect("a line");
        let path = path.split('"').next().expect("its path");
        assert_eq!(path.matches('M').count(), 2, "{path}");
        assert_eq!(drawn.matches("h0").count(), 1, "a value between gaps is a dot: {drawn}");
        assert_eq!(drawn.matches("<rect").count(), 3, "one strip for each value: {drawn}");
        assert!(drawn.contains("between 1/s and 3/s"), "{drawn}");
    }

    #[test]
    fn stacked_series_add_up() {
        let one = [Some(1.0), None];
        let drawn = chart(Unit::Count, true, &[&one, &one]);
        let tops = Chart {
            title: "",
            unit: Unit::Count,
            is_stacked: true,
            times: vec![Timestamp(0), Timestamp(1)],
            end: Timestamp(2),
            series: vec![
                Series { name: "a", values: one.to_vec() },
                Series { name: "b", values: one.to_vec() },
            ],
        }
        .tops();
        assert_eq!(tops, [[Some(1.0), None], [Some(2.0), None]]);
        assert_eq!(drawn.matches("class=\"area").count(), 2, "{drawn}");
    }

    #[test]
    fn chart_without_data_says_so() {
        let drawn = chart(Unit::Latency, false, &[&[None, None]]);
        assert!(drawn.contains("No data"), "{drawn}");
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
    }
}
