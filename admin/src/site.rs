//! [`Site`]: where the service is on the web, and which other sites may call it.

use std::str::FromStr;

use reqwest::Url;
use tritmill_http::Proxies;

/// Origin of a site as browsers write it: scheme, host, and the port unless it is the scheme's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebOrigin(String);

impl WebOrigin {
    /// Returns its text, without a slash at the end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether its scheme is `https`.
    pub fn is_https(&self) -> bool {
        self.0.starts_with("https:")
    }
}

/// A text is not an origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected http:// or https://, a host and at most a port, e.g. https://chat.example")]
pub struct InvalidOrigin;

impl FromStr for WebOrigin {
    type Err = InvalidOrigin;

    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        let url: Url = text.parse().map_err(|_| InvalidOrigin)?;
        let origin = url.origin().ascii_serialization();
        // The rest, which an origin does not have, is empty or one slash.
        let is_origin = url.as_str().strip_prefix(&origin) == Some("/");
        match ["http", "https"].contains(&url.scheme()) && is_origin {
            true => Ok(Self(origin)),
            false => Err(InvalidOrigin),
        }
    }
}

/// Sites with scripts that may call the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CrossOrigin {
    /// Every site.
    Any,
    /// One site.
    Of(WebOrigin),
}

impl FromStr for CrossOrigin {
    type Err = InvalidOrigin;

    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        if text == "*" { Ok(Self::Any) } else { text.parse().map(Self::Of) }
    }
}

/// Where the service is on the web, and which other sites may call it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Site {
    /// URL under which clients reach the service; `None` if only its own address is known.
    pub public_url: Option<WebOrigin>,
    /// Sites with scripts that may call the API.
    pub cross_origins: Vec<CrossOrigin>,
    /// Proxies that say for which client they forward a request.
    pub proxies: Proxies,
}

impl Site {
    /// Returns whether clients reach the service by HTTPS alone.
    pub fn is_https(&self) -> bool {
        self.public_url.as_ref().is_some_and(WebOrigin::is_https)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_is_scheme_host_and_port() {
        let check = |text: &str, expect: Option<&str>| {
            let parsed: Result<WebOrigin, _> = text.parse();
            assert_eq!(parsed.as_ref().ok().map(WebOrigin::as_str), expect, "{text}");
        };
        check("https://Chat.example/", Some("https://chat.example"));
        check("https://chat.example:443", Some("https://chat.example"));
        check("http://127.0.0.1:3000", Some("http://127.0.0.1:3000"));
        for wrong in
            ["", "*", "chat.example", "https://a/b", "https://a/?b", "https://u@a", "ftp://a"]
        {
            check(wrong, None);
        }
        assert_eq!("*".parse(), Ok(CrossOrigin::Any));
    }
}
