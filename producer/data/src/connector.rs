//! Gives object stores this program's HTTP client: rustls with ring, and the system's certificates.

use std::{sync::LazyLock, time::Duration};

use async_trait::async_trait;
use http_body_util::BodyExt as _;
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
        HttpResponseBody, HttpService,
    },
};
use reqwest::Body;
use tritmill_client::http::{self, BadCertificates};

/// Longest wait for the head of an answer: a store answers a finished upload of many parts late.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);

/// The client, made once: reading the system's certificates takes time.
static CLIENT: LazyLock<Result<http::HttpClient, BadCertificates>> =
    LazyLock::new(http::HttpClient::of_trusted_server);

/// Returns the client of web servers and object stores.
pub(crate) fn client() -> Result<http::HttpClient, BadCertificates> {
    match &*CLIENT {
        Ok(client) => Ok(client.clone()),
        // The error has no copy; this one has the same reason.
        Err(_) => http::HttpClient::of_trusted_server(),
    }
}

/// Connects object stores through [`client`].
#[derive(Debug)]
pub(crate) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = client().map_err(|source| object_store::Error::Generic {
            store: "HTTP",
            source: Box::new(source),
        })?;
        Ok(HttpClient::new(Service(client)))
    }
}

#[derive(Debug)]
struct Service(http::HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let request = self.0.request(head.method, &head.uri.to_string());
        let request = request.map_err(|error| HttpError::new(HttpErrorKind::Request, error))?;
        let request = request.headers(head.headers).body(Body::wrap(body));
        let answer = self.0.send(request, ANSWER_WITHIN).await;
        let answer = answer.map_err(|error| HttpError::new(kind(&error), error))?;
        let answer: ::http::Response<Body> = answer.into();
        let (head, body) = answer.into_parts();
        let broken = |error| HttpError::new(HttpErrorKind::Interrupted, error);
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body.map_err(broken))))
    }
}

/// Tells the store which failures a retry may change.
fn kind(error: &http::HttpError) -> HttpErrorKind {
    match error {
        http::HttpError::Connect { .. } | http::HttpError::Resolve { .. } => HttpErrorKind::Connect,
        http::HttpError::Timeout(_) => HttpErrorKind::Timeout,
        http::HttpError::Broken(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Request,
    }
}
