//! TLS to a server whose certificate is its own authority, as `openssl req -x509` makes them.
//!
//! Webpki takes no authority's certificate for that of a server, in any client of rustls; OpenSSL and so `redis-cli`
//! do. Here such a certificate is good if `sslrootcert` has the very same one: it names the server, and the times of
//! its validity are checked as those of others.

use std::sync::Arc;

use redis::{
    AsyncConnectionConfig, RedisConnectionInfo, RedisError, RedisResult, TlsCertificates,
    aio::MultiplexedConnection,
};
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore,
        SignatureScheme,
        client::{
            WebPkiServerVerifier,
            danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
            verify_server_name,
        },
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
        server::ParsedCertificate,
    },
};

/// Opens connections to one server, with private authorities.
pub(super) struct Connector {
    tls: TlsConnector,
    host: String,
    port: u16,
}

impl Connector {
    /// Returns how to connect; `None` if the authorities are the system's.
    ///
    /// # Errors
    /// If a file has no certificate or no key.
    pub(super) fn new(
        certificates: &TlsCertificates,
        (host, port): (String, u16),
    ) -> RedisResult<Option<Self>> {
        let Some(roots) = &certificates.root_cert else { return Ok(None) };
        let roots = chain(roots)?;
        let mut store = RootCertStore::empty();
        for root in &roots {
            store.add(root.clone()).map_err(unusable)?;
        }
        let provider = Arc::new(ring::default_provider());
        let usual = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider.clone());
        let verifier = Arc::new(Verifier { usual: usual.build().map_err(unusable)?, roots });
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let config = match &certificates.client_tls {
            Some(client) => {
                let key = PrivateKeyDer::from_pem_slice(&client.client_key).map_err(unusable)?;
                config.with_client_auth_cert(chain(&client.client_cert)?, key).map_err(unusable)?
            }
            None => config.with_no_client_auth(),
        };
        Ok(Some(Self { tls: TlsConnector::from(Arc::new(config)), host, port }))
    }

    /// Opens a connection with this login.
    pub(super) async fn connect(
        &self,
        login: &RedisConnectionInfo,
        config: AsyncConnectionConfig,
    ) -> RedisResult<MultiplexedConnection> {
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await?;
        tcp.set_nodelay(true)?;
        let name = ServerName::try_from(self.host.clone()).map_err(unusable)?;
        let stream = self.tls.connect(name, tcp).await?;
        let (connection, driver) =
            MultiplexedConnection::new_with_config(login, stream, config).await?;
        tokio::spawn(driver);
        Ok(connection)
    }
}

fn chain(pem: &[u8]) -> RedisResult<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(unusable)
}

fn unusable(error: impl std::error::Error) -> RedisError {
    let kind = redis::ErrorKind::InvalidClientConfig;
    (kind, "certificates cannot be used", error.to_string()).into()
}

/// Verifies as webpki does, and takes a certificate that is its own authority.
#[derive(Debug)]
struct Verifier {
    usual: Arc<WebPkiServerVerifier>,
    roots: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let refused = match self.usual.verify_server_cert(
            end_entity,
            intermediates,
            name,
            ocsp_response,
            now,
        ) {
            Ok(verified) => return Ok(verified),
            Err(error) => error,
        };
        // Webpki looks at the times of validity first.
        if !is_authority(&refused) || !self.roots.iter().any(|root| root == end_entity) {
            return Err(refused);
        }
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.usual.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.usual.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.usual.supported_verify_schemes()
    }
}

/// Returns whether webpki's only objection is that the certificate is that of an authority.
fn is_authority(error: &Error) -> bool {
    let Error::InvalidCertificate(CertificateError::Other(other)) = error else { return false };
    other.0.to_string() == "CaUsedAsEndEntity"
}
