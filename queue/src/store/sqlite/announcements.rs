//! A process that opens the file has an empty dispatcher in memory, which it fills from the file: it needs
//! no notes of what the dispatcher may lack.

use super::SqliteStore;
use crate::{
    dispatch::Entry,
    job::QueueName,
    store::{StoreError, Unannounced},
};

pub(super) fn announced(_: &SqliteStore, _: &[Entry]) {}

pub(super) async fn unannounced(_: &SqliteStore, _: &QueueName) -> Result<Unannounced, StoreError> {
    Ok(Unannounced::default())
}

pub(super) async fn forget(_: &SqliteStore, _: &Unannounced) -> Result<(), StoreError> {
    Ok(())
}
