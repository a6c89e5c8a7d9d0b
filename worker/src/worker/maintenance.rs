//! Maintains the tables of the store. Every worker does it; most find nothing to do.

use std::{sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tritmill_queue::Operations;

const INTERVAL: Duration = Duration::from_secs(3600);

/// Runs until it is aborted.
pub(super) async fn run(operations: Arc<dyn Operations>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = operations.maintain().await {
            tracing::warn!(%error, "tables not maintained, trying again in an hour");
        }
    }
}
