//! [`HttpClient`]: one request, one connection, over hyper and rustls.
//!
//! No redirects, no cookies, no proxy, no pool: whoever calls knows where it goes, and how often. A
//! target that somebody else named is called with [`AddressPolicy::PublicOnly`]: every address that its name
//! resolves to is checked, and the connection is made to those very addresses, so that a name cannot
//! mean another machine a moment later.

mod address;

use std::{
    error::Error,
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use hyper::{
    Request, Response, Uri,
    body::{Body, Incoming},
    client::conn::http1::{self, SendRequest},
    header::{HOST, HeaderValue},
    http::uri::{PathAndQuery, Scheme},
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject as _},
    },
};

/// How long a connection may take, of each address.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Where a client may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressPolicy {
    /// Anywhere.
    Any,
    /// To addresses of the public internet alone: not to this machine, nor to its networks.
    PublicOnly,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address is none that this client can call.
    #[error("'{0}' is no http:// or https:// address")]
    Address(String),
    /// Its name is nobody's.
    #[error("cannot resolve {host}: {source}")]
    Unresolved {
        /// The name.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// Its name is that of a machine that this client must not call.
    #[error("{host} is {address}, which is not public")]
    NotPublic {
        /// The name.
        host: String,
        /// What it resolves to.
        address: IpAddr,
    },
    /// Nobody answers there.
    #[error("cannot connect to {host}: {source}")]
    Connect {
        /// The name.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// It is not who it should be, or speaks no TLS.
    #[error("no secure connection to {host}: {source}")]
    Tls {
        /// The name.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// The connection broke, or what came is no HTTP.
    #[error("{}", spelled(.0))]
    Broken(#[from] hyper::Error),
    /// Nothing came for so long.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
}

/// hyper's errors keep their cause to themselves.
fn spelled(error: &hyper::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Which certificates cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the certificates of {path}: {problem}")]
pub struct BadCertificates {
    path: String,
    problem: String,
}

/// Makes requests.
#[derive(Clone)]
pub struct HttpClient {
    tls: TlsConnector,
    allowed: AddressPolicy,
}

impl std::fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpClient").field("allowed", &self.allowed).finish_non_exhaustive()
    }
}

impl HttpClient {
    /// One that trusts whom this system trusts, and the certificates of `ca`, a PEM file.
    ///
    /// # Errors
    /// [`BadCertificates`] if that file cannot be used.
    pub fn new(allowed: AddressPolicy, ca: Option<&Path>) -> Result<Self, BadCertificates> {
        let mut roots = RootCertStore::empty();
        // A system without any can still call http:// addresses, and those of `ca`.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(path) = ca {
            let bad =
                |problem: String| BadCertificates { path: path.display().to_string(), problem };
            let certificates = CertificateDer::pem_file_iter(path)
                .and_then(|found| found.collect::<Result<Vec<_>, _>>())
                .map_err(|error| bad(error.to_string()))?;
            if certificates.is_empty() {
                return Err(bad("there are none".to_owned()));
            }
            for certificate in certificates {
                roots.add(certificate).map_err(|error| bad(error.to_string()))?;
            }
        }
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has the default protocols")
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), allowed })
    }

    /// Sends a request to the absolute address that it names, and waits up to `within` for the head of
    /// the answer once the connection stands.
    ///
    /// # Errors
    /// [`HttpError`].
    pub async fn send<B>(
        &self,
        mut request: Request<B>,
        within: Duration,
    ) -> Result<Response<Incoming>, HttpError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let target = Target::of(request.uri())?;
        let mut sender = self.open(&target).await?;
        if !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, target.host_header);
        }
        let path = request.uri().path_and_query().cloned();
        *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
        match timeout(within, sender.send_request(request)).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(HttpError::Silent(within)),
        }
    }

    /// A connection that carries one request. It ends with the answer's body, or when that is dropped.
    async fn open<B>(&self, target: &Target) -> Result<SendRequest<B>, HttpError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let host = || target.host.clone();
        let stream = self.connect(target).await?;
        // Small requests are not to wait for more. Fails for a connection that is gone already.
        let _ = stream.set_nodelay(true);
        if !target.is_secure {
            return speak(stream).await;
        }
        let name = ServerName::try_from(target.host.clone());
        let name = name.map_err(|_| HttpError::Address(target.host.clone()))?;
        match timeout(CONNECT_WITHIN, self.tls.connect(name, stream)).await {
            Ok(Ok(stream)) => speak(stream).await,
            Ok(Err(source)) => Err(HttpError::Tls { host: host(), source }),
            Err(_) => Err(HttpError::Tls { host: host(), source: io::ErrorKind::TimedOut.into() }),
        }
    }

    async fn connect(&self, target: &Target) -> Result<TcpStream, HttpError> {
        let host = || target.host.clone();
        let found: Vec<SocketAddr> = lookup_host((target.host.as_str(), target.port))
            .await
            .map_err(|source| HttpError::Unresolved { host: host(), source })?
            .collect();
        if self.allowed == AddressPolicy::PublicOnly
            && let Some(private) = found.iter().find(|found| !address::is_public(found.ip()))
        {
            return Err(HttpError::NotPublic { host: host(), address: private.ip() });
        }
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in found {
            match timeout(CONNECT_WITHIN, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(_) => last = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(HttpError::Connect { host: format!("{}:{}", target.host, target.port), source: last })
    }
}

/// Speaks HTTP over a connection, driven by a task of its own.
async fn speak<S, B>(stream: S) -> Result<SendRequest<B>, HttpError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // Whoever reads the answer is told too.
        if let Err(error) = connection.await {
            tracing::debug!(error = spelled(&error), "a connection ended");
        }
    });
    Ok(sender)
}

