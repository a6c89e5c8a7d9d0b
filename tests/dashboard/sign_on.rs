//! Login at an OpenID provider, which the test runs: its metadata, keys and tokens, signed with RS256.

use std::{
    collections::HashMap,
    io::Read as _,
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Form, Json, Router,
    extract::{Query, State},
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    response::Html,
    routing::{get, post},
};
use base64::{Engine as _, prelude::BASE64_STANDARD, prelude::BASE64_URL_SAFE_NO_PAD};
use rsa::{
    RsaPrivateKey,
    pkcs1v15::SigningKey,
    rand_core::OsRng,
    sha2::{Digest as _, Sha256},
    signature::{SignatureEncoding as _, Signer as _},
    traits::PublicKeyParts as _,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use url::Url;

use crate::{
    browser::Window,
    fleet::Fleet,
    pages::Visitor,
    rig::{Admin, Caller},
};

const CALLBACK: &str = "/dashboard/login/sign-on/callback";
const SECRET: &str = "the client's secret";
/// Name of the session cookie.
const SESSION: &str = "tritmill_session";

/// The provider: what it does at the next login.
struct Provider {
    issuer: String,
    key: RsaPrivateKey,
    /// Signs instead of `key`, which is the published one.
    forger: Option<RsaPrivateKey>,
    next: Mutex<Login>,
}

/// A login: its PKCE challenge, and the claims of its token.
#[derive(Default)]
struct Login {
    challenge: String,
    claims: Value,
}

type Shared = State<Arc<Mutex<Provider>>>;

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

impl Provider {
    async fn start() -> Arc<Mutex<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        // For browsers another site than the admin, which has an address.
        let issuer = format!("http://localhost:{}", listener.local_addr().unwrap().port());
        let key = RsaPrivateKey::new(&mut OsRng, 2048).unwrap();
        let provider = Self { issuer, key, forger: None, next: Mutex::default() };
        let provider = Arc::new(Mutex::new(provider));
        let router = Router::new()
            .route("/.well-known/openid-configuration", get(metadata))
            .route("/authorize", get(authorize))
            .route("/keys", get(keys))
            .route("/token", post(token))
            .with_state(Arc::clone(&provider));
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        provider
    }

    /// Signs claims.
    fn signed(&self, claims: &Value) -> String {
        let head = json!({ "alg": "RS256", "typ": "JWT", "kid": "one" });
        let text = format!("{}.{}", encoded(head.to_string()), encoded(claims.to_string()));
        let key = self.forger.as_ref().unwrap_or(&self.key).clone();
        let signature = SigningKey::<Sha256>::new(key).sign(text.as_bytes());
        format!("{text}.{}", encoded(signature.to_bytes()))
    }
}

async fn metadata(State(provider): Shared) -> Json<Value> {
    let issuer = provider.lock().unwrap().issuer.clone();
    Json(json!({
        "issuer": issuer,
        "authorization_endpoint": format!("{issuer}/authorize"),
        "token_endpoint": format!("{issuer}/token"),
        "jwks_uri": format!("{issuer}/keys"),
        "response_types_supported": ["code"],
        "subject_types_supported": ["public"],
        "id_token_signing_alg_values_supported": ["RS256"],
    }))
}

async fn keys(State(provider): Shared) -> Json<Value> {
    let key = provider.lock().unwrap().key.to_public_key();
    let (n, e) = (encoded(key.n().to_bytes_be()), encoded(key.e().to_bytes_be()));
    Json(json!({ "keys": [
        { "kty": "RSA", "use": "sig", "alg": "RS256", "kid": "one", "n": n, "e": e },
    ] }))
}

/// Logs a visitor in without a question, and shows the way back.
async fn authorize(
    State(provider): Shared,
    Query(asked): Query<HashMap<String, String>>,
) -> Html<String> {
    let provider = provider.lock().unwrap();
    let claims = claims(&provider.issuer, &asked["nonce"]);
    *provider.next.lock().unwrap() = Login { challenge: asked["code_challenge"].clone(), claims };
    let back = format!("{}?code=the-code&amp;state={}", asked["redirect_uri"], asked["state"]);
    Html(format!("<a id=back href=\"{back}\">Allow</a>"))
}

/// The claims of a token for a login.
fn claims(issuer: &str, nonce: &str) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    json!({
        "iss": issuer, "aud": "tritmill", "sub": "ann-7", "iat": now, "exp": now + 300,
        "nonce": nonce, "email": "ann@example.com", "email_verified": true,
    })
}

