//! Ends of lines.

use async_trait::async_trait;
use serde_json::json;
use uuid::Uuid;

use tritmill_queue::{Job, JobState, StoreError};

use super::{ADD_ENDS, Connection, Row, SqlStore, line_list, query, rows, text_list};
use crate::store::{
    batch_ends::{BatchEnds, EndOrder, EndsPage, KnownEnd, LineEnd},
    batches::{Batch, BatchId},
};

/// A page of ends, in one order.
macro_rules! page_sql {
    ($by:literal) => {
        concat!(
            "SELECT line, seq, state, ended_at, output FROM batch_ends
             WHERE batch_id = $1 AND ",
            $by,
            " > $2 AND ",
            $by,
            " <= $3 AND ($4 OR state ",
            any_text!("$5"),
            ") ORDER BY ",
            $by,
            " LIMIT $6"
        )
    };
}

fn end(row: &Row) -> Result<(u64, LineEnd), StoreError> {
    let end = LineEnd {
        line: rows::small(row, "line")?,
        state: rows::word(row, "state")?,
        ended_at: rows::time(row, "ended_at")?,
        output: rows::get(row, "output")?,
    };
    Ok((rows::count(row, "seq")?, end))
}

fn known(row: &Row) -> Result<KnownEnd, StoreError> {
    Ok(KnownEnd {
        line: rows::small(row, "line")?,
        state: rows::word(row, "state")?,
        ended_at: rows::time(row, "ended_at")?,
        has_output: rows::get(row, "has_output")?,
    })
}

/// Adds ends of a batch, which counts them already: the last of them has its last number.
pub(super) async fn add(
    connection: &mut Connection,
    batch: &Batch,
    ends: &[LineEnd],
) -> Result<(), StoreError> {
    if ends.is_empty() {
        return Ok(());
    }
    let first = (batch.last_end + 1).saturating_sub(ends.len() as u64);
    let row = |(seq, end): (u64, &LineEnd)| {
        json!({
            "line": end.line, "seq": seq, "state": end.state.as_str(),
            "ended_at": end.ended_at.0, "output": end.output,
        })
    };
    let all: Vec<_> = (first..).zip(ends).map(row).collect();
    let add = query(ADD_ENDS).bind(Uuid::from(batch.id)).bind(rows::to_json(&all));
    add.execute(connection).await?;
    Ok(())
}

/// Deletes the ends of lines that run again, also of those that had no job before.
pub(super) async fn forget(
    connection: &mut Connection,
    batch: &Batch,
    jobs: &[Job],
) -> Result<(), StoreError> {
    let lines: Vec<u32> = jobs.iter().filter_map(|job| batch.id.line(job.id)).collect();
    if lines.is_empty() {
        return Ok(());
    }
    let delete = concat!("DELETE FROM batch_ends WHERE batch_id = $1 AND line ", any_line!("$2"));
    query(delete).bind(Uuid::from(batch.id)).bind(line_list(&lines)).execute(connection).await?;
    Ok(())
}

#[async_trait]
impl BatchEnds for SqlStore {
    async fn ends(
        &self,
        id: BatchId,
        page: EndsPage<'_>,
    ) -> Result<Vec<(u64, LineEnd)>, StoreError> {
        let found = match page.order {
            EndOrder::Completion => page_sql!("seq"),
            EndOrder::Lines => page_sql!("line"),
        };
        let states: Vec<String> =
            page.states.iter().copied().map(|state| JobState::as_str(state).to_owned()).collect();
        let found = query(found)
            .bind(Uuid::from(id))
            .bind(rows::stored(page.after))
            .bind(rows::stored(page.until))
            .bind(states.is_empty())
            .bind(text_list(&states))
            .bind(i64::from(page.limit));
        self.fetch_all(found).await?.iter().map(end).collect()
    }

    async fn known_ends(&self, id: BatchId, lines: &[u32]) -> Result<Vec<KnownEnd>, StoreError> {
        let found = query(concat!(
            "SELECT line, state, ended_at, output IS NOT NULL AS has_output FROM batch_ends
             WHERE batch_id = $1 AND line ",
            any_line!("$2")
        ));
        let found = self.fetch_all(found.bind(Uuid::from(id)).bind(line_list(lines))).await?;
        found.iter().map(known).collect()
    }
}
