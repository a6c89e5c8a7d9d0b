//! Samples of the queues.

use async_trait::async_trait;

use super::{
    SqlStore,
    calls::{Connection, Row, query},
    rows,
    sampler::sample,
};
use crate::{
    job::{QueueName, Timestamp},
    store::{
        StoreError,
        history::{Period, Point, QueueHistory, Sample, Snapshot, Subject},
        sampler::{self, State},
    },
};

/// Returns the columns of a queue; the empty name stands for all queues together.
pub(crate) fn names(queue: Option<&QueueName>) -> (&str, &str) {
    queue.map_or(("", ""), |queue| (&queue.model, &queue.format))
}

#[async_trait]
impl QueueHistory for SqlStore {
    async fn sample(&self) -> Result<bool, StoreError> {
        self.within(sample(self)).await
    }

    async fn snapshot(&self) -> Result<Option<Snapshot>, StoreError> {
        let found = query("SELECT taken_at, CAST(state AS text) AS state FROM sampler");
        let Some(row) = self.fetch_optional(found).await? else { return Ok(None) };
        let State { queues, .. } = rows::document(&row, "state")?;
        Ok(Some(Snapshot { at: rows::time(&row, "taken_at")?, queues }))
    }

    async fn samples(
        &self,
        queue: Option<&QueueName>,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError> {
        let (model, format) = names(queue);
        let found = query(
            "SELECT at, CAST(sample AS text) AS sample FROM samples
             WHERE model = $1 AND format = $2 AND period_s = $3 AND at >= $4 AND at < $5
             ORDER BY at",
        )
        .bind(model)
        .bind(format)
        .bind(period.length().as_secs() as i64)
        .bind(period.begin(from).0)
        .bind(to.0);
        self.fetch_all(found).await?.iter().map(point).collect()
    }

    async fn subject_samples(
        &self,
        subject: &Subject,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError> {
        let found = query(
            "SELECT at, CAST(sample AS text) AS sample FROM subject_samples
             WHERE kind = $1 AND name = $2 AND period_s = $3 AND at >= $4 AND at < $5
             ORDER BY at",
        )
        .bind(subject.kind())
        .bind(subject.name())
        .bind(period.length().as_secs() as i64)
        .bind(period.begin(from).0)
        .bind(to.0);
        self.fetch_all(found).await?.iter().map(point).collect()
    }
}

fn point(row: &Row) -> Result<Point, StoreError> {
    Ok(Point { at: rows::time(row, "at")?, sample: rows::document(row, "sample")? })
}

/// Adds a row of finished jobs: counts of a state, or one bucket of a latency.
pub(crate) fn observe(
    row: &Row,
    bucket: Option<usize>,
    sample: &mut Sample,
) -> Result<(), StoreError> {
    let (name, jobs): (&str, u64) = (rows::get(row, "name")?, rows::count(row, "jobs")?);
    // The sum of the latencies, in milliseconds, is in the column of the prompt tokens.
    let tokens = rows::count(row, "prompt_tokens")?;
    if let Some(bucket) = bucket {
        sampler::latency(sample, name, bucket, jobs, tokens);
    } else {
        sample.prompt_tokens += tokens;
        sample.completion_tokens += rows::count(row, "completion_tokens")?;
        sampler::finished(sample, name, jobs);
    }
    Ok(())
}

/// Deletes samples that are past the retention of their period.
pub(crate) async fn sweep(connection: &mut Connection, now: i64) -> Result<(), StoreError> {
    for period in Period::ALL {
        query("DELETE FROM samples WHERE period_s = $1 AND at < $2")
            .bind(period.length().as_secs() as i64)
            .bind(now.saturating_sub(rows::milliseconds(period.kept())))
            .execute(&mut *connection)
            .await?;
        query("DELETE FROM subject_samples WHERE period_s = $1 AND at < $2")
            .bind(period.length().as_secs() as i64)
            .bind(now.saturating_sub(rows::milliseconds(period.kept())))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}
