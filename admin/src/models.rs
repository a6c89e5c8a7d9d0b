//! [`Models`]: the models that requests may name.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tritmill_queue::{
    QueueName, StoreError,
    store::{NumericsClasses, classes::RegisteredQueue},
};

/// How long a list of models is cached.
const CACHE_FOR: Duration = Duration::from_secs(2);

/// The queues that requests may name as `MODEL` or `MODEL@FORMAT`.
pub struct Models(Source);

enum Source {
    Fixed(Vec<RegisteredQueue>),
    Registered {
        classes: Arc<dyn NumericsClasses>,
        cache: Mutex<Option<(Instant, Vec<RegisteredQueue>)>>,
    },
}

impl Models {
    /// A fixed list of queues.
    pub fn fixed(queues: Vec<RegisteredQueue>) -> Self {
        Self(Source::Fixed(queues))
    }

    /// The queues that workers have registered.
    pub fn registered(classes: Arc<dyn NumericsClasses>) -> Self {
        Self(Source::Registered { classes, cache: Mutex::default() })
    }

    /// Returns all queues, in the order of registration.
    ///
    /// # Errors
    /// If the list cannot be read from the store.
    pub async fn all(&self) -> Result<Vec<RegisteredQueue>, StoreError> {
        let (classes, cache) = match &self.0 {
            Source::Fixed(queues) => return Ok(queues.clone()),
            Source::Registered { classes, cache } => (classes, cache),
        };
        if let Some((at, queues)) = &*cache.lock().unwrap_or_else(PoisonError::into_inner)
            && at.elapsed() < CACHE_FOR
        {
            return Ok(queues.clone());
        }
        let queues = classes.registered_queues().await?;
        let now = Some((Instant::now(), queues.clone()));
        *cache.lock().unwrap_or_else(PoisonError::into_inner) = now;
        Ok(queues)
    }

    /// Returns the queue of a model name. A name without a format means the format registered first.
    ///
    /// # Errors
    /// If the list cannot be read from the store.
    pub async fn find(&self, name: &str) -> Result<Option<QueueName>, StoreError> {
        Ok(find(self.all().await?, name).map(|found| found.queue))
    }
}

/// Finds a queue by `MODEL@FORMAT`, or by `MODEL`.
pub(crate) fn find(queues: Vec<RegisteredQueue>, name: &str) -> Option<RegisteredQueue> {
    let exact = queues.iter().position(|known| known.queue.to_string() == name);
    let index = exact.or_else(|| queues.iter().position(|known| known.queue.model == name))?;
    queues.into_iter().nth(index)
}

#[cfg(test)]
mod tests {
    use tritmill_queue::Timestamp;

    use super::*;

    #[test]
    fn model_without_a_format_means_the_one_registered_first() {
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
