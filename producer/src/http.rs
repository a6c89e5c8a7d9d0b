//! [`HttpClient`]: requests over reqwest and rustls, without redirects, cookies or proxies.
//!
//! A URL that a user chose (a webhook) is called with [`AddressPolicy::PublicOnly`]. A literal address
//! in the URL is checked before the request; a name is checked by the resolver that the connection
//! itself uses, so it cannot point to another machine between the check and the connection.

mod address;

use std::{
    error::Error,
    io, iter,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use reqwest::{
    Method, RequestBuilder, Response, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    redirect, retry,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use tokio::{net::lookup_host, time::timeout};
use url::Host;

/// Idle connections are closed after this time, sooner than by a server.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Time limit for a connection, its name lookup and TLS handshake included.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Addresses that a client may connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressPolicy {
    /// Any address.
    Any,
    /// Addresses of the public internet only: not this machine, not its networks.
    PublicOnly,
}

/// The reason why a request got no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The URL cannot be called.
    #[error("'{0}' is not an http:// or https:// URL")]
    Url(String),
    /// [`AddressPolicy::PublicOnly`] forbids the address.
    #[error(transparent)]
    NotPublic(#[from] NotPublic),
    /// The name could not be resolved.
    #[error("cannot resolve {host}: {cause}")]
    Resolve {
        /// Host and port.
        host: String,
        /// The root cause.
        cause: String,
    },
    /// The server did not accept a connection.
    #[error("cannot connect to {host}: {cause}")]
    Connect {
        /// Host and port.
        host: String,
        /// The root cause.
        cause: String,
    },
    /// The server speaks no TLS, or its certificate is not trusted.
    #[error("no secure connection to {host}: {cause}")]
    Tls {
        /// Host and port.
        host: String,
        /// The root cause.
        cause: String,
    },
    /// The connection broke, or the answer is not HTTP.
    #[error("{0}")]
    Broken(String),
    /// Nothing arrived for this long.
    #[error("no answer within {} s", .0.as_secs())]
    Timeout(Duration),
}

/// A host with an address that [`AddressPolicy::PublicOnly`] forbids.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{host} has the address {address}, which is not public")]
pub struct NotPublic {
    host: String,
    address: IpAddr,
}

impl From<reqwest::Error> for HttpError {
    fn from(error: reqwest::Error) -> Self {
        if let Some(found) = causes(&error).find_map(|cause| cause.downcast_ref::<NotPublic>()) {
            return Self::NotPublic(found.clone());
        }
        let host = error.url().map_or(String::new(), |url| {
            let port = url.port_or_known_default().unwrap_or_default();
            format!("{}:{port}", url.host_str().unwrap_or_default())
        });
        // Without the outer errors: they repeat the URL, which may contain a password.
        let cause = causes(&error).last().map_or(String::new(), ToString::to_string);
        if causes(&error).any(|cause| cause.is::<rustls::Error>()) {
            Self::Tls { host, cause }
        } else if error.is_dns() {
            Self::Resolve { host, cause }
        } else if error.is_connect() {
            Self::Connect { host, cause }
        } else {
            Self::Broken(cause)
        }
    }
}

/// Returns an error and its causes. `io::Error` leaves the error inside it out of `source`.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    let first: &(dyn Error + 'static) = error;
    iter::successors(Some(first), |&error| {
        match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner as &(dyn Error + 'static)),
            None => error.source(),
        }
    })
}

/// A file of certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the certificates of {path}: {problem}")]
pub struct BadCertificates {
    path: String,
    problem: String,
}

/// Sends requests to the addresses that its policy allows.
#[derive(Debug, Clone)]
pub struct HttpClient {
    client: reqwest::Client,
    allowed: AddressPolicy,
}

impl HttpClient {
    /// Creates a client that trusts the system's certificate authorities and those of `ca`, a PEM
    /// file.
    ///
    /// # Errors
    /// [`BadCertificates`] if that file cannot be used.
    pub fn new(allowed: AddressPolicy, ca: Option<&Path>) -> Result<Self, BadCertificates> {
        // One connection per request: the address is checked each time.
        Self::with_idle_connections(0, allowed, ca)
    }

    /// Creates a client of one trusted server: it uses connections again.
    pub fn of_trusted_server() -> Result<Self, BadCertificates> {
        Self::with_idle_connections(usize::MAX, AddressPolicy::Any, None)
    }

