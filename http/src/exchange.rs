//! [`Exchange`]: one request and its response, with limits on the client's time.

use std::{
    error::Error,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};

use crate::{Limit, Metrics, NotAdmitted, client_timeout::ClientTimeout, connections::Connections};

/// A request body broke off.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The client took too long.
    #[error("the request body did not arrive in time")]
    Timeout,
    /// The connection failed, or the encoding of the body is invalid.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
}

impl BodyError {
    /// Returns whether an error was caused by a [`BodyError::Timeout`].
    pub fn is_timeout(error: &(dyn Error + 'static)) -> bool {
        let mut next = Some(error);
        while let Some(error) = next {
            if matches!(error.downcast_ref(), Some(Self::Timeout)) {
                return true;
            }
            next = error.source();
        }
        false
    }
}

/// A request in progress, in the extensions of the request.
#[derive(Clone)]
pub struct Exchange(Arc<State>);

struct State {
    connections: Arc<Connections>,
    connection: u64,
    is_upload: AtomicBool,
    /// Whether the request body was read to its end.
    is_received: AtomicBool,
}

impl Exchange {
    pub(crate) fn new(connections: Arc<Connections>, connection: u64) -> Self {
        let (is_upload, is_received) = (AtomicBool::new(false), AtomicBool::new(false));
        Self(Arc::new(State { connections, connection, is_upload, is_received }))
    }

    /// Keeps the connection open until the response ends, whatever other clients do. The response holds
    /// `permit`. Without this call the connection may be closed for another one.
    ///
    /// # Errors
    /// If all connections for admitted requests are in use, or this one was closed.
    pub fn admit(&self, permit: impl Send + 'static) -> Result<(), NotAdmitted> {
        self.0.connections.admit(self.0.connection, Box::new(permit))
    }

    /// Lets the body take as long as it arrives at a minimum rate. Without this call it must
    /// arrive within the time limit for clients.
    pub fn expect_upload(&self) {
        self.0.is_upload.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_received(&self) -> bool {
        self.0.is_received.load(Ordering::Relaxed)
    }
}

/// The body of a request, which arrives in time or fails.
pub(crate) struct RequestBody {
    body: Incoming,
    exchange: Exchange,
    client_timeout: ClientTimeout,
    metrics: Metrics,
    is_late: bool,
}

impl RequestBody {
    pub fn new(body: Incoming, exchange: Exchange, limit: Duration, metrics: Metrics) -> Self {
        exchange.0.is_received.store(body.is_end_stream(), Ordering::Relaxed);
        Self { body, exchange, client_timeout: ClientTimeout::new(limit), metrics, is_late: false }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.is_late {
            return Poll::Ready(Some(Err(BodyError::Timeout)));
        }
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
            std::task::ready!(self.client_timeout.poll_end(context));
            self.is_late = true;
            self.metrics.refuse(Limit::BodyTime);
            return Poll::Ready(Some(Err(BodyError::Timeout)));
        };
        self.client_timeout.resume();
        let state = &self.exchange.0;
        if frame.is_none() || self.body.is_end_stream() {
            state.is_received.store(true, Ordering::Relaxed);
        }
        if state.is_upload.load(Ordering::Relaxed)
            && let Some(Ok(frame)) = &frame
        {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            self.client_timeout.forgive(bytes);
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BodyError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a response. Its end is the end of the exchange.
pub(crate) struct ResponseBody {
    body: body::Body,
    exchange: Exchange,
}

impl ResponseBody {
    pub fn new(body: body::Body, exchange: Exchange) -> Self {
        Self { body, exchange }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.exchange.0.connections.wait(self.exchange.0.connection);
    }
}