/// Gives a token for the code of the login that was begun, to the client that began it.
async fn token(
    State(provider): Shared,
    headers: HeaderMap,
    Form(form): Form<HashMap<String, String>>,
) -> (StatusCode, Json<Value>) {
    let provider = provider.lock().unwrap();
    let login = provider.next.lock().unwrap();
    let challenge = encoded(Sha256::digest(form["code_verifier"].as_bytes()));
    let client = headers[AUTHORIZATION].to_str().unwrap().strip_prefix("Basic ").unwrap();
    let client = String::from_utf8(BASE64_STANDARD.decode(client).unwrap()).unwrap();
    let is_client = client == format!("tritmill:{}", SECRET.replace('\'', "%27").replace(' ', "+"));
    assert!(is_client, "{client}");
    if form["code"] != "the-code" || challenge != login.challenge {
        return (StatusCode::BAD_REQUEST, Json(json!({ "error": "invalid_grant" })));
    }
    let token = provider.signed(&login.claims);
    let answer = json!({
        "access_token": "unused", "token_type": "Bearer", "expires_in": 60, "id_token": token,
    });
    (StatusCode::OK, Json(answer))
}

/// An answer with its head as it came.
struct Raw {
    status: u16,
    head: String,
}

impl Raw {
    fn get(client: &Caller, path: &str, cookie: &str) -> Self {
        let head = client.head("GET", path, &format!("Cookie: {cookie}\r\n"));
        let mut text = Vec::new();
        client.open(head.as_bytes()).read_to_end(&mut text).unwrap();
        let text = String::from_utf8_lossy(&text).into_owned();
        let (head, _) = text.split_once("\r\n\r\n").unwrap();
        Self { status: head.split(' ').nth(1).unwrap().parse().unwrap(), head: head.to_owned() }
    }

    /// Value of a cookie that is set.
    fn cookie(&self, name: &str) -> Option<String> {
        let start = format!("{name}=");
        let values = self.head.lines().filter_map(|line| line.split_once(": "));
        let mut set = values.filter(|(name, _)| name.eq_ignore_ascii_case("set-cookie"));
        let (_, cookie) = set.find(|(_, value)| value.starts_with(&start))?;
        Some(cookie.split(';').next().unwrap().to_owned())
    }

    fn location(&self) -> Url {
        let line = self.head.lines().find_map(|line| line.strip_prefix("location: "));
        line.unwrap_or_else(|| panic!("{}", self.head)).parse().unwrap()
    }
}

/// An admin with this provider, and a browser's side of a login.
struct Rig {
    admin: Admin,
    provider: Arc<Mutex<Provider>>,
    issuer: String,
}

/// A login that was begun.
struct Begun {
    cookie: String,
    state: String,
    nonce: String,
}

impl Rig {
    async fn start(fleet: &Fleet) -> Self {
        let provider = Provider::start().await;
        let issuer = provider.lock().unwrap().issuer.clone();
        // The address of the admin is part of its settings.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (listen, public_url) = (free.to_string(), format!("http://{free}"));
        let admin = Admin::run(fleet.command(&[
            "admin",
            "--json",
            "--listen",
            &listen,
            "--oidc-issuer",
            &issuer,
            "--oidc-client-id",
            "tritmill",
            "--oidc-client-secret",
            SECRET,
            "--public-url",
            &public_url,
            "--oidc-allow",
            "@example.com=read,group:ops=operate",
        ]));
        Self { admin, provider, issuer }
    }

    fn begin(&self) -> Begun {
        let path = "/dashboard/login/sign-on?next=/dashboard/jobs";
        let sent = Raw::get(&self.admin.with(""), path, "");
        assert_eq!(sent.status, 303, "{}", sent.head);
        let url = sent.location();
        assert!(url.as_str().starts_with(&format!("{}/authorize?", self.issuer)), "{url}");
        let query: HashMap<String, String> = url.query_pairs().into_owned().collect();
        let back = format!("http://{}{CALLBACK}", self.admin.listen);
        assert_eq!(query["redirect_uri"], back);
        assert_eq!((&*query["code_challenge_method"], &*query["client_id"]), ("S256", "tritmill"));
        assert!(query["scope"].contains("openid"), "{query:?}");
        let provider = self.provider.lock().unwrap();
        provider.next.lock().unwrap().challenge = query["code_challenge"].clone();
        let cookie = sent.cookie("tritmill_login").unwrap();
        Begun { cookie, state: query["state"].clone(), nonce: query["nonce"].clone() }
    }

    /// Lets the provider answer with claims that differ from good ones.
    fn answers(&self, begun: &Begun, change: Value) {
        let mut claims = claims(&self.issuer, &begun.nonce);
        claims.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        self.provider.lock().unwrap().next.lock().unwrap().claims = claims;
    }

    /// Comes back from the provider.
    fn finish(&self, state: &str, cookie: &str) -> Raw {
        let path = format!("{CALLBACK}?code=the-code&state={state}");
        Raw::get(&self.admin.with(""), &path, cookie)
    }

    /// Logs in with claims that differ from good ones.
    fn log_in(&self, change: Value) -> Raw {
        let begun = self.begin();
        self.answers(&begun, change);
        self.finish(&begun.state, &begun.cookie)
    }

