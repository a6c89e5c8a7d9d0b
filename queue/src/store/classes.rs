//! Numerics classes of queues: which workers may serve a queue.
//!
//! The first worker of a queue registers its class; a worker of another class refuses to start unless an
//! operator has allowed that class. A queue with allowed classes has answers of either class, and each
//! answer names its class. Withdrawing a class drains its workers with their next heartbeats.

use async_trait::async_trait;

use super::StoreError;
use crate::job::{QueueName, Timestamp};

/// Maximum number of classes that may be allowed for a queue besides its own.
pub const ALLOWED_CLASSES_MAX: usize = 16;
/// Longest name of a class, in bytes.
const CLASS_BYTES_MAX: usize = 256;

/// A worker's numerics class was not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClassError {
    /// The queue has another class: answers would depend on which worker runs a job.
    #[error("queue {queue} has numerics class '{registered}'{}, not '{offered}'", others(.allowed))]
    Mismatch {
        /// The queue.
        queue: QueueName,
        /// The class of its first worker.
        registered: String,
        /// Other classes that an operator has allowed.
        allowed: Vec<String>,
        /// The class that was refused.
        offered: String,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn others(allowed: &[String]) -> String {
    allowed.iter().map(|class| format!(" or '{class}'")).collect()
}

/// A queue's numerics class was not reset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetClassError {
    /// Live workers have this class; a worker of another class would give different answers.
    #[error("queue {queue} is served by {}: drain them first", .workers.join(", "))]
    Served {
        /// The queue.
        queue: QueueName,
        /// Names of the workers, as in their heartbeats.
        workers: Vec<String>,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A queue that a worker has registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredQueue {
    /// The queue.
    pub queue: QueueName,
    /// Time of the first registration; zero if an early release registered it.
    pub at: Timestamp,
}

/// Numerics classes of queues.
#[async_trait]
pub trait NumericsClasses: Send + Sync {
    /// Registers a queue's numerics class, or confirms that workers of this class may serve it.
    ///
    /// # Errors
    /// [`ClassError::Mismatch`] when the queue has another class and this one is not allowed.
    async fn register_class(&self, queue: &QueueName, class: &str) -> Result<(), ClassError>;

    /// Lets workers of another numerics class serve a queue too. Returns false if the class is
    /// already allowed.
    ///
    /// # Errors
    /// [`StoreError::InvalidValue`] when the name is invalid or the queue has
    /// [`ALLOWED_CLASSES_MAX`] allowed classes.
    async fn allow_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError>;

    /// Reverts [`allow_class`](Self::allow_class): workers of this class drain with their next
    /// heartbeats and no new ones start. Returns false if the class was not allowed; the queue's own
    /// class cannot be withdrawn.
    async fn withdraw_class(&self, queue: &QueueName, class: &str) -> Result<bool, StoreError>;

    /// Deletes a queue's numerics class and its allowed classes, so that the next worker registers a
    /// new one; returns the deleted class. Needed when a queue's model or engine settings change:
    /// later answers may then differ from earlier ones.
    ///
    /// # Errors
    /// [`ResetClassError::Served`] while a worker of the queue has sent a heartbeat within
    /// [`SILENT_ALIVE_MAX`](super::workers::SILENT_ALIVE_MAX).
    async fn reset_class(&self, queue: &QueueName) -> Result<Option<String>, ResetClassError>;

    /// Returns the queues that a worker has registered, the earliest first.
    async fn registered_queues(&self) -> Result<Vec<RegisteredQueue>, StoreError>;
}

/// Checks the name of a class.
///
/// # Errors
/// [`StoreError::InvalidValue`] when it is empty, too long, or has control characters.
pub fn check(class: &str) -> Result<(), StoreError> {
    let problem = match class.len() {
        0 => "must not be empty".to_owned(),
        bytes if bytes > CLASS_BYTES_MAX => {
            format!("has {bytes} bytes, the limit is {CLASS_BYTES_MAX}")
        }
        _ if class.contains(char::is_control) => "must not have control characters".to_owned(),
        _ => return Ok(()),
    };
    Err(StoreError::InvalidValue { what: "class", problem })
}

/// The classes of one queue.
#[derive(Default)]
pub(super) struct Classes {
    pub registered: Option<String>,
    pub allowed: Vec<String>,
}

impl Classes {
    fn has(&self, class: &str) -> bool {
        self.registered.as_deref() == Some(class) || self.allowed.iter().any(|one| one == class)
    }

    /// Returns an error unless workers of this class may serve the queue.
    pub fn admit(self, queue: &QueueName, class: &str) -> Result<(), ClassError> {
        if self.has(class) {
            return Ok(());
        }
        let Self { registered, allowed } = self;
        Err(ClassError::Mismatch {
            queue: queue.clone(),
            registered: registered.unwrap_or_default(),
            allowed,
            offered: class.to_owned(),
        })
    }

    /// Returns whether workers of this class must drain. Workers of early releases send an empty
    /// class.
    pub fn must_drain(&self, class: &str) -> bool {
        !class.is_empty() && self.registered.is_some() && !self.has(class)
    }

    /// Adds a class; returns false if the queue has it.
    pub fn allow(&mut self, class: &str) -> Result<bool, StoreError> {
        check(class)?;
        if self.has(class) {
            return Ok(false);
        }
        if self.allowed.len() >= ALLOWED_CLASSES_MAX {
            let problem = format!("is one too many: a queue allows {ALLOWED_CLASSES_MAX}");
            return Err(StoreError::InvalidValue { what: "class", problem });
        }
        self.allowed.push(class.to_owned());
        Ok(true)
    }

    /// Removes an allowed class; returns false if it was not allowed.
    pub fn withdraw(&mut self, class: &str) -> bool {
        let before = self.allowed.len();
        self.allowed.retain(|one| one != class);
        self.allowed.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_classes_are_limited_and_their_names_checked() {
        let mut classes = Classes { registered: Some("a".into()), allowed: Vec::new() };
        for wrong in ["", "a\nb", "a\0", &"x".repeat(CLASS_BYTES_MAX + 1)] {
            let refused = classes.allow(wrong);
            assert!(matches!(refused, Err(StoreError::InvalidValue { .. })), "{wrong:?}");
        }
        assert!(matches!(classes.allow("a"), Ok(false)), "the queue's own class");
        for i in 0..ALLOWED_CLASSES_MAX {
            assert!(matches!(classes.allow(&format!("b{i}")), Ok(true)));
        }
        assert!(matches!(classes.allow("b0"), Ok(false)));
        assert!(matches!(classes.allow("c"), Err(StoreError::InvalidValue { .. })));
        assert!(!classes.must_drain("b0") && classes.must_drain("c"));
        assert!(!classes.must_drain(""), "the worker sent no class");
        assert!(!classes.withdraw("a") && classes.withdraw("b0") && !classes.withdraw("b0"));
    }
}
