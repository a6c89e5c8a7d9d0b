//! What a queue is called: a model and a format.

use std::fmt;

use serde::{Deserialize, Serialize};

/// All jobs of one model in one format.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QueueName {
    /// Name of the model as workers serve it.
    pub model: String,
    /// Packing of its weights (`i2_s`, `tl1`, `tl2`).
    pub format: String,
}

/// A model or format that no queue can be named after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueNameError {
    /// Nothing.
    #[error("the name is empty")]
    Empty,
    /// Too much.
    #[error("the name has {0} bytes, the limit is {max}", max = QueueName::PART_BYTES_MAX)]
    Long(usize),
    /// Something that a list, a log or a key cannot show.
    #[error("the name has a control character")]
    Control,
}

impl QueueName {
    /// Longest name of a model or a format.
    pub const PART_BYTES_MAX: usize = 256;

    /// Whether a model or a format may be called so.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_part(part: &str) -> Result<(), QueueNameError> {
        match part {
            "" => Err(QueueNameError::Empty),
            _ if part.len() > Self::PART_BYTES_MAX => Err(QueueNameError::Long(part.len())),
            _ if part.chars().any(char::is_control) => Err(QueueNameError::Control),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.model, self.format)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_short_and_can_be_shown() {
        let check = |part: &str, expect| assert_eq!(QueueName::check_part(part), expect);
        check("demo", Ok(()));
        check("a{}:%\"' é@", Ok(()));
        check(&"x".repeat(QueueName::PART_BYTES_MAX), Ok(()));
        check("", Err(QueueNameError::Empty));
        check(&"x".repeat(1000), Err(QueueNameError::Long(1000)));
        check("a\nb", Err(QueueNameError::Control));
    }
}
