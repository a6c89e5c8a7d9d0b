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
pub mod files;
pub mod formats;
pub mod kernels;
pub mod kv;
pub mod math;
pub mod tokenizer;
