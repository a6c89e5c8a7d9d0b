//! Pages for operators about tenants, workers and files.

use serde_json::{Value, json};

use crate::{
    fleet::{Fleet, eventually},
    pages::Visitor,
    rig::{Admin, OURS, key, question},
};

#[test]
fn tenants_are_listed_and_erased_after_their_name_is_typed() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let acme = admin.with(&key(&fleet, "acme & co", "submit"));
    assert_eq!(acme.post("/v1/chat/completions", &question(json!({}))).status, 200);
    let long = json!([{ "role": "user", "content": "x ".repeat(20_000) }]);
    assert_eq!(
        acme.post("/v1/chat/completions", &question(json!({ "messages": long }))).status,
        400
    );
    assert_eq!(acme.upload(b"{\"prompt\": \"hi\"}\n").status, 200);
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let list = visitor.sees("/dashboard/tenants");
    let page = "/dashboard/tenants/acme%20%26%20co";
    assert!(list.contains(&format!("href=\"{page}\"")) && list.contains("default"), "{list}");
    assert!(!visitor.sees("/dashboard/tenants?after=b").contains("acme"));
    let tenant = visitor.sees(page);
    assert!(tenant.contains("context_length_exceeded") && tenant.contains("17 B"), "{tenant}");
    assert_eq!(visitor.client.page("/dashboard/tenants/none", &visitor.session).status, 404);
    let erase = |name: &str| {
        visitor.client.form(
            &format!("{page}/erase"),
            &visitor.session,
            OURS,
            &format!("confirm={name}"),
        )
    };
    assert_eq!(erase("acme").status, 400);
    assert_eq!(fleet.sql("SELECT count(*) FROM jobs WHERE tenant = 'acme & co'").trim(), "2");
    assert_eq!(erase("acme+%26+co").status, 303);
    assert_eq!(fleet.sql("SELECT count(*) FROM jobs WHERE tenant = 'acme & co'").trim(), "0");
    assert!(!visitor.sees("/dashboard/tenants").contains("acme"));
    let own = visitor.sees("/dashboard/tenants/default");
    assert!(!own.contains("Erase"), "the visitor's own tenant stays: {own}");
}

#[test]
fn worker_page_shows_its_jobs_and_errors() {
    let (fleet, worker, admin) = Admin::with_worker();
    let caller = admin.first();
    let long = json!([{ "role": "user", "content": "x ".repeat(20_000) }]);
    assert_eq!(
        caller.post("/v1/chat/completions", &question(json!({ "messages": long }))).status,
        400
    );
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let path = format!("/dashboard/workers/{}", worker.owner.replace('-', "%2D"));
    eventually("the worker sent a heartbeat", || {
        visitor.sees("/dashboard/workers").contains(&format!("href=\"{path}\""))
    });
    let page = visitor.sees(&path);
    assert!(page.contains("context_length_exceeded") && page.contains("It runs no job"), "{page}");
    assert!(page.contains("on its device alone"), "it has no tiers: {page}");
    // A job under a claim of this worker.
    fleet.sql(&format!(
        "INSERT INTO open_jobs (id, model, format, tenant, priority, state, cost, attempts_max,
                                submitted_at, started_at, job, custom_id, owner, lease_until)
         SELECT gen_random_uuid(), model, format, tenant, priority, 'running', cost, attempts_max,
                submitted_at, started_at, job, 'held', '{}', submitted_at + 3600000 FROM jobs",
        worker.owner
    ));
    assert!(visitor.sees(&path).contains("held"));
    let jobs = visitor.sees(&format!("/dashboard/jobs?worker={}", worker.owner));
    assert!(jobs.contains("held"), "{jobs}");
    assert_eq!(visitor.client.page("/dashboard/workers/none", &visitor.session).status, 404);
}

/// Records what was sampled two minutes ago.
fn sampled(fleet: &Fleet, kind: &str, name: &str, sample: &Value) {
    fleet.sql(&format!(
        "INSERT INTO subject_samples (kind, name, period_s, at, sample)
         SELECT '{kind}', '{name}', 60, store_now_ms(NULL) / 60000 * 60000 - 120000, '{sample}'
         ON CONFLICT (kind, name, period_s, at) DO UPDATE SET sample = excluded.sample"
    ));
}

