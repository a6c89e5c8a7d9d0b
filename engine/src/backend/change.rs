//! Changes of single logits that a backend makes before it draws a token.

/// A change of a token's logit: a bias, and then penalties.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    /// The token.
    pub token: u32,
    /// Added first. −∞ for a token that must not be drawn, and −0, which changes no logit, for none.
    pub bias: f32,
    /// Then logits below 0 are multiplied by it, and others are divided by it. 1 for none.
    pub penalty: f32,
    /// Subtracted last. 0 for none.
    pub less: f32,
}

impl LogitChange {
    /// The change of a token that changes nothing.
    pub const fn none(token: u32) -> Self {
        Self { token, bias: -0.0, penalty: 1.0, less: 0.0 }
    }

    /// Returns the changed logit.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = logit + self.bias;
        let logit = if logit < 0.0 { logit * self.penalty } else { logit / self.penalty };
        logit - self.less
    }
}