    fn with_idle_connections(
        idle_max: usize,
        allowed: AddressPolicy,
        ca: Option<&Path>,
    ) -> Result<Self, BadCertificates> {
        let mut roots = RootCertStore::empty();
        // Without any system certificates, http:// URLs and the servers of `ca` still work.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(path) = ca {
            let bad =
                |problem: String| BadCertificates { path: path.display().to_string(), problem };
            let certificates = CertificateDer::pem_file_iter(path)
                .and_then(|found| found.collect::<Result<Vec<_>, _>>())
                .map_err(|error| bad(error.to_string()))?;
            if certificates.is_empty() {
                return Err(bad("it has no certificate".to_owned()));
            }
            for certificate in certificates {
                roots.add(certificate).map_err(|error| bad(error.to_string()))?;
            }
        }
        let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has the default protocols")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(redirect::Policy::none())
            .retry(retry::never())
            .no_proxy()
            .http1_only()
            .connect_timeout(CONNECT_WITHIN)
            .pool_idle_timeout(IDLE_MAX)
            .pool_max_idle_per_host(idle_max);
        if allowed == AddressPolicy::PublicOnly {
            builder = builder.dns_resolver(Arc::new(PublicResolver));
        }
        let client = builder.build().expect("TLS is configured and no other option can fail");
        Ok(Self { client, allowed })
    }

    /// Returns a request to an absolute URL, for [`send`](Self::send).
    ///
    /// # Errors
    /// As [`check_target`].
    pub fn request(&self, method: Method, url: &str) -> Result<RequestBuilder, HttpError> {
        Ok(self.client.request(method, check_target(url, self.allowed)?))
    }

    /// Sends a request and waits up to `within` for the head of the answer.
    ///
    /// # Errors
    /// [`HttpError`] if none arrives.
    pub async fn send(
        &self,
        request: RequestBuilder,
        within: Duration,
    ) -> Result<Response, HttpError> {
        let answer = timeout(within, request.send()).await;
        Ok(answer.map_err(|_| HttpError::Timeout(within))??)
    }
}

/// Resolves a name if all its addresses are public.
struct PublicResolver;

impl Resolve for PublicResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let host = name.as_str().to_owned();
            // The connector puts the URL's port in place of 0.
            let found: Vec<SocketAddr> = lookup_host((host.as_str(), 0)).await?.collect();
            match found.iter().find(|found| !address::is_public(found.ip())) {
                Some(private) => Err(NotPublic { host, address: private.ip() }.into()),
                None => Ok(Box::new(found.into_iter()) as Addrs),
            }
        })
    }
}

/// Checks a URL that a user chose: `http://` or `https://`, without a user name or password, and not
/// a literal address that the policy forbids. Returns it parsed.
///
/// # Errors
/// [`HttpError::Url`] or [`HttpError::NotPublic`].
pub fn check_target(url: &str, allowed: AddressPolicy) -> Result<Url, HttpError> {
    let bad = || HttpError::Url(url.to_owned());
    let parsed = Url::parse(url).map_err(|_| bad())?;
    let has_user = !parsed.username().is_empty() || parsed.password().is_some();
    if !matches!(parsed.scheme(), "http" | "https") || has_user {
        return Err(bad());
    }
    // The connector takes a literal address as it is, without asking the resolver.
    let address = match parsed.host() {
        Some(Host::Ipv4(address)) => IpAddr::from(address),
        Some(Host::Ipv6(address)) => IpAddr::from(address),
        _ => return Ok(parsed),
    };
    match allowed {
        AddressPolicy::PublicOnly if !address::is_public(address) => {
            Err(NotPublic { host: address.to_string(), address }.into())
        }
        _ => Ok(parsed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_http_or_https_without_user() {
        let check = |url: &str| {
            check_target(url, AddressPolicy::PublicOnly)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        for good in ["http://a.example", "https://a.example:8443/x?y=z", "https://93.184.215.14/"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "a.example", "ftp://a.example", "http://u:p@a.example", "file:///etc/x"] {
            assert!(check(bad).is_err(), "{bad}");
        }
        for private in [
            "http://127.0.0.1/",
            "http://[::1]:80/",
            "http://[::ffff:10.0.0.1]/",
            // Other spellings of 127.0.0.1, which the URL parser turns into an address.
            "http://0x7f000001/",
            "http://2130706433/",
            "http://127.1/",
        ] {
            assert!(check(private).is_err_and(|error| error.contains("not public")), "{private}");
            assert!(check_target(private, AddressPolicy::Any).is_ok(), "{private}");
        }
    }

    #[tokio::test]
    async fn name_of_a_private_address_is_not_called() {
        let call = async |allowed| {
            let client = HttpClient::new(allowed, None).expect("no file to read");
            let request = client.request(Method::GET, "http://localhost:1/").expect("a URL");
            client.send(request, CONNECT_WITHIN).await.expect_err("nothing listens there")
        };
        let refused = call(AddressPolicy::PublicOnly).await;
        assert!(matches!(refused, HttpError::NotPublic(_)), "{refused}");
        let refused = call(AddressPolicy::Any).await;
        assert!(matches!(refused, HttpError::Connect { .. }), "{refused}");
        assert!(refused.to_string().starts_with("cannot connect to localhost:1: "), "{refused}");
        assert!(refused.source().is_none(), "the message has the cause already");
    }
}
