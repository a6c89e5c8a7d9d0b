//! The batch file of an embedded run: the lines of the input, their jobs and their answers.
//!
//! Every start reads the whole input again under a new run number. A line is recognised by its key (a
//! hash of its content): it keeps its job and its answer and changes only its number. A line with a new
//! key gets a new job; lines that the run did not see are pruned. So the rows follow any edit of the
//! input, and no answer is computed twice.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::{
    super::StoreError,
    SqliteStore,
    calls::{Connection, Row, query},
    claims,
    dialect::{self, hex},
    rows::{self, to_json},
};
use crate::{
    job::{Job, JobId, QueueName, Timestamp},
    outcome::Outcome,
};

/// A parsed line of the input.
#[derive(Debug, Clone)]
pub struct IngestedLine {
    /// Hash of the line's content: equal keys have equal answers.
    pub key: [u8; 32],
    /// Number of the line in the input, from 1.
    pub number: u64,
    /// The caller's name for the line, if it has a readable one.
    pub custom_id: Option<String>,
    /// Form of the answer (`chat`, `completion`, `refusal`).
    pub shape: &'static str,
    /// The line's job, or the reason why it has none (JSON).
    pub content: Result<Box<Job>, String>,
}

/// Number of lines in an ingested chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IngestCounts {
    /// Lines with a new job.
    pub added: u64,
    /// Lines with a known job.
    pub known: u64,
    /// Rejected lines.
    pub refused: u64,
}

/// A rejected line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedLine {
    /// Number of the line in the input, from 1.
    pub number: u64,
    /// The caller's name for the line, if it has a readable one.
    pub custom_id: Option<String>,
    /// The line's key.
    pub key: Vec<u8>,
    /// The reason, as JSON.
    pub refusal: String,
}

/// A line with its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredLine {
    /// Position in the order of commits.
    pub seq: i64,
    /// Number of the line in the input, from 1.
    pub number: u64,
    /// The caller's name for the line.
    pub custom_id: Option<String>,
    /// The line's key.
    pub key: Vec<u8>,
    /// Form of the answer.
    pub shape: String,
    /// How the job ended; `None` for a cancelled job.
    pub outcome: Option<Outcome>,
    /// Time at which the job finished.
    pub finished_at: Timestamp,
    /// What the answer repeats of the request, if its form is `response`.
    pub repeated: Map<String, Value>,
}

impl SqliteStore {
    /// Returns a named fact about the file, if it was set.
    pub async fn fact(&self, name: &str) -> Result<Option<String>, StoreError> {
        let found = query("SELECT value FROM facts WHERE name = $1").bind(name);
        self.fetch_optional(found).await?.map(|row| rows::get(&row, "value")).transpose()
    }

    /// Sets a named fact about the file.
    pub async fn set_fact(&self, name: &str, value: &str) -> Result<(), StoreError> {
        let set = query("INSERT OR REPLACE INTO facts (name, value) VALUES ($1, $2)");
        self.execute(set.bind(name).bind(value)).await.map(drop)
    }

    /// Returns a new run number, greater than the numbers of all earlier runs.
    pub async fn begin_run(&self) -> Result<i64, StoreError> {
        let next = query(
            "INSERT INTO facts (name, value) VALUES ('run', '1')
             ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1
             RETURNING CAST(value AS INTEGER) AS run",
        );
        rows::integer(&self.fetch_one(next).await?, "run")
    }

    /// Returns the first line of this run for each of the names.
    pub async fn first_lines(
        &self,
        run: i64,
        custom_ids: &[&str],
    ) -> Result<HashMap<String, u64>, StoreError> {
        // The cross join makes the planner look up each name by its index; otherwise it scans every
        // line of the run.
        let found = query(
            "SELECT custom_id, min(number) AS number
             FROM json_each($1) AS name CROSS JOIN lines ON lines.custom_id = name.value
             WHERE run = $2 GROUP BY custom_id",
        );
        let found = self.fetch_all(found.bind(to_json(&custom_ids)).bind(run)).await?;
        let line = |row| Ok((rows::get(row, "custom_id")?, rows::count(row, "number")?));
        found.iter().map(line).collect()
    }

    /// Records a chunk of lines and the jobs of the new ones, in one transaction.
    pub async fn ingest(
        &self,
        run: i64,
        lines: &[IngestedLine],
    ) -> Result<IngestCounts, StoreError> {
        let mut tx = self.begin().await?;
        let kept = upsert(&mut tx, run, lines).await?;
        let mut counts = IngestCounts::default();
        let mut added = Vec::new();
        for line in lines {
            match &line.content {
                Err(_) => counts.refused += 1,
                Ok(job) if kept.get(line.key.as_slice()) == Some(&job.id) => {
                    counts.added += 1;
                    added.push((**job).clone());
                }
                Ok(_) => counts.known += 1,
            }
        }
        claims::insert_jobs(self, &mut tx, &added, None).await?;
        tx.commit().await?;
        Ok(counts)
    }

