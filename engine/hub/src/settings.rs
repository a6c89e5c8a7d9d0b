//! [`Settings`]: the hub's address, the cache and the token, from the variables that `huggingface_hub` reads. Nothing
//! else in the crate reads the environment, except for proxies and certificates.

use std::{
    env,
    ffi::OsString,
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use reqwest::Url;

/// Address of the hub.
const ENDPOINT: &str = "https://huggingface.co";

/// Where models come from, and where they are kept.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// Address of the hub or of a mirror, without a slash at its end.
    pub endpoint: Url,
    /// Folder of the cache: it holds a folder for each repository.
    pub cache: PathBuf,
    /// Proof of the user's identity, for gated and private repositories.
    pub token: Option<Token>,
    /// Whether only the cache may be used.
    pub offline: bool,
    /// Most requests in a row that bring nothing, per file.
    pub attempts_max: u32,
    /// Time before the second of them; it doubles each time.
    pub retry_delay: Duration,
    /// Time limit for a connection, and for each part of an answer.
    pub timeout: Duration,
}

/// A secret that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl From<&str> for Token {
    fn from(secret: &str) -> Self {
        Self(secret.to_owned())
    }
}

impl Token {
    /// Returns the text that is sent to the hub.
    pub(crate) fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// A variable that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// `HF_ENDPOINT` is not an address.
    #[error("HF_ENDPOINT '{0}' is not an http:// or https:// URL")]
    Endpoint(String),
    /// There is no place for the cache.
    #[error("no home directory: set HF_HOME to a folder for models")]
    NoHome,
}

impl Settings {
    /// Returns settings without a token, for a hub at this address.
    ///
    /// # Errors
    /// [`SettingsError::Endpoint`].
    pub fn at(hub: &str, cache: &Path) -> Result<Self, SettingsError> {
        Ok(Self {
            endpoint: endpoint(hub)?,
            cache: cache.to_owned(),
            token: None,
            offline: false,
            attempts_max: 6,
            retry_delay: Duration::from_millis(500),
            timeout: Duration::from_secs(30),
        })
    }

    /// Reads the environment, and the token file if no variable has a token.
    ///
    /// # Errors
    /// Names the variable that is wrong or missing.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::from_variables(|name| env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, SettingsError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
        let home = variable("HOME").or_else(|| variable("USERPROFILE")).map(PathBuf::from);
        let folder = |name: &str| variable(name).map(|path| in_home(path.into(), home.as_deref()));
        let hf_home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|caches| caches.join("huggingface")))
            .or_else(|| home.as_ref().map(|home| home.join(".cache/huggingface")));
        let cache = folder("HF_HUB_CACHE")
            .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")))
            .ok_or(SettingsError::NoHome)?;
        let token_file = folder("HF_TOKEN_PATH").or_else(|| hf_home.map(|home| home.join("token")));
        let token = text("HF_TOKEN")
            .or_else(|| text("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| fs::read_to_string(token_file?).ok())
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        let is_set = |name: &str| {
            text(name)
                .is_some_and(|value| matches!(&*value.to_uppercase(), "1" | "ON" | "YES" | "TRUE"))
        };
        Ok(Self {
            token: token.map(Token),
            offline: is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"),
            ..Self::at(text("HF_ENDPOINT").as_deref().unwrap_or(ENDPOINT), &cache)?
        })
    }
}

/// Parses the address of a hub.
fn endpoint(text: &str) -> Result<Url, SettingsError> {
    let bad = || SettingsError::Endpoint(text.to_owned());
    let url = Url::parse(text.trim().trim_end_matches('/')).map_err(|_| bad())?;
    let is_web = matches!(url.scheme(), "http" | "https") && url.has_host();
    if is_web && url.query().is_none() { Ok(url) } else { Err(bad()) }
}

/// Replaces a leading `~`.
fn in_home(path: PathBuf, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        Settings::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    fn cache(variables: &[(&str, &str)]) -> String {
        let settings = settings(variables).expect("good variables");
        settings.cache.to_string_lossy().into_owned()
    }

    #[test]
    fn cache_is_where_huggingface_hub_has_it() {
        let home = ("HOME", "/h");
        assert_eq!(cache(&[home]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[home, ("HF_HOME", "/y"), ("XDG_CACHE_HOME", "/x")]), "/y/hub");
        assert_eq!(cache(&[home, ("HF_HOME", "~/y")]), "/h/y/hub");
        assert_eq!(cache(&[home, ("HF_HOME", "/y"), ("HF_HUB_CACHE", "/z")]), "/z");
        assert_eq!(cache(&[home, ("HUGGINGFACE_HUB_CACHE", "/z")]), "/z");
        assert!(matches!(settings(&[]), Err(SettingsError::NoHome)));
    }

    #[test]
    fn token_comes_from_a_variable_or_the_file_and_is_never_printed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("token"), "hf_file\n").expect("a small file");
        let home = ("HF_HOME", folder.path().to_str().expect("UTF-8"));
        let token = |variables: &[_]| {
            let settings = settings(variables).expect("good variables");
            assert!(!format!("{settings:?}").contains("hf_"), "{settings:?}");
            settings.token.map(|token| token.secret().to_owned())
        };
        assert_eq!(token(&[home]).as_deref(), Some("hf_file"));
        assert_eq!(token(&[home, ("HF_TOKEN", " hf_env ")]).as_deref(), Some("hf_env"));
        assert_eq!(token(&[home, ("HF_TOKEN_PATH", "/nowhere/token")]), None);
    }

    #[test]
    fn endpoint_is_a_url_and_offline_a_switch() {
        let with = |name, value| settings(&[("HOME", "/h"), (name, value)]);
        let endpoint = |value| with("HF_ENDPOINT", value).map(|found| found.endpoint.to_string());
        assert_eq!(endpoint("http://mirror:81/hf/").ok().as_deref(), Some("http://mirror:81/hf"));
        for bad in ["mirror", "ftp://mirror", "file:///x", "https://m/?a=b"] {
            let error = endpoint(bad).expect_err(bad).to_string();
            assert!(error.contains(bad), "{error}");
        }
        for (value, expect) in [("1", true), ("true", true), ("0", false), ("", false)] {
            let offline = with("HF_HUB_OFFLINE", value).expect("good variables").offline;
            assert_eq!(offline, expect, "{value}");
        }
    }
}
