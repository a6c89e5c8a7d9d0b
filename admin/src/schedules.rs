//! [`Scheduler`]: creates the batches of schedules when they are due.
//!
//! A run creates its batch under an idempotency key of the schedule and the time, and then writes the time of the next run.
//! So any number of processes may look for due runs: each run creates one batch, whatever dies in between. Runs that were
//! due while nothing looked are made up for by one run; the others are counted as missed.

use std::time::Duration;

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use croner::{
    Cron,
    parser::{CronParser, Seconds, Year},
};
use tokio::{sync::watch, time::sleep};
use tritmill_queue::{StoreError, Timestamp};

use crate::{
    ApiError, App, Caller,
    openai::batches::create_batch,
    store::{
        KeyRole,
        schedules::{Schedule, ScheduleRecord},
    },
};

/// Pause between two looks for due runs.
const POLL: Duration = Duration::from_secs(1);
/// Due runs of a look.
const DUE_MAX: u32 = 16;
/// Missed runs that are counted at once.
const MISSED_MAX: u64 = 100_000;

/// The times of a schedule.
#[derive(Debug, Clone)]
pub(crate) struct Times {
    cron: Cron,
    zone: Tz,
}

impl Times {
    /// Parses five fields of cron and the name of a time zone.
    ///
    /// # Errors
    /// Names the invalid field.
    pub fn parse(cron: &str, timezone: &str) -> Result<Self, ApiError> {
        let invalid = |problem: String| ApiError::invalid_value("cron", format!("cron {problem}"));
        let parser =
            CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
        let cron = parser.parse(cron).map_err(|error| {
            invalid(format!("must have five fields, such as '30 6 * * 1-5': {error}"))
        })?;
        let zone: Tz = timezone.parse().map_err(|_| {
            let message = "timezone must be a name of the IANA database, such as Europe/Berlin";
            ApiError::invalid_value("timezone", message)
        })?;
        Ok(Self { cron, zone })
    }

    /// Returns the first time after another one; `None` if there is none.
    pub fn after(&self, at: Timestamp) -> Option<Timestamp> {
        let at: DateTime<Utc> = DateTime::from_timestamp_millis(at.0)?;
        let next = self.cron.find_next_occurrence(&at.with_timezone(&self.zone), false).ok()?;
        Some(Timestamp(next.timestamp_millis()))
    }

    /// Returns how many times there are after a time and up to another one.
    fn between(&self, after: Timestamp, to: Timestamp) -> u64 {
        let (mut count, mut at) = (0, after);
        while let Some(next) = self.after(at).filter(|next| *next <= to) {
            (count, at) = (count + 1, next);
            if count == MISSED_MAX {
                break;
            }
        }
        count
    }
}

/// Makes the due runs of schedules.
pub struct Scheduler {
    app: App,
}

impl Scheduler {
    /// A scheduler of a service.
    pub fn new(app: App) -> Self {
        Self { app }
    }

    /// Runs until `stop` is true or its sender is dropped.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(POLL) => {}
            }
            if let Err(error) = self.run_due().await {
                tracing::warn!(%error, "cannot run schedules, trying again");
            }
        }
    }

    /// Makes the runs that are due now.
    ///
    /// # Errors
    /// If the store fails: the runs are made at the next call.
    pub async fn run_due(&self) -> Result<(), StoreError> {
        for schedule in self.app.store.due_schedules(DUE_MAX).await? {
            self.run_one(schedule).await?;
        }
        Ok(())
    }

    async fn run_one(&self, mut schedule: Schedule) -> Result<(), StoreError> {
        let Some(due) = schedule.next_at else { return Ok(()) };
        let now = self.app.store.now().await?;
        let caller = Caller {
            key: schedule.key,
            name: schedule.id.to_string(),
            tenant: schedule.tenant.clone(),
            role: KeyRole::Submit,
            address: None,
        };
        let key = format!("{}:{}", schedule.id, due.0);
        let created =
            create_batch(&self.app, &caller, schedule.record.batch.clone(), Some(key)).await;
        let ScheduleRecord { cron, timezone, .. } = &schedule.record;
        let times = Times::parse(cron, timezone).ok();
        let record = &mut schedule.record;
        record.last_run_at = Some(now);
        match created {
            Ok(batch) => (record.last_batch, record.error) = (Some(batch.id), None),
            // Tried again at the next look, with the same key.
            Err(error) if error.status().is_server_error() => {
                tracing::warn!(schedule = %schedule.id, error = error.message(), "a run failed, trying again");
                return Ok(());
            }
            Err(error) => {
                tracing::warn!(schedule = %schedule.id, "a run created no batch");
                record.error = Some(error.message().to_owned());
            }
        }
        if let Some(times) = times {
            record.missed += times.between(due, now);
            schedule.next_at = times.after(now);
        } else {
            schedule.next_at = None;
        }
        // Another process or the tenant may have been first.
        self.app.store.save_schedule(&schedule, Some(due)).await.map(drop)
    }
}

/// Returns an error about the batch of a schedule: its field is in `batch`.
pub(crate) fn named_in_batch(error: ApiError) -> ApiError {
    match error.param().map(|param| format!("batch.{param}")) {
        Some(param) => error.at(param),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time in UTC.
    fn at(text: &str) -> Timestamp {
        let time: DateTime<Utc> = text.parse().expect("a time");
        Timestamp(time.timestamp_millis())
    }

    #[test]
    fn times_follow_the_clocks_of_their_zone() {
        let times = Times::parse("30 6 * * *", "Europe/Berlin").expect("times");
        let next = |from: &str| times.after(at(from));
        assert_eq!(next("2026-11-28T05:29:59Z"), Some(at("2026-11-28T05:30:00Z")));
        assert_eq!(next("2026-11-28T05:30:00Z"), Some(at("2026-11-29T05:30:00Z")));
        // Summer time begins in between.
        assert_eq!(next("2027-03-27T12:00:00Z"), Some(at("2027-03-28T04:30:00Z")));
        assert_eq!(times.between(at("2026-11-01T00:00:00Z"), at("2026-11-04T00:00:00Z")), 3);
        // An hour that the clocks skip, and one that they repeat, have one run each.
        let night = Times::parse("30 2 * * *", "Europe/Berlin").expect("times");
        assert_eq!(night.between(at("2027-03-27T23:00:00Z"), at("2027-03-28T22:00:00Z")), 1);
        assert_eq!(night.between(at("2026-10-24T22:00:00Z"), at("2026-10-25T23:00:00Z")), 1);
    }

    #[test]
    fn times_that_cannot_be_used_are_named() {
        let param = |cron: &str, zone: &str| {
            let error = Times::parse(cron, zone).expect_err("invalid");
            error.param().map(str::to_owned)
        };
        for cron in ["", "* * * *", "0 0 * * * *", "61 * * * *", "* * * * mon-", "@never"] {
            assert_eq!(param(cron, "UTC").as_deref(), Some("cron"), "{cron}");
        }
        assert_eq!(param("* * * * *", "Europe/Atlantis").as_deref(), Some("timezone"));
        let never = Times::parse("0 0 30 2 *", "UTC").expect("five fields");
        assert_eq!(never.after(at("2026-01-01T00:00:00Z")), None);
    }
}