    fn visitor(&self, answer: &Raw) -> Visitor {
        let session = answer.cookie(SESSION);
        let session = session.unwrap_or_else(|| panic!("{}", answer.head));
        Visitor { client: self.admin.with(""), session }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn visitors_log_in_at_the_provider_with_the_role_of_the_rules() {
    let fleet = Fleet::start();
    let rig = Rig::start(&fleet).await;
    let login = rig.admin.with("").get("/dashboard/login").text();
    assert!(login.contains("/dashboard/login/sign-on") && login.contains("name=\"key\""));
    let answer = rig.log_in(json!({}));
    assert_eq!(answer.status, 200, "{}", answer.head);
    let reader = rig.visitor(&answer);
    assert!(reader.sees("/dashboard/jobs").contains("read key"));
    assert_eq!(reader.client.page("/dashboard/keys", &reader.session).status, 403);
    // The next login has another role, and the same key.
    let operator = rig.visitor(&rig.log_in(json!({ "groups": ["users", "ops"] })));
    let keys = operator.sees("/dashboard/keys");
    assert_eq!(keys.matches("ann@example.com").count(), 1, "{keys}");
    let found = "SELECT tenant, role FROM api_keys WHERE name = 'ann@example.com'";
    assert_eq!(fleet.sql(found).trim(), "default|operate");
    // Keys log in as before, and a logout ends the session.
    let by_key = Visitor::new(&rig.admin, rig.admin.first_key.as_deref().unwrap());
    by_key.sees("/dashboard/keys");
    operator.does("/dashboard/logout", "");
    assert_eq!(operator.client.page("/dashboard/keys", &operator.session).status, 303);
    // A revoked key stays revoked.
    let id = fleet.sql("SELECT id FROM api_keys WHERE name = 'ann@example.com'");
    by_key.does(&format!("/dashboard/keys/{}/revoke", id.trim()), "");
    assert_eq!(reader.client.page("/dashboard/jobs", &reader.session).status, 303);
    let refused = rig.log_in(json!({}));
    assert_eq!((refused.status, refused.cookie(SESSION)), (403, None));
}

/// Another site begins the last navigation of a login, so that browsers withhold the session's cookie from it.
#[tokio::test(flavor = "multi_thread")]
async fn browser_logs_in_at_the_provider() {
    let fleet = Fleet::start();
    let rig = Rig::start(&fleet).await;
    let Some(window) = Window::open(&rig.admin.listen).await else { return };
    window.go("/dashboard/jobs?state=failed").await;
    window.sees("h1", "Log in").await;
    window.picture("login-sign-on").await;
    window.click("a.button").await;
    window.click("#back").await;
    window.sees("h1", "Jobs").await;
    window.sees(".who", "read key").await;
    let page = window.client.current_url().await.unwrap();
    assert!(page.as_str().ends_with("/dashboard/jobs?state=failed"), "{page}");
    // The provider has no icon.
    let errors = window.errors().await;
    assert!(errors.iter().all(|error| error.to_string().contains("/favicon.ico")), "{errors:?}");
    window.close().await;
}

/// Checks that a login was refused.
fn refused(what: &str, answer: &Raw, status: u16) {
    assert_eq!(answer.status, status, "{what}: {}", answer.head);
    assert_eq!(answer.cookie(SESSION), None, "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_other_logins_and_clients_are_refused() {
    let fleet = Fleet::start();
    let rig = Rig::start(&fleet).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    for (change, status) in [
        (json!({ "nonce": "of another login" }), 401),
        (json!({ "nonce": null }), 401),
        (json!({ "aud": "another client" }), 401),
        (json!({ "iss": "http://another.example" }), 401),
        (json!({ "exp": now - 600, "iat": now - 900 }), 401),
        (json!({ "email": "eve@evil.example" }), 403),
        (json!({ "email_verified": false }), 403),
    ] {
        refused(&change.to_string(), &rig.log_in(change.clone()), status);
    }
    let keys = "SELECT count(*) FROM api_keys";
    assert_eq!(fleet.sql(keys).trim(), "1", "no key was made");
}

#[tokio::test(flavor = "multi_thread")]
async fn login_ends_only_where_it_was_begun() {
    let fleet = Fleet::start();
    let rig = Rig::start(&fleet).await;
    let begun = rig.begin();
    rig.answers(&begun, json!({}));
    refused("another state", &rig.finish("another", &begun.cookie), 400);
    refused("another browser", &rig.finish(&begun.state, ""), 400);
    let other = rig.begin();
    refused("the state of another login", &rig.finish(&begun.state, &other.cookie), 400);
    // The provider has the challenge of the latest login.
    refused("another verifier", &rig.finish(&begun.state, &begun.cookie), 502);
    let denied = format!("{CALLBACK}?error=access_denied&state={}", other.state);
    refused("denied", &Raw::get(&rig.admin.with(""), &denied, &other.cookie), 403);
    rig.provider.lock().unwrap().forger = Some(RsaPrivateKey::new(&mut OsRng, 2048).unwrap());
    refused("another key", &rig.log_in(json!({})), 401);
}
