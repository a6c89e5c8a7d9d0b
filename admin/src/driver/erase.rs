//! Deletes the jobs and ends of deleted batches, chunk by chunk: beside the steps, which it must not hold up.

use tokio::{sync::watch, time::sleep};

use super::sweep::SWEEP;
use crate::App;

/// Runs until it is stopped. Chunks that two processes delete at the same time are deleted once.
pub(super) async fn run(app: App, mut stop: watch::Receiver<bool>) {
    loop {
        let erased = app.store.erase_deleted_batches().await;
        if let Err(error) = &erased {
            tracing::warn!(%error, "cannot delete the jobs of deleted batches, trying again later");
        }
        let has_more = erased.unwrap_or(false);
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return,
            () = std::future::ready(()), if has_more => {}
            () = app.batch_deleted.notified() => {}
            () = sleep(SWEEP) => {}
        }
    }
}
