//! What operators allow to wait, as this process knows it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tritmill_queue::{QueueName, dispatch::Quotas, store::QueueSettings};

/// How late a producer may learn of a change.
const KNOWN_FOR: Duration = Duration::from_secs(5);

/// Quotas of queues, asked for now and then.
pub(crate) struct KnownQuotas {
    operations: Arc<dyn QueueSettings>,
    known: Mutex<HashMap<QueueName, (Instant, Quotas)>>,
}

impl KnownQuotas {
    pub fn new(operations: Arc<dyn QueueSettings>) -> Self {
        Self { operations, known: Mutex::default() }
    }

    /// A queue's quotas, at most some seconds old. Of a store that does not answer the last ones
    /// go on being true; it will refuse the submission itself.
    pub async fn of(&self, queue: &QueueName) -> Quotas {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(queue).cloned();
        if let Some((at, quotas)) = &known
            && at.elapsed() < KNOWN_FOR
        {
            return quotas.clone();
        }
        let quotas = match self.operations.quotas(queue).await {
            Ok(quotas) => quotas,
            Err(error) => {
                tracing::debug!(%error, "quotas not read");
                known.map(|(_, quotas)| quotas).unwrap_or_default()
            }
        };
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(queue.clone(), (Instant::now(), quotas.clone()));
        quotas
    }
}
