//! Queues; the other operations are next door.

use async_trait::async_trait;
use sqlx::postgres::PgRow;

use super::{
    PostgresStore, audit, classes, dead_letters, milliseconds, quotas, rows, sampler, unavailable,
    workers,
};
use crate::{
    dispatch::Quotas,
    job::{JobId, QueueName, Tenant},
    store::{
        Maintained, Progress, StoreError,
        classes::{ClassError, ResetClassError},
        operations::{
            DeadLetter, Directive, Erased, Heartbeat, Operations, Pace, QueueOverview, QueueState,
            RegisteredQueue, Replay, Worker,
        },
    },
};

#[async_trait]
impl Operations for PostgresStore {
    async fn maintain(&self) -> Result<Maintained, StoreError> {
        Self::maintain(self).await
    }

    async fn queue_state(&self, queue: &QueueName) -> Result<QueueState, StoreError> {
        let row = sqlx::query(
            "SELECT model, format, paused, limit_tokens, numerics_class, allowed_classes
             FROM queues
             WHERE model = $1 AND format = $2",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .fetch_optional(&self.pool)
        .await
        .map_err(unavailable)?;
        row.as_ref().map_or_else(|| Ok(QueueState::with_defaults(queue.clone())), settings)
    }

    async fn set_paused(&self, queue: &QueueName, paused: bool) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO queues (model, format, paused) VALUES ($1, $2, $3)
             ON CONFLICT (model, format) DO UPDATE SET paused = excluded.paused",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(paused)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(())
    }

    async fn set_limit(
        &self,
        queue: &QueueName,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO queues (model, format, limit_tokens) VALUES ($1, $2, $3)
             ON CONFLICT (model, format) DO UPDATE SET limit_tokens = excluded.limit_tokens",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(limit_tokens.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX)))
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(())
    }

    async fn quotas(&self, queue: &QueueName) -> Result<Quotas, StoreError> {
        quotas::read(&self.pool, queue).await
    }

    async fn set_quota(
        &self,
        queue: &QueueName,
        tenant: Option<&Tenant>,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        quotas::set(&self.pool, queue, tenant, limit_tokens).await
    }

    async fn register_class(&self, queue: &QueueName, class: &str) -> Result<(), ClassError> {
        classes::register(self, queue, class).await
    }

    async fn allow_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError> {
        classes::allow(self, queue, class).await
    }

    async fn withdraw_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError> {
        classes::withdraw(self, queue, class).await
    }

    async fn registered_queues(&self) -> Result<Vec<RegisteredQueue>, StoreError> {
        let found = sqlx::query(
            "SELECT model, format, coalesce(registered_at, 0) AS at FROM queues WHERE numerics_class IS NOT NULL
             ORDER BY registered_at NULLS FIRST, model, format",
        )
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let registered =
            |row| Ok(RegisteredQueue { queue: rows::queue(row)?, at: rows::time(row, "at")? });
        found.iter().map(registered).collect()
    }

    async fn reset_class(&self, queue: &QueueName) -> Result<Option<String>, ResetClassError> {
        classes::reset(self, queue).await
    }

