//! Options of the single sign-on for the dashboard.

use anyhow::Context as _;
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
        let (Some(issuer), Some(client_id), Some(public_url)) =
            (&self.oidc_issuer, &self.oidc_client_id, &site.public_url)
        else {
            return Ok(None);
        };
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
