//! Changes of jobs that wait for their time.

use async_trait::async_trait;
use uuid::Uuid;

use super::{SqlStore, calls::query, dialect, rows};
use crate::{
    job::{Job, JobId, Priority},
    store::{StoreError, waiting::WaitingJobs},
};

#[async_trait]
impl WaitingJobs for SqlStore {
    async fn run_now(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let due = query(concat!(
            "UPDATE ",
            open_jobs!(),
            " SET run_at = ",
            now!(),
            " WHERE id ",
            any_of!("$2"),
            " AND state IN ('scheduled', 'retrying') RETURNING id"
        ));
        let due = due.bind(self.clock_parameter());
        let due = due.bind(dialect::id_list(ids.iter().copied()));
        rows::ids(&self.fetch_all(due).await?)
    }

    async fn set_priority(&self, id: JobId, priority: Priority) -> Result<bool, StoreError> {
        self.within(set_priority(self, id, priority)).await
    }
}

/// Changes the column and the job, which have the same priority.
async fn set_priority(store: &SqlStore, id: JobId, priority: Priority) -> Result<bool, StoreError> {
    let found = concat!(
        "SELECT model, format, job FROM ",
        open_jobs!(),
        " WHERE id = $1 AND state IN ('scheduled', 'retrying')",
        for_update!()
    );
    let mut tx = store.begin().await?;
    let found = query(found).bind(Uuid::from(id)).fetch_optional(&mut *tx).await?;
    let Some(row) = found else { return Ok(false) };
    let job = Job { priority, ..rows::stored_job(&row)? };
    let changed = concat!("UPDATE ", open_jobs!(), " SET priority = $2, job = $3 WHERE id = $1");
    let changed = query(changed).bind(Uuid::from(id)).bind(priority.as_str());
    changed.bind(dialect::encode(&job)).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(true)
}
