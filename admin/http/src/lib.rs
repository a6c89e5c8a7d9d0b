//! Serves HTTP/1.1 to clients that may be hostile.
//!
//! [`Server::serve`] accepts connections and serves a router on them, within [`Bounds`]:
//!
//! - A connection either waits for its client (handshake, request, body, reading of the response, next
//!   request), or serves a request that the service admitted by [`Exchange::admit`].
//! - Over a bound on connections, the one that has waited longest is closed. Some connections are reserved
//!   from admitted requests, so there is always one to close, and a health check is always served. This
//!   needs no look at the request, and therefore works with TLS.
//! - Request bodies in memory have one budget over all connections: [`Bounds::request_bytes`].
//! - Every wait for a client ends in time: [`Bounds::client_timeout`].
//! - A failed accept ends the server only if the listener itself is broken.
//!
//! HTTP/2 is not offered: one connection carries one request at a time.

mod accept;
mod client_timeout;
mod connections;
mod exchange;
mod metrics;
mod proxies;
mod request_memory;
mod server;
mod socket;
mod tls;

pub use connections::NotAdmitted;
pub use exchange::{BodyError, Exchange};
pub use metrics::{Limit, Metrics};
pub use proxies::{InvalidNetwork, Network, Proxies};
pub use server::{Bounds, Peer, SLACK, Server};
pub use tls::{Tls, TlsError};

#[cfg(test)]
mod tests;
