//! Maintains the tables of the store, in the worker that leads it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tritmill_queue::{Operations, store::workers::Directive};

/// Time between two rounds of maintenance.
const EVERY: Duration = Duration::from_secs(3600);
/// Time until a round that failed is tried again; a worker also looks whether it leads.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Runs until it is aborted.
pub(super) async fn run(
    operations: Arc<dyn Operations>,
    mut directive: watch::Receiver<Directive>,
) {
    let (mut ticks, mut due) = (interval(LOOK_EVERY), Instant::now());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first worker of a new fleet does not wait.
    let _ = directive.changed().await;
    loop {
        ticks.tick().await;
        if !directive.borrow().leads.store || Instant::now() < due {
            continue;
        }
        match operations.maintain().await {
            Ok(_) => due = Instant::now() + EVERY,
            Err(error) => tracing::warn!(%error, "tables not maintained, trying again in a minute"),
        }
    }
}
