//! [`AllowedAddresses`]: what a server may read and write for its callers.
//!
//! A server reads with its own rights, so an address that a caller names must be below a prefix that the operator allows. Both are
//! parsed, and compared part by part: scheme, bucket or host and port, and the parts of the path between slashes. An address with user
//! information is refused, and one of which the path has a relative part, however often it is percent-encoded.

use std::{fmt, str::FromStr};

use percent_encoding::percent_decode_str;
use url::Url;

use crate::{Address, DataError, address::Cloud};

/// What stands for the tenant in a prefix, and how the path of a URL has it.
const TENANT: [&str; 2] = ["{tenant}", "%7Btenant%7D"];

/// A prefix of allowed addresses, as `s3://data/{tenant}/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedPrefix {
    text: String,
    place: Place,
    parts: Vec<String>,
}

/// Where the path of an address begins.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Bucket(Cloud, String),
    Server { scheme: String, host: String, port: Option<u16> },
}

/// A prefix cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}: expected s3://BUCKET/…, gs://BUCKET/…, az://CONTAINER/… or https://HOST/…, with {{tenant}} as a whole part of the path"
)]
pub struct BadPrefix(String);

impl FromStr for AllowedPrefix {
    type Err = BadPrefix;

    fn from_str(text: &str) -> Result<Self, BadPrefix> {
        let bad = |problem: &str| BadPrefix(problem.to_owned());
        let address = Address::parse(text).map_err(|error| BadPrefix(error.to_string()))?;
        if let Address::Http(url) = &address
            && (url.query().is_some() || url.fragment().is_some())
        {
            return Err(bad("it has a query"));
        }
        let (place, parts) = split(&address).map_err(BadPrefix)?;
        let has_tenant = |text: &str| TENANT.iter().any(|name| text.contains(name));
        let in_place = match &place {
            Place::Bucket(_, name) | Place::Server { host: name, .. } => has_tenant(name),
        };
        let is_whole = |part: &String| !has_tenant(part) || TENANT.contains(&part.as_str());
        if in_place || !parts.iter().all(is_whole) {
            return Err(bad("{tenant} is not a whole part of its path"));
        }
        Ok(Self { text: text.to_owned(), place, parts })
    }
}

impl fmt::Display for AllowedPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl AllowedPrefix {
    fn has(&self, place: &Place, parts: &[String], tenant: &str) -> bool {
        // With a `/` at the end, the prefix is what lies below it.
        let (begin, is_folder) = match self.parts.split_last() {
            Some((last, begin)) if last.is_empty() => (begin, !begin.is_empty()),
            _ => (self.parts.as_slice(), false),
        };
        let is_equal = |(allowed, part): (&String, &String)| match TENANT.contains(&&**allowed) {
            true => part == tenant && is_plain_name(tenant),
            false => allowed == part,
        };
        self.place == *place
            && parts.len() >= begin.len() + usize::from(is_folder)
            && begin.iter().zip(parts).all(is_equal)
    }
}

/// Whether a tenant has a name that a part of a path can have as it is.
fn is_plain_name(tenant: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    tenant.bytes().all(is_plain) && !matches!(tenant, "" | "." | "..")
}

/// Splits an address of another machine into its place and the parts of its path, or says what is wrong with it.
fn split(address: &Address) -> Result<(Place, Vec<String>), String> {
    let (place, path) = match address {
        Address::Object { cloud, bucket, key } => {
            (Place::Bucket(*cloud, bucket.clone()), key.as_str())
        }
        Address::Http(url) => (server(url)?, url.path().strip_prefix('/').unwrap_or_default()),
        Address::Stdio | Address::Path(_) => return Err("it is of this machine".to_owned()),
    };
    if has_relative_part(path) {
        return Err("its path has a relative part, a backslash or a control character".to_owned());
    }
    let parts = path.split('/').map(str::to_owned).collect();
    Ok((place, if path.is_empty() { Vec::new() } else { parts }))
}

fn server(url: &Url) -> Result<Place, String> {
    if !url.username().is_empty() || url.password().is_some() {
        return Err("it has user information".to_owned());
    }
    let Some(host) = url.host_str() else { return Err("it has no host".to_owned()) };
    let (scheme, port) = (url.scheme().to_owned(), url.port_or_known_default());
    Ok(Place::Server { scheme, host: host.to_owned(), port })
}

