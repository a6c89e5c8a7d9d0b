//! [`QuotaCache`]: a cache of the queue limits that operators set.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tritmill_queue::{QueueName, dispatch::Quotas, store::QueueSettings};

/// Time until a producer sees a change.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// Quotas of queues, read from the store at most every [`FRESH_FOR`].
pub(crate) struct QuotaCache {
    settings: Arc<dyn QueueSettings>,
    known: Mutex<HashMap<QueueName, (Instant, Quotas)>>,
}

impl QuotaCache {
    pub fn new(settings: Arc<dyn QueueSettings>) -> Self {
        Self { settings, known: Mutex::default() }
    }

    /// Returns a queue's quotas. If the store does not answer, the last known quotas apply; the
    /// store will refuse the submission itself.
    pub async fn of(&self, queue: &QueueName) -> Quotas {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(queue).cloned();
        if let Some((at, quotas)) = &known
            && at.elapsed() < FRESH_FOR
        {
            return quotas.clone();
        }
        let quotas = match self.settings.quotas(queue).await {
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
