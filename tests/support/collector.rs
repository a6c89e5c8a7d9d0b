//! A collector of traces: an HTTP server that decodes what exporters send.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, HeaderValue},
    routing::post,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{KeyValue, any_value::Value},
};
use prost::Message as _;
use tokio::{net::TcpListener, runtime::Runtime};

/// A span that arrived.
#[derive(Debug, Clone)]
pub struct ReceivedSpan {
    pub name: String,
    pub trace: String,
    pub id: String,
    pub parent: String,
    pub attributes: BTreeMap<String, String>,
    /// Attributes of the process.
    pub resource: BTreeMap<String, String>,
}

/// What arrived.
#[derive(Debug, Clone, Default)]
pub struct Received {
    pub spans: Vec<ReceivedSpan>,
    /// Headers of the requests, by name.
    pub heads: Vec<BTreeMap<String, String>>,
}

impl Received {
    /// Returns the spans with this name.
    pub fn named(&self, name: &str) -> impl Iterator<Item = &ReceivedSpan> {
        self.spans.iter().filter(move |span| span.name == name)
    }
}

/// A running collector, stopped when dropped.
pub struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Received>>,
    _runtime: Runtime,
}

impl Collector {
    pub fn start() -> Self {
        let received = Arc::<Mutex<Received>>::default();
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let router =
            Router::new().route("/v1/traces", post(receive)).with_state(Arc::clone(&received));
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { address, received, _runtime: runtime }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn received(&self) -> Received {
        self.received.lock().unwrap().clone()
    }
}

async fn receive(State(received): State<Arc<Mutex<Received>>>, headers: HeaderMap, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    let mut received = received.lock().unwrap();
    let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
    received.heads.push(headers.iter().map(|(name, v)| (name.to_string(), text(v))).collect());
    for of_resource in request.resource_spans {
        let resource = of_resource.resource.map(|one| attributes(one.attributes));
        let resource = resource.unwrap_or_default();
        let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        received.spans.extend(spans.map(|span| ReceivedSpan {
            name: span.name,
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            attributes: attributes(span.attributes),
            resource: resource.clone(),
        }));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attributes(list: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: Option<Value>| match value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    list.into_iter().map(|one| (one.key, text(one.value.and_then(|any| any.value)))).collect()
}
