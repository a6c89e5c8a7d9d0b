//! [`Client`]: requests to the hub, over reqwest and rustls with ring, as everywhere in the program.
//!
//! Redirects are followed here, since the answer of the hub and that of the server it points to mean different things:
//! the first has the hash, the second the content. The token goes to the hub only, and a secure address never leads
//! to an insecure one. Proxies of the environment (`HTTPS_PROXY`) are used.

use std::{sync::Arc, time::Duration};

use reqwest::{
    Method, Response, StatusCode, Url,
    header::{self, HeaderMap, HeaderName, HeaderValue},
    redirect, retry,
};
use rustls::{ClientConfig, RootCertStore, crypto::ring};

use crate::{
    Reference, Settings,
    digest::Digest,
    error::{PullError, Unreachable},
    listing::{LISTING_BYTES_MAX, Listing},
};

/// Most redirects of a request.
const REDIRECTS_MAX: usize = 10;
/// Time limit for a connection, its name lookup and TLS handshake included.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Longest wait that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Most requests for a description.
const DESCRIPTION_ATTEMPTS_MAX: u32 = 3;

/// Asks one hub.
pub(crate) struct Client<'a> {
    http: reqwest::Client,
    settings: &'a Settings,
}

/// What the hub says of a file.
#[derive(Debug, Default)]
pub(crate) struct Head {
    pub digest: Option<Digest>,
    pub size: Option<u64>,
}

/// A file at a commit, in the words of the user for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub reference: &'a Reference,
    pub commit: &'a str,
    pub file: &'a str,
}

impl<'a> Client<'a> {
    /// Creates a client that trusts the system's certificate authorities.
    pub fn new(settings: &'a Settings) -> Self {
        let mut roots = RootCertStore::empty();
        // Without any, http:// mirrors still work.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has the default protocols")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(redirect::Policy::none())
            .retry(retry::never())
            .http1_only()
            .user_agent(concat!("tritmill/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_WITHIN.min(settings.timeout))
            .read_timeout(settings.timeout)
            .build()
            .expect("TLS is configured and no other option can fail");
        Self { http, settings }
    }

    /// Returns the files of the repository and the commit that the revision means.
    pub async fn listing(&self, reference: &Reference) -> Result<Listing, PullError> {
        let [organisation, name] = reference.parts();
        let path = ["api", "models", organisation, name, "revision", reference.revision()];
        let mut url = self.url(path);
        url.set_query(Some("blobs=true"));
        self.patient(async || {
            let mut response = self.follow(&url, 0).await?;
            if !response.status().is_success() {
                return Err(self.refusal(&response, reference, None));
            }
            let mut bytes = Vec::new();
            while let Some(part) = response.chunk().await.map_err(unreachable)? {
                if bytes.len() + part.len() > LISTING_BYTES_MAX {
                    return Err(answer(response.url(), "it is too long"));
                }
                bytes.extend_from_slice(&part);
            }
            Listing::parse(&bytes).map_err(|problem| answer(response.url(), problem))
        })
        .await
    }

    /// Returns hash and size of a file, as far as the hub states them.
    pub async fn head(&self, place: Place<'_>) -> Result<Head, PullError> {
        self.patient(async || {
            let mut url = self.file_url(place);
            let mut head = Head::default();
            for _ in 0..=REDIRECTS_MAX {
                let response = self.send(Method::HEAD, &url, 0).await?;
                head.add(response.status(), response.headers());
                let is_hub = self.is_hub(&url);
                match target(&response)? {
                    Some(next) if head.digest.is_none() || head.size.is_none() => url = next,
                    None if is_hub && !response.status().is_success() => {
                        return Err(self.refusal(&response, place.reference, Some(place.file)));
                    }
                    // Other servers may refuse HEAD; the listing has most of it too.
                    _ => return Ok(head),
                }
            }
            Err(answer(&url, "too many redirects"))
        })
        .await
    }

    /// Requests the content of a file from a byte on. The status is 200 (all of it), 206 or 416.
    pub async fn get(&self, place: Place<'_>, from: u64) -> Result<Response, PullError> {
        let response = self.follow(&self.file_url(place), from).await?;
        match response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                Ok(response)
            }
            _ => Err(self.refusal(&response, place.reference, Some(place.file))),
        }
    }

    /// Returns the time before another attempt, after so many that brought nothing.
    pub fn delay(&self, attempts: u32, cause: &Unreachable) -> Duration {
        let doubled = 1 << (attempts.saturating_sub(1)).min(6);
        let delay = self.settings.retry_delay * doubled;
        match cause {
            Unreachable::Busy { retry_after: Some(seconds), .. } => {
                delay.max(Duration::from_secs(*seconds).min(RETRY_AFTER_MAX))
            }
            _ => delay,
        }
    }

