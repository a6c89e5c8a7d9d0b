//! [`Tls`]: certificate and private key of the listener, from PEM files.

use std::{io, path::Path, sync::Arc};

use tokio::io::{AsyncRead, AsyncWrite};
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

/// TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The certificate file cannot be read, or is not PEM.
    #[error("cannot read certificates: {0}")]
    Certificates(#[source] pem::Error),
    /// The certificate file holds no certificate.
    #[error("the file has no certificate")]
    NoCertificate,
    /// The key file cannot be read, or holds no key.
    #[error("cannot read the private key: {0}")]
    Key(#[source] pem::Error),
    /// Key and certificate do not match, or are not supported.
    #[error("certificate and key cannot be used: {0}")]
    Unusable(#[source] rustls::Error),
}

/// Encrypts connections.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Loads a certificate with its chain, and its private key.
    ///
    /// # Errors
    /// If a file cannot be read, or its content cannot be used.
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
            .map_err(TlsError::Unusable)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Performs the TLS handshake.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<TlsStream<S>> {
        self.0.accept(stream).await
    }
}
