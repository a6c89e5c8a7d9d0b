//! Workers: one row per process incarnation. The statement that deletes a worker adds its fault counters
//! to the totals, so that each is counted once.

use async_trait::async_trait;
use sqlx::{PgConnection, postgres::PgRow};

use super::{
    PostgresStore,
    calls::query,
    classes::classes,
    rows::{self, milliseconds},
};
use crate::{
    job::QueueName,
    store::{
        Serving, StoreError,
        attempts::{AWAY_AFTER, AWAY_LEASE},
        workers::{Directive, Heartbeat, Integrity, Leadership, Worker, WorkerMetrics, Workers},
    },
};

/// Records a heartbeat. Also notes that the store was reached, as a reconciler does: see `PULSE`. Takes
/// the roles that the worker has or that are free; gives them up if it drains.
const HEARTBEAT: &str = "
WITH clock AS (SELECT store_now_ms($1) AS now), before AS MATERIALIZED (
    SELECT at FROM pulse WHERE at < (SELECT now FROM clock) - 1000
    FOR NO KEY UPDATE SKIP LOCKED
), pulsed AS (
    UPDATE pulse SET at = (SELECT now FROM clock) FROM before
), extended AS (
    UPDATE open_jobs SET lease_until = (SELECT now FROM clock) + $13
    WHERE (SELECT at FROM before) + $12 < (SELECT now FROM clock)
      AND state = 'running' AND lease_until < (SELECT now FROM clock) + $13
    RETURNING id
), extended_workers AS (
    UPDATE worker_leases SET until = (SELECT now FROM clock) + $13
    WHERE (SELECT at FROM before) + $12 < (SELECT now FROM clock)
      AND until < (SELECT now FROM clock) + $13
    RETURNING owner
), beat AS (
    INSERT INTO workers (owner, model, format, host, pid, started_at, seen_at, running, slots,
                         draining, tokens_per_s, vitals)
    SELECT $2, $3, $4, $5, $6, now, now, $7, $8, $9, $10, $11::text::jsonb FROM clock
    ON CONFLICT (owner) DO UPDATE
    SET seen_at = excluded.seen_at, running = excluded.running, slots = excluded.slots,
        draining = excluded.draining, tokens_per_s = excluded.tokens_per_s,
        vitals = excluded.vitals
    RETURNING drain_requested
), kept AS (
    UPDATE leaders
    SET owner = $2, until = CASE WHEN $9 THEN 0 ELSE (SELECT now FROM clock) + $15 END
    WHERE role = ANY($14) AND (owner = $2 OR until <= (SELECT now FROM clock))
    RETURNING role
), begun AS (
    INSERT INTO leaders (role, owner, until)
    SELECT role, $2, now + $15 FROM UNNEST($14::text[]) AS wanted (role), clock
    WHERE role NOT IN (SELECT role FROM leaders) AND NOT $9
    ON CONFLICT (role) DO NOTHING RETURNING role
)
SELECT drain_requested, coalesce(paused, false) AS paused, numerics_class,
       coalesce(allowed_classes, '{}') AS allowed_classes,
       (SELECT count(*) FROM extended) + (SELECT count(*) FROM extended_workers) AS extended,
       ARRAY(SELECT role FROM kept WHERE NOT $9 UNION ALL SELECT role FROM begun) AS led
FROM beat LEFT JOIN queues ON queues.model = $3 AND queues.format = $4";

#[async_trait]
impl Workers for PostgresStore {
    async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<Directive, StoreError> {
        let roles = ["store".to_owned(), format!("queue {}", heartbeat.queue)];
        let beat = query(HEARTBEAT)
            .bind(self.clock_parameter())
            .bind(&heartbeat.owner)
            .bind(&heartbeat.queue.model)
            .bind(&heartbeat.queue.format)
            .bind(&heartbeat.host)
            .bind(i64::from(heartbeat.pid))
            .bind(i64::from(heartbeat.running))
            .bind(i64::from(heartbeat.slots))
            .bind(heartbeat.draining)
            .bind(heartbeat.tokens_per_s)
            .bind(rows::to_json(&heartbeat.metrics))
            .bind(milliseconds(AWAY_AFTER))
            .bind(milliseconds(AWAY_LEASE))
            .bind(&roles[..])
            .bind(milliseconds(Leadership::LEASE));
        let row = self.fetch_hot(beat).await?.pop().ok_or(sqlx::Error::RowNotFound)?;
        if rows::integer(&row, "extended")? > 0 {
            tracing::warn!("the store was away: leases are extended");
        }
        let led: Vec<String> = rows::get(&row, "led")?;
        let leads = Leadership { store: led.contains(&roles[0]), queue: led.contains(&roles[1]) };
        let is_withdrawn = classes(&row)?.must_drain(&heartbeat.metrics.numerics_class);
        let drain = rows::get::<bool>(&row, "drain_requested")? || is_withdrawn;
        Ok(Directive { drain, paused: rows::get(&row, "paused")?, leads })
    }

