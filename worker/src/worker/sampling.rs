//! Samples the queues for the dashboard's history, in the worker that leads the store.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tritmill_queue::{Operations, store::workers::Directive};

const INTERVAL: Duration = Duration::from_secs(2);

/// Runs until it is aborted.
pub(super) async fn run(operations: Arc<dyn Operations>, directive: watch::Receiver<Directive>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let leads = directive.borrow().leads.store;
        if leads && let Err(error) = operations.sample().await {
            tracing::warn!(%error, "queues not sampled");
        }
    }
}
