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

use crate::{
    Limit, Metrics, NotAdmitted,
    client_timeout::ClientTimeout,
    connections::Connections,
    request_memory::{BodyPart, Held, Taking},
};

/// A request body broke off.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The client took too long.
    #[error("the request body did not arrive in time")]
    Timeout,
    /// The bodies of other requests take all the memory for bodies.
    #[error("too many request bodies are in memory")]
    NoMemory,
    /// The connection failed, or the encoding of the body is invalid.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
}

impl BodyError {
    /// Returns the error of the body that caused an error.
    pub fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }
}

/// A request in progress, in the extensions of the request.
#[derive(Clone)]
pub struct Exchange(Arc<State>);

struct State {
    connections: Arc<Connections>,
    connection: u64,
    is_upload: AtomicBool,
    is_admitted: AtomicBool,
    /// Whether the request body was read to its end.
    is_received: AtomicBool,
    /// Memory of the request body.
    memory: Held,
}

impl Exchange {
    pub(crate) fn new(connections: Arc<Connections>, connection: u64, memory: Held) -> Self {
        let [is_upload, is_admitted, is_received] = [(); 3].map(|()| AtomicBool::new(false));
        let state = State { connections, connection, is_upload, is_admitted, is_received, memory };
        Self(Arc::new(state))
    }

    /// Gives back the memory of the request body.
    pub(crate) fn release_memory(&self) {
        self.0.memory.release();
    }

    /// Keeps the connection open until the response ends, whatever other clients do. The response holds
    /// `permit`. Without this call the connection may be closed for another one.
    ///
    /// # Errors
    /// If all connections for admitted requests are in use, or this one was closed.
    pub fn admit(&self, permit: impl Send + 'static) -> Result<(), NotAdmitted> {
        self.0.connections.admit(self.0.connection, Box::new(permit))?;
        self.0.is_admitted.store(true, Ordering::Relaxed);
        Ok(())
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
    /// Bytes of the whole body, if its head says so.
    declared: Option<u64>,
    /// A part that has arrived and waits for memory.
    waiting: Option<(Frame<Bytes>, Taking)>,
    /// Whether it failed for lack of memory: the rest is read only to be discarded.
    is_discarded: bool,
}

impl RequestBody {
    pub fn new(body: Incoming, exchange: Exchange, limit: Duration, metrics: Metrics) -> Self {
        exchange.0.is_received.store(body.is_end_stream(), Ordering::Relaxed);
        Self {
            declared: body.size_hint().exact(),
            body,
            exchange,
            client_timeout: ClientTimeout::new(limit),
            metrics,
            is_late: false,
            waiting: None,
            is_discarded: false,
        }
    }

    /// Passes a part on once there is memory for it.
    fn poll_memory(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some((frame, mut taking)) = self.waiting.take() else { return Poll::Ready(None) };
        match taking.poll(&self.exchange.0.memory, context) {
            Poll::Pending => {
                self.waiting = Some((frame, taking));
                Poll::Pending
            }
            Poll::Ready(true) => Poll::Ready(Some(Ok(frame))),
            Poll::Ready(false) => {
                self.is_discarded = true;
                self.metrics.refuse(Limit::RequestMemory);
                Poll::Ready(Some(Err(BodyError::NoMemory)))
            }
        }
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
        if self.waiting.is_some() {
            return self.poll_memory(context);
        }
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
            std::task::ready!(self.client_timeout.poll_end(context));
            self.is_late = true;
            self.metrics.refuse(Limit::BodyTime);
            return Poll::Ready(Some(Err(BodyError::Timeout)));
        };
        self.client_timeout.resume();
        let state = Arc::clone(&self.exchange.0);
        if frame.is_none() || self.body.is_end_stream() {
            state.is_received.store(true, Ordering::Relaxed);
        }
        let Some(Ok(frame)) = frame else {
            return Poll::Ready(frame.map(|frame| frame.map_err(BodyError::from)));
        };
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        let is_upload = state.is_upload.load(Ordering::Relaxed);
        if is_upload {
            self.client_timeout.forgive(bytes);
        }
        if self.is_discarded {
            return Poll::Ready(Some(Ok(frame)));
        }
        let is_admitted = state.is_admitted.load(Ordering::Relaxed);
        let part = BodyPart { bytes, declared: self.declared, is_upload, is_admitted };
        match state.memory.take(part) {
            None => Poll::Ready(Some(Ok(frame))),
            Some(taking) => {
                self.waiting = Some((frame, taking));
                self.poll_memory(context)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.waiting {
            None => self.body.size_hint(),
            // The rest, without the part that waits.
            Some(_) => SizeHint::default(),
        }
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