    async fn workers(&self) -> Result<Vec<Worker>, StoreError> {
        let found = query(
            "SELECT owner, model, format, host, pid, started_at, store_now_ms($1) - seen_at AS silent,
                    running, slots, draining, drain_requested, tokens_per_s, vitals::text
             FROM workers ORDER BY owner",
        );
        self.fetch_all(found.bind(self.clock_parameter())).await?.iter().map(worker).collect()
    }

    async fn serving(&self, queue: &QueueName) -> Result<Serving, StoreError> {
        let found = query(
            "SELECT store_now_ms($1) AS now, count(*) AS workers,
                    count(*) FILTER (WHERE vitals ->> 'device' LIKE 'cuda%') AS gpu_workers,
                    coalesce(sum(slots), 0)::bigint AS slots,
                    coalesce(sum(running), 0)::bigint AS running,
                    coalesce(sum(slots) FILTER (WHERE rate IS NOT NULL), 0)::bigint AS measured_slots,
                    sum(rate) FILTER (WHERE slots > 0) AS rate,
                    coalesce(sum((vitals ->> 'kv_blocks_used')::bigint), 0)::bigint AS blocks_used,
                    coalesce(sum((vitals ->> 'kv_blocks_total')::bigint), 0)::bigint AS blocks_total
             FROM (SELECT slots, running, vitals, (vitals ->> 'drain_tokens_per_s')::float8 AS rate
                   FROM workers WHERE model = $2 AND format = $3 AND NOT draining
                     AND seen_at >= store_now_ms($1) - $4) AS live",
        );
        let found = found.bind(self.clock_parameter()).bind(&queue.model).bind(&queue.format);
        rows::serving(&self.fetch_one(found.bind(milliseconds(Worker::SILENT_MAX))).await?)
    }

    async fn request_drain(&self, owner: &str) -> Result<bool, StoreError> {
        let request = query("UPDATE workers SET drain_requested = true WHERE owner = $1");
        Ok(self.execute(request.bind(owner)).await? == 1)
    }

    async fn forget_worker(&self, owner: &str) -> Result<(), StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let forgotten = forget(&mut connection, Some(owner), None).await;
            self.release(connection, forgotten)
        })
        .await
    }

    async fn integrity(&self) -> Result<Integrity, StoreError> {
        let sums = query(
            "SELECT coalesce(jsonb_object_agg(name, count), '{}')::text AS integrity FROM (
                 SELECT name, sum(count)::bigint AS count FROM (
                     SELECT name, count FROM integrity
                     UNION ALL
                     SELECT name, value::bigint FROM workers, jsonb_each_text(vitals -> 'integrity')
                            AS counted (name, value)
                 ) AS counts GROUP BY name
             ) AS sums",
        );
        rows::document(&self.fetch_one(sums).await?, "integrity")
    }
}

fn worker(row: &PgRow) -> Result<Worker, StoreError> {
    let metrics = match rows::get::<Option<&str>>(row, "vitals")? {
        Some(_) => rows::document(row, "vitals")?,
        None => WorkerMetrics::default(),
    };
    Ok(Worker {
        heartbeat: Heartbeat {
            owner: rows::get(row, "owner")?,
            queue: rows::queue(row)?,
            host: rows::get(row, "host")?,
            pid: rows::small(row, "pid")?,
            running: rows::small(row, "running")?,
            slots: rows::small(row, "slots")?,
            draining: rows::get(row, "draining")?,
            tokens_per_s: rows::get(row, "tokens_per_s")?,
            metrics,
        },
        started_at: rows::time(row, "started_at")?,
        silent: rows::duration(rows::integer(row, "silent")?),
        drain_requested: rows::get(row, "drain_requested")?,
    })
}

/// Deletes the worker of this name, or those with a last heartbeat before a time.
pub(super) async fn forget(
    connection: &mut PgConnection,
    owner: Option<&str>,
    seen_before: Option<i64>,
) -> Result<(), StoreError> {
    query(
        "WITH gone AS (
             DELETE FROM workers WHERE owner = $1 OR seen_at < $2 RETURNING owner, vitals
         ), resigned AS (
             UPDATE leaders SET until = 0 WHERE owner IN (SELECT owner FROM gone)
         ), ended AS (
             DELETE FROM worker_leases WHERE owner IN (SELECT owner FROM gone)
         )
         INSERT INTO integrity (name, count)
         SELECT name, sum(value::bigint) FROM gone, jsonb_each_text(vitals -> 'integrity')
                AS counted (name, value)
         GROUP BY name
         ON CONFLICT (name) DO UPDATE SET count = integrity.count + excluded.count",
    )
    .bind(owner)
    .bind(seen_before)
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes leases that ended before a time.
pub(super) async fn forget_leases(
    connection: &mut PgConnection,
    before: i64,
) -> Result<(), StoreError> {
    let delete = query("DELETE FROM worker_leases WHERE until < $1").bind(before);
    delete.execute(connection).await?;
    Ok(())
}
