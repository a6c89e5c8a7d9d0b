//! Lines of open batches, added in one transaction under the lock of the batch.

use std::collections::HashMap;

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant};
use uuid::Uuid;

use super::{
    Connection, SqlStore, batch_changes, batch_steps::add_custom_ids, batches::whole, bytes_list,
    files, query, rows,
};
use crate::store::{
    batch_steps::{CustomIdHash, NamedLine},
    batches::{Batch, BatchId, BatchState},
    open_batches::{AddedLine, AddedLines, Adding, OpenBatches},
};

/// Returns the keys of the lines that have one of the names, by name.
async fn known_lines(
    tx: &mut Connection,
    id: BatchId,
    lines: &[AddedLine],
) -> Result<HashMap<CustomIdHash, Vec<u8>>, StoreError> {
    let names: Vec<CustomIdHash> = lines.iter().map(|line| line.name).collect();
    let found = query(concat!(
        "SELECT custom_id, line_key FROM batch_custom_ids WHERE batch_id = $1 AND custom_id ",
        any_of!("$2")
    ));
    let found = found.bind(Uuid::from(id)).bind(bytes_list(&names)).fetch_all(tx).await?;
    let mut known = HashMap::with_capacity(found.len());
    for row in &found {
        let name: &[u8] = rows::get(row, "custom_id")?;
        let name = name.try_into().map_err(|error| rows::damaged("custom_id", error))?;
        let key: Option<Vec<u8>> = rows::get(row, "line_key")?;
        known.insert(name, key.unwrap_or_default());
    }
    Ok(known)
}

/// Lets a batch know the models of new lines. Returns why it cannot.
fn set_models(batch: &mut Batch, new: &[(usize, &AddedLine)], models_max: usize) -> Option<Adding> {
    for (index, AddedLine { model: (name, queue), .. }) in new {
        if batch.has_models() {
            if !batch.queues.contains_key(name) && batch.queues.len() >= models_max {
                return Some(Adding::ManyModels(*index));
            }
            batch.set_queues([(name.clone(), queue.clone())]);
        } else if *batch.queue.get_or_insert_with(|| queue.clone()) != *queue {
            return Some(Adding::OtherModel(*index));
        }
    }
    None
}

#[async_trait]
impl OpenBatches for SqlStore {
    async fn add_lines(
        &self,
        tenant: &Tenant,
        id: BatchId,
        AddedLines { lines, lines_max, bytes_max, models_max }: &AddedLines,
    ) -> Result<Option<Adding>, StoreError> {
        let found = concat!(
            "SELECT ",
            super::batches::columns!(),
            " FROM batches WHERE id = $1 AND tenant = $2",
            for_update!()
        );
        let count = "UPDATE batches SET added_lines = $2, next_at = 0 WHERE id = $1";
        self.within(async {
            let mut tx = self.begin().await?;
            let found = query(found).bind(Uuid::from(id)).bind(&tenant.0);
            let Some(row) = found.fetch_optional(&mut *tx).await? else { return Ok(None) };
            let mut batch = whole(&row)?;
            let is_valid = batch.steps.is_valid || batch.at.in_progress.is_some();
            match batch.state {
                _ if !batch.is_open => return Ok(Some(Adding::Closed(Box::new(batch)))),
                BatchState::InProgress | BatchState::Paused | BatchState::Validating
                    if is_valid => {}
                BatchState::Validating | BatchState::Paused => {
                    return Ok(Some(Adding::Validating));
                }
                _ => return Ok(Some(Adding::Closed(Box::new(batch)))),
            }
            let known = known_lines(&mut tx, id, lines).await?;
            let is_other =
                |line: &AddedLine| known.get(&line.name).is_some_and(|key| *key != line.key);
            if let Some(index) = lines.iter().position(is_other) {
                return Ok(Some(Adding::OtherRequest(index)));
            }
            let is_new = |(_, line): &(usize, &AddedLine)| !known.contains_key(&line.name);
            let new: Vec<(usize, &AddedLine)> = lines.iter().enumerate().filter(is_new).collect();
            let (added, before) = (new.len() as u64, batch.clone());
            if batch.total_lines() + added > *lines_max {
                return Ok(Some(Adding::ManyLines));
            }
            if let Some(refused) = set_models(&mut batch, &new, *models_max) {
                return Ok(Some(refused));
            }
            if added > 0 {
                let texts = new.iter().map(|(_, line)| line.text.as_slice());
                if !files::append_lines(&mut tx, batch.input, texts, *bytes_max).await? {
                    return Ok(Some(Adding::TooLarge));
                }
                let total = batch.total_lines();
                let number = |index: u64| u32::try_from(total + 1 + index).unwrap_or(u32::MAX);
                let named = (0..).zip(&new).map(|(index, (_, line))| NamedLine {
                    name: line.name,
                    line: number(index),
                    key: Some(line.key),
                });
                add_custom_ids(&mut tx, id, &named.collect::<Vec<_>>()).await?;
                if (&batch.queues, &batch.queue) != (&before.queues, &before.queue) {
                    batch_changes::write(&mut tx, &batch).await?;
                }
                batch.added += added;
                let count = query(count).bind(Uuid::from(id)).bind(rows::stored(batch.added));
                count.execute(&mut *tx).await?;
                tx.commit().await?;
            }
            let known = lines.len() as u64 - added;
            Ok(Some(Adding::Added { batch: Box::new(batch), added, known }))
        })
        .await
    }
}