    /// Tries a request for a description again while the hub is away.
    async fn patient<T>(
        &self,
        mut attempt: impl AsyncFnMut() -> Result<T, PullError>,
    ) -> Result<T, PullError> {
        let attempts_max = self.settings.attempts_max.min(DESCRIPTION_ATTEMPTS_MAX);
        let mut attempts = 0;
        loop {
            attempts += 1;
            match attempt().await {
                Err(PullError::Unreachable(cause)) if attempts < attempts_max => {
                    tokio::time::sleep(self.delay(attempts, &cause)).await;
                }
                ended => return ended,
            }
        }
    }

    /// Returns an address at the hub.
    fn url<'s>(&self, path: impl IntoIterator<Item = &'s str>) -> Url {
        let mut url = self.settings.endpoint.clone();
        let mut parts = url.path_segments_mut().expect("the endpoint is an http URL");
        parts.pop_if_empty().extend(path);
        drop(parts);
        url
    }

    fn file_url(&self, place: Place<'_>) -> Url {
        let [organisation, name] = place.reference.parts();
        let fixed = [organisation, name, "resolve", place.commit];
        self.url(fixed.into_iter().chain(place.file.split('/')))
    }

    fn is_hub(&self, url: &Url) -> bool {
        url.origin() == self.settings.endpoint.origin()
    }

    /// Sends a GET and follows its redirects.
    async fn follow(&self, url: &Url, from: u64) -> Result<Response, PullError> {
        let mut url = url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let response = self.send(Method::GET, &url, from).await?;
            match target(&response)? {
                Some(next) => url = next,
                None => return Ok(response),
            }
        }
        Err(answer(&url, "too many redirects"))
    }

    /// Sends one request. Answers that say to come later are errors.
    async fn send(&self, method: Method, url: &Url, from: u64) -> Result<Response, PullError> {
        let mut request = self.http.request(method, url.clone());
        // The hash and the size are those of the file, not of a compressed one.
        request = request.header(header::ACCEPT_ENCODING, "identity");
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_hub(url)) {
            request = request.bearer_auth(token.secret());
        }
        let response = request.send().await.map_err(unreachable)?;
        let status = response.status();
        if status.is_server_error()
            || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
        {
            let retry_after = text(response.headers(), &header::RETRY_AFTER);
            return Err(PullError::Unreachable(Unreachable::Busy {
                host: host(url),
                status: status.as_u16(),
                retry_after: retry_after.and_then(|seconds| seconds.parse().ok()),
            }));
        }
        Ok(response)
    }

    /// Returns what a refusal of the hub means.
    fn refusal(&self, response: &Response, reference: &Reference, file: Option<&str>) -> PullError {
        let header = |name: &'static str| text(response.headers(), &HeaderName::from_static(name));
        let repository = reference.repository();
        let revision = reference.revision().to_owned();
        match (response.status(), header("x-error-code"), file) {
            (_, Some("GatedRepo"), _) => self.gated(reference),
            (_, Some("RepoNotFound"), _) => PullError::NoRepository { repository },
            (_, Some("RevisionNotFound"), _) => PullError::NoRevision { repository, revision },
            (StatusCode::UNAUTHORIZED, ..) if self.settings.token.is_some() => {
                let reason = header("x-error-message").unwrap_or("401").to_owned();
                PullError::TokenRefused { repository, reason }
            }
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, ..) => self.gated(reference),
            (StatusCode::NOT_FOUND | StatusCode::GONE, _, Some(file)) => {
                PullError::NoFile { repository, file: file.to_owned(), revision }
            }
            (StatusCode::NOT_FOUND | StatusCode::GONE, _, None) => {
                PullError::NoRepository { repository }
            }
            (status, ..) => answer(response.url(), format!("status {}", status.as_u16())),
        }
    }

    fn gated(&self, reference: &Reference) -> PullError {
        let page = self.url(reference.parts()).to_string();
        PullError::Gated { repository: reference.repository(), page }
    }
}

impl Head {
    /// Adds what an answer says. What the hub said first counts.
    fn add(&mut self, status: StatusCode, headers: &HeaderMap) {
        let linked = |name| text(headers, &HeaderName::from_static(name));
        // A redirect has its own tag and length.
        let own = |name| text(headers, &name).filter(|_| status.is_success());
        let etag = linked("x-linked-etag").or_else(|| own(header::ETAG));
        let size = linked("x-linked-size").or_else(|| own(header::CONTENT_LENGTH));
        self.digest = self.digest.take().or_else(|| Digest::of_etag(etag?));
        self.size = self.size.or_else(|| size?.parse().ok());
    }
}

