//! Chromium, driven.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fantoccini::{
    Client, ClientBuilder, Locator,
    elements::Element,
    wd::{Capabilities, WebDriverCompatibleCommand},
};
use http::Method;
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tritmill_servers::Browser;
use url::{ParseError, Url};

/// Machines that run tests are busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// A window, and what is in it.
pub struct Window {
    pub client: Client,
    address: String,
    _browser: Browser,
}

/// A command beside those that WebDriver has in common: its path and parameters.
#[derive(Debug)]
struct Special(&'static str, Value);

impl WebDriverCompatibleCommand for Special {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.0))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.1.to_string()))
    }
}

impl Window {
    /// Opens one on a service; none where there is no browser.
    pub async fn open(listen: &str) -> Option<Self> {
        if !Browser::is_installed() {
            eprintln!("SKIPPED: no chromium with chromedriver; cargo xtask test installs them");
            return None;
        }
        let browser = Browser::start().unwrap();
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-prefers-reduced-motion",
        ];
        let options = json!({ "binary": browser.chromium(), "args": arguments });
        let mut wanted = Capabilities::new();
        wanted.insert("goog:chromeOptions".to_owned(), options);
        wanted.insert("goog:loggingPrefs".to_owned(), json!({ "browser": "ALL" }));
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(wanted)
            .connect(&browser.url())
            .await;
        let client = client.unwrap();
        let window = Self { client, address: format!("http://{listen}"), _browser: browser };
        window.size(1280, 860).await;
        Some(window)
    }

    async fn devtools(&self, command: &'static str, parameters: Value) -> Value {
        let body = json!({ "cmd": command, "params": parameters });
        self.client.issue_cmd(Special("goog/cdp/execute", body)).await.unwrap()
    }

    pub async fn size(&self, width: u32, height: u32) {
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Shows the page as those see it who prefer `dark` or `light`.
    pub async fn scheme(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", json!({ "features": features })).await;
    }

    pub async fn go(&self, path: &str) {
        self.client.goto(&format!("{}{path}", self.address)).await.unwrap();
    }

    /// The element, once it is there.
    pub async fn find(&self, css: &str) -> Element {
        let found = self.client.wait().at_most(PATIENCE).for_element(Locator::Css(css)).await;
        match found {
            Ok(element) => element,
            Err(error) => panic!("{css}: {error}; {}", self.text("body").await),
        }
    }

    /// The element's text, as it is now.
    pub async fn text(&self, css: &str) -> String {
        match self.client.find(Locator::Css(css)).await {
            Ok(element) => element.text().await.unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    pub async fn click(&self, css: &str) {
        // The page may put a new one in its place at any moment.
        let started = Instant::now();
        while let Err(error) = self.find(css).await.click().await {
            assert!(started.elapsed() < PATIENCE, "{css}: {error}");
        }
    }

    /// The element's attribute, if it is there now.
    pub async fn attribute(&self, css: &str, name: &str) -> Option<String> {
        match self.client.find(Locator::Css(css)).await {
            Ok(element) => element.attr(name).await.unwrap_or_default(),
            Err(_) => None,
        }
    }

    /// Waits until the element has the text.
    pub async fn sees(&self, css: &str, text: &str) {
        let started = Instant::now();
        loop {
            let found = self.text(css).await;
            if found.contains(text) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "'{text}' is not in {css}: {found}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Fills in a field.
    pub async fn fill(&self, css: &str, text: &str) {
        let field = self.find(css).await;
        field.clear().await.unwrap();
        field.send_keys(text).await.unwrap();
    }

    /// Writes pictures of the page in both schemes to `target/screenshots`.
    pub async fn picture(&self, name: &str) {
        let script = "return [innerWidth, innerHeight, document.documentElement.scrollHeight]";
        let sizes = self.client.execute(script, vec![]).await.unwrap();
        let size = |index: usize| u32::try_from(sizes[index].as_u64().unwrap()).unwrap();
        let (width, height, whole) = (size(0), size(1), size(2).clamp(size(1), 2400));
        self.size(width, whole).await;
        for scheme in ["light", "dark"] {
            self.scheme(scheme).await;
            let picture = self.client.screenshot().await.unwrap();
            std::fs::write(folder().join(format!("{name}-{scheme}.png")), picture).unwrap();
        }
        self.size(width, height).await;
        self.scheme("light").await;
    }

    /// Fails if the page is wider than its window, or the browser complained of it.
    pub async fn is_sound(&self, what: &str) {
        let script = "return document.documentElement.scrollWidth - innerWidth";
        let beyond = self.client.execute(script, vec![]).await.unwrap();
        assert!(beyond.as_i64().unwrap() <= 0, "{what} is {beyond} pixels too wide");
        let severe = self.complaints().await;
        assert!(severe.is_empty(), "{what}: {severe:?}");
    }

    /// What the browser complained of since it was asked last.
    pub async fn complaints(&self) -> Vec<Value> {
        let logs = self.client.issue_cmd(Special("se/log", json!({ "type": "browser" }))).await;
        let Value::Array(mut logs) = logs.unwrap() else { return Vec::new() };
        logs.retain(|entry| entry["level"] == "SEVERE");
        logs
    }

    pub async fn close(self) {
        self.client.close().await.unwrap();
    }
}

/// Where pictures go.
fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/screenshots");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
