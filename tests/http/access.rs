//! All routes × roles × tenants: who may, who may not, and that a tenant learns nothing of another.

use std::collections::HashMap;

use serde_json::{Value, json};
use tritmill_admin::{Access, ROUTES, Route};
use tritmill_queue::store::KeyRole;

use crate::{
    fleet::Fleet,
    rig::{Admin, Answer, Caller, OURS, key},
};

/// Somebody with a key, and logged in with it: a page asks for the session, the API for the key.
struct Visitor {
    caller: Caller,
    session: String,
}

impl Visitor {
    fn of(admin: &Admin, key: &str) -> Self {
        Self { caller: admin.with(key), session: admin.with("").log_in(key) }
    }

    /// A request to a route that is good enough to be let in; whether it is answered is another
    /// matter.
    fn ask(&self, admin: &Admin, route: &Route, path: &str) -> Answer {
        match route.is_page() {
            true => ask_page(&admin.with(""), route, path, &self.session),
            false => ask(&self.caller, route, path),
        }
    }
}

fn ask_page(nobody: &Caller, route: &Route, path: &str, session: &str) -> Answer {
    match route.method.as_str() {
        "GET" => nobody.page(path, session),
        _ => nobody.form(path, session, OURS, ""),
    }
}

/// A route's path with an id in it.
fn path(route: &Route, ids: &HashMap<&str, String>) -> String {
    let noun = route.path.split('/').nth(2).unwrap_or_default();
    let id = ids.get(noun).map_or("none", String::as_str);
    let path = route.path.replace("{id}", id).replace("{*model}", "demo");
    path.replace("{version}", "0")
        .replace("{name}", "dashboard.css")
        .replace("{queue}", "demo@i2_s")
}

/// A request to a route that is good enough to be let in; whether it is answered is another matter.
fn ask(caller: &Caller, route: &Route, path: &str) -> Answer {
    match route.method.as_str() {
        // What is let in streams without an end; a bad place in it is refused after the key.
        "GET" if path == "/admin/v1/events" => {
            caller.send(caller.head("GET", path, "Last-Event-ID: none\r\n").as_bytes())
        }
        "GET" => caller.get(path),
        "DELETE" => caller.delete(path),
        _ => caller.post(path, &json!({})),
    }
}

#[test]
fn every_route_asks_for_its_role_and_keeps_tenants_apart() {
    let fleet = Fleet::start();
    drop(fleet.worker(&[]));
    let admin = Admin::start(&fleet, &[]);
    let owner = admin.with(&key(&fleet, "acme", "submit"));
    let file = owner.upload(b"{}\n").json()["id"].as_str().unwrap().to_owned();
    let asked = json!({
        "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h",
    });
    let batch = owner.post("/v1/batches", &asked).json()["id"].as_str().unwrap().to_owned();
    let ids = HashMap::from([("files", file), ("batches", batch)]);
    // The same with a digit changed: ids of nothing.
    let no_ids: HashMap<&str, String> = ids
        .iter()
        .map(|(noun, id)| {
            let at = id.len() - 20;
            let digit = if &id[at..=at] == "0" { "1" } else { "0" };
            (*noun, format!("{}{digit}{}", &id[..at], &id[at + 1..]))
        })
        .collect();
    let others =
        KeyRole::ALL.map(|role| (role, Visitor::of(&admin, &key(&fleet, "other", role.as_str()))));
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
            // Nobody is logged out for those who come after.
            if route.path == "/dashboard/logout" {
                continue;
            }
            let allowed = match route.access {
                Access::Public => true,
                Access::Key(needed) | Access::Page(needed) => *role >= needed,
            };
            // Another tenant first: it changes nothing.
            let answer = other.ask(&admin, route, &here);
            let is_other_form = route.is_page() && is_public;
            assert_eq!(
                answer.status == 403 && !is_other_form,
                !allowed,
                "{role:?} {here}: {}",
                answer.text()
            );
            if allowed && route.path.contains("{id}") {
                let none = other.ask(&admin, route, &nowhere);
                assert_eq!((answer.status, none.status), (404, 404), "{here}");
                let body = |answer: &Answer| answer.text().replace(&here, "").replace(&nowhere, "");
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
    // Nothing of the above was a tenant's own.
    for (noun, id) in &ids {
        assert_eq!(owner.get(&format!("/v1/{noun}/{id}")).status, 200);
        let listed = owner.get(&format!("/v1/{noun}")).json();
        assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed}");
    }
    // Another's file is no input.
    let other = admin.with(&key(&fleet, "other", "submit"));
    let stolen = other.post("/v1/batches", &asked);
    assert_eq!(stolen.error(), (404, "not_found".to_owned()));
}

#[test]
fn a_revoked_key_opens_nothing_and_no_secret_is_kept() {
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
    assert!(!kept.contains(digits), "the hash is kept, not the secret");
}

#[test]
fn every_answer_carries_what_browsers_are_told() {
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
