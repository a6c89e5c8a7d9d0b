//! [`SingleSignOn`]: login at an OpenID provider (authorization code flow with PKCE).
//!
//! The provider's metadata and keys are read for every login, so that a change of its keys needs no restart. The ID token
//! is accepted if the provider signed it, for this client, for this login (nonce), and it has not expired; who may log in,
//! and with which role, is what [`Rule`]s say of its claims.

mod rules;

use std::{pin::Pin, time::Duration};

use openidconnect::{
    AdditionalClaims, AsyncHttpClient, AuthenticationFlow, AuthorizationCode, Client, ClientId,
    ClientSecret, CsrfToken, EmptyExtraTokenFields, EndpointMaybeSet, EndpointNotSet, EndpointSet,
    HttpRequest, HttpResponse, IdTokenFields, IssuerUrl, Nonce, PkceCodeChallenge,
    PkceCodeVerifier, RedirectUrl, Scope, StandardErrorResponse, StandardTokenResponse,
    TokenResponse as _,
    core::{
        CoreAuthDisplay, CoreAuthPrompt, CoreErrorResponseType, CoreGenderClaim, CoreJsonWebKey,
        CoreJweContentEncryptionAlgorithm, CoreJwsSigningAlgorithm, CoreProviderMetadata,
        CoreResponseType, CoreRevocableToken, CoreRevocationErrorResponse,
        CoreTokenIntrospectionResponse, CoreTokenType,
    },
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tritmill_client::http::{AddressPolicy, BadCertificates, HttpClient, HttpError, check_target};
use tritmill_queue::Tenant;
use uuid::Uuid;

pub use self::rules::{InvalidRule, Rule};
use crate::{WebOrigin, store::KeyRole};

/// Time limit of a call of the provider, and the most bytes of its answer.
const CALL_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Path below the public URL to which the provider sends visitors back.
pub(crate) const CALLBACK: &str = "/dashboard/login/sign-on/callback";

/// Settings of a single sign-on.
#[derive(Clone)]
pub struct SignOnSettings {
    /// URL of the provider, below which its metadata lie.
    pub issuer: String,
    /// This service's id at the provider.
    pub client_id: String,
    /// Its secret, if it has one.
    pub client_secret: Option<String>,
    /// URL at which browsers reach this service.
    pub public_url: WebOrigin,
    /// Who may log in, and with which role.
    pub rules: Vec<Rule>,
    /// Name of the claim with the groups of a visitor.
    pub groups_claim: String,
    /// Tenant of everyone who logs in.
    pub tenant: Tenant,
}

/// The settings of a single sign-on cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignOnSettingsError {
    /// The URL of the provider.
    #[error("issuer: {0}")]
    Issuer(HttpError),
    /// The system's certificates.
    #[error(transparent)]
    Certificates(#[from] BadCertificates),
}

/// A login failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignOnError {
    /// The provider cannot be reached, or its answer cannot be used.
    #[error("the provider does not answer as it should: {0}")]
    Provider(String),
    /// The token is not for this login.
    #[error("the provider's token is refused: {0}")]
    Token(String),
}

/// A call of the provider failed.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("the answer is longer than {ANSWER_BYTES_MAX} bytes")]
    Long,
}

/// The claims of an ID token that have no place in the standard.
#[derive(Debug, Serialize, Deserialize)]
struct OtherClaims {
    #[serde(flatten)]
    all: Map<String, Value>,
}

impl AdditionalClaims for OtherClaims {}

type TokenFields = IdTokenFields<
    OtherClaims,
    EmptyExtraTokenFields,
    CoreGenderClaim,
    CoreJweContentEncryptionAlgorithm,
    CoreJwsSigningAlgorithm,
>;
type ProviderClient = Client<
    OtherClaims,
    CoreAuthDisplay,
    CoreGenderClaim,
    CoreJweContentEncryptionAlgorithm,
    CoreJsonWebKey,
    CoreAuthPrompt,
    StandardErrorResponse<CoreErrorResponseType>,
    StandardTokenResponse<TokenFields, CoreTokenType>,
    CoreTokenIntrospectionResponse,
    CoreRevocableToken,
    CoreRevocationErrorResponse,
    EndpointSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    EndpointMaybeSet,
    EndpointMaybeSet,
>;

/// What a login that was begun must be finished with; the visitor's browser keeps it.
pub(crate) struct Attempt {
    pub state: String,
    pub nonce: String,
    pub verifier: String,
}

/// Who logged in, as the provider says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The provider's name for the visitor, which never changes.
    pub subject: String,
    /// The address, if the provider has verified it.
    pub email: Option<String>,
    pub groups: Vec<String>,
}

/// Login at an OpenID provider.
pub struct SingleSignOn {
    settings: SignOnSettings,
    issuer: IssuerUrl,
    redirect: RedirectUrl,
    provider: Provider,
}

impl SingleSignOn {
    /// Checks the settings; the provider is called at the first login.
    ///
    /// # Errors
    /// [`SignOnSettingsError`] names the setting.
    pub fn new(settings: SignOnSettings) -> Result<Self, SignOnSettingsError> {
        let any = AddressPolicy::Any;
        check_target(&settings.issuer, any).map_err(SignOnSettingsError::Issuer)?;
        let bad_url = |_| HttpError::Url(settings.issuer.clone());
        let issuer = IssuerUrl::new(settings.issuer.clone());
        let issuer = issuer.map_err(|error| SignOnSettingsError::Issuer(bad_url(error)))?;
        let redirect = RedirectUrl::new(format!("{}{CALLBACK}", settings.public_url.as_str()))
            .expect("an origin with a path is a URL");
        let provider = Provider(HttpClient::new(any, None)?);
        Ok(Self { settings, issuer, redirect, provider })
    }

