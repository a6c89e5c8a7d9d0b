//! TLS of the listener: a certificate and its key, from PEM files.

use std::{io, path::Path, sync::Arc};

use tokio::net::TcpStream;
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        pki_types::{
            CertificateDer, PrivateKeyDer,
            pem::{self, PemObject as _},
        },
    },
    server::TlsStream,
};

/// Why connections cannot be secured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The file of certificates cannot be read, or is no PEM.
    #[error("cannot read certificates: {0}")]
    Certificates(#[source] pem::Error),
    /// There is none in the file.
    #[error("the file has no certificate")]
    NoCertificate,
    /// The key's file cannot be read, or has no key.
    #[error("cannot read the private key: {0}")]
    Key(#[source] pem::Error),
    /// Key and certificate do not fit one another, or are of no use here.
    #[error("certificate and key cannot be used: {0}")]
    Unfit(#[source] rustls::Error),
}

/// What secures connections.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// A certificate with those that vouch for it, and its private key.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn from_files(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificates)
            .and_then(Iterator::collect)
            .map_err(TlsError::Certificates)?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        let key = PrivateKeyDer::from_pem_file(key).map_err(TlsError::Key)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key))
            .map_err(TlsError::Unfit)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Shakes hands.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.0.accept(stream).await
    }
}
