//! Operator routes, and what tenants can see of jobs.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    batches::lines,
    fleet::eventually,
    rig::{Admin, Caller, key, question},
};

fn ask(caller: &Caller, change: Value) -> u16 {
    caller.post("/v1/chat/completions", &question(change)).status
}

/// Returns jobs that match a query.
fn jobs(caller: &Caller, query: &str) -> Vec<Value> {
    let found = caller.get(&format!("/admin/v1/jobs?{query}"));
    assert_eq!(found.status, 200, "{query}: {}", found.text());
    found.json()["data"].as_array().unwrap().clone()
}

fn post(caller: &Caller, path: &str, body: &Value) -> Value {
    let answer = caller.post(path, body);
    assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
    answer.json()
}

#[test]
fn operator_actions_work_and_are_audited() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let (operator, acme) = (admin.first(), admin.with(&key(&fleet, "acme", "submit")));
    assert_eq!(ask(&acme, json!({})), 200);
    let long = json!([{ "role": "user", "content": "x ".repeat(20_000) }]);
    assert_eq!(ask(&acme, json!({ "messages": long })), 400);
    let batch = operator.batch(lines(3).as_bytes(), "1h");
    operator.finished(&batch);

    // Search.
    assert_eq!(jobs(&operator, "tenant=acme").len(), 2);
    assert_eq!(jobs(&operator, &format!("batch={batch}")).len(), 3);
    let named = jobs(&operator, &format!("batch={batch}&limit=1"));
    let custom_id = named[0]["custom_id"].as_str().unwrap();
    assert_eq!(jobs(&operator, &format!("custom_id={custom_id}")), named);
    let counted = operator.get("/admin/v1/jobs/count?state=completed").json();
    assert_eq!(counted, json!({ "jobs": 4, "or_more": false }));
    for (query, param) in
        [("state=done", "state"), ("limit=0", "limit"), ("after=x", "after"), ("batch=x", "batch")]
    {
        let refused = operator.get(&format!("/admin/v1/jobs?{query}"));
        assert_eq!(refused.json()["error"]["param"], param, "{query}");
    }
    assert_eq!(operator.get("/admin/v1/jobs?color=red").status, 400);

    // Job details.
    let failed = &jobs(&operator, "state=failed")[0];
    let id = failed["id"].as_str().unwrap();
    let job = operator.get(&format!("/admin/v1/jobs/{id}")).json();
    assert_eq!(job["attempts"][0]["error_code"], "context_length_exceeded", "{job}");
    assert!(job["attempts"][0]["worker"].is_string() && job["started_at_ms"].is_i64());
    let answered = &jobs(&operator, "tenant=acme&state=completed")[0];
    let job = operator.get(&format!("/admin/v1/jobs/{}", answered["id"].as_str().unwrap()));
    let job = job.json();
    assert!(job["numerics_class"].as_str().unwrap().ends_with("/cpu"), "{job}");
    assert_eq!(job["texts"], json!(["2024-03-03"]));
    assert!(job["attempts"][0]["first_token_ms"].is_u64(), "{job}");

    // Dead letters.
    let groups = operator.get("/admin/v1/dead-letters").json();
    assert_eq!(groups["data"][0]["jobs"], 1, "{groups}");
    assert_eq!(operator.post("/admin/v1/dead-letters/purge", &json!({ "filter": {} })).status, 400);
    let of_code = json!({ "filter": { "error_code": "context_length_exceeded" }, "limit": 1 });
    let replayed = post(&operator, "/admin/v1/dead-letters/replay", &of_code);
    assert_eq!(replayed["done"], 1);
    eventually("the replay fails too", || jobs(&operator, "state=failed").len() == 2);
    let purged = post(
        &operator,
        "/admin/v1/dead-letters/purge",
        &json!({ "filter": { "error_code": "context_length_exceeded" } }),
    );
    assert_eq!((&purged["done"], &purged["next"]), (&json!(2), &Value::Null));

    // Queues and workers.
    let queue = json!({ "queue": "demo@i2_s" });
    post(&operator, "/admin/v1/queues/pause", &queue);
    let paused =
        |expect: bool| operator.get("/admin/v1/queues").json()["data"][0]["paused"] == expect;
    assert!(paused(true));
    post(&operator, "/admin/v1/queues/resume", &queue);
    assert!(paused(false));
    post(&operator, "/admin/v1/queues/limit", &json!({ "queue": "demo@i2_s", "limit_tokens": 99 }));
    assert_eq!(operator.get("/admin/v1/queues").json()["data"][0]["limit_tokens"], 99);
    let wait = |max_wait_s: Value| json!({ "queue": "demo@i2_s", "max_wait_s": max_wait_s });
    post(&operator, "/admin/v1/queues/max-wait", &wait(json!(30.5)));
    assert_eq!(operator.get("/admin/v1/queues").json()["data"][0]["max_wait_s"], 30.5);
    for wrong in [json!(0), json!(-1), json!(1e300), json!("1")] {
        let refused = operator.post("/admin/v1/queues/max-wait", &wait(wrong.clone()));
        assert_eq!(refused.status, 400, "{wrong}");
    }
    post(&operator, "/admin/v1/queues/max-wait", &wait(Value::Null));
    assert_eq!(operator.get("/admin/v1/queues").json()["data"][0]["max_wait_s"], Value::Null);
    let class = json!({ "queue": "demo@i2_s", "numerics_class": "x/kv-f16/head-bf16/cuda" });
    post(&operator, "/admin/v1/queues/allow-class", &class);
    let allowed = || operator.get("/admin/v1/queues").json()["data"][0]["allowed_classes"].clone();
    assert_eq!(allowed(), json!(["x/kv-f16/head-bf16/cuda"]));
    post(&operator, "/admin/v1/queues/withdraw-class", &class);
    assert_eq!(allowed(), json!([]));
    assert_eq!(operator.post("/admin/v1/queues/withdraw-class", &class).status, 404);
    for wrong in ["", "a\u{0}b", &"x".repeat(300)] {
        let wrong = json!({ "queue": "demo@i2_s", "numerics_class": wrong });
        assert_eq!(operator.post("/admin/v1/queues/allow-class", &wrong).status, 400, "{wrong}");
    }
    eventually("the queue is sampled", || {
        operator.get("/admin/v1/queues").json()["data"][0]["completed"].as_u64() > Some(0)
    });
    let points = operator.get("/admin/v1/history?minutes=60").json();
    let completed = points["data"].as_array().unwrap().iter();
    assert!(completed.map(|point| point["completed_per_s"].as_f64().unwrap()).sum::<f64>() > 0.0);
    let workers = operator.get("/admin/v1/workers").json();
    assert!(workers["data"][0]["kv_usage"].is_f64(), "{workers}");
    assert_ne!(workers["data"][0]["isa"], "", "{workers}");
    assert_eq!(workers["data"][0]["device"], "cpu", "{workers}");
    assert!(workers["data"][0]["numerics_class"].as_str().unwrap().ends_with("/cpu"), "{workers}");
    assert!(operator.get("/admin/v1/integrity").json()["results_fenced"].is_u64());
    let drain = json!({ "worker": workers["data"][0]["worker"] });
    post(&operator, "/admin/v1/workers/drain", &drain);
    assert_eq!(operator.post("/admin/v1/workers/drain", &json!({ "worker": "x" })).status, 404);

    // Keys and tenants.
    let made = post(&operator, "/admin/v1/keys", &json!({ "tenant": "new", "role": "read" }));
    let secret = made["secret"].as_str().unwrap();
    assert_eq!(admin.with(secret).get("/admin/v1/jobs").status, 200);
    assert!(!operator.get("/admin/v1/keys").text().contains(secret));
    let path = format!("/admin/v1/keys/{}", made["id"].as_str().unwrap());
    assert_eq!((operator.delete(&path).status, operator.delete(&path).status), (200, 404));
    assert_eq!(admin.with(secret).get("/admin/v1/jobs").status, 401);
    let erase = json!({ "tenant": "acme", "confirm": "acme" });
    let erased = post(&operator, "/admin/v1/tenants/erase", &erase);
    assert_eq!((&erased["done"], &erased["keys"]), (&json!(true), &json!(1)), "{erased}");
    assert!(jobs(&operator, "tenant=acme").is_empty());
    assert_eq!(acme.get("/v1/files").status, 401);

    let log = operator.get("/admin/v1/audit").json();
    let acts: Vec<&str> = log["data"]
        .as_array()
        .unwrap()
        .iter()
        .rev()
        .map(|line| line["action"].as_str().unwrap())
        .collect();
    let expected = [
        "key.create",
        "dead_letters.replay",
        "dead_letters.purge",
        "queue.pause",
        "queue.resume",
        "queue.limit",
        "queue.max_wait",
        "queue.max_wait",
        "queue.allow_class",
        "queue.withdraw_class",
        "queue.withdraw_class",
        "worker.drain",
        "worker.drain",
        "key.create",
        "key.revoke",
        "key.revoke",
        "tenant.erase",
    ];
    assert_eq!(acts, expected);
    assert_eq!(log["data"][0]["key_name"], "first");
    assert!(!log.to_string().contains(secret));
}

