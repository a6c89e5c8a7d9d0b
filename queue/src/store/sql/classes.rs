//! Numerics classes of queues.

use async_trait::async_trait;

use super::{
    SqlStore,
    calls::{Row, query},
    dialect, queues, rows,
};
use crate::{
    job::QueueName,
    store::{
        StoreError,
        classes::{ClassError, Classes, NumericsClasses, RegisteredQueue, ResetClassError},
    },
};

/// Returns the classes in a queue's row.
pub(crate) fn classes(row: &Row) -> Result<Classes, StoreError> {
    let registered = rows::get(row, "numerics_class")?;
    Ok(Classes { registered, allowed: dialect::texts(row, "allowed_classes")? })
}

impl SqlStore {
    /// Reads a queue's classes, changes them and writes the allowed ones, in one transaction.
    async fn change_classes(
        &self,
        queue: &QueueName,
        change: impl FnOnce(&mut Classes) -> Result<bool, StoreError> + Send,
    ) -> Result<bool, StoreError> {
        let insert = "INSERT INTO queues (model, format) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        let read = concat!(
            "SELECT numerics_class, allowed_classes FROM queues WHERE model = $1 AND format = $2",
            for_update!()
        );
        let write = "UPDATE queues SET allowed_classes = $3 WHERE model = $1 AND format = $2";
        let QueueName { model, format } = queue;
        self.within(async {
            let mut tx = self.begin().await?;
            query(insert).bind(model).bind(format).execute(&mut *tx).await?;
            let row = query(read).bind(model).bind(format).fetch_one(&mut *tx).await?;
            let mut classes = classes(&row)?;
            let changed = change(&mut classes)?;
            let allowed = dialect::text_list(&classes.allowed);
            query(write).bind(model).bind(format).bind(allowed).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(changed)
        })
        .await
    }
}

#[async_trait]
impl NumericsClasses for SqlStore {
    async fn register_class(&self, queue: &QueueName, class: &str) -> Result<(), ClassError> {
        // Written even when the class is known: RETURNING gives written rows only.
        let register = query(concat!(
            "INSERT INTO queues (model, format, numerics_class, registered_at)
             VALUES ($2, $3, $4, ",
            now!(),
            ") ON CONFLICT (model, format) DO UPDATE
             SET numerics_class = coalesce(queues.numerics_class, excluded.numerics_class),
                 registered_at = coalesce(queues.registered_at, excluded.registered_at)
             RETURNING numerics_class, allowed_classes"
        ))
        .bind(self.clock_parameter())
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(class);
        classes(&self.fetch_one(register).await?)?.admit(queue, class)
    }

    async fn allow_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError> {
        self.change_classes(queue, |classes| classes.allow(class)).await
    }

    async fn withdraw_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError> {
        self.change_classes(queue, |classes| Ok(classes.withdraw(class))).await
    }

    async fn reset_class(&self, queue: &QueueName) -> Result<Option<String>, ResetClassError> {
        let (workers, class) = queues::reset_class(self, queue).await?;
        if workers.is_empty() {
            return Ok(class);
        }
        Err(ResetClassError::Served { queue: queue.clone(), workers })
    }

    async fn registered_queues(&self) -> Result<Vec<RegisteredQueue>, StoreError> {
        let found = query(
            "SELECT model, format, coalesce(registered_at, 0) AS at FROM queues
             WHERE numerics_class IS NOT NULL ORDER BY registered_at NULLS FIRST, model, format",
        );
        let registered =
            |row| Ok(RegisteredQueue { queue: rows::queue(row)?, at: rows::time(row, "at")? });
        self.fetch_all(found).await?.iter().map(registered).collect()
    }
}
