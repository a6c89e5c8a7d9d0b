//! [`Address`]: where a source or a sink is.

use std::{fmt, path::PathBuf};

use url::Url;

use crate::DataError;

/// Kinds of object stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    /// `s3://BUCKET/KEY`
    S3,
    /// `gs://BUCKET/KEY`
    Google,
    /// `az://CONTAINER/KEY`
    Azure,
}

impl Cloud {
    const fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
        }
    }

    /// Returns the environment variables with credentials.
    pub(crate) const fn variables(self) -> &'static str {
        match self {
            Self::S3 => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the machine's role)",
            Self::Google => "GOOGLE_APPLICATION_CREDENTIALS (or the machine's service account)",
            Self::Azure => {
                "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or the machine's identity)"
            }
        }
    }
}

/// Where a source or a sink is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Standard input or output.
    Stdio,
    /// A file or folder of this machine.
    Path(PathBuf),
    /// A file of a web server.
    Http(Url),
    /// An object, or a folder of objects.
    Object {
        /// The kind of store.
        cloud: Cloud,
        /// The bucket or container.
        bucket: String,
        /// The key; with a `/` at the end it is a folder.
        key: String,
    },
}

impl Address {
    /// Parses an address: `-`, `SCHEME://…`, or a path.
    ///
    /// # Errors
    /// [`DataError::Scheme`] or [`DataError::Address`].
    pub fn parse(text: &str) -> Result<Self, DataError> {
        if text == "-" {
            return Ok(Self::Stdio);
        }
        let bad = |problem: &str| DataError::Address {
            address: text.to_owned(),
            problem: problem.to_owned(),
        };
        let is_scheme =
            |scheme: &str| !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric());
        let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme))
        else {
            return Ok(Self::Path(text.into()));
        };
        let cloud = match scheme {
            "file" if rest.starts_with('/') => return Ok(Self::Path(rest.into())),
            "http" | "https" => {
                return Url::parse(text).map(Self::Http).map_err(|_| bad("it is not a URL"));
            }
            "s3" => Cloud::S3,
            "gs" => Cloud::Google,
            "az" => Cloud::Azure,
            _ => {
                let (address, scheme) = (text.to_owned(), scheme.to_owned());
                return Err(DataError::Scheme { address, scheme });
            }
        };
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(bad("it names no bucket"));
        }
        Ok(Self::Object { cloud, bucket: bucket.to_owned(), key: key.to_owned() })
    }

    /// Returns the last part of the address; empty for a whole bucket.
    pub fn name(&self) -> &str {
        let last = |text: &'_ str| text.trim_end_matches('/').rfind('/').map_or(0, |at| at + 1);
        match self {
            Self::Stdio => "-",
            Self::Path(path) => path.file_name().and_then(|name| name.to_str()).unwrap_or(""),
            Self::Http(url) => url.path()[last(url.path())..].trim_end_matches('/'),
            Self::Object { key, .. } => key[last(key)..].trim_end_matches('/'),
        }
    }

    /// Returns whether another machine has it.
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Http(_) | Self::Object { .. })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdio => f.write_str("-"),
            Self::Path(path) => path.display().fmt(f),
            // Without its query, which may have a signature.
            Self::Http(url) => {
                let (scheme, host) = (url.scheme(), url.host_str().unwrap_or_default());
                let port = url.port().map_or(String::new(), |port| format!(":{port}"));
                write!(f, "{scheme}://{host}{port}{}", url.path())
            }
            Self::Object { cloud, bucket, key } => {
                write!(f, "{}://{bucket}/{key}", cloud.scheme())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_told_by_its_scheme() {
        let shown = |text| Address::parse(text).map(|a| (a.to_string(), a.name().to_owned()));
        let good = |text, as_text: &str, name: &str| {
            let expected = (as_text.to_owned(), name.to_owned());
            assert_eq!(shown(text).expect(text), expected);
        };
        good("s3://b/a b/c#1.csv", "s3://b/a b/c#1.csv", "c#1.csv");
        good("gs://b/train/", "gs://b/train/", "train");
        good("az://b", "az://b/", "");
        good("https://h:8443/x/y.csv?sig=secret", "https://h:8443/x/y.csv", "y.csv");
        good("file:///x/y", "/x/y", "y");
        good("x/y:z", "x/y:z", "y:z");
        good("-", "-", "-");
        let fails = |text: &str, message: &str| {
            let error = Address::parse(text).expect_err(text).to_string();
            assert!(error.contains(message), "{error}");
        };
        fails("ftp://h/x", "unknown scheme 'ftp' of ftp://h/x");
        fails("s3:///x", "it names no bucket");
        fails("http://", "it is not a URL");
    }
}
