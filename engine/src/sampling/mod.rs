//! From a row of logits to a token, as a function of the request alone. Knows no backend: it asks a [`LogitsRow`].
//!
//! ```text
//! engine   SamplingMetadata: parameters, counts, drafts, allowed tokens, position of each row
//!    │
//!    ▼
//! backend  the step; each row's first question (`RowMetadata::largest`) is answered with it
//!    ├── CPU: the screen finds few logits        → sampler asks the row: `at_least`, `logits_of`, `all`
//!    ├── CPU without a screen: all logits        → sampler takes them
//!    └── GPU: kernels draw from the metadata     → the token is there; `all` if they do not decide
//!    ▼
//! sampler  allowed tokens → logit bias → penalties → greedy, or temperature, top-k, top-p, min-p
//!          → the largest sum of logit and Gumbel noise → token, log-probabilities
//! ```
//!
//! Arithmetic is f64 with the crate's own `exp` and `ln` ([`crate::math`]), in fixed order: every machine draws the
//! same token from the same logits.

pub mod allowed_tokens;
pub mod gumbel;
pub mod logit_bias;
pub mod logit_changes;
mod logits;
pub mod logprobs;
pub mod metadata;
pub mod params;
pub mod penalties;
pub mod row;
pub mod sampler;
#[cfg(test)]
mod tests;
pub mod top_k_top_p;

pub use allowed_tokens::AllowedTokens;
pub use gumbel::GumbelNoise;
pub use logit_changes::LogitChange;
pub use logprobs::{Distribution, Logprobs};
pub use metadata::{RowMetadata, SamplingMetadata};
pub use params::{InvalidParam, SamplingParams};
pub use penalties::TokenCounts;
pub use row::{FirstQuestion, Largest, LogitsRow, Remainder, Threshold, TokenLogit};
pub use sampler::{DrawError, Drawn, SampleError, Scratch, sample};

/// Version of the definition of a draw, for numerics classes.
pub const VERSION: &str = "draw-2";