/// Whether a path has a part that leads elsewhere, for a reader that decodes it any number of times.
fn has_relative_part(path: &str) -> bool {
    let mut path = path.to_owned();
    loop {
        let mut parts = path.split('/');
        if parts.any(|part| matches!(part, "." | ".."))
            || path.chars().any(|letter| letter == '\\' || letter.is_control())
        {
            return true;
        }
        match percent_decode_str(&path).decode_utf8() {
            Ok(decoded) if decoded == path => return false,
            Ok(decoded) => path = decoded.into_owned(),
            Err(_) => return true,
        }
    }
}

/// The prefixes of a server; without any, no address is allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedAddresses(Vec<AllowedPrefix>);

impl AllowedAddresses {
    /// Allows what is below these prefixes.
    pub fn new(prefixes: Vec<AllowedPrefix>) -> Self {
        Self(prefixes)
    }

    /// Checks that a tenant may use an address.
    ///
    /// # Errors
    /// [`DataError::Address`] or [`DataError::NotAllowed`].
    pub fn check(&self, address: &Address, tenant: &str) -> Result<(), DataError> {
        let named = || address.to_string();
        let (place, parts) =
            split(address).map_err(|problem| DataError::Address { address: named(), problem })?;
        match self.0.iter().any(|prefix| prefix.has(&place, &parts, tenant)) {
            true => Ok(()),
            false => Err(DataError::NotAllowed { address: named() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(prefix: &str, address: &str) -> bool {
        allowed_for("acme", prefix, address)
    }

    fn allowed_for(tenant: &str, prefix: &str, address: &str) -> bool {
        let prefix = prefix.parse().expect(prefix);
        let Ok(address) = Address::parse(address) else { return false };
        AllowedAddresses::new(vec![prefix]).check(&address, tenant).is_ok()
    }

    #[test]
    fn addresses_below_a_prefix_are_allowed() {
        for (prefix, address) in [
            ("s3://data/", "s3://data/a.csv"),
            ("s3://data", "s3://data/deep/er/a.csv"),
            ("s3://data/sets/", "s3://data/sets/"),
            ("s3://data/sets/", "s3://data/sets/a b#1?.csv"),
            ("s3://data/sets", "s3://data/sets"),
            ("s3://data/sets/a.csv", "s3://data/sets/a.csv"),
            ("gs://data/x/", "gs://data/x/..y"),
            ("az://data/", "az://data/a%20b"),
            ("https://data.example.com/sets/", "https://data.example.com/sets/a.csv?sig=x%2F"),
            ("https://data.example.com/sets/", "https://DATA.example.com:443/x/../sets/a"),
            ("https://data.example.com", "https://data.example.com/"),
            ("https://h:8443/", "https://h:8443/a"),
            ("http://127.0.0.1:9000/", "http://127.0.0.1:9000/a"),
        ] {
            assert!(allowed(prefix, address), "{prefix} {address}");
        }
    }

    #[test]
    fn tricks_do_not_lead_out_of_a_prefix() {
        for (prefix, address) in [
            // Of another place.
            ("s3://data/", "gs://data/a"),
            ("s3://data/", "s3://other/a"),
            ("s3://data/", "s3://data.evil/a"),
            ("s3://data/", "s3://data@evil/a"),
            ("s3://data/", "s3:///data/a"),
            ("s3://data/", "S3://data/a"),
            ("s3://data/", "https://data/a"),
            ("s3://data/", "/data/a"),
            ("s3://data/", "data/a"),
            ("s3://data/", "file:///data/a"),
            ("s3://data/", "-"),
            ("s3://data/", "s3://DATA/a"),
            // Not below it.
            ("s3://data/sets/", "s3://data/sets"),
            ("s3://data/sets/", "s3://data/sets2/a"),
            ("s3://data/sets", "s3://data/sets2"),
            ("s3://data/sets/", "s3://data//sets/a"),
            ("https://d.com/sets/", "https://d.com//sets/a"),
            ("s3://data/sets/", "s3://data/SETS/a"),
            ("s3://data/sets/", "s3://data/"),
            // Relative parts, in every spelling.
            ("s3://data/sets/", "s3://data/sets/../a"),
            ("s3://data/sets/", "s3://data/sets/./a"),
            ("s3://data/sets/", "s3://data/sets/%2e%2e/a"),
            ("s3://data/sets/", "s3://data/sets/%252E%252e/a"),
            ("s3://data/sets/", "s3://data/sets/..\\a"),
            ("s3://data/sets/", "s3://data/sets/..%5ca"),
            ("s3://data/sets/", "s3://data/sets/a\nb"),
            ("s3://data/sets/", "s3://data/sets/%ff"),
            ("https://d.com/sets/", "https://d.com/sets/../a"),
            ("https://d.com/sets/", "https://d.com/sets/%2e%2e/a"),
            ("https://d.com/sets/", "https://d.com/sets/.%2E/a"),
            ("https://d.com/sets/", "https://d.com/sets/..%2fa"),
            ("https://d.com/sets/", "https://d.com/sets/..%5ca"),
            ("https://d.com/sets/", "https://d.com/sets/%252e%252e%252fa"),
            ("https://d.com/sets/", "https://d.com/sets%2fa"),
            ("https://d.com/sets/", "https://d.com/sets%2f..%2fsets/a"),
            ("https://d.com/sets/", "https://d.com/sets\\..\\a"),
            ("https://d.com/sets/", "https://d.com/sets/a%00"),
            // Another server.
            ("https://d.com/sets/", "https://d.com@evil/sets/a"),
            ("https://d.com/sets/", "https://me@d.com/sets/a"),
            ("https://d.com/sets/", "https://:x@d.com/sets/a"),
            ("https://d.com/sets/", "https://d.com.evil/sets/a"),
            ("https://d.com/sets/", "https://evil/https://d.com/sets/a"),
            ("https://d.com/sets/", "https://evil?https://d.com/sets/a"),
            ("https://d.com/sets/", "https://evil#@d.com/sets/a"),
            ("https://d.com/sets/", "https://evil\\@d.com/sets/a"),
            ("https://d.com/sets/", "https://d.com:8443/sets/a"),
            ("https://d.com:8443/sets/", "https://d.com/sets/a"),
            ("https://d.com/sets/", "http://d.com/sets/a"),
            ("https://d.com/sets/", "http://d.com:443/sets/a"),
            ("https://d.com/sets/", "https://d.com./sets/a"),
            ("https://d.com/sets/", "ftp://d.com/sets/a"),
        ] {
            assert!(!allowed(prefix, address), "{prefix} {address}");
        }
        let none = AllowedAddresses::default();
        let address = Address::parse("s3://data/a").expect("an address");
        assert!(matches!(none.check(&address, "acme"), Err(DataError::NotAllowed { .. })));
    }

    #[test]
    fn tenant_is_a_whole_part_of_the_path() {
        for prefix in
            ["s3://data/{tenant}/", "s3://data/{tenant}", "https://d.com/of/{tenant}/sets/"]
        {
            let base = prefix.trim_end_matches('/');
            let of = |tenant: &str| format!("{}/a.csv", base.replace("{tenant}", tenant));
            assert!(allowed_for("acme", prefix, &of("acme")), "{prefix}");
            assert!(allowed_for("a-1_b.c", prefix, &of("a-1_b.c")), "{prefix}");
            for (tenant, other) in [
                ("acme", "other"),
                ("acme", "acme2"),
                ("acme", "ACME"),
                ("acme", "{tenant}"),
                ("{tenant}", "{tenant}"),
                ("a/b", "a/b"),
                ("..", ".."),
                (".", "."),
                ("a b", "a b"),
                ("", ""),
                ("a%2fb", "a%2fb"),
            ] {
                assert!(!allowed_for(tenant, prefix, &of(other)), "{prefix} {tenant} {other}");
            }
        }
        assert!(!allowed("s3://data/{tenant}/", "s3://data/acme"));
        assert!(!allowed("s3://data/{tenant}/", "s3://data/acme/../other/a"));
    }

    #[test]
    fn prefixes_that_would_allow_something_else_are_refused() {
        for bad in [
            "",
            "-",
            "/data/",
            "data/",
            "file:///data/",
            "ftp://h/",
            "S3://data/",
            "s3://",
            "s3://data/../",
            "s3://data-{tenant}/",
            "s3://data/x-{tenant}/",
            "https://{tenant}.d.com/",
            "https://d.com/x{tenant}/",
            "https://me@d.com/",
            "https://d.com/?x",
            "https://d.com/#x",
            "https://d.com/%2e%2e%2fa/",
        ] {
            assert!(bad.parse::<AllowedPrefix>().is_err(), "{bad}");
        }
        let prefix: AllowedPrefix = "s3://data/{tenant}/".parse().expect("a prefix");
        assert_eq!(prefix.to_string(), "s3://data/{tenant}/");
    }
}
