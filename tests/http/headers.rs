//! Headers that clients and browsers rely on, whatever the route and the status.

use serde_json::json;

use crate::{
    fleet::Fleet,
    rig::{Admin, Answer, Caller, question},
};

/// Sends a request without a body and with these headers.
fn ask(caller: &Caller, method: &str, path: &str, headers: &str) -> Answer {
    caller.send(caller.head(method, path, headers).as_bytes())
}

#[test]
fn every_answer_has_the_id_of_its_request() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let (first, stranger) = (admin.first(), admin.with(""));
    let mut ids = Vec::new();
    for (caller, method, path, status) in [
        (&stranger, "GET", "/healthz", 200),
        (&stranger, "GET", "/dashboard/login", 200),
        (&stranger, "GET", "/dashboard/keys", 303),
        (&stranger, "GET", "/v1/models", 401),
        (&stranger, "GET", "/nothing", 404),
        (&first, "GET", "/v1/models", 200),
        (&first, "GET", "/v1/files/none", 404),
        (&first, "PUT", "/v1/files", 405),
        (&first, "GET", "/v1/files/%ff", 400),
    ] {
        let answer = ask(caller, method, path, "");
        assert_eq!(answer.status, status, "{path}");
        let id = answer.header("x-request-id").unwrap_or_else(|| panic!("{path}")).to_owned();
        assert!(id.starts_with("req_") && !ids.contains(&id), "{path}: {id}");
        ids.push(id);
        let own = ask(caller, method, path, "X-Request-Id: night-shift/7\r\n");
        assert_eq!(own.header("x-request-id"), Some("night-shift/7"), "{path}");
    }
    let odd = ask(&first, "GET", "/v1/models", "X-Request-Id: two words\r\n");
    assert!(odd.header("x-request-id").unwrap().starts_with("req_"));
}

#[test]
fn answers_tell_what_is_left_of_the_rate_of_a_key() {
    let fleet = Fleet::start();
    let unlimited = Admin::start(&fleet, &[]);
    let first = unlimited.first();
    assert_eq!(first.get("/v1/models").header("x-ratelimit-limit-requests"), None);
    let admin = Admin::start(&fleet, &["--max-key-rate", "1"]);
    let caller = admin.with(first.key());
    let answers: Vec<Answer> =
        (0..7).map(|_| caller.post("/v1/chat/completions", &question(json!({})))).collect();
    let first = &answers[0];
    assert_eq!(first.header("x-ratelimit-limit-requests"), Some("5"));
    assert_eq!(first.header("x-ratelimit-remaining-requests"), Some("4"));
    let refused = answers.iter().find(|answer| answer.status == 429).unwrap();
    assert_eq!(refused.error().1, "rate_limit_exceeded");
    assert_eq!(refused.header("x-ratelimit-remaining-requests"), Some("0"));
    assert_eq!(refused.header("x-ratelimit-reset-requests"), Some("5s"));
    assert_eq!(refused.header("x-should-retry"), Some("true"));
    let wrong = admin.with("").get("/v1/models");
    assert_eq!((wrong.status, wrong.header("x-should-retry")), (401, None));
}

