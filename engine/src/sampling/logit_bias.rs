//! The bias that a request adds to logits.

use super::{SamplingParams, logits::LogitSet};

/// Adds the logit bias.
pub fn apply<C: LogitSet + ?Sized>(params: &SamplingParams, logits: &mut C) {
    for (token, bias) in &params.logit_bias {
        if let Some(logit) = logits.logit_mut(*token) {
            *logit += bias;
        }
    }
}