#[test]
fn tenants_and_workers_have_charts_that_zoom() {
    let (fleet, worker, admin) = Admin::with_worker();
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    // Of a minute, five seconds had jobs that ended: the rate is over the minute.
    let ended =
        json!({ "looks": 2, "covered_ms": 5000, "completed": 120, "completion_tokens": 7200 });
    sampled(&fleet, "tenant", "default", &ended);
    let load = json!({
        "looks": 20, "covered_ms": 60000, "prompt_tokens": 180_000, "running_sum": 30,
        "slots_sum": 40, "kv_used_sum": 10, "kv_total_sum": 100, "busy_permille_sum": 10_000,
    });
    sampled(&fleet, "worker", &worker.owner, &load);
    let worker = format!("/dashboard/workers/{}", worker.owner.replace('-', "%2D"));
    eventually("the worker sent a heartbeat", || {
        visitor.client.page(&worker, &visitor.session).status == 200
    });
    let tenant = visitor.sees("/dashboard/tenants/default");
    // Minutes that pass meanwhile have other values.
    for text in ["completed: between 0/s and 2/s", "0/s and 120/s", "class=\"zoom\"", "data-zone"] {
        assert!(tenant.contains(text), "{text}: {tenant}");
    }
    let page = visitor.sees(&format!("{worker}?span=1h"));
    for (title, share) in [("Slots in use", "75 %"), ("KV blocks in use", "10 %"), ("Busy", "50 %")]
    {
        let chart = page.split(&format!("aria-label=\"{title}. ")).nth(1);
        let label = chart.and_then(|chart| chart.split('"').next()).unwrap_or_default();
        assert!(label.contains(share), "{title}: {page}");
    }
    for path in ["/dashboard/tenants/default", &worker] {
        let early = visitor.sees(&format!("{path}?from=2026-01-01T00:00&to=2026-01-01T01:00"));
        assert!(early.contains("Zoom out") && early.contains("No data"), "{early}");
        let wrong = visitor.client.page(&format!("{path}?from=now&to=x"), &visitor.session);
        assert_eq!(wrong.status, 400, "{path}");
    }
    assert!(!visitor.sees("/dashboard/tenants/default").contains("Zoom out"));
}

#[test]
fn worker_page_shows_its_memory_and_tiers() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let worker = fleet.worker(&["--kv-host-memory", "16"]);
    assert_eq!(admin.first().post("/v1/chat/completions", &question(json!({}))).status, 200);
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let path = format!("/dashboard/workers/{}", worker.owner.replace('-', "%2D"));
    // The sizes come with the first heartbeat after a step.
    eventually("the worker tells what memory it has", || {
        visitor.client.page(&path, &visitor.session).text().contains("Memory in use")
    });
    let page = visitor.sees(&path);
    assert!(page.contains("Memory of the host") && page.contains("Hit rate"), "{page}");
    let told = admin.first().get("/admin/v1/workers").json()["data"][0].clone();
    let [used, total] =
        ["kv_bytes_used", "kv_bytes_total"].map(|name| told[name].as_u64().unwrap());
    assert!(used <= total && total > 0, "{told}");
    assert!(told["kv_blocks_total"].as_u64() > Some(0), "{told}");
    assert!(told["prefix_miss_tokens"].as_u64() > Some(0), "{told}");
    assert!(told["kv_tiers"]["memory_bytes"].is_u64() && told["kv_tiers"]["misses"].is_u64());
}

#[test]
fn files_are_listed_downloaded_and_deleted() {
    let (fleet, admin) = Admin::without_worker();
    let key = key(&fleet, "acme", "submit");
    let content = b"{\"prompt\": \"hi\"}\n";
    let file = admin.with(&key).upload(content).json()["id"].as_str().unwrap().to_owned();
    let visitor = Visitor::new(&admin, &key);
    let list = visitor.sees("/dashboard/files");
    assert!(list.contains(&file) && list.contains("in.jsonl") && list.contains("17 B"), "{list}");
    assert!(visitor.sees("/dashboard/files?purpose=batch").contains(&file));
    assert!(!visitor.sees("/dashboard/files?purpose=batch_output").contains(&file));
    let path = format!("/dashboard/files/{file}");
    assert_eq!(visitor.sees(&path).as_bytes(), content);
    let other = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    assert!(!other.sees("/dashboard/files").contains(&file), "files of a tenant are its own");
    let refused = other.client.form(&format!("{path}/delete"), &other.session, OURS, "");
    assert_eq!(refused.status, 404);
    visitor.does(&format!("{path}/delete"), "");
    assert!(visitor.sees("/dashboard/files").contains("No files"));
}