#[test]
fn scripts_of_chosen_sites_may_call_the_api() {
    let fleet = Fleet::start();
    let closed = Admin::start(&fleet, &[]);
    let (first, ours) = (closed.first(), "Origin: https://chat.example\r\n");
    let allowed = |answer: &Answer| answer.header("access-control-allow-origin").map(str::to_owned);
    assert_eq!(allowed(&ask(&first, "GET", "/v1/models", ours)), None, "off by default");

    let sites = ["--cors-origin", "https://chat.example", "--cors-origin", "http://localhost:3000"];
    let admin = Admin::start(&fleet, &sites);
    let (caller, stranger) = (admin.with(first.key()), admin.with(""));
    let wanted = "Access-Control-Request-Method: POST\r\n\
                  Access-Control-Request-Headers: authorization,x-stainless-os\r\n";
    let path = "/v1/chat/completions";
    let preflight = ask(&stranger, "OPTIONS", path, &format!("{ours}{wanted}"));
    assert_eq!(preflight.status, 204);
    assert_eq!(allowed(&preflight).as_deref(), Some("https://chat.example"));
    let may = preflight.header("access-control-allow-headers");
    assert_eq!(may, Some("authorization,x-stainless-os"));
    assert!(preflight.header("access-control-allow-methods").unwrap().contains("post"));
    assert_eq!(preflight.header("vary"), Some("origin"));
    for (path, status) in [("/v1/models", 200), ("/v1/files/none", 404), ("/nothing", 404)] {
        let answer = ask(&caller, "GET", path, ours);
        assert_eq!(answer.status, status);
        assert_eq!(allowed(&answer).as_deref(), Some("https://chat.example"), "{path}");
        let exposed = answer.header("access-control-expose-headers").unwrap();
        assert!(exposed.contains("x-request-id"), "{exposed}");
        assert_eq!(answer.header("access-control-allow-credentials"), None);
    }
    let other =
        ask(&stranger, "OPTIONS", path, &format!("Origin: https://evil.example\r\n{wanted}"));
    assert_eq!(allowed(&other), None);
    let plain = ask(&caller, "OPTIONS", path, "");
    assert_eq!((plain.status, plain.header("allow")), (204, Some("post")));

    let open = Admin::start(&fleet, &["--cors-origin", "*"]);
    let everyone = open.with(first.key());
    assert_eq!(allowed(&ask(&everyone, "GET", "/v1/models", ours)).as_deref(), Some("*"));
    let (code, _, stderr) = fleet.run(&["admin", "--cors-origin", "chat.example"]);
    assert_eq!(code, Some(1), "{stderr}");
}

#[test]
fn trusted_proxy_names_client_and_scheme() {
    let fleet = Fleet::start();
    let first = Admin::start(&fleet, &[]).first();
    let url = ["--public-url", "https://llm.example"];
    let admin = Admin::start(&fleet, &[&["--trusted-proxy", "127.0.0.0/8"], &url[..]].concat());
    let (operator, stranger) = (admin.with(first.key()), admin.with(""));
    let of = |address: &str| format!("X-Forwarded-For: {address}\r\nX-Forwarded-Proto: https\r\n");
    let limit = json!({ "tenant": "acme", "keys": 3 }).to_string();
    let length = format!("Content-Length: {}\r\n", limit.len());
    let head = operator.head("POST", "/admin/v1/tenants/limits", &(of("192.0.2.7") + &length));
    assert_eq!(operator.send((head + &limit).as_bytes()).status, 200);
    let log = operator.get("/admin/v1/audit").json();
    assert_eq!(log["data"][0]["address"], "192.0.2.7");
    let form = format!("key={}", first.key());
    let headers = format!("{}Origin: https://llm.example\r\n", of("192.0.2.7"));
    let opened = stranger.form("/dashboard/login", "", &headers, &form);
    assert_eq!(opened.status, 303, "{}", opened.text());
    assert!(opened.cookie().starts_with("__Secure-tritmill_session="), "{}", opened.cookie());
    let session = opened.cookie();
    let page = ask(&stranger, "GET", "/dashboard/keys", &format!("Cookie: {session}\r\n"));
    assert_eq!(page.status, 200, "the connection is not one of TLS, the site is");
    let kept = opened.header("strict-transport-security");
    assert_eq!(kept, Some("max-age=31536000"));

    let document = stranger.get("/openapi.json").json();
    assert_eq!(document["servers"][0]["url"], "https://llm.example");

    // A proxy that is not trusted names no client; each address has its own limit.
    let strict = ["--max-stranger-rate", "1"];
    let trusting = Admin::start(&fleet, &[&["--trusted-proxy", "127.0.0.1"], &strict[..]].concat());
    let plain = Admin::start(&fleet, &strict);
    for (admin, expect) in [(&trusting, 0), (&plain, 3)] {
        let refused = (1..9).filter(|last| {
            let client = of(&format!("192.0.2.{last}"));
            ask(&admin.with(""), "GET", "/v1/models", &client).status == 429
        });
        assert!(refused.count() >= expect, "{expect}");
    }
    let one = (1..9)
        .filter(|_| ask(&trusting.with(""), "GET", "/v1/models", &of("192.0.2.1")).status == 429);
    assert!(one.count() >= 2);
    let (code, _, stderr) = fleet.run(&["admin", "--trusted-proxy", "proxy.example"]);
    assert_eq!(code, Some(1), "{stderr}");
}
