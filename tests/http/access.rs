//! All routes × roles × tenants: which are allowed, and that no response reveals another tenant's data.

use std::collections::HashMap;

use serde_json::{Value, json};
use tritmill_admin::store::KeyRole;
use tritmill_admin::{Access, ROUTES, Route};

use crate::{
    fleet::Fleet,
    rig::{Admin, Answer, Caller, OURS, key},
};

/// A client with a key for the API and a session for the pages.
struct Visitor {
    caller: Caller,
    session: String,
}

impl Visitor {
    fn new(admin: &Admin, key: &str) -> Self {
        Self { caller: admin.with(key), session: admin.with("").log_in(key) }
    }

    /// Sends a request that passes the checks of access, if they allow it; it may fail later.
    fn ask(&self, admin: &Admin, route: &Route, path: &str) -> Answer {
        match route.is_page() {
            true => ask_page(&admin.with(""), route, path, &self.session),
            false => ask(&self.caller, route, path),
        }
    }
}

fn ask_page(anonymous: &Caller, route: &Route, path: &str, session: &str) -> Answer {
    match route.method.as_str() {
        "GET" => anonymous.page(path, session),
        _ => anonymous.form(path, session, OURS, ""),
    }
}

/// Returns the path of a route with its parameters filled in.
fn path(route: &Route, ids: &HashMap<&str, String>) -> String {
    let noun = route.path.split('/').nth(2).unwrap_or_default();
    let id = ids.get(noun).map_or("none", String::as_str);
    let path = route.path.replace("{id}", id).replace("{*model}", "demo");
    path.replace("{version}", "0")
        .replace("{name}", "dashboard.css")
        .replace("{queue}", "demo@i2_s")
}

/// Sends a request that passes the checks of access, if they allow it; it may fail later.
fn ask(caller: &Caller, route: &Route, path: &str) -> Answer {
    match route.method.as_str() {
        // An allowed request would stream forever; an invalid id fails after the check of the key.
        "GET" if path == "/admin/v1/events" => {
            caller.send(caller.head("GET", path, "Last-Event-ID: none\r\n").as_bytes())
        }
        "GET" => caller.get(path),
        "DELETE" => caller.delete(path),
        _ => caller.post(path, &json!({})),
    }
}

/// Routes where an operator sees and changes the batches of all tenants, and the log of the changes.
const OF_ALL_TENANTS: [(&str, &str); 9] = [
    ("GET", "/admin/v1/batches"),
    ("GET", "/dashboard/batches"),
    ("GET", "/dashboard/batches/{id}"),
    ("POST", "/dashboard/batches/{id}/cancel"),
    ("POST", "/dashboard/batches/{id}/pause"),
    ("POST", "/dashboard/batches/{id}/resume"),
    ("POST", "/dashboard/batches/{id}/retry"),
    ("POST", "/dashboard/batches/{id}/seal"),
    ("GET", "/dashboard/audit"),
];

#[test]
fn every_route_checks_role_and_tenant() {
    let fleet = Fleet::start();
    drop(fleet.worker(&[])); // It has registered the demo model.
    // Strangers call all routes faster than the limit on them allows.
    let admin = Admin::start(&fleet, &["--max-stranger-rate", "100000"]);
    let owner = admin.with(&key(&fleet, "acme", "submit"));
    let file = owner.upload(b"{}\n").json()["id"].as_str().unwrap().to_owned();
    let asked = json!({
        "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h",
    });
    let batch = owner.post("/v1/batches", &asked).json()["id"].as_str().unwrap().to_owned();
    let ids = HashMap::from([("files", file), ("batches", batch)]);
    // Ids that do not exist: one digit is changed.
    let no_ids: HashMap<&str, String> = ids
        .iter()
        .map(|(noun, id)| {
            let at = id.len() - 20;
            let digit = if &id[at..=at] == "0" { "1" } else { "0" };
            (*noun, format!("{}{digit}{}", &id[..at], &id[at + 1..]))
        })
        .collect();
    let others =
        KeyRole::ALL.map(|role| (role, Visitor::new(&admin, &key(&fleet, "other", role.as_str()))));
    for route in ROUTES {
        let (here, nowhere) = (path(route, &ids), path(route, &no_ids));
        let is_public = route.access == Access::Public;
        for stranger in ["", "tm-1", "nonsense", &format!("tm-{}", "0".repeat(64))] {
            let answer = match route.is_page() {
                true => {
                    let session = format!("tritmill_session={stranger}");
                    ask_page(&admin.with(""), route, &here, &session)
                }
                false => ask(&admin.with(stranger), route, &here),
            };
            let is_refused = match route.access {
                Access::Page(_) => answer
                    .header("location")
                    .is_some_and(|to| to.starts_with("/dashboard/login?next=")),
                _ => answer.status == 401 && !route.is_page(),
            };
            assert_eq!(is_refused, !is_public, "{here} without a key: {}", answer.status);
        }
        for (role, other) in &others {
            // The session is used by the following routes.
            if route.path == "/dashboard/logout" {
                continue;
            }
            let allowed = match route.access {
                Access::Public => true,
                Access::Key(needed) | Access::Page(needed) => role.includes(needed),
            };
            // A request of another tenant changes nothing.
            let answer = other.ask(&admin, route, &here);
            let is_other_form = route.is_page() && is_public;
            assert_eq!(
                answer.status == 403 && !is_other_form,
                !allowed,
                "{role:?} {here}: {}",
                answer.text()
            );
            let sees_all = *role == KeyRole::Operate
                && OF_ALL_TENANTS.contains(&(route.method.as_str(), route.path));
            if sees_all {
                let id = &ids["batches"];
                // The state of the batch may not allow the change.
                let is_refused = answer.text().contains("cannot be");
                assert!(answer.status < 400 || is_refused, "{here}: {}", answer.text());
                let is_action = route.method != "GET";
                assert!(
                    is_action || answer.text().contains(id.as_str()),
                    "{here}: {}",
                    answer.text()
                );
                assert!(!answer.text().contains("/dashboard/files/"), "{here}: {}", answer.text());
            } else if allowed && route.path.contains("{id}") {
                let none = other.ask(&admin, route, &nowhere);
                assert_eq!((answer.status, none.status), (404, 404), "{here}");
                let body = |answer: &Answer| {
                    let text = answer.text().replace(&here, "").replace(&nowhere, "");
                    // Every request has an id of its own.
                    text.split("\"request_id\":").next().unwrap_or_default().to_owned()
                };
                let shape = |answer: &Answer, ids: &HashMap<&str, String>| {
                    ids.values().fold(body(answer), |text, id| text.replace(id.as_str(), "ID"))
                };
                assert_eq!(shape(&answer, &ids), shape(&none, &no_ids));
            } else if allowed {
                let text = answer.text();
                assert!(!ids.values().any(|id| text.contains(id.as_str())), "{here}: {text}");
            }
        }
    }
    // The owner's file and batch are unchanged.
    for (noun, id) in &ids {
        assert_eq!(owner.get(&format!("/v1/{noun}/{id}")).status, 200);
        let listed = owner.get(&format!("/v1/{noun}")).json();
        assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
    }
    // A file of another tenant is refused as input.
    let other = admin.with(&key(&fleet, "other", "submit"));
    let refused = other.post("/v1/batches", &asked);
    assert_eq!(refused.error(), (404, "not_found".to_owned()));
}

