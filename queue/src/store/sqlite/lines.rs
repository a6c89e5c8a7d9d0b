//! The batch file of an embedded run: which line of the input is which job, and what is known of
//! its answer.
//!
//! Every start reads the whole input again under a new run number. A line is found again by its
//! key (a hash of what it asks), keeps its job and its answer, and only changes its number; a line
//! with a new key gets a new job; what the run did not see is pruned. So the rows follow the input
//! whatever was edited, and an answer is never computed twice.

use std::collections::HashMap;

use serde_json::json;
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};

use super::{
    super::StoreError,
    SqliteStore, claims,
    rows::{self, to_json},
    unavailable,
};
use crate::{
    job::{Job, JobId, QueueName, Timestamp},
    outcome::Outcome,
};

/// A line of the input, parsed.
#[derive(Debug, Clone)]
pub struct IngestedLine {
    /// What the line asks, as a hash: the same key means the same answer.
    pub key: [u8; 32],
    /// In the input, from 1.
    pub number: u64,
    /// The caller's name for it, if it has a readable one.
    pub custom_id: Option<String>,
    /// Form of the answer (`chat`, `completion`, `refusal`).
    pub shape: &'static str,
    /// The job it became, or why not (JSON).
    pub content: Result<Box<Job>, String>,
}

/// What an ingested chunk held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IngestCounts {
    /// Lines that became a job now.
    pub added: u64,
    /// Lines whose job was known.
    pub known: u64,
    /// Lines that were refused.
    pub refused: u64,
}

/// Why a line was refused, as the codec wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedLine {
    /// In the input, from 1.
    pub number: u64,
    /// The caller's name for the line, if it has a readable one.
    pub custom_id: Option<String>,
    /// The line's key.
    pub key: Vec<u8>,
    /// The codec's JSON.
    pub refusal: String,
}

/// A line's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredLine {
    /// In the order of commit.
    pub seq: i64,
    /// Line in the input, from 1.
    pub number: u64,
    /// The caller's name for it.
    pub custom_id: Option<String>,
    /// The line's key.
    pub key: Vec<u8>,
    /// Form of the answer.
    pub shape: String,
    /// How it ended; `None` for a cancelled job.
    pub outcome: Option<Outcome>,
    /// When.
    pub finished_at: Timestamp,
}

impl SqliteStore {
    /// A fact about the file, if it was set.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn fact(&self, name: &str) -> Result<Option<String>, StoreError> {
        let row = sqlx::query("SELECT value FROM facts WHERE name = ?1")
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map_err(unavailable)?;
        row.map(|row| rows::text(&row, "value")).transpose()
    }

    /// Sets a fact about the file.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn set_fact(&self, name: &str, value: &str) -> Result<(), StoreError> {
        sqlx::query("INSERT OR REPLACE INTO facts (name, value) VALUES (?1, ?2)")
            .bind(name)
            .bind(value)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
        Ok(())
    }

    /// A number no earlier run had.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn begin_run(&self) -> Result<i64, StoreError> {
        let row = sqlx::query(
            "INSERT INTO facts (name, value) VALUES ('run', '1')
             ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1
             RETURNING CAST(value AS INTEGER) AS run",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(unavailable)?;
        rows::integer(&row, "run")
    }

    /// For each of the names that this run has seen, the first line that bore it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn first_lines(
        &self,
        run: i64,
        custom_ids: &[&str],
    ) -> Result<HashMap<String, u64>, StoreError> {
        let found = sqlx::query(
            // The cross join keeps the names outside and looks each up by its index; left alone,
            // the planner scans every line of the run.
            "SELECT custom_id, min(number) AS number
             FROM json_each(?1) AS name CROSS JOIN lines ON lines.custom_id = name.value
             WHERE run = ?2 GROUP BY custom_id",
        )
        .bind(to_json(&custom_ids)?)
        .bind(run)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        found.iter().map(|row| Ok((rows::text(row, "custom_id")?, number(row)?))).collect()
    }

    /// Records a chunk of lines and the jobs of those that are new, in one transaction.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing of the chunk was recorded.
    pub async fn ingest(
        &self,
        run: i64,
        lines: &[IngestedLine],
    ) -> Result<IngestCounts, StoreError> {
        let mut tx = self.begin().await?;
        let kept = upsert(&mut tx, run, lines).await?;
        let mut seen = IngestCounts::default();
        let mut added = Vec::new();
        for line in lines {
            match &line.content {
                Err(_) => seen.refused += 1,
                Ok(job) if kept.get(line.key.as_slice()) == Some(&job.id) => {
                    seen.added += 1;
                    added.push((**job).clone());
                }
                Ok(_) => seen.known += 1,
            }
        }
        claims::insert_jobs(&mut tx, &added, None, self.now()).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(seen)
    }

    /// Forgets the lines that `run` did not see, with their jobs and answers; returns how many.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn prune(&self, run: i64) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        sqlx::query("DELETE FROM jobs WHERE id IN (SELECT job_id FROM lines WHERE run < ?1)")
            .bind(run)
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        let done = sqlx::query("DELETE FROM lines WHERE run < ?1")
            .bind(run)
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(done.rows_affected())
    }

    /// Forgets lines that ended without an answer though nothing was wrong with them, with their
    /// jobs, so that the next run sees them for the first time; returns how many.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn forget_failures(&self) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let lines = sqlx::query(
            "DELETE FROM lines WHERE job_id IN (
                 SELECT job_id FROM results JOIN jobs ON jobs.id = results.job_id
                 WHERE state IN ('failed', 'cancelled', 'expired')
                   AND coalesce(outcome ->> '$.error.kind', '') <> 'invalid_request')",
        )
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        sqlx::query(
            "DELETE FROM jobs WHERE id NOT IN (SELECT job_id FROM lines WHERE job_id IS NOT NULL)",
        )
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(lines.rows_affected())
    }

    /// Puts every unfinished job into `queue`: the same model may be served in another format now.
    /// Reads every job.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn move_unfinished(&self, queue: &QueueName) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE jobs SET model = ?1, format = ?2
             WHERE state IN ('scheduled', 'queued', 'running', 'retrying')
               AND (model <> ?1 OR format <> ?2)",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(())
    }

    /// Rejected lines above line `after`, in order of line.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn rejected_lines(
        &self,
        after: u64,
        limit: u32,
    ) -> Result<Vec<RejectedLine>, StoreError> {
        let found = sqlx::query(
            "SELECT number, custom_id, key, refusal FROM lines
             WHERE job_id IS NULL AND number > ?1 ORDER BY number LIMIT ?2",
        )
        .bind(i64::try_from(after).unwrap_or(i64::MAX))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        found.iter().map(refused).collect()
    }

    /// Answers committed after `seq`, in order of commit.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn answers(&self, after: i64, limit: u32) -> Result<Vec<AnsweredLine>, StoreError> {
        let found = sqlx::query(
            "SELECT seq, number, custom_id, key, shape, outcome, finished_at
             FROM results JOIN lines ON lines.job_id = results.job_id
             WHERE seq > ?1 ORDER BY seq LIMIT ?2",
        )
        .bind(after)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        found.iter().map(answer).collect()
    }

    /// What is known of the lines above line `after`, in order of line, up to the first that is
    /// not answered.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn answers_in_order(
        &self,
        after: u64,
        limit: u32,
    ) -> Result<Vec<Result<AnsweredLine, RejectedLine>>, StoreError> {
        let found = sqlx::query(
            "SELECT seq, number, custom_id, key, shape, lines.job_id AS job_id, refusal, outcome,
                    finished_at
             FROM lines LEFT JOIN results ON lines.job_id = results.job_id
             WHERE number > ?1 ORDER BY number LIMIT ?2",
        )
        .bind(i64::try_from(after).unwrap_or(i64::MAX))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut known = Vec::with_capacity(found.len());
        for row in &found {
            let job_id: Option<Vec<u8>> = row.try_get("job_id").map_err(unavailable)?;
            let seq: Option<i64> = row.try_get("seq").map_err(unavailable)?;
            match (job_id, seq) {
                (None, _) => known.push(Err(refused(row)?)),
                (Some(_), Some(_)) => known.push(Ok(answer(row)?)),
                (Some(_), None) => break,
            }
        }
        Ok(known)
    }
}

