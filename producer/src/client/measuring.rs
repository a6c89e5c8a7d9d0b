//! What operators measure: the time of calls, connections, and what waits in the dispatcher.

use std::sync::Arc;

use tritmill_queue::{
    DispatchError, QueueName,
    metrics::{CallMetrics, ConnectionMetrics, MeasuredDispatcher, MeasuredStore},
};

use super::Client;

impl Client {
    /// Returns the same client; the time of each call of its store and dispatcher is recorded. Submissions
    /// under idempotency keys and reads of quotas are not.
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
        match &self.servers {
            Some((store, dispatcher)) => ConnectionMetrics::new(store, dispatcher),
            None => ConnectionMetrics::default(),
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
