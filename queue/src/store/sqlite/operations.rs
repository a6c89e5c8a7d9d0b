//! What operators set and see: as in the servers' store, for one process.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sqlx::{Row as _, sqlite::SqliteRow};

use super::{
    SqliteStore, audit, classes, dead_letters,
    job_queries::{count, queue, time},
    rows::{self, from_json, text},
    sampler, unavailable, workers,
};
use crate::{
    dispatch::Quotas,
    job::{JobId, QueueName, Tenant},
    store::{
        Maintained, StoreError,
        classes::{ClassError, ResetClassError},
        operations::{
            DeadLetter, Directive, Erased, Heartbeat, Operations, Pace, QueueOverview, QueueState,
            RegisteredQueue, Replay, SILENT_KEPT, Worker,
        },
    },
};

fn settings(row: &SqliteRow) -> Result<QueueState, StoreError> {
    let limit_tokens: Option<i64> = row.try_get("limit_tokens").map_err(unavailable)?;
    Ok(QueueState {
        queue: queue(row)?,
        paused: row.try_get("paused").map_err(unavailable)?,
        limit_tokens: limit_tokens.map(i64::unsigned_abs),
        class: row.try_get("numerics_class").map_err(unavailable)?,
        allowed_classes: from_json("allowed_classes", &text(row, "allowed_classes")?)?,
    })
}

fn stored(tokens: Option<u64>) -> Option<i64> {
    tokens.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX))
}

impl SqliteStore {
    /// Sets one column of a queue's row.
    async fn set<'q, T>(
        &self,
        statement: &'static str,
        queue: &'q QueueName,
        value: T,
    ) -> Result<(), StoreError>
    where
        T: sqlx::Encode<'q, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite> + Send + 'q,
    {
        sqlx::query(statement)
            .bind(&queue.model)
            .bind(&queue.format)
            .bind(value)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
        Ok(())
    }
}

#[async_trait]
impl Operations for SqliteStore {
    async fn queue_state(&self, queue: &QueueName) -> Result<QueueState, StoreError> {
        let row = sqlx::query("SELECT * FROM queues WHERE model = ?1 AND format = ?2")
            .bind(&queue.model)
            .bind(&queue.format)
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
        row.as_ref().map_or_else(|| Ok(QueueState::with_defaults(queue.clone())), settings)
    }

    async fn queue_states(&self) -> Result<Vec<QueueState>, StoreError> {
        let found = sqlx::query("SELECT * FROM queues ORDER BY model, format")
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        found.iter().map(settings).collect()
    }

    async fn set_paused(&self, queue: &QueueName, paused: bool) -> Result<(), StoreError> {
        let statement = "INSERT INTO queues (model, format, paused) VALUES (?1, ?2, ?3)
             ON CONFLICT (model, format) DO UPDATE SET paused = excluded.paused";
        self.set(statement, queue, paused).await
    }

    async fn set_limit(
        &self,
        queue: &QueueName,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        let statement = "INSERT INTO queues (model, format, limit_tokens) VALUES (?1, ?2, ?3)
             ON CONFLICT (model, format) DO UPDATE SET limit_tokens = excluded.limit_tokens";
        self.set(statement, queue, stored(limit_tokens)).await
    }

