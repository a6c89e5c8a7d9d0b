//! What operators measure: the time of calls, connections, and what waits in the dispatcher.

use std::sync::Arc;

use tritmill_queue::{
    DispatchError, QueueName,
    metrics::{CallMetrics, ConnectionMetrics, MeasuredDispatcher, MeasuredStore},
};

use super::{Client, Mode};

impl Client {
    /// Returns the same client; the time of each call of its store and dispatcher is recorded. Submissions
    /// under idempotency keys, reads of quotas, and calls that accept jobs in the fast mode are not.
    #[must_use]
    pub fn measured(self, calls: &CallMetrics) -> Self {
        Self {
            store: Arc::new(MeasuredStore::new(self.store, calls)),
            dispatcher: Arc::new(MeasuredDispatcher::new(self.dispatcher, calls)),
            ..self
        }
    }

    /// Returns the metrics of the connections to Postgres and Redis; empty unless the client uses both.
    pub fn connections(&self) -> ConnectionMetrics {
        match &self.mode {
            Mode::Servers { store, redis, .. } => ConnectionMetrics::new(Some(store), Some(redis)),
            Mode::Embedded | Mode::Fast(_) => ConnectionMetrics::default(),
        }
    }

    /// Returns the number of entries of a queue that wait in the dispatcher.
    ///
    /// # Errors
    /// If the dispatcher cannot be reached; the store still has all jobs.
    pub async fn waiting_entries(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        self.dispatcher.depth(queue).await
    }
}
