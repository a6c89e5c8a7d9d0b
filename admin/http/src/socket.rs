//! [`Socket`]: a TCP stream that fails when its client stops reading.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use crate::{Limit, Metrics, client_timeout::ClientTimeout};

/// Idle time after which the system asks whether the client's machine is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// A TCP stream whose writes end in time. It lies below TLS, so encrypted responses are bounded alike.
pub(crate) struct Socket {
    stream: TcpStream,
    client_timeout: ClientTimeout,
    metrics: Metrics,
}

impl Socket {
    /// Limits the time that the client may take to read.
    pub fn new(stream: TcpStream, limit: Duration, metrics: Metrics) -> Self {
        // Sends small pieces of a stream at once. Each setting fails if the client is already gone.
        let _ = stream.set_nodelay(true);
        let socket = SockRef::from(&stream);
        let _ = socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE));
        // A stream of few events never fills the system's buffer. With this the system notices that none
        // of it is read, or that the client's machine is gone.
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_user_timeout(Some(limit));
        Self { stream, client_timeout: ClientTimeout::new(limit), metrics }
    }

    /// Handles the result of a write, of which `bytes` tells the progress.
    fn written<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
        bytes: impl FnOnce(&T) -> usize,
    ) -> Poll<io::Result<T>> {
        match result {
            Poll::Ready(result) => {
                self.client_timeout.resume();
                self.client_timeout.forgive(result.as_ref().map_or(0, bytes));
                Poll::Ready(result)
            }
            Poll::Pending => {
                ready!(self.client_timeout.poll_end(context));
                self.metrics.refuse(Limit::ReadTime);
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, result, |bytes| *bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.written(context, result, |bytes| *bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
