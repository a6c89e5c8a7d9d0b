//! Keys with the roles of scrapers and of tenants' own administrators, keys that expire, and what tenants do not see.

use serde_json::{Value, json};

use crate::{
    fleet::{Fleet, eventually},
    rig::{Admin, OURS, key, question},
};

#[test]
fn scraper_reads_the_metrics_and_nothing_else() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let scraper = admin.with(&key(&fleet, "default", "metrics"));
    assert_eq!(scraper.get("/metrics").status, 200);
    for path in ["/v1/models", "/v1/files", "/admin/v1/queues", "/admin/v1/keys", "/admin/v1/jobs"]
    {
        assert_eq!(scraper.get(path).error(), (403, "insufficient_role".to_owned()), "{path}");
    }
    for role in ["read", "submit", "manage"] {
        let other = admin.with(&key(&fleet, "default", role));
        assert_eq!(other.get("/metrics").status, 403, "{role}: metrics name all tenants");
    }
}

#[test]
fn manager_makes_and_revokes_keys_of_its_tenant() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let manager = admin.with(&key(&fleet, "acme", "manage"));
    let new = |change: Value| {
        let mut body = json!({ "tenant": "acme", "role": "submit", "name": "nightly" });
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        manager.post("/admin/v1/keys", &body)
    };
    let made = new(json!({ "expires_after_s": 2 }));
    assert_eq!(made.status, 200, "{}", made.text());
    let nightly = admin.with(made.json()["secret"].as_str().unwrap());
    assert_eq!(nightly.get("/v1/files").status, 200);
    for wrong in
        [json!({ "tenant": "other" }), json!({ "role": "operate" }), json!({ "role": "metrics" })]
    {
        assert_eq!(new(wrong.clone()).error().0, 403, "{wrong}");
    }
    assert_eq!(new(json!({ "expires_after_s": 0 })).error().0, 400);
    assert_eq!(nightly.get("/admin/v1/keys").error().0, 403, "submit does not include manage");

    let listed = manager.get("/admin/v1/keys").json()["data"].as_array().unwrap().clone();
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|key| key["tenant"] == "acme"), "{listed:?}");
    eventually("the use of the key is recorded", || {
        let keys = manager.get("/admin/v1/keys").json();
        keys["data"].as_array().unwrap().iter().all(|key| key["last_used_at_ms"].is_i64())
    });
    eventually("the key has expired", || nightly.get("/v1/files").status == 401);

    // An operator's key of the same tenant stays out of reach, and so do keys of others.
    let all = |tenant: &str, role: &str| {
        key(&fleet, tenant, role);
        let keys = admin.first().get("/admin/v1/keys").json();
        keys["data"].as_array().unwrap().last().unwrap()["id"].as_str().unwrap().to_owned()
    };
    let revoke = |id: &str| manager.delete(&format!("/admin/v1/keys/{id}")).status;
    assert_eq!(revoke(&all("acme", "operate")), 403);
    assert_eq!(revoke(&all("other", "read")), 404);
    assert_eq!(revoke(&all("acme", "read")), 200);

    let session = admin.with("").log_in(manager.key());
    let page = admin.with("").page("/dashboard/keys", &session);
    assert_eq!(page.status, 200);
    assert!(page.text().contains("acme") && !page.text().contains(">other<"), "{}", page.text());
    let form = "tenant=acme&role=read&name=web&days=7";
    let made = admin.with("").form("/dashboard/keys", &session, OURS, form);
    assert!(made.status == 201 && made.text().contains("New key for acme"), "{}", made.text());
    let (code, _, stderr) = fleet.run(&["keys", "create", "--expires-after", "90x"]);
    assert_eq!(code, Some(1), "{stderr}");
    let (code, printed, _) = fleet.run(&["keys", "create", "--expires-after", "90d", "--json"]);
    let printed: Value = serde_json::from_str(&printed).unwrap();
    assert!(code == Some(0) && printed["expires_at"].is_i64(), "{printed}");
}

#[test]
fn tenants_see_no_names_of_workers() {
    let (fleet, worker, admin) = Admin::with_worker();
    let tenant = admin.with(&key(&fleet, "acme", "submit"));
    assert_eq!(tenant.post("/v1/chat/completions", &question(json!({}))).status, 200);
    let jobs = tenant.get("/admin/v1/jobs").json();
    let id = jobs["data"][0]["id"].as_str().unwrap();
    let path = format!("/admin/v1/jobs/{id}");
    for path in ["/admin/v1/jobs", &path] {
        assert!(!tenant.get(path).text().contains(&worker.owner), "{path}");
        assert!(admin.first().get(path).text().contains(&worker.owner), "{path}");
    }
    let session = admin.with("").log_in(tenant.key());
    let page = admin.with("").page(&format!("/dashboard/jobs/{id}"), &session);
    assert!(page.status == 200 && !page.text().contains(&worker.owner));
}

#[test]
fn acts_at_the_command_line_are_audited() {
    let (fleet, worker, admin) = Admin::with_worker();
    for words in [
        &["queue", "pause", "demo@i2_s"][..],
        &["queue", "resume", "demo@i2_s"],
        &["queue", "limit", "demo@i2_s", "1000"],
        &["workers", "drain", &worker.owner],
        &["keys", "create"],
    ] {
        let (code, _, stderr) = fleet.run(words);
        assert_eq!(code, Some(0), "{words:?}: {stderr}");
    }
    let log = admin.first().get("/admin/v1/audit").json();
    let mut acts: Vec<&str> = log["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|act| act["key_id"].is_null())
        .map(|act| act["action"].as_str().unwrap())
        .collect();
    acts.reverse();
    let expect = ["queue.pause", "queue.resume", "queue.limit", "worker.drain", "key.create"];
    assert_eq!(acts, expect);
}
