//! Options of the single sign-on for the dashboard.

use anyhow::{Context as _, ensure};
use clap::Args;
use tritmill_admin::{SignOnRule, SignOnSettings, SingleSignOn, Site};
use tritmill_client::Tenant;

/// Login to the dashboard at an OpenID provider, beside API keys.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Single sign-on")]
pub struct SignOnOptions {
    /// URL of the OpenID provider, without /.well-known/openid-configuration. It must allow --public-url with
    /// /dashboard/login/sign-on/callback
    #[arg(long, value_name = "URL", requires_all = ["oidc_client_id", "public_url", "oidc_allow"])]
    oidc_issuer: Option<String>,
    /// Id of this service at the provider
    #[arg(long, value_name = "ID", requires = "oidc_issuer")]
    oidc_client_id: Option<String>,
    /// Its secret; other users of this machine see arguments, so use the variable TRITMILL_OIDC_CLIENT_SECRET
    #[arg(long, value_name = "SECRET", requires = "oidc_issuer")]
    oidc_client_secret: Option<String>,
    /// Who may log in, with which role: EMAIL, @DOMAIN or group:NAME, then =read, =submit, =manage or =operate.
    /// May be repeated; the highest role counts
    #[arg(long, value_name = "WHO=ROLE", requires = "oidc_issuer", value_delimiter = ',')]
    oidc_allow: Vec<SignOnRule>,
    /// Claim of the ID token with the groups
    #[arg(long, value_name = "NAME", default_value = "groups")]
    oidc_groups_claim: String,
    /// Tenant of everyone who logs in
    #[arg(long, value_name = "NAME", default_value = "default")]
    oidc_tenant: String,
}

impl SignOnOptions {
    /// Returns the single sign-on of a site, if there is one.
    pub fn sign_on(&self, site: &Site) -> anyhow::Result<Option<SingleSignOn>> {
        // Settings of the file are checked here alone.
        let Some(issuer) = &self.oidc_issuer else {
            let has_more = self.oidc_client_id.is_some() || self.oidc_client_secret.is_some();
            ensure!(!has_more && self.oidc_allow.is_empty(), "single sign-on needs --oidc-issuer");
            return Ok(None);
        };
        let client_id = self.oidc_client_id.as_ref();
        let client_id = client_id.context("--oidc-issuer needs --oidc-client-id")?;
        let public_url = site.public_url.as_ref().context("--oidc-issuer needs --public-url")?;
        ensure!(!self.oidc_allow.is_empty(), "--oidc-issuer needs --oidc-allow");
        let settings = SignOnSettings {
            issuer: issuer.clone(),
            client_id: client_id.clone(),
            client_secret: self.oidc_client_secret.clone(),
            public_url: public_url.clone(),
            rules: self.oidc_allow.clone(),
            groups_claim: self.oidc_groups_claim.clone(),
            tenant: Tenant(self.oidc_tenant.clone()),
        };
        SingleSignOn::new(settings).map(Some).context("cannot use the OpenID provider")
    }
}
