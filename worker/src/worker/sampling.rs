//! Samples the queues for the dashboard's history.

use std::{sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tritmill_queue::Operations;

const INTERVAL: Duration = Duration::from_secs(2);

/// Runs until it is aborted.
pub(super) async fn run(operations: Arc<dyn Operations>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = operations.sample().await {
            tracing::warn!(%error, "queues not sampled");
        }
    }
}
