//! Text generation with ternary (BitNet b1.58) language models on CPUs and NVIDIA GPUs.
//!
//! The crate reads model files ([`files`]), packs their ternary weights ([`formats`]), runs them on a
//! device ([`backend`]) and joins device, scheduler, KV cache and sampler in an [`Engine`] that
//! serves many requests at once. It does no network, queue or database work.
//!
//! The tokens of a request depend on the request and the model alone: never on the other requests
//! of a batch, the thread count, the instruction set or the packing.
//!
//! ```
//! use std::{path::Path, sync::Arc};
//!
//! use tritmill_engine::{
//!     Request, SamplingParams,
//!     files::Model,
//!     generate,
//!     load::{self, EngineOptions},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A Hugging Face folder or a GGUF file.
//! let model = Arc::new(Model::open(Path::new("tests/golden/bitnet-tiny"))?);
//! let mut engine = load::engine(&model, &EngineOptions::default())?;
//!
//! let sampling = SamplingParams { max_tokens: 16, temperature: 0.0, ..SamplingParams::default() };
//! let prompt = model.tokenizer().encode("The capital of France is", true)?;
//! let request = Request { prompt, sampling, ..Request::default() };
//! let output = generate::run(&mut engine, request, |_choice, text| print!("{text}"))?;
//! assert!(output.choices[0].tokens.len() <= 16);
//! # Ok(())
//! # }
//! ```
//!
//! To serve several requests, call [`Engine::submit`] for each and [`Engine::step`] in a loop.
//!
//! Items hidden from the documentation are for the tests, benchmarks and fuzz targets of this
//! repository. They may change in any release.

#![warn(missing_docs)]

pub mod backend;
pub mod chat;
pub mod config;
pub mod embed;
mod engine;
pub mod files;
pub mod formats;
pub mod generate;
pub mod kernels;
pub mod kv;
pub mod load;
pub mod logits;
mod math;
pub mod measure;
mod names;
mod request;
pub mod sampling;
mod scheduler;
mod text;
pub mod tokenizer;

pub use engine::{Engine, EngineConfig, EngineStats, ForkError, RowTarget, StepReport};
pub use names::UnknownName;
pub use request::{
    Choice, Event, FinishReason, Output, Request, RequestError, RequestId, SubmitError,
    TokenLogprob,
};
pub use sampling::{InvalidParam, SampleError, SamplingParams, TokenLogit};
pub use scheduler::{Fork, Priority};
pub use text::TokenText;
pub use tritmill_grammar::{Constraint, Grammar, GrammarError};