    /// The tenant of everyone who logs in.
    pub(crate) fn tenant(&self) -> &Tenant {
        &self.settings.tenant
    }

    /// Returns the role that the rules give; the highest, if several apply.
    pub(crate) fn role(&self, identity: &Identity) -> Option<KeyRole> {
        rules::role(&self.settings.rules, identity)
    }

    /// The id of the key that a visitor's sessions belong to: the same at each login.
    pub(crate) fn key_id(&self, identity: &Identity) -> Uuid {
        let mut digest = Sha256::new();
        for part in [self.issuer.as_str(), &identity.subject] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        let digest: [u8; 32] = digest.finalize().into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    }

    /// Begins a login: returns the provider's page to send the visitor to.
    pub(crate) async fn begin(&self) -> Result<(String, Attempt), SignOnError> {
        let client = self.client().await?;
        let (challenge, verifier) = PkceCodeChallenge::new_random_sha256();
        let flow = AuthenticationFlow::<CoreResponseType>::AuthorizationCode;
        let (url, state, nonce) = client
            .authorize_url(flow, CsrfToken::new_random, Nonce::new_random)
            .add_scope(Scope::new("email".to_owned()))
            .add_scope(Scope::new("profile".to_owned()))
            .set_pkce_challenge(challenge)
            .url();
        let attempt = Attempt {
            state: state.into_secret(),
            nonce: nonce.secret().clone(),
            verifier: verifier.into_secret(),
        };
        Ok((url.into(), attempt))
    }

    /// Finishes a login with the code that the provider gave the visitor.
    pub(crate) async fn finish(
        &self,
        code: String,
        attempt: Attempt,
    ) -> Result<Identity, SignOnError> {
        let failed = |error: &dyn std::error::Error| SignOnError::Provider(causes(error));
        let client = self.client().await?;
        let tokens = client
            .exchange_code(AuthorizationCode::new(code))
            .map_err(|error| failed(&error))?
            .set_pkce_verifier(PkceCodeVerifier::new(attempt.verifier))
            .request_async(&self.provider)
            .await
            .map_err(|error| failed(&error))?;
        let token = tokens.id_token();
        let token = token.ok_or_else(|| SignOnError::Provider("no ID token".to_owned()))?;
        let claims = token
            .claims(&client.id_token_verifier(), &Nonce::new(attempt.nonce))
            .map_err(|error| SignOnError::Token(causes(&error)))?;
        let groups = claims.additional_claims().all.get(&self.settings.groups_claim);
        let email = claims.email().filter(|_| claims.email_verified() == Some(true));
        Ok(Identity {
            subject: claims.subject().to_string(),
            email: email.map(|email| email.to_string()),
            groups: groups.map(texts).unwrap_or_default(),
        })
    }

    /// Reads the provider's metadata and keys.
    async fn client(&self) -> Result<ProviderClient, SignOnError> {
        let metadata =
            CoreProviderMetadata::discover_async(self.issuer.clone(), &self.provider).await;
        let metadata = metadata.map_err(|error| SignOnError::Provider(causes(&error)))?;
        let id = ClientId::new(self.settings.client_id.clone());
        let secret = self.settings.client_secret.clone().map(ClientSecret::new);
        let client = ProviderClient::from_provider_metadata(metadata, id, secret);
        Ok(client.set_redirect_uri(self.redirect.clone()))
    }
}

/// The texts of a claim: a list of them, or one.
fn texts(claim: &Value) -> Vec<String> {
    match claim {
        Value::String(text) => vec![text.clone()],
        Value::Array(items) => items.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

/// An error and what caused it, on one line.
fn causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The provider's server.
struct Provider(HttpClient);

impl<'c> AsyncHttpClient<'c> for Provider {
    type Error = CallError;
    type Future = Pin<Box<dyn Future<Output = Result<HttpResponse, CallError>> + Send + 'c>>;

    fn call(&'c self, request: HttpRequest) -> Self::Future {
        Box::pin(call(&self.0, request))
    }
}

/// Calls a server; its answer is bounded in size and time.
async fn call(http: &HttpClient, request: HttpRequest) -> Result<HttpResponse, CallError> {
    let (head, body) = request.into_parts();
    let call = http.request(head.method, &head.uri.to_string())?;
    let mut response = http.send(call.headers(head.headers).body(body), CALL_WITHIN).await?;
    let (status, headers) = (response.status(), response.headers().clone());
    let reading = async {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(HttpError::from)? {
            if bytes.len() + chunk.len() > ANSWER_BYTES_MAX {
                return Err(CallError::Long);
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    };
    let read = tokio::time::timeout(CALL_WITHIN, reading).await;
    let mut answer = HttpResponse::new(read.map_err(|_| HttpError::Timeout(CALL_WITHIN))??);
    *answer.status_mut() = status;
    *answer.headers_mut() = headers;
    Ok(answer)
}
