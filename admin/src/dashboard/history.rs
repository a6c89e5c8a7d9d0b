//! Charts of one queue, of all queues together, of a tenant or of a worker, over time.

use std::time::Duration;

use serde::Deserialize;

use tritmill_queue::{
    QueueName, StoreError, Timestamp,
    store::history::{Histogram, Period, Point, Sample, Subject},
};

use super::{
    chart::{Chart, Series, Unit},
    filters,
};
use crate::{ApiError, App};

/// Most columns of a chart.
const COLUMNS_MAX: usize = 96;

/// Time span of a chart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    /// Word in URLs.
    pub word: &'static str,
    /// Name on pages.
    pub name: &'static str,
    length: Duration,
}

const HOUR: u64 = 3600;

impl Span {
    /// All time spans, the shortest first.
    pub const ALL: [Self; 5] = [
        Self { word: "15m", name: "15 min", length: Duration::from_secs(HOUR / 4) },
        Self { word: "1h", name: "1 h", length: Duration::from_secs(HOUR) },
        Self { word: "6h", name: "6 h", length: Duration::from_secs(6 * HOUR) },
        Self { word: "2d", name: "2 days", length: Duration::from_secs(48 * HOUR) },
        Self { word: "30d", name: "30 days", length: Duration::from_secs(30 * 24 * HOUR) },
    ];

    /// Returns the time span of a word, by default the shortest.
    fn parse(word: &str) -> Self {
        Self::ALL.into_iter().find(|span| span.word == word).unwrap_or(Self::ALL[0])
    }
}

/// A time span, or a range of time in UTC, as in URLs.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RangeQuery {
    span: String,
    from: String,
    to: String,
}

/// The time that charts show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Range {
    /// Until now.
    Span(Span),
    /// From a time until another, in whole minutes.
    Zoomed { from: Timestamp, to: Timestamp },
}

impl Range {
    /// Parses the range of a URL.
    pub fn parse(query: &RangeQuery) -> Result<Self, ApiError> {
        if query.from.is_empty() && query.to.is_empty() {
            return Ok(Self::Span(Span::parse(&query.span)));
        }
        let (from, to) = (filters::minute("from", &query.from)?, filters::minute("to", &query.to)?);
        if from >= to {
            return Err(ApiError::invalid_value("to", "to must be later than from"));
        }
        Ok(Self::Zoomed { from, to })
    }

    /// Whether it is this time span.
    pub fn is(&self, span: &Span) -> bool {
        *self == Self::Span(*span)
    }

    /// Its ends as a form has them; empty for a time span.
    pub fn ends(&self) -> [String; 2] {
        match self {
            Self::Span(_) => Default::default(),
            Self::Zoomed { from, to } => [*from, *to].map(filters::minute_text),
        }
    }

    /// Its query, for links to the same range.
    pub fn query(&self) -> String {
        match self {
            Self::Span(span) => format!("span={}", span.word),
            Self::Zoomed { .. } => {
                let [from, to] = self.ends();
                format!("from={from}&to={to}")
            }
        }
    }

    /// Returns the period of its samples, and its ends at whole periods that have passed.
    fn samples(&self, now: Timestamp) -> (Period, Timestamp, Timestamp) {
        match *self {
            Self::Span(span) => {
                let period = Period::for_span(span.length);
                // Without the current period: its incomplete counts would look like a drop.
                let to = period.begin(now);
                (period, period.begin(Timestamp(to.0 - milliseconds(span.length))), to)
            }
            Self::Zoomed { from, to } => {
                // A range in the future is empty.
                let to = to.min(now);
                let from = from.min(to);
                let long = Period::for_span(to.since(from));
                let is_kept = |period: &Period| *period >= long && period.kept() >= now.since(from);
                let period = Period::ALL.into_iter().find(is_kept).unwrap_or(Period::Hour);
                (period, period.begin(from), period.begin(to))
            }
        }
    }
}

/// Returns the charts of a queue, or of all queues together.
pub(super) async fn charts(
    app: &App,
    queue: Option<&QueueName>,
    range: Range,
    now: Timestamp,
) -> Result<Vec<Chart>, StoreError> {
    let (period, from, to) = range.samples(now);
    let points = app.store.samples(queue, period, from, to).await?;
    Ok(Columns::new(&points, period, from, to).charts())
}

