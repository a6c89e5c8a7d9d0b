//! The name of a queue: a model and a format.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Name of a queue: all jobs of one model in one format.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QueueName {
    /// Name of the model as workers serve it.
    pub model: String,
    /// Packing of its weights (`i2_s`, `tl1`, `tl2`).
    pub format: String,
}

/// The name of a model or format is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueNameError {
    /// The name is empty.
    #[error("the name is empty")]
    Empty,
    /// The name is too long.
    #[error("the name has {0} bytes, the limit is {max}", max = QueueName::PART_BYTES_MAX)]
    Long(usize),
    /// The name has a control character, which lists, logs and keys cannot show.
    #[error("the name has a control character")]
    Control,
}

impl QueueName {
    /// Longest name of a model or a format, in bytes.
    pub const PART_BYTES_MAX: usize = 256;

    /// Checks the name of a model or a format.
    ///
    /// # Errors
    /// When the name is empty, too long, or has a control character.
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
    fn names_are_short_and_printable() {
        let check = |part: &str, expect| assert_eq!(QueueName::check_part(part), expect);
        check("demo", Ok(()));
        check("a{}:%\"' é@", Ok(()));
        check(&"x".repeat(QueueName::PART_BYTES_MAX), Ok(()));
        check("", Err(QueueNameError::Empty));
        check(&"x".repeat(1000), Err(QueueNameError::Long(1000)));
        check("a\nb", Err(QueueNameError::Control));
    }
}