/// Who is called.
struct Target {
    host: String,
    port: u16,
    is_secure: bool,
    host_header: HeaderValue,
}

impl Target {
    fn of(uri: &Uri) -> Result<Self, HttpError> {
        let bad = || HttpError::Address(uri.to_string());
        let is_secure = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTP => false,
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            _ => return Err(bad()),
        };
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
        let authority = authority.ok_or_else(bad)?;
        let bare = authority.host().trim_start_matches('[').trim_end_matches(']');
        if bare.is_empty() {
            return Err(bad());
        }
        Ok(Self {
            host: bare.to_owned(),
            port: authority.port_u16().unwrap_or(if is_secure { 443 } else { 80 }),
            is_secure,
            host_header: HeaderValue::from_str(authority.as_str()).map_err(|_| bad())?,
        })
    }
}

/// Whether an address is one that somebody else may name: `http://` or `https://`, without a user,
/// and if it names a machine by number, a public one.
///
/// # Errors
/// [`HttpError::Address`] or [`HttpError::NotPublic`].
pub fn check_target(uri: &str, allowed: AddressPolicy) -> Result<(), HttpError> {
    let parsed: Uri = uri.parse().map_err(|_| HttpError::Address(uri.to_owned()))?;
    let target = Target::of(&parsed)?;
    match target.host.parse::<IpAddr>() {
        Ok(address) if allowed == AddressPolicy::PublicOnly && !address::is_public(address) => {
            Err(HttpError::NotPublic { host: target.host, address })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_http_or_https_without_a_user() {
        let check = |uri: &str| {
            check_target(uri, AddressPolicy::PublicOnly).map_err(|error| error.to_string())
        };
        for good in ["http://a.example", "https://a.example:8443/x?y=z", "https://93.184.215.14/"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "a.example", "ftp://a.example", "http://u:p@a.example", "file:///etc/x"] {
            assert!(check(bad).is_err(), "{bad}");
        }
        for private in ["http://127.0.0.1/", "http://[::1]:80/", "http://[::ffff:10.0.0.1]/"] {
            assert!(check(private).is_err_and(|said| said.contains("not public")), "{private}");
            assert!(check_target(private, AddressPolicy::Any).is_ok(), "{private}");
        }
    }
}
