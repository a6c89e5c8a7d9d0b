//! A batch file answered by a server, over its HTTP API.
//!
//! The promise is that of an embedded run: every line of the input has one line in the output. What
//! the server would refuse a whole batch for (a line that is no request, a name that comes twice)
//! stays here and becomes an error line; the rest is split into batches of one endpoint and model and
//! of a size that servers take ([`split`]). Each is uploaded, created, waited for and fetched; then
//! the output is put together in the order of the input ([`merge`]).
//!
//! How far it is lies in a folder beside the output ([`state`]), written before each step and after
//! it. A run that is killed goes on where it was: an upload is looked for by its name, which no other
//! run has, and a batch is created under an idempotency key.

mod answers;
mod api;
mod merge;
mod run;
mod split;
mod state;
mod terms;

pub use answers::{Counted, Errors, LineError, RemoteBatch, RemoteError};
pub use api::{Api, Content, NewBatch};
pub use run::RemoteRun;
pub use terms::{RemoteRunError, RemoteSettings, RemoteUpdate};
