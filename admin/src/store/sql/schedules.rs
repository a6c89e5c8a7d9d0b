//! Schedules of batches.

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant, Timestamp, store::Page};
use uuid::Uuid;

use super::{Row, SqlStore, query, rows};
use crate::store::schedules::{Schedule, ScheduleId, Schedules};

/// Selects schedules.
macro_rules! select_schedules {
    ($rest:expr) => {
        concat!(
            "SELECT id, tenant, api_key, next_at, CAST(schedule AS text) AS schedule FROM schedules ",
            $rest
        )
    };
}

fn schedule(row: &Row) -> Result<Schedule, StoreError> {
    Ok(Schedule {
        id: ScheduleId(rows::get(row, "id")?),
        tenant: Tenant(rows::get(row, "tenant")?),
        key: rows::get(row, "api_key")?,
        next_at: rows::time_or_none(row, "next_at")?,
        record: rows::document(row, "schedule")?,
    })
}

#[async_trait]
impl Schedules for SqlStore {
    async fn add_schedule(&self, schedule: &Schedule, max: u32) -> Result<bool, StoreError> {
        let add = query(concat!(
            "INSERT INTO schedules (id, tenant, api_key, next_at, schedule)
             SELECT $1, $2, $3, $4, ",
            as_json!("$5"),
            " WHERE (SELECT count(*) FROM schedules WHERE tenant = $2) < $6"
        ));
        let add = add
            .bind(schedule.id.0)
            .bind(&schedule.tenant.0)
            .bind(schedule.key)
            .bind(schedule.next_at.map(|at| at.0))
            .bind(rows::to_json(&schedule.record))
            .bind(i64::from(max));
        Ok(self.execute(add).await? > 0)
    }

    async fn schedules(
        &self,
        tenant: Option<&Tenant>,
        page: Page<ScheduleId>,
    ) -> Result<Vec<Schedule>, StoreError> {
        let found = query(match page.ascending {
            true => select_schedules!(
                "WHERE ($1 IS NULL OR tenant = $1) AND ($2 IS NULL OR id > $2) ORDER BY id LIMIT $3"
            ),
            false => select_schedules!(
                "WHERE ($1 IS NULL OR tenant = $1) AND ($2 IS NULL OR id < $2) ORDER BY id DESC LIMIT $3"
            ),
        });
        let found = found
            .bind(tenant.map(|tenant| &tenant.0))
            .bind(page.after.map(Uuid::from))
            .bind(i64::from(page.limit));
        self.fetch_all(found).await?.iter().map(schedule).collect()
    }

    async fn schedule(
        &self,
        tenant: &Tenant,
        id: ScheduleId,
    ) -> Result<Option<Schedule>, StoreError> {
        let found = query(select_schedules!("WHERE tenant = $1 AND id = $2"));
        let found = self.fetch_optional(found.bind(&tenant.0).bind(id.0)).await?;
        found.as_ref().map(schedule).transpose()
    }

    async fn due_schedules(&self, max: u32) -> Result<Vec<Schedule>, StoreError> {
        let found = query(select_schedules!(concat!(
            "WHERE next_at <= ",
            now!(),
            " ORDER BY next_at LIMIT $2"
        )));
        let found = found.bind(self.clock_parameter()).bind(i64::from(max));
        self.fetch_all(found).await?.iter().map(schedule).collect()
    }

    async fn save_schedule(
        &self,
        schedule: &Schedule,
        before: Option<Timestamp>,
    ) -> Result<bool, StoreError> {
        let save = query(concat!(
            "UPDATE schedules SET next_at = $3, schedule = ",
            as_json!("$4"),
            " WHERE id = $1 AND coalesce(next_at, -1) = $2"
        ));
        let save = save
            .bind(schedule.id.0)
            .bind(before.map_or(-1, |at| at.0))
            .bind(schedule.next_at.map(|at| at.0))
            .bind(rows::to_json(&schedule.record));
        Ok(self.execute(save).await? > 0)
    }

    async fn delete_schedule(&self, tenant: &Tenant, id: ScheduleId) -> Result<bool, StoreError> {
        let delete = query("DELETE FROM schedules WHERE tenant = $1 AND id = $2");
        Ok(self.execute(delete.bind(&tenant.0).bind(id.0)).await? > 0)
    }
}
