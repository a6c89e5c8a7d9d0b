//! Sweeps files, idempotency keys and batches that expired, beside the driver: large files take a while.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};

use crate::App;

/// Pause between two sweeps.
pub(super) const SWEEP: Duration = Duration::from_secs(3600);

/// Sweeps until `stop`.
pub(super) async fn run(app: App, mut stop: watch::Receiver<bool>) {
    let sweeping = async {
        loop {
            sweep(&app).await;
            sleep(SWEEP).await;
        }
    };
    tokio::select! {
        () = sweeping => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

async fn sweep(app: &App) {
    let store = &app.store;
    match store.sweep_files().await {
        Ok(0) => {}
        Ok(files) => {
            tracing::info!(files, "deleted files that expired or were never completed");
        }
        Err(error) => tracing::warn!(%error, "cannot sweep files, trying again in an hour"),
    }
    if let Err(error) = store.sweep_calls().await {
        tracing::warn!(%error, "cannot sweep idempotency keys, trying again in an hour");
    }
    if let Err(error) = store.sweep_batches().await {
        tracing::warn!(%error, "cannot sweep batches, trying again in an hour");
    }
}
