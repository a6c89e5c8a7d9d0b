//! The life of a worker.

use tokio::sync::watch;

use super::{
    config::Stop,
    error::WorkerError,
    presence::Presence,
    setup::{Device, Worker},
};
use crate::engine_thread::Turns;

impl Worker {
    /// Runs on these devices, at least one, until the work is done ([`Mode::Embedded`]) or `stop` asks
    /// for a drain.
    ///
    /// # Errors
    /// See the variants of [`WorkerError`] for what becomes of the claims.
    pub async fn run(
        self,
        devices: Vec<Device>,
        stop: watch::Receiver<Stop>,
    ) -> Result<(), WorkerError> {
        let presence = self.appear();
        let result = presence.work(devices, &Turns::default(), stop).await;
        presence.leave().await;
        result
    }

    /// Starts what a worker does with engines or without.
    pub(crate) fn appear(mut self) -> Presence {
        self.measure_calls();
        Presence::start(self)
    }
}