#[test]
fn tenants_see_only_their_own_jobs_and_events() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let [acme, other] = ["acme", "other"].map(|tenant| admin.with(&key(&fleet, tenant, "submit")));
    assert_eq!(ask(&acme, json!({ "stream": true })), 200);
    let own = jobs(&acme, "");
    let id = own[0]["id"].as_str().unwrap();
    assert!(jobs(&other, "").is_empty());
    assert_eq!(other.get("/admin/v1/jobs?tenant=acme").status, 403);
    for path in [format!("/admin/v1/jobs/{id}"), format!("/v1/jobs/{id}/events")] {
        assert_eq!(acme.get(&path).status, 200);
        let refused = other.get(&path);
        assert_eq!(refused.error(), (404, "not_found".to_owned()), "{path}");
    }
    assert_eq!(acme.get("/admin/v1/queues").status, 403);

    // All events of the job, then those after the first.
    let events = acme.get(&format!("/v1/jobs/{id}/events")).text();
    let text: String = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| {
            serde_json::from_str::<Value>(data).unwrap()["text"].as_str().map(str::to_owned)
        })
        .collect();
    assert_eq!(text, "2024-03-03", "{events}");
    assert!(events.contains("event: started") && events.contains("\"completed\""), "{events}");
    let first = events.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
    let path = format!("/v1/jobs/{id}/events");
    let head = acme.head("GET", &path, &format!("Last-Event-ID: {first}\r\n"));
    let rest = acme.send(head.as_bytes()).text();
    assert!(!rest.contains(&format!("id: {first}\n")) && rest.contains("finished"), "{rest}");
    let head = acme.head("GET", &path, "Last-Event-ID: soon\r\n");
    assert_eq!(acme.send(head.as_bytes()).status, 400);
}

