//! Sweeps the object store with the content of files, beside the driver: listing a large one takes minutes.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};

use crate::App;

/// Pause between two sweeps.
const SWEEP: Duration = Duration::from_secs(6 * 3600);

/// Deletes objects without a row until `stop`.
pub(super) async fn run(app: App, mut stop: watch::Receiver<bool>) {
    let sweeping = async {
        loop {
            if let Err(error) = app.files.sweep_objects().await {
                tracing::warn!(%error, "cannot sweep the object store of files, trying again later");
            }
            sleep(SWEEP).await;
        }
    };
    tokio::select! {
        () = sweeping => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}
