//! [`CollectorClient`]: requests to the collector, on a runtime of its own.

use std::{fmt, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use opentelemetry_http::{HttpClient as Sender, HttpError, Request, Response};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};
use tritmill_client::http::{AddressPolicy, HttpClient};

use super::losses::Losses;

/// Longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 16;

/// Sends requests from the thread of the SDK, which has no async runtime. The program's runtimes end before
/// the last spans are sent.
pub(super) struct CollectorClient {
    http: HttpClient,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    limit: Duration,
    losses: Arc<Losses>,
}

impl fmt::Debug for CollectorClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectorClient").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl CollectorClient {
    /// Creates a client that also trusts the authorities of the file `certificate`.
    pub fn new(
        certificate: Option<&Path>,
        limit: Duration,
        losses: Arc<Losses>,
    ) -> anyhow::Result<Self> {
        let http = HttpClient::new(AddressPolicy::Any, certificate);
        let http = http.context("OTEL_EXPORTER_OTLP_CERTIFICATE")?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start a runtime for the export of traces")?;
        Ok(Self { http, runtime: Some(runtime), limit, losses })
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let request = self.http.request(head.method, &head.uri.to_string())?;
        let request = request.headers(head.headers).body(body);
        let mut answer = self.http.send(request, self.limit).await?;
        let (mut body, status) = (BytesMut::new(), answer.status());
        while let Some(part) = answer.chunk().await? {
            if body.len() + part.len() > ANSWER_BYTES_MAX {
                break;
            }
            body.extend_from_slice(&part);
        }
        if !status.is_success() {
            self.losses.set_reason(format!("the collector answered {status}"));
        }
        let mut response = Response::new(body.freeze());
        *response.status_mut() = status;
        *response.headers_mut() = std::mem::take(answer.headers_mut());
        Ok(response)
    }
}

#[async_trait]
impl Sender for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let runtime = self.runtime.as_ref().ok_or("the export has ended")?;
        let sent = runtime.block_on(async { timeout(self.limit, self.send(request)).await });
        let sent = sent.unwrap_or_else(|_| Err("the collector does not answer in time".into()));
        sent.inspect_err(|error| self.losses.set_reason(error.to_string()))
    }
}

impl Drop for CollectorClient {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Without waiting for a name server that does not answer.
            runtime.shutdown_background();
        }
    }
}
