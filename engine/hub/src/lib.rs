//! Models of the Hugging Face Hub: which files of a repository a model consists of, their download, and the cache.
//!
//! The cache has the hub's layout (`models--ORG--NAME/{blobs,refs,snapshots}`), and locks and partial files have the
//! names that `huggingface_hub` gives them, so that both programs use each other's files. A blob gets its name when
//! all of it is on disk and has the hash that the hub states; until then it is `HASH.incomplete`, which the next
//! download continues.
//!
//! ```text
//! Reference ─► listing of the repository ─► choice of files ─► for each: HEAD ─► lock ─► GET from the last byte on
//!                                                                             hash ─► blob ─► link in the snapshot
//! ```
//!
//! The crate stands apart from the engine, which does no network I/O, and knows none of its types: it returns a path.
//! Everything that a server says is untrusted: names, sizes and hashes are checked before they become a path.
//!
//! The crate `hf-hub` would do most of this. It provides the paths here and no more: its version 1.0 has to be built
//! with a second TLS provider (aws-lc), and version 0.5 with a second reqwest or with ureq. Its clients also do not
//! compare hashes, know no offline mode, and ignore `HF_HUB_CACHE` (0.5).

mod cache;
mod choice;
mod client;
mod digest;
mod error;
mod families;
mod listing;
mod progress;
mod pull;
mod reference;
mod settings;
mod transfer;
mod variants;

pub use self::{
    choice::RemoteFile,
    error::{FileList, PullError, Unreachable},
    families::{FAMILIES, Family},
    progress::Event,
    pull::{Pulled, cached, pull},
    reference::{PREFIX, Reference, ReferenceError},
    settings::{Settings, SettingsError},
    variants::{PassedOver, WhyNot},
};