    async fn quotas(&self, queue: &QueueName) -> Result<Quotas, StoreError> {
        // The queue's own row has no tenant.
        let found = sqlx::query(
            "SELECT NULL AS tenant, limit_tokens, tenant_limit_tokens FROM queues
             WHERE model = ?1 AND format = ?2
             UNION ALL
             SELECT tenant, limit_tokens, NULL FROM tenant_quotas WHERE model = ?1 AND format = ?2",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut quotas = Quotas::default();
        for row in &found {
            let tokens = |column| -> Result<Option<u64>, StoreError> {
                let tokens: Option<i64> = row.try_get(column).map_err(unavailable)?;
                Ok(tokens.map(i64::unsigned_abs))
            };
            match row.try_get::<Option<String>, _>("tenant").map_err(unavailable)? {
                Some(tenant) => {
                    let limit = tokens("limit_tokens")?;
                    quotas.tenants.extend(limit.map(|limit| (Tenant(tenant), limit)));
                }
                None => {
                    quotas.tokens = tokens("limit_tokens")?;
                    quotas.each_tenant = tokens("tenant_limit_tokens")?;
                }
            }
        }
        Ok(quotas)
    }

    async fn set_quota(
        &self,
        queue: &QueueName,
        tenant: Option<&Tenant>,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        let Some(tenant) = tenant else {
            let statement = "INSERT INTO queues (model, format, tenant_limit_tokens)
                 VALUES (?1, ?2, ?3) ON CONFLICT (model, format)
                 DO UPDATE SET tenant_limit_tokens = excluded.tenant_limit_tokens";
            return self.set(statement, queue, stored(limit_tokens)).await;
        };
        let query = match limit_tokens {
            None => sqlx::query(
                "DELETE FROM tenant_quotas WHERE model = ?1 AND format = ?2 AND tenant = ?3",
            ),
            Some(_) => sqlx::query(
                "INSERT INTO tenant_quotas (model, format, tenant, limit_tokens)
                 VALUES (?1, ?2, ?3, ?4) ON CONFLICT (model, format, tenant)
                 DO UPDATE SET limit_tokens = excluded.limit_tokens",
            ),
        };
        let query = query.bind(&queue.model).bind(&queue.format).bind(&tenant.0);
        let query = match limit_tokens {
            None => query,
            limit => query.bind(stored(limit)),
        };
        query.execute(&self.pool).await.map_err(unavailable)?;
        Ok(())
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
        let registered = |row| Ok(RegisteredQueue { queue: queue(row)?, at: time(row, "at")? });
        found.iter().map(registered).collect()
    }

    async fn reset_class(&self, queue: &QueueName) -> Result<Option<String>, ResetClassError> {
        classes::reset(self, queue).await
    }

    async fn queues(&self) -> Result<Vec<QueueOverview>, StoreError> {
        let mut tx = self.begin().await?;
        let now = self.now();
        let counted = sqlx::query(
            "SELECT model, format, state, count(*) AS jobs, min(submitted_at) AS oldest,
                    count(*) FILTER (WHERE expires_at <= ?1) AS overdue,
                    coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
                    coalesce(sum(completion_tokens), 0) AS completion_tokens
             FROM jobs LEFT JOIN results ON job_id = id GROUP BY model, format, state",
        )
        .bind(now.0)
        .fetch_all(&mut *tx)
        .await
        .map_err(unavailable)?;
        let set = sqlx::query("SELECT * FROM queues").fetch_all(&mut *tx).await;
        let mut overviews: BTreeMap<QueueName, QueueOverview> = BTreeMap::new();
        for row in &set.map_err(unavailable)? {
            let settings = settings(row)?;
            overviews.insert(settings.queue.clone(), QueueOverview::of(settings));
        }
        for row in &counted {
            let (queue, state) = (queue(row)?, rows::state(row)?);
            let overview = overviews
                .entry(queue.clone())
                .or_insert_with(|| QueueOverview::of(QueueState::with_defaults(queue)));
            *overview.progress.counter(state) = count(row, "jobs")?;
            overview.progress.prompt_tokens += count(row, "prompt_tokens")?;
            overview.progress.completion_tokens += count(row, "completion_tokens")?;
            match state.as_str() {
                "queued" => overview.oldest_queued = Some(now.since(time(row, "oldest")?)),
                "scheduled" | "retrying" => {}
                _ => continue,
            }
            overview.overdue += count(row, "overdue")?;
        }
        for (queue, workers, _) in workers::serving(&mut tx, now.before(Worker::SILENT_MAX)).await?
        {
            if let Some(overview) = overviews.get_mut(&queue) {
                overview.workers = workers;
            }
        }
        Ok(overviews.into_values().collect())
    }

    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError> {
        let mut tx = self.begin().await?;
        let directive = workers::heartbeat(&mut tx, heartbeat, self.now()).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(directive)
    }

    async fn workers(&self) -> Result<Vec<Worker>, StoreError> {
        workers::list(&self.pool, self.now()).await
    }

    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError> {
        workers::request_drain(&self.pool, owner).await
    }

    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        workers::forget_where(&mut tx, Some(owner), None).await?;
        tx.commit().await.map_err(unavailable)
    }

    /// Nothing here goes by the day: it forgets silent workers and old samples.
    async fn maintain(&self) -> Result<Maintained, StoreError> {
        let mut tx = self.begin().await?;
        let now = self.now();
        workers::forget_where(&mut tx, None, Some(now.before(SILENT_KEPT))).await?;
        sampler::sweep(&mut tx, now).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(Maintained::default())
    }

    async fn dead_letters(
        &self,
        queue: &QueueName,
        limit: u32,
        after: Option<JobId>,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        dead_letters::list(self, queue, limit, after).await
    }

    async fn replay(&self, ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError> {
        dead_letters::replay(self, ids, pace).await
    }

    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let purged = dead_letters::purge(&mut tx, ids).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(purged)
    }

    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError> {
        audit::erase(self, tenant).await
    }

    async fn sample(&self) -> Result<bool, StoreError> {
        sampler::sample(self).await
    }
}