/// Returns where a redirect leads.
fn target(response: &Response) -> Result<Option<Url>, PullError> {
    let url = response.url();
    if !response.status().is_redirection() {
        return Ok(None);
    }
    let location = text(response.headers(), &header::LOCATION);
    location_of(url, location.unwrap_or_default()).map(Some)
}

fn location_of(url: &Url, location: &str) -> Result<Url, PullError> {
    let next = Some(location).filter(|text| !text.is_empty()).and_then(|text| url.join(text).ok());
    let next = next.ok_or_else(|| answer(url, "a redirect without a target"))?;
    let is_safe = next.scheme() == "https" || (next.scheme() == "http" && url.scheme() == "http");
    if !is_safe {
        return Err(answer(url, "a redirect to an address that is not secure"));
    }
    Ok(next)
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name).map(HeaderValue::to_str)?.ok()
}

fn host(url: &Url) -> String {
    let port = url.port_or_known_default().unwrap_or_default();
    format!("{}:{port}", url.host_str().unwrap_or_default())
}

/// Returns the error of an answer that makes no sense.
fn answer(url: &Url, problem: impl Into<String>) -> PullError {
    // Without the query, which may have a signature.
    let mut url = url.clone();
    url.set_query(None);
    PullError::Answer { url: url.to_string(), problem: problem.into() }
}

/// Returns the error of a request or body without an answer.
pub(crate) fn unreachable(error: reqwest::Error) -> PullError {
    let host = error.url().map(host).unwrap_or_default();
    let mut cause: &dyn std::error::Error = &error;
    // Without the outer errors: they repeat the URL, which may have a signature.
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let cause = if error.is_timeout() { "no answer in time".to_owned() } else { cause.to_string() };
    PullError::Unreachable(Unreachable::Connection { host, cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_keeps_the_connection_secure_and_hides_signatures() {
        let check = |from: &str, location: &str| {
            let from = Url::parse(from).expect("a URL");
            location_of(&from, location).map(String::from).map_err(|error| error.to_string())
        };
        let relative = check("https://h/o/n?a", "/api/x?b");
        assert_eq!(relative.as_deref(), Ok("https://h/api/x?b"));
        assert_eq!(check("http://h/o", "http://c/x").as_deref(), Ok("http://c/x"));
        assert_eq!(check("http://h/o", "https://c/x").as_deref(), Ok("https://c/x"));
        for bad in ["http://c/x", "file:///etc/x", "ftp://c/x", "", "https://"] {
            let error = check("https://h/o/n?secret", bad).expect_err(bad);
            assert!(error.starts_with("unexpected answer of https://h/o/n: a redirect"), "{error}");
        }
    }

    #[test]
    fn only_the_hub_is_the_hub() {
        let settings = Settings::at("https://h/mirror/", "cache".as_ref()).expect("settings");
        let client = Client::new(&settings);
        let place = Place {
            reference: &"o/n".parse().expect("a reference"),
            commit: "c",
            file: "a b/c.gguf",
        };
        assert_eq!(client.file_url(place).as_str(), "https://h/mirror/o/n/resolve/c/a%20b/c.gguf");
        for (url, expect) in [
            ("https://h:443/x", true),
            ("http://h/x", false),
            ("https://h:1/x", false),
            ("https://h.c/x", false),
        ] {
            assert_eq!(client.is_hub(&Url::parse(url).expect("a URL")), expect, "{url}");
        }
    }

    #[test]
    fn delay_doubles_and_follows_the_server_within_a_bound() {
        let settings = Settings::at("https://h", "cache".as_ref()).expect("settings");
        let client = Client::new(&settings);
        let closed = || Unreachable::Closed { host: String::new() };
        let seconds = |attempts, cause: Unreachable| client.delay(attempts, &cause).as_secs_f64();
        assert_eq!([1, 2, 3, 4].map(|attempts| seconds(attempts, closed())), [0.5, 1.0, 2.0, 4.0]);
        let busy =
            |retry_after| Unreachable::Busy { host: String::new(), status: 429, retry_after };
        assert_eq!(seconds(1, busy(Some(7))), 7.0);
        assert_eq!(seconds(1, busy(Some(1 << 40))), 60.0);
        assert_eq!(seconds(1, busy(None)), 0.5);
    }
}
