//! Export of spans to an OpenTelemetry collector, by OTLP over HTTP in protobuf.
//!
//! On when the standard variable `OTEL_EXPORTER_OTLP_ENDPOINT` (or `…_TRACES_ENDPOINT`) is set; otherwise
//! no thread, layer or client exists. The other standard variables apply: service name, resource
//! attributes, headers, timeout, certificate, sampler, sizes of queue and batch.
//!
//! Invariants: a span that ends is put into a bounded queue or dropped, and never waits; one thread of
//! the SDK sends; a collector that is away costs a log line a minute, and [`FLUSH_LIMIT`] at the end of
//! the process.
//!
//! See also `queue/src/trace.rs`, which joins spans to the traces of submitters.

mod client;
mod losses;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use opentelemetry::{Key, trace::TracerProvider as _};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider},
};
use tracing::{Level, Metadata, Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{Layer, filter::FilterFn, registry::LookupSpan};

use self::{
    client::CollectorClient,
    losses::{Bounded, Counted, Losses},
};

/// Name of the service if the environment gives none.
const SERVICE: &str = "tritmill";
/// Longest time that the last spans may take at the end of the process.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// Spans that wait for export without `OTEL_BSP_MAX_QUEUE_SIZE`.
const QUEUE_MAX: usize = 2048;
/// Longest time for one request to the collector without `OTEL_EXPORTER_OTLP_TIMEOUT`.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Returns a variable that is not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the variable of the exporter for traces, or the one for all signals.
fn of_exporter(name: &str) -> Option<String> {
    let for_traces = variable(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"));
    for_traces.or_else(|| variable(&format!("OTEL_EXPORTER_OTLP_{name}")))
}

/// The export of this process.
pub struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// Starts the export if the environment asks for it.
    ///
    /// # Errors
    /// If a variable has a value that cannot be used.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let is = |name, value| variable(name).is_some_and(|v| v.eq_ignore_ascii_case(value));
        let is_off = is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none");
        if is_off || of_exporter("ENDPOINT").is_none() {
            return Ok(None);
        }
        if let Some(other) = of_exporter("PROTOCOL").filter(|protocol| protocol != "http/protobuf")
        {
            bail!("OTEL_EXPORTER_OTLP_PROTOCOL is {other}: only http/protobuf is supported");
        }
        let limit = of_exporter("TIMEOUT").and_then(|ms| ms.parse().ok());
        let limit = limit.map_or(REQUEST_LIMIT, Duration::from_millis);
        let losses = Arc::new(Losses::default());
        let certificate = of_exporter("CERTIFICATE").map(PathBuf::from);
        let client = CollectorClient::new(certificate.as_deref(), limit, Arc::clone(&losses))?;
        let exporter = SpanExporter::builder().with_http().with_http_client(client).build();
        let exporter = exporter.context("OTEL_EXPORTER_OTLP_ENDPOINT")?;
        let exporter = Counted { exporter, losses: Arc::clone(&losses) };
        let queue_max =
            variable("OTEL_BSP_MAX_QUEUE_SIZE").and_then(|size| size.parse::<usize>().ok());
        let queue_max = queue_max.filter(|size| *size > 0).unwrap_or(QUEUE_MAX);
        let batches = BatchConfigBuilder::default().with_max_queue_size(queue_max).build();
        let next = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
        let provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_span_processor(Bounded { next, queue_max, losses })
            .build();
        Ok(Some(Self { provider }))
    }

    /// Returns the layer that hands the spans of this program to the export, with the warnings in them.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let is_ours = |about: &Metadata<'_>| {
            let most = if about.is_span() { Level::INFO } else { Level::WARN };
            about.target().starts_with("tritmill") && *about.level() <= most
        };
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer(SERVICE))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(FilterFn::new(is_ours).with_max_level_hint(LevelFilter::INFO))
    }

    /// Sends the last spans, for up to [`FLUSH_LIMIT`].
    pub fn flush(self) {
        // A collector that is away was logged.
        let _ = self.provider.shutdown_with_timeout(FLUSH_LIMIT);
    }
}

/// Returns the attributes of this process: those of the environment, and the name and the release.
fn resource() -> Resource {
    let given = Resource::builder().build();
    let name = given.get(&Key::from_static_str("service.name"));
    let is_unnamed = name.is_none_or(|name| name.as_str().starts_with("unknown_service"));
    let mut resource = Resource::builder();
    if is_unnamed {
        resource = resource.with_service_name(SERVICE);
    }
    let release = opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    resource.with_attribute(release).build()
}
