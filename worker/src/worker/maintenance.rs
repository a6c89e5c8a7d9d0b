//! Maintains the tables of the store, in the worker that leads it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tritmill_queue::{Operations, store::workers::Directive};

use crate::metrics::Metrics;

/// Time between two rounds of maintenance.
const EVERY: Duration = Duration::from_secs(3600);
/// Time until a round that failed is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Runs until it is aborted.
pub(super) async fn run(
    operations: Arc<dyn Operations>,
    metrics: Arc<Metrics>,
    mut directive: watch::Receiver<Directive>,
) {
    let mut due = Instant::now();
    while directive.wait_for(|directive| directive.leads.store).await.is_ok() {
        sleep_until(due).await;
        if !directive.borrow().leads.store {
            continue;
        }
        due = Instant::now() + EVERY;
        match operations.maintain().await {
            Ok(_) => metrics.upkeep.store_maintained(),
            Err(error) => {
                tracing::warn!(%error, "tables not maintained, trying again in a minute");
                due = Instant::now() + RETRY_AFTER;
            }
        }
    }
}