    async fn queues(&self) -> Result<Vec<QueueOverview>, StoreError> {
        let found = sqlx::query(
            "WITH counted AS (
                 SELECT model, format,
                        count(*) FILTER (WHERE state = 'scheduled') AS scheduled,
                        count(*) FILTER (WHERE state = 'queued') AS queued,
                        count(*) FILTER (WHERE state = 'running') AS running,
                        count(*) FILTER (WHERE state = 'retrying') AS retrying,
                        count(*) FILTER (WHERE state = 'completed') AS completed,
                        count(*) FILTER (WHERE state = 'failed') AS failed,
                        count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
                        count(*) FILTER (WHERE state = 'expired') AS expired,
                        count(*) FILTER (WHERE expires_at <= store_now_ms($1)
                            AND state IN ('scheduled', 'queued', 'retrying')) AS overdue,
                        store_now_ms($1) - min(submitted_at) FILTER (WHERE state = 'queued')
                            AS oldest_queued
                 FROM jobs GROUP BY model, format
             ), serving AS (
                 SELECT model COLLATE \"C\" AS model, format COLLATE \"C\" AS format,
                        count(*) AS workers
                 FROM workers WHERE seen_at >= store_now_ms($1) - $2 GROUP BY 1, 2
             ), used AS (
                 SELECT model, format, sum(prompt_tokens)::bigint AS prompt_tokens,
                        sum(completion_tokens)::bigint AS completion_tokens
                 FROM results GROUP BY model, format
             )
             SELECT model, format, coalesce(paused, false) AS paused, limit_tokens,
                    numerics_class, coalesce(allowed_classes, '{}') AS allowed_classes, scheduled, queued, running, retrying, completed, failed,
                    cancelled, expired, overdue, workers, oldest_queued, prompt_tokens,
                    completion_tokens
             FROM counted FULL JOIN queues USING (model, format)
                  LEFT JOIN used USING (model, format)
                  LEFT JOIN serving USING (model, format)
             ORDER BY model, format",
        )
        .bind(self.given_now())
        .bind(milliseconds(Worker::SILENT_MAX))
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        found.iter().map(overview).collect()
    }

    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError> {
        workers::heartbeat(&self.pool, heartbeat, self.given_now()).await
    }

    async fn workers(&self) -> Result<Vec<Worker>, StoreError> {
        workers::list(&self.pool, self.given_now()).await
    }

    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError> {
        workers::request_drain(&self.pool, owner).await
    }

    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError> {
        workers::forget(&self.pool, owner).await
    }

    async fn dead_letters(
        &self,
        queue: &QueueName,
        limit: u32,
        after: Option<JobId>,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        dead_letters::list(&self.pool, queue, limit, after).await
    }

    async fn replay(&self, ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError> {
        dead_letters::replay(&self.pool, ids, pace, self.given_now()).await
    }

    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        dead_letters::purge(&self.pool, ids).await
    }

    async fn sample(&self) -> Result<bool, StoreError> {
        self.within(sampler::sample(&self.pool, self.given_now())).await
    }

    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError> {
        let mut connection = self.pool.acquire().await.map_err(unavailable)?;
        audit::erase(&mut connection, tenant).await
    }

    async fn queue_states(&self) -> Result<Vec<QueueState>, StoreError> {
        let found = sqlx::query(
            "SELECT model, format, paused, limit_tokens, numerics_class, allowed_classes
             FROM queues
             ORDER BY model, format",
        )
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        found.iter().map(settings).collect()
    }
}

fn settings(row: &PgRow) -> Result<QueueState, StoreError> {
    let limit_tokens: Option<i64> = rows::get(row, "limit_tokens")?;
    Ok(QueueState {
        queue: rows::queue(row)?,
        paused: rows::get(row, "paused")?,
        limit_tokens: limit_tokens.map(i64::unsigned_abs),
        class: rows::get(row, "numerics_class")?,
        allowed_classes: rows::get(row, "allowed_classes")?,
    })
}

fn overview(row: &PgRow) -> Result<QueueOverview, StoreError> {
    // A queue without jobs has no row to count.
    let count = |column| Ok(rows::get::<Option<i64>>(row, column)?.map_or(0, i64::unsigned_abs));
    let oldest_queued: Option<i64> = rows::get(row, "oldest_queued")?;
    Ok(QueueOverview {
        settings: settings(row)?,
        progress: Progress {
            scheduled: count("scheduled")?,
            queued: count("queued")?,
            running: count("running")?,
            retrying: count("retrying")?,
            completed: count("completed")?,
            failed: count("failed")?,
            cancelled: count("cancelled")?,
            expired: count("expired")?,
            prompt_tokens: count("prompt_tokens")?,
            completion_tokens: count("completion_tokens")?,
        },
        oldest_queued: oldest_queued.map(rows::duration),
        overdue: count("overdue")?,
        workers: count("workers")?,
    })
}
