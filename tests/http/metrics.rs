//! What the metrics pages of admin and worker tell operators.

use serde_json::json;

use crate::{
    fleet::{Fleet, eventually, questions, series},
    rig::{Admin, key, question},
};

fn submit(fleet: &Fleet, model: &str, lines: &str) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    std::fs::write(&input, lines).unwrap();
    let (code, _, stderr) = fleet.run(&["submit", input.to_str().unwrap(), "--model", model]);
    assert_eq!(code, Some(0), "{stderr}");
}

#[test]
fn queues_calls_connections_and_rounds_of_leaders_are_measured() {
    let (fleet, worker, admin) = Admin::with_worker();
    let operator = admin.first();
    assert_eq!(operator.post("/v1/chat/completions", &question(json!({}))).status, 200);
    // A queue without a worker; the worker of the other queue samples both.
    submit(&fleet, "ghost", &questions(3));
    let page = || operator.get("/metrics").text();
    let of = |page: &str, name: &str, queue: &str| {
        series(page, &format!("tritmill_queue_{name}{{queue=\"{queue}\"}}"))
    };
    let [ghost, served] = ["ghost@i2_s", "demo@i2_s"];
    eventually("the queues are sampled", || {
        let page = page();
        let queued = format!("tritmill_queue_depth{{queue=\"{ghost}\",kind=\"queued\"}}");
        series(&page, &queued) == Some(3.0)
            && of(&page, "entries", ghost) == Some(3.0)
            && of(&page, "missing_jobs", ghost) == Some(0.0)
            && of(&page, "unannounced_seconds", ghost) > Some(0.0)
    });
    // The admin confirms an enqueueing with its next submission; before that, the leader of the queue does.
    eventually("all jobs of the served queue are announced", || {
        of(&page(), "unannounced_seconds", served) == Some(0.0)
    });
    // Redis loses the entries of a queue that has no leader.
    fleet.flush_redis();
    eventually("what Redis lacks is seen", || of(&page(), "missing_jobs", ghost) == Some(3.0));
    let [of_admin, of_worker] = [page(), worker.get("/metrics").1];
    assert!(of(&of_admin, "oldest_seconds", ghost) > Some(0.0));
    for (page, store, dispatcher) in
        [(&of_admin, "submit", "admit"), (&of_worker, "finish", "acknowledge")]
    {
        for (kind, call) in [("store", store), ("dispatcher", dispatcher)] {
            let labels = format!("call=\"{call}\",result=\"ok\"");
            let name = format!("tritmill_{kind}_call_seconds_count{{{labels}}}");
            assert!(series(page, &name) >= Some(1.0), "{name}: {page}");
        }
        for pool in ["calls", "hot"] {
            let of_pool = format!("{{pool=\"{pool}\"}}");
            assert!(
                series(page, &format!("tritmill_postgres_connections_max{of_pool}")) > Some(1.0)
            );
            assert_eq!(
                series(page, &format!("tritmill_postgres_pool_timeouts_total{of_pool}")),
                Some(0.0)
            );
        }
        assert!(series(page, "tritmill_redis_connections_max") > Some(1.0));
    }
    let of_worker = |name: &str| series(&worker.get("/metrics").1, name);
    for name in ["store_reconciled", "store_maintained"] {
        let name = format!("tritmill_worker_{name}_timestamp_seconds");
        assert!(of_worker(&name) > Some(1e9), "{name}");
    }
    let name = "tritmill_worker_queue_reconciled_timestamp_seconds{queue=\"demo@i2_s\"}";
    assert!(of_worker(name) > Some(1e9));
    assert!(of(&of_admin, "sampled_timestamp_seconds", served) > Some(1e9));
}

#[test]
fn lease_margins_are_measured_at_renewals() {
    let fleet = Fleet::start();
    let worker = fleet.worker(&[]);
    // Jobs of a second or more, so that most renewals find a lease that was renewed before.
    let long = json!({
        "custom_id": "long", "method": "POST", "url": "/v1/completions",
        "body": { "prompt": "Paid", "max_tokens": 400, "ignore_eos": true },
    });
    submit(&fleet, "demo", &format!("{long}\n").repeat(300));
    eventually("leases are renewed", || {
        let page = worker.get("/metrics").1;
        let value =
            |name: &str| series(&page, &format!("tritmill_worker_lease_margin_seconds_{name}"));
        let count = value("count").unwrap();
        // A lease of 2 s is renewed after two thirds of a second: 1.3 s are left. The first renewal of a job
        // may come earlier.
        count > 2.0 && (0.1..=1.6).contains(&(value("sum").unwrap() / count))
    });
}

#[test]
fn refusals_are_counted_by_limit_and_tenant() {
    let (fleet, admin) = Admin::without_worker();
    let acme = key(&fleet, "acme", "submit");
    let operator = admin.first();
    assert_eq!(fleet.run(&["queue", "limit", "demo@i2_s", "10", "--tenant", "default"]).0, Some(0));
    submit(&fleet, "demo", &questions(1));
    let limited = Admin::start(&fleet, &["--max-key-rate", "1", "--max-open-batches", "1"]);
    let (here, acme) = (limited.with(admin.first_key.as_deref().unwrap()), limited.with(&acme));
    let full = here.post("/v1/chat/completions", &question(json!({})));
    // Its last worker counts as live for some seconds.
    let cause = match full.json()["error"]["code"].as_str() {
        Some("queue_full") => "backlog",
        Some("no_worker") => "no_worker",
        other => panic!("{other:?}"),
    };
    assert_eq!(full.status, 429);
    let refused = (0..20).filter(|_| acme.get("/v1/models").status == 429).count();
    assert!(refused > 5, "{refused} of 20 within a second");
    let name = |limit: &str, cause: &str, tenant: &str| {
        let labels = format!("limit=\"{limit}\",cause=\"{cause}\",tenant=\"{tenant}\"");
        format!("tritmill_admin_refusals_total{{{labels}}}")
    };
    let page = here.get("/metrics").text();
    assert_eq!(series(&page, &name("tenant_tokens", cause, "default")), Some(1.0), "{page}");
    assert_eq!(series(&page, &name("key_rate", "caller", "acme")), Some(refused as f64), "{page}");
    assert_eq!(series(&operator.get("/metrics").text(), &name("key_rate", "caller", "acme")), None);
}