/// Reads operator events until they contain `awaited`.
fn read_events(caller: &Caller, headers: &str, awaited: &str) -> String {
    let head = caller.head("GET", "/admin/v1/events", headers);
    let mut stream = caller.open(head.as_bytes());
    stream.flush().unwrap();
    let (started, mut events, mut piece) = (Instant::now(), String::new(), [0; 4096]);
    while !events.contains(awaited) {
        assert!(started.elapsed() < Duration::from_secs(60), "no {awaited} in {events}");
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "closed after {events}");
        events.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    events
}

#[test]
fn operator_events_can_be_resumed_at_another_admin() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let second = Admin::start(&fleet, &[]);
    let operator = admin.first();
    let elsewhere = second.with(admin.first_key.as_deref().unwrap());
    let events = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_events(&operator, "", "event: queue"));
        // Changes are published only once the stream is open, so they are repeated.
        while !reader.is_finished() {
            assert_eq!(ask(&elsewhere, json!({})), 200);
            std::thread::sleep(Duration::from_millis(500));
        }
        reader.join().unwrap()
    });
    let id = events.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
    assert_eq!(ask(&operator, json!({})), 200);
    // Resumes at the other admin.
    read_events(&elsewhere, &format!("Last-Event-ID: {id}\r\n"), "event: queue");
}

/// The words of a text that name metrics of this service.
fn metric_names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("tritmill_")).collect()
}

/// The expressions of the alerts.
fn alert_expressions() -> Vec<String> {
    let rules: Value =
        serde_saphyr::from_str(include_str!("../../docker/grafana/alerts.yaml")).unwrap();
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let text = |rule: &Value, name: &str| rule[name].as_str().unwrap().to_owned();
    let expression = |rule: &Value| {
        let summary = text(&rule["annotations"], "summary");
        assert!(text(rule, "alert").starts_with("Tritmill") && !summary.is_empty(), "{rule}");
        text(rule, "expr")
    };
    rules.map(expression).collect()
}

#[test]
fn every_metric_of_the_grafana_dashboard_and_the_alerts_is_exported() {
    let (fleet, worker, first) = Admin::with_worker();
    let operator = first.first();
    assert_eq!(ask(&operator, json!({})), 200);
    // Refusals have a metric of their own once there is one.
    let limited = Admin::start(&fleet, &["--max-key-rate", "1"]);
    let hasty = limited.with(&key(&fleet, "acme", "read"));
    eventually("a request is refused", || hasty.get("/v1/models").status == 429);
    let exported = || operator.get("/metrics").text() + &worker.get("/metrics").1;
    eventually("the queue is sampled and the store maintained", || {
        let exported = exported();
        exported.contains("tritmill_queue_wait_seconds_bucket")
            && exported.contains("tritmill_worker_store_maintained_timestamp_seconds ")
    });
    let refusals = limited.with(first.first_key.as_deref().unwrap()).get("/metrics").text();
    let exported = exported() + &refusals;
    let alerts = alert_expressions();
    assert!(alerts.len() > 10, "{alerts:?}");
    let dashboard = include_str!("../../docker/grafana/tritmill.json");
    let mut names = metric_names(dashboard);
    assert!(names.len() > 10, "{names:?}");
    names.extend(alerts.iter().flat_map(|alert| metric_names(alert)));
    for name in names {
        let is_exported = exported
            .lines()
            .any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        assert!(is_exported, "{name} is not exported");
    }
}
