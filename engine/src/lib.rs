//! Tokens in, tokens out: ternary (BitNet b1.58) language models on CPUs.
//!
//! The crate owns model files ([`files`]), the lossless packings of ternary weights ([`formats`])
//! and their kernels ([`kernels`]), the KV cache ([`kv`]), the scheduler ([`scheduler`]), the
//! sampler ([`sampler`]) and the loop that joins them ([`Engine`]). It knows nothing of jobs,
//! networks or databases.
//!
//! Promise: the tokens a request gets depend on the request and the model alone, never on its
//! batch mates, the thread count, the ISA or the packing. ARCHITECTURE.md says how.

pub mod backend;
pub mod chat;
pub mod config;
mod engine;
pub mod files;
pub mod formats;
pub mod generate;
pub mod kernels;
pub mod kv;
pub mod load;
pub mod logits;
pub mod math;
pub mod measure;
mod names;
mod request;
pub mod sampler;
pub mod scheduler;
pub mod text;
pub mod tokenizer;

pub use engine::{Engine, EngineConfig, EngineStats, StepReport};
pub use names::UnknownName;
pub use request::{
    Choice, Event, FinishReason, Output, Request, RequestError, RequestId, SubmitError,
    TokenLogprob,
};
pub use sampler::{InvalidParam, SampleError, SamplingParams};
pub use scheduler::Priority;
pub use text::TokenText;
