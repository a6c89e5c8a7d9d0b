//! A batch file answered by a server, over its HTTP API.
//!
//! As in an embedded run, every line of the input has one line in the output. Lines for which a server
//! would refuse a whole batch (not a request, a repeated `custom_id`, a model that it does not have) are
//! not sent and become error lines. The others are split into batches of one endpoint and model, of a size that servers accept
//! ([`split`]). Each batch is uploaded, created, waited for and downloaded; then the output is merged
//! in the order of the input ([`merge`]).
//!
//! The state of a run is in a folder beside the output ([`state`]), written before and after each step,
//! so that a killed run continues: an upload is found by its name, which is unique to the run, and a
//! batch is created with an idempotency key.

mod answers;
mod api;
mod finish;
mod merge;
mod results;
mod run;
mod split;
mod state;
mod terms;
mod unserved;

pub use answers::{
    BatchErrors, BatchEstimate, Cost, LineError, LinesAdded, RemoteBatch, RemoteError,
    RequestCounts,
};
pub use api::{AfterBatch, Api, Content, Escalation, NewBatch, OpenBatch, Retry, UrlBatch};
pub use results::{BatchResult, ResultsQuery};
pub use run::RemoteRun;
pub use terms::{RemoteRunError, RemoteSettings, RemoteUpdate};
