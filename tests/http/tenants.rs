//! Limits of tenants, set by operators.

use serde_json::{Value, json};

use crate::{
    fleet::Fleet,
    rig::{Admin, key},
};

#[test]
fn tenant_may_have_what_the_operator_allows() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let operator = admin.first();
    let tenant = admin.with(&key(&fleet, "acme", "submit"));
    let limit = |change: Value| {
        let mut body = json!({ "tenant": "acme" });
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let answer = operator.post("/admin/v1/tenants/limits", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    limit(json!({ "file_bytes": 20, "open_batches": 1, "keys": 2 }));
    let file = tenant.upload(b"0123456789").json()["id"].clone();
    let refused = tenant.upload(b"0123456789.");
    assert_eq!(refused.error(), (403, "tenant_limit_reached".to_owned()));
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("may have 20 bytes of files and has 10"), "{message}");
    let ask = json!({
        "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h",
    });
    let second = tenant.upload(b"{}{}{}{}{}");
    assert_eq!(second.status, 200, "{}", second.text());
    assert_eq!(tenant.upload(b"x").error().0, 403);
    let accounts = operator.get("/admin/v1/tenants/limits").json();
    let account = &accounts["data"][0];
    assert_eq!(account["tenant"], "acme");
    assert_eq!(account["file_bytes"], json!({ "limit": 20, "used": 20 }));
    assert_eq!(account["keys"], json!({ "limit": 2, "used": 1 }));

    let new = |tenant: &str| {
        let body = json!({ "tenant": tenant, "role": "read" });
        operator.post("/admin/v1/keys", &body)
    };
    assert_eq!(new("acme").status, 200);
    let refused = new("acme");
    assert_eq!(refused.error(), (403, "tenant_limit_reached".to_owned()));
    assert_eq!(new("other").status, 200, "another tenant is not limited");

    limit(json!({ "open_batches": 0 }));
    let refused = tenant.post("/v1/batches", &ask);
    assert_eq!(refused.error(), (429, "too_many_batches".to_owned()));
    assert_eq!(tenant.upload(b"x").status, 200, "the limit on files is removed");
    let (code, _, stderr) = fleet.run(&["tenants", "limit", "acme", "--file-bytes", "1K"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(tenant.post("/v1/batches", &ask).status, 200);
    let (_, listed, _) = fleet.run(&["tenants", "list"]);
    let listed: Value = serde_json::from_str(listed.trim()).unwrap();
    assert_eq!(listed["file_bytes"], json!({ "limit": 1024, "used": 21 }));
    assert_eq!(listed["open_batches"]["limit"], Value::Null);
    let log = operator.get("/admin/v1/audit").json();
    let acts = log["data"].as_array().unwrap().iter().filter(|act| act["action"] == "tenant.limit");
    assert_eq!(acts.count(), 3);
}