/// Writes the lines; returns which job each key of a job has now.
async fn upsert(
    tx: &mut SqliteConnection,
    run: i64,
    lines: &[IngestedLine],
) -> Result<HashMap<Vec<u8>, JobId>, StoreError> {
    let parsed: Vec<_> = lines
        .iter()
        .map(|line| {
            json!({
                "key": rows::hex(&line.key),
                "number": line.number,
                "custom_id": line.custom_id,
                "shape": line.shape,
                "job_id": line.content.as_ref().ok().map(|job| rows::hex(job.id.as_bytes())),
                "refusal": line.content.as_ref().err(),
            })
        })
        .collect();
    let written = sqlx::query(
        "INSERT INTO lines (key, number, run, custom_id, shape, job_id, refusal)
         SELECT unhex(value ->> 'key'), value ->> 'number', ?2, value ->> 'custom_id',
                value ->> 'shape', unhex(value ->> 'job_id'), value ->> 'refusal'
         FROM json_each(?1) WHERE true
         ON CONFLICT (key) DO UPDATE SET number = excluded.number, run = excluded.run,
                                         shape = excluded.shape, refusal = excluded.refusal
         RETURNING key, job_id",
    )
    .bind(to_json(&parsed)?)
    .bind(run)
    .fetch_all(tx)
    .await
    .map_err(unavailable)?;
    let mut kept = HashMap::with_capacity(written.len());
    for row in &written {
        let job_id: Option<Vec<u8>> = row.try_get("job_id").map_err(unavailable)?;
        if job_id.is_some() {
            let key = row.try_get("key").map_err(unavailable)?;
            kept.insert(key, rows::id(row, "job_id")?);
        }
    }
    Ok(kept)
}

fn number(row: &SqliteRow) -> Result<u64, StoreError> {
    let number = rows::integer(row, "number")?;
    u64::try_from(number).map_err(|_| rows::damaged("line number", number))
}

fn refused(row: &SqliteRow) -> Result<RejectedLine, StoreError> {
    Ok(RejectedLine {
        number: number(row)?,
        custom_id: row.try_get("custom_id").map_err(unavailable)?,
        key: row.try_get("key").map_err(unavailable)?,
        refusal: rows::text(row, "refusal")?,
    })
}

fn answer(row: &SqliteRow) -> Result<AnsweredLine, StoreError> {
    let outcome: Option<String> = row.try_get("outcome").map_err(unavailable)?;
    Ok(AnsweredLine {
        seq: rows::integer(row, "seq")?,
        number: number(row)?,
        custom_id: row.try_get("custom_id").map_err(unavailable)?,
        key: row.try_get("key").map_err(unavailable)?,
        shape: rows::text(row, "shape")?,
        outcome: outcome.map(|json| rows::from_json("outcome", &json)).transpose()?,
        finished_at: Timestamp(rows::integer(row, "finished_at")?),
    })
}