    /// Deletes the lines that `run` did not see, with their jobs and answers; returns how many.
    pub async fn prune(&self, run: i64) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        query("DELETE FROM jobs WHERE id IN (SELECT job_id FROM lines WHERE run < $1)")
            .bind(run)
            .execute(&mut *tx)
            .await?;
        let lines = query("DELETE FROM lines WHERE run < $1").bind(run).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(lines.rows_affected())
    }

    /// Deletes the valid lines that ended without an answer, with their jobs, so that the next run
    /// submits them again; returns how many.
    pub async fn forget_failures(&self) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let lines = query(
            "DELETE FROM lines WHERE job_id IN (
                 SELECT job_id FROM results JOIN jobs ON jobs.id = results.job_id
                 WHERE state IN ('failed', 'cancelled', 'expired')
                   AND coalesce(outcome ->> '$.error.kind', '') <> 'invalid_request')",
        );
        let lines = lines.execute(&mut *tx).await?;
        query(
            "DELETE FROM jobs WHERE id NOT IN (SELECT job_id FROM lines WHERE job_id IS NOT NULL)",
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(lines.rows_affected())
    }

    /// Moves every unfinished job to `queue`: the model may now be served in another format. Reads
    /// every job.
    pub async fn move_unfinished(&self, queue: &QueueName) -> Result<(), StoreError> {
        let update = query(
            "UPDATE jobs SET model = $1, format = $2
             WHERE state IN ('scheduled', 'queued', 'running', 'retrying')
               AND (model <> $1 OR format <> $2)",
        );
        self.execute(update.bind(&queue.model).bind(&queue.format)).await.map(drop)
    }

    /// Returns rejected lines after line `after`, in order of line.
    pub async fn rejected_lines(
        &self,
        after: u64,
        limit: u32,
    ) -> Result<Vec<RejectedLine>, StoreError> {
        let found = query(
            "SELECT number, custom_id, key, refusal FROM lines
             WHERE job_id IS NULL AND number > $1 ORDER BY number LIMIT $2",
        );
        self.fetch_all(found.bind(rows::stored(after)).bind(limit))
            .await?
            .iter()
            .map(rejected)
            .collect()
    }

    /// Returns answers committed after `seq`, in order of commit.
    pub async fn answers(&self, after: i64, limit: u32) -> Result<Vec<AnsweredLine>, StoreError> {
        let found = query(
            "SELECT seq, number, custom_id, key, shape, outcome, finished_at,
                    CASE WHEN shape = 'response' THEN (
                        SELECT job FROM jobs WHERE jobs.id = lines.job_id
                    ) END AS repeating
             FROM results JOIN lines ON lines.job_id = results.job_id
             WHERE seq > $1 ORDER BY seq LIMIT $2",
        );
        self.fetch_all(found.bind(after).bind(limit)).await?.iter().map(answered).collect()
    }

    /// Returns the lines after line `after`, in order of line, up to the first without an answer.
    pub async fn answers_in_order(
        &self,
        after: u64,
        limit: u32,
    ) -> Result<Vec<Result<AnsweredLine, RejectedLine>>, StoreError> {
        let found = query(
            "SELECT seq, number, custom_id, key, shape, lines.job_id AS job_id, refusal, outcome,
                    finished_at, CASE WHEN shape = 'response' THEN (
                        SELECT job FROM jobs WHERE jobs.id = lines.job_id
                    ) END AS repeating
             FROM lines LEFT JOIN results ON lines.job_id = results.job_id
             WHERE number > $1 ORDER BY number LIMIT $2",
        );
        let found = self.fetch_all(found.bind(rows::stored(after)).bind(limit)).await?;
        let mut known = Vec::with_capacity(found.len());
        for row in &found {
            let job_id: Option<Uuid> = rows::get(row, "job_id")?;
            let seq: Option<i64> = rows::get(row, "seq")?;
            match (job_id, seq) {
                (None, _) => known.push(Err(rejected(row)?)),
                (Some(_), Some(_)) => known.push(Ok(answered(row)?)),
                (Some(_), None) => break,
            }
        }
        Ok(known)
    }
}

/// Writes the lines; returns the job of each key that has one.
async fn upsert(
    tx: &mut Connection,
    run: i64,
    lines: &[IngestedLine],
) -> Result<HashMap<Vec<u8>, JobId>, StoreError> {
    let parsed: Vec<_> = lines
        .iter()
        .map(|line| {
            json!({
                "key": hex(&line.key),
                "number": line.number,
                "custom_id": line.custom_id,
                "shape": line.shape,
                "job_id": line.content.as_ref().ok().map(|job| hex(job.id.as_bytes())),
                "refusal": line.content.as_ref().err(),
            })
        })
        .collect();
    let written = query(
        "INSERT INTO lines (key, number, run, custom_id, shape, job_id, refusal)
         SELECT unhex(value ->> 'key'), value ->> 'number', $2, value ->> 'custom_id',
                value ->> 'shape', unhex(value ->> 'job_id'), value ->> 'refusal'
         FROM json_each($1) WHERE true
         ON CONFLICT (key) DO UPDATE SET number = excluded.number, run = excluded.run,
                                         shape = excluded.shape, refusal = excluded.refusal
         RETURNING key, job_id",
    )
    .bind(to_json(&parsed))
    .bind(run)
    .fetch_all(tx)
    .await?;
    let mut kept = HashMap::with_capacity(written.len());
    for row in &written {
        if let Some(job) = rows::get::<Option<Uuid>>(row, "job_id")? {
            kept.insert(rows::get(row, "key")?, JobId::from(job));
        }
    }
    Ok(kept)
}

fn rejected(row: &Row) -> Result<RejectedLine, StoreError> {
    Ok(RejectedLine {
        number: rows::count(row, "number")?,
        custom_id: rows::get(row, "custom_id")?,
        key: rows::get(row, "key")?,
        refusal: rows::get(row, "refusal")?,
    })
}

fn answered(row: &Row) -> Result<AnsweredLine, StoreError> {
    Ok(AnsweredLine {
        seq: rows::integer(row, "seq")?,
        number: rows::count(row, "number")?,
        custom_id: rows::get(row, "custom_id")?,
        key: rows::get(row, "key")?,
        shape: rows::get(row, "shape")?,
        outcome: dialect::outcome(row)?.0,
        finished_at: rows::time(row, "finished_at")?,
        repeated: rows::repeated(row)?,
    })
}