/// Returns the charts of a tenant or worker. They have no samples of seconds.
pub(super) async fn subject_charts(
    app: &App,
    subject: &Subject,
    range: Range,
    now: Timestamp,
) -> Result<Vec<Chart>, StoreError> {
    let (period, from, to) = match range.samples(now) {
        (Period::Seconds, from, to) => {
            (Period::Minute, Period::Minute.begin(from), Period::Minute.begin(to))
        }
        longer => longer,
    };
    let points = app.store.subject_samples(subject, period, from, to).await?;
    let columns = Columns::new(&points, period, from, to);
    Ok(match subject {
        Subject::Tenant(_) => columns.over_all_time().charts_of_tenant(),
        Subject::Worker(_) => columns.charts_of_worker(),
    })
}

/// Returns the sum of all queues over the last minute.
pub(super) async fn last_minute(app: &App, now: Timestamp) -> Result<Sample, StoreError> {
    let from = Timestamp(now.0 - milliseconds(Duration::from_secs(60)));
    let points = app.store.samples(None, Period::Seconds, from, now).await?;
    Ok(points.iter().fold(Sample::default(), |mut sum, point| {
        sum.merge(&point.sample);
        sum
    }))
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Samples in columns of equal length. A column without samples stands for a time without jobs.
struct Columns {
    times: Vec<Timestamp>,
    end: Timestamp,
    samples: Vec<Sample>,
}

impl Columns {
    fn new(points: &[Point], period: Period, from: Timestamp, to: Timestamp) -> Self {
        let length = milliseconds(period.length());
        let periods = usize::try_from((to.0 - from.0) / length).unwrap_or(0).max(1);
        let step = length * periods.div_ceil(COLUMNS_MAX) as i64;
        let count = ((to.0 - from.0) as u64).div_ceil(step as u64) as usize;
        let mut samples = vec![Sample::default(); count];
        for point in points {
            let column = usize::try_from((point.at.0 - from.0) / step).ok();
            if let Some(sample) = column.and_then(|column| samples.get_mut(column)) {
                sample.merge(&point.sample);
            }
        }
        let times = (0..count as i64).map(|column| Timestamp(from.0 + column * step)).collect();
        Self { times, end: to, samples }
    }

    /// Lets rates be over the whole time of a column: samples of tenants cover only the time in which jobs ended.
    fn over_all_time(mut self) -> Self {
        let ends = self.times.iter().skip(1).chain([&self.end]);
        for ((sample, begin), end) in self.samples.iter_mut().zip(&self.times).zip(ends) {
            sample.covered_ms = end.0.saturating_sub(begin.0).max(1).unsigned_abs();
        }
        self
    }

    fn series(&self, name: &'static str, of: impl Fn(&Sample) -> Option<f64>) -> Series {
        Series { name, values: self.samples.iter().map(of).collect() }
    }

    fn rate(&self, name: &'static str, of: impl Fn(&Sample) -> u64) -> Series {
        self.series(name, |sample| Some(sample.per_second(of(sample))))
    }

    fn chart(&self, title: &'static str, unit: Unit, series: Vec<Series>) -> Chart {
        let (times, end) = (self.times.clone(), self.end);
        Chart { title, unit, is_stacked: false, times, end, series }
    }

    fn latencies(&self, title: &'static str, of: impl Fn(&Sample) -> &Histogram) -> Chart {
        let quantile = |name, share| {
            self.series(name, |sample| {
                of(sample).quantile(share).map(|latency| latency.as_secs_f64())
            })
        };
        let series = vec![quantile("p50", 0.5), quantile("p95", 0.95), quantile("p99", 0.99)];
        self.chart(title, Unit::Latency, series)
    }

    fn tokens(&self) -> Chart {
        let series = vec![
            self.rate("decode", |sample| sample.completion_tokens),
            self.rate("prefill", |sample| sample.prompt_tokens),
        ];
        self.chart("Tokens", Unit::PerSecond, series)
    }

    fn finished(&self) -> Chart {
        let series = vec![
            self.rate("completed", |sample| sample.completed),
            self.rate("failed", |sample| sample.failed),
        ];
        self.chart("Throughput", Unit::PerSecond, series)
    }

    fn share(
        &self,
        title: &'static str,
        name: &'static str,
        of: impl Fn(&Sample) -> Option<f64>,
    ) -> Chart {
        // For a moment, a worker may hold a job more than it has slots.
        let series = self.series(name, |sample| of(sample).map(|share| share.min(1.0)));
        self.chart(title, Unit::Share, vec![series])
    }

    fn errors(&self) -> Chart {
        let count =
            |name, of: fn(&Sample) -> u64| self.series(name, move |sample| Some(of(sample) as f64));
        let errors = vec![
            count("failed", |sample| sample.failed),
            count("expired", |sample| sample.expired),
            count("cancelled", |sample| sample.cancelled),
        ];
        Chart { is_stacked: true, ..self.chart("Failed, expired, cancelled", Unit::Count, errors) }
    }

    fn charts_of_tenant(&self) -> Vec<Chart> {
        vec![
            self.finished(),
            self.tokens(),
            self.latencies("Queue wait", |sample| &sample.latencies.start),
            self.latencies("Run time", |sample| &sample.latencies.run),
            self.latencies("Time to first token", |sample| &sample.latencies.first_token),
            self.errors(),
        ]
    }

    fn charts_of_worker(&self) -> Vec<Chart> {
        vec![
            self.tokens(),
            self.finished(),
            self.share("Slots in use", "slots", Sample::batch_fill),
            self.share("KV blocks in use", "blocks", Sample::kv_fill),
            self.share("Busy", "steps", Sample::utilisation),
            self.latencies("Run time", |sample| &sample.latencies.run),
        ]
    }

    fn charts(&self) -> Vec<Chart> {
        vec![
            self.chart(
                "Throughput",
                Unit::PerSecond,
                vec![
                    self.rate("completed", |sample| sample.completed),
                    self.rate("submitted", |sample| sample.arrived),
                ],
            ),
            self.chart(
                "Queued",
                Unit::Count,
                vec![self.series("jobs", |sample| Some(sample.queued_mean()))],
            ),
            self.latencies("Queue wait", |sample| &sample.latencies.start),
            self.latencies("Run time", |sample| &sample.latencies.run),
            self.latencies("Time to first token", |sample| &sample.latencies.first_token),
            self.tokens(),
            self.share("Batch fill", "fill", Sample::batch_fill),
            self.errors(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zoomed_range_takes_the_finest_samples_that_are_kept() {
        let query = |from: &str, to: &str| RangeQuery {
            from: from.to_owned(),
            to: to.to_owned(),
            ..RangeQuery::default()
        };
        let now = filters::minute("now", "2026-11-28T12:00").expect("a minute");
        let check = |from: &str, to: &str, expect: Period| {
            let range = Range::parse(&query(from, to)).expect("a range");
            let (period, begin, end) = range.samples(now);
            assert_eq!(period, expect, "{from} {to}");
            assert!(begin <= end && end <= now, "{from} {to}");
            assert_eq!(range.ends(), [from, to]);
        };
        check("2026-11-28T11:00", "2026-11-28T11:10", Period::Seconds);
        check("2026-11-28T11:00", "2026-11-29T11:10", Period::Seconds);
        check("2026-11-27T11:00", "2026-11-27T11:10", Period::Minute);
        check("2026-11-20T11:00", "2026-11-20T11:10", Period::Hour);
        check("2027-01-01T00:00", "2027-01-01T01:00", Period::Seconds);
        for (from, to) in
            [("", "2026-11-28T11:00"), ("x", "y"), ("2026-11-28T11:00", "2026-11-28T11:00")]
        {
            assert!(Range::parse(&query(from, to)).is_err(), "{from} {to}");
        }
    }

    #[test]
    fn samples_are_summed_in_columns_of_equal_length() {
        let at = |seconds: i64, completed| Point {
            at: Timestamp(seconds * 1000),
            sample: Sample { completed, covered_ms: 10_000, looks: 1, ..Sample::default() },
        };
        let points = [at(0, 1), at(10, 2), at(3580, 3), at(3600, 9)];
        let columns = Columns::new(&points, Period::Seconds, Timestamp(0), Timestamp(3_600_000));
        assert!(columns.samples.len() <= COLUMNS_MAX, "{}", columns.samples.len());
        assert_eq!(columns.samples[0].completed, 3, "two periods are one column");
        assert_eq!(columns.samples.last().map(|sample| sample.completed), Some(3));
        let charts = columns.charts();
        assert_eq!(charts.len(), 8);
        // 96 columns of 40 s at most: of a tenant, the rate is over a whole column.
        let ended = columns.over_all_time().charts_of_tenant();
        assert_eq!(ended[0].series[0].values[0], Some(3.0 / 40.0));
        assert!(charts.iter().all(|chart| !chart.draw().contains("NaN")));
    }
}
