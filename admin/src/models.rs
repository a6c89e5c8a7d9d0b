//! Which models are served.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tritmill_queue::{Operations, QueueName, StoreError, store::operations::RegisteredQueue};

/// How late a caller may learn of a new model.
const KNOWN_FOR: Duration = Duration::from_secs(2);

/// The queues that requests may name, as `MODEL` or `MODEL@FORMAT`.
pub struct Models(Source);

enum Source {
    Fixed(Vec<RegisteredQueue>),
    Registered {
        operations: Arc<dyn Operations>,
        known: Mutex<Option<(Instant, Vec<RegisteredQueue>)>>,
    },
}

impl Models {
    /// These alone.
    pub fn fixed(queues: Vec<RegisteredQueue>) -> Self {
        Self(Source::Fixed(queues))
    }

    /// Those that workers have registered.
    pub fn registered(operations: Arc<dyn Operations>) -> Self {
        Self(Source::Registered { operations, known: Mutex::default() })
    }

    /// All of them, the first registered first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn all(&self) -> Result<Vec<RegisteredQueue>, StoreError> {
        let (operations, known) = match &self.0 {
            Source::Fixed(queues) => return Ok(queues.clone()),
            Source::Registered { operations, known } => (operations, known),
        };
        if let Some((at, queues)) = &*known.lock().unwrap_or_else(PoisonError::into_inner)
            && at.elapsed() < KNOWN_FOR
        {
            return Ok(queues.clone());
        }
        let queues = operations.registered_queues().await?;
        let now = Some((Instant::now(), queues.clone()));
        *known.lock().unwrap_or_else(PoisonError::into_inner) = now;
        Ok(queues)
    }

    /// The queue that a request means: a name without a format means the one registered first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn find(&self, name: &str) -> Result<Option<QueueName>, StoreError> {
        Ok(find(self.all().await?, name).map(|found| found.queue))
    }
}

/// The one of these that a name means.
pub(crate) fn find(queues: Vec<RegisteredQueue>, name: &str) -> Option<RegisteredQueue> {
    let whole = queues.iter().position(|known| known.queue.to_string() == name);
    let at = whole.or_else(|| queues.iter().position(|known| known.queue.model == name))?;
    queues.into_iter().nth(at)
}

#[cfg(test)]
mod tests {
    use tritmill_queue::Timestamp;

    use super::*;

    #[test]
    fn a_model_without_a_format_is_the_one_registered_first() {
        let queue = |model: &str, format: &str| RegisteredQueue {
            queue: QueueName { model: model.to_owned(), format: format.to_owned() },
            at: Timestamp::default(),
        };
        let queues = vec![queue("a", "tl2"), queue("a", "i2_s"), queue("a@b", "i2_s")];
        let check = |name: &str, expect: Option<&RegisteredQueue>| {
            assert_eq!(find(queues.clone(), name).as_ref(), expect, "{name}");
        };
        check("a", Some(&queues[0]));
        check("a@i2_s", Some(&queues[1]));
        check("a@b", Some(&queues[2]));
        check("a@tl1", None);
        check("", None);
    }
}
