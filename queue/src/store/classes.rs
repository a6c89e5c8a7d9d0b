//! Which numerics classes a queue's answers may be of, and what is refused about them.
//!
//! The first worker of a queue registers its class; a worker of another one does not start, unless an
//! operator has allowed that class. Then a job's answer is of either class, and names it. A class that is
//! withdrawn drains its workers with their next heartbeats.

use super::StoreError;
use crate::job::QueueName;

/// Classes that may be allowed for a queue, beside its own.
pub const ALLOWED_CLASSES_MAX: usize = 16;
/// Longest name of a class, in bytes.
const CLASS_BYTES_MAX: usize = 256;

/// A worker that would answer otherwise than the queue's other workers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClassError {
    /// The queue has another class: its jobs would depend on who runs them.
    #[error("queue {queue} has numerics class '{registered}'{}, not '{offered}'", others(.allowed))]
    Mismatch {
        /// The queue.
        queue: QueueName,
        /// The class of its first worker.
        registered: String,
        /// Classes that an operator has allowed beside it.
        allowed: Vec<String>,
        /// The class that was refused.
        offered: String,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn others(allowed: &[String]) -> String {
    allowed.iter().map(|class| format!(" or '{class}'")).collect()
}

/// A numerics class that must stay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResetClassError {
    /// Workers of this class live: one of another class beside them would answer otherwise.
    #[error("queue {queue} is served by {}: drain them first", .workers.join(", "))]
    Served {
        /// The queue.
        queue: QueueName,
        /// Names of the workers, as in their heartbeats.
        workers: Vec<String>,
    },
    /// The store did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Refuses a name that no class has.
///
/// # Errors
/// [`StoreError::InvalidValue`].
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

/// What a queue has registered, as far as it decides about a class.
pub(super) struct Classes {
    pub registered: Option<String>,
    pub allowed: Vec<String>,
}

impl Classes {
    fn has(&self, class: &str) -> bool {
        self.registered.as_deref() == Some(class) || self.allowed.iter().any(|one| one == class)
    }

    /// Whether workers of this class serve the queue.
    pub fn admit(self, queue: &QueueName, class: &str) -> Result<(), ClassError> {
        if self.has(class) {
            return Ok(());
        }
        let Self { registered, allowed } = self;
        let (queue, offered) = (queue.clone(), class.to_owned());
        let registered = registered.unwrap_or_default();
        Err(ClassError::Mismatch { queue, registered, allowed, offered })
    }

    /// Whether workers of this class are to go. One of an earlier release does not say its class.
    pub fn must_drain(&self, class: &str) -> bool {
        !class.is_empty() && self.registered.is_some() && !self.has(class)
    }

    /// Adds a class; false if it is there.
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

    /// Takes an allowed class away; false if it was not there.
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
    fn a_queue_allows_so_many_classes_of_names_that_can_be_read() {
        let mut classes = Classes { registered: Some("a".into()), allowed: Vec::new() };
        for wrong in ["", "a\nb", "a\0", &"x".repeat(CLASS_BYTES_MAX + 1)] {
            assert!(
                matches!(classes.allow(wrong), Err(StoreError::InvalidValue { .. })),
                "{wrong:?}"
            );
        }
        assert!(matches!(classes.allow("a"), Ok(false)), "it is the queue's own");
        for i in 0..ALLOWED_CLASSES_MAX {
            assert!(matches!(classes.allow(&format!("b{i}")), Ok(true)));
        }
        assert!(matches!(classes.allow("b0"), Ok(false)));
        assert!(matches!(classes.allow("c"), Err(StoreError::InvalidValue { .. })));
        assert!(!classes.must_drain("b0") && classes.must_drain("c"));
        assert!(!classes.must_drain(""), "it does not say");
        assert!(!classes.withdraw("a") && classes.withdraw("b0") && !classes.withdraw("b0"));
    }
}
