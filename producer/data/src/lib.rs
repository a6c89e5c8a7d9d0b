//! Data from where it lies: sources and sinks of batch runs.
//!
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod address;
mod allowed;
mod answers;
mod connector;
mod encoding;
mod error;
mod folder;
mod format;
mod http;
pub mod objects;
mod pages;
mod reading;
mod requests;
mod rows;
mod run;
mod sink;
mod source;
mod spool;

pub use address::Address;
pub use allowed::{AllowedAddresses, AllowedPrefix, BadPrefix};
pub use encoding::Encoding;
pub use error::DataError;
pub use format::{Format, UnknownFormat};
pub use pages::{Ended, Page, RemoteSource};
pub use requests::{Columns, EndpointOfRows};
pub use run::{DataRun, DataSettings};
pub use sink::{Answered, Answers, Sink};