#[test]
fn revoked_key_is_refused_and_secrets_are_hashed() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let secret = key(&fleet, "acme", "read");
    assert_eq!(admin.with(&secret).get("/v1/files").status, 200);
    let (_, listed, _) = fleet.run(&["keys", "list"]);
    assert!(!listed.contains(&secret), "{listed}");
    let keys: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&keys[0]["role"], &keys[1]["tenant"]), (&json!("operate"), &json!("acme")));
    let id = keys[1]["id"].as_str().unwrap();
    assert_eq!(fleet.run(&["keys", "revoke", id]).0, Some(0));
    assert_eq!(admin.with(&secret).get("/v1/files").status, 401);
    assert_eq!(fleet.run(&["keys", "revoke", id]).0, Some(2));
    let digits = secret.trim_start_matches("tm-");
    let kept = fleet.sql("SELECT encode(hash, 'hex') FROM api_keys");
    assert!(!kept.contains(digits), "only the hash is stored");
}

#[test]
fn every_response_has_security_headers() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    for answer in [admin.first().get("/v1/models"), admin.with("").get("/none")] {
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        assert!(answer.header("content-security-policy").unwrap().contains("default-src 'none'"));
    }
    assert_eq!(admin.with("").get("/none").error(), (404, "unknown_url".to_owned()));
    assert_eq!(admin.with("").get("/healthz").status, 200);
    assert_eq!(admin.with("").get("/readyz").status, 200);
}

#[test]
fn paths_name_their_methods_and_odd_heads_are_refused() {
    let (_fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let ask = |method: &str, path: &str, headers: &str| {
        caller.send(caller.head(method, path, headers).as_bytes())
    };
    let wrong = ask("DELETE", "/v1/models", "");
    assert_eq!(wrong.error(), (405, "method_not_allowed".to_owned()));
    assert_eq!(wrong.header("allow"), Some("get,head"));
    assert_eq!(ask("PUT", "/v1/files", "").header("allow"), Some("get,head,post"));
    let options = ask("OPTIONS", "/v1/chat/completions", "");
    assert_eq!((options.status, options.header("allow")), (204, Some("post")));
    let head = ask("HEAD", "/v1/models", "");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(ask("GET", "/v1/nothing", "").error(), (404, "unknown_url".to_owned()));
    assert_eq!(ask("GET", "/v1/files/%ff", "").error(), (400, "invalid_path".to_owned()));
    let length = "Content-Length: 2\r\nContent-Type: application/json\r\nContent-Encoding: ";
    let encoded = |encoding: &str| {
        let head = caller.head("POST", "/v1/completions", &format!("{length}{encoding}\r\n"));
        caller.send(format!("{head}{{}}").as_bytes())
    };
    let gzip = encoded("gzip");
    assert_eq!(gzip.error(), (415, "unsupported_encoding".to_owned()));
    assert_eq!(gzip.header("accept-encoding"), Some("identity"));
    assert_eq!(encoded("identity").error(), (400, "missing_field".to_owned()));
}
