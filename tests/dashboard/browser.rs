//! Chromium, controlled through WebDriver.

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

/// Longest wait for an element: machines that run tests are busy.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

/// A browser window.
pub struct Window {
    pub client: Client,
    address: String,
    _browser: Browser,
}

/// A vendor command of WebDriver: its path and parameters.
#[derive(Debug)]
struct VendorCommand(&'static str, Value);

impl WebDriverCompatibleCommand for VendorCommand {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.0))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.1.to_string()))
    }
}

impl Window {
    /// Opens a window on a service; `None` if no browser is installed.
    pub async fn open(listen: &str) -> Option<Self> {
        if !Browser::is_installed() {
            tritmill_servers::skip("a browser (apt install chromium chromium-driver)");
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
        self.client.issue_cmd(VendorCommand("goog/cdp/execute", body)).await.unwrap()
    }

    pub async fn size(&self, width: u32, height: u32) {
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
        });
        self.devtools("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// Sets the preferred color scheme: `dark` or `light`.
    pub async fn scheme(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", json!({ "features": features })).await;
    }

    /// Sets the zone of local times.
    pub async fn zone(&self, zone: &str) {
        self.devtools("Emulation.setTimezoneOverride", json!({ "timezoneId": zone })).await;
    }

    /// Drags the pointer over an element, from one share of its width to another.
    pub async fn drag(&self, css: &str, from: f64, to: f64) {
        self.find(css).await;
        let script = "
            const [css, from, to] = arguments;
            const one = document.querySelector(css), box = one.getBoundingClientRect();
            const fire = (kind, share) => one.dispatchEvent(new PointerEvent(kind, {
                bubbles: true, pointerType: 'mouse', clientX: box.left + box.width * share,
            }));
            fire('pointerdown', from);
            fire('pointermove', (from + to) / 2);
            fire('pointerup', to);";
        self.client.execute(script, vec![json!(css), json!(from), json!(to)]).await.unwrap();
    }

    pub async fn go(&self, path: &str) {
        self.client.goto(&format!("{}{path}", self.address)).await.unwrap();
    }

    /// Waits for an element.
    pub async fn find(&self, css: &str) -> Element {
        let found = self.client.wait().at_most(WAIT_LIMIT).for_element(Locator::Css(css)).await;
        match found {
            Ok(element) => element,
            Err(error) => panic!("{css}: {error}; {}", self.text("body").await),
        }
    }

    /// Returns the current text of an element; empty if it is absent.
    pub async fn text(&self, css: &str) -> String {
        match self.client.find(Locator::Css(css)).await {
            Ok(element) => element.text().await.unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    pub async fn click(&self, css: &str) {
        // A live update may replace the element at any moment.
        let started = Instant::now();
        while let Err(error) = self.find(css).await.click().await {
            assert!(started.elapsed() < WAIT_LIMIT, "{css}: {error}");
        }
    }

    /// Returns the current attribute of an element, if it is present.
    pub async fn attribute(&self, css: &str, name: &str) -> Option<String> {
        match self.client.find(Locator::Css(css)).await {
            Ok(element) => element.attr(name).await.unwrap_or_default(),
            Err(_) => None,
        }
    }

    /// Waits until an element contains a text.
    pub async fn sees(&self, css: &str, text: &str) {
        let started = Instant::now();
        loop {
            let found = self.text(css).await;
            if found.contains(text) {
                return;
            }
            assert!(started.elapsed() < WAIT_LIMIT, "'{text}' is not in {css}: {found}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Fills in a field.
    pub async fn fill(&self, css: &str, text: &str) {
        let field = self.find(css).await;
        field.clear().await.unwrap();
        field.send_keys(text).await.unwrap();
    }

    /// Writes screenshots of the page in both color schemes to `target/screenshots`.
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

    /// Fails if the page is wider than its window or the browser logged errors.
    pub async fn is_sound(&self, what: &str) {
        let script = "return document.documentElement.scrollWidth - innerWidth";
        let beyond = self.client.execute(script, vec![]).await.unwrap();
        assert!(beyond.as_i64().unwrap() <= 0, "{what} is {beyond} pixels too wide");
        let severe = self.errors().await;
        assert!(severe.is_empty(), "{what}: {severe:?}");
    }

    /// Returns the errors that the browser logged since the last call.
    pub async fn errors(&self) -> Vec<Value> {
        let logs =
            self.client.issue_cmd(VendorCommand("se/log", json!({ "type": "browser" }))).await;
        let Value::Array(mut logs) = logs.unwrap() else { return Vec::new() };
        logs.retain(|entry| entry["level"] == "SEVERE");
        logs
    }

    pub async fn close(self) {
        self.client.close().await.unwrap();
    }
}

/// Returns the folder of the screenshots.
fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/screenshots");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
