//! Batches that wait, that fail their driver, and that exceed limits hold up no others; what operators can do.

use serde_json::{Value, json};
use tritmill_servers::Signal;

use crate::{
    batches::{by_name, embedded, lines},
    fleet::{Fleet, eventually},
    rig::{Admin, Caller, key},
};

fn state(caller: &Caller, id: &str) -> String {
    let batch = caller.get(&format!("/v1/batches/{id}")).json();
    batch["status"].as_str().unwrap().to_owned()
}

fn cancel(caller: &Caller, id: &str) {
    assert_eq!(caller.post(&format!("/v1/batches/{id}/cancel"), &json!({})).status, 200);
}

/// Starts servers with the demo model, which a worker serves if the returned one is kept, and a model that no
/// worker serves.
fn two_models() -> Fleet {
    let fleet = Fleet::start();
    drop(fleet.worker(&["--name", "unserved"]));
    drop(fleet.worker(&[]));
    fleet
}

#[test]
fn batches_that_wait_for_a_worker_hold_up_no_others() {
    let fleet = two_models();
    let admin = Admin::start(&fleet, &[]);
    let [acme, other] = ["acme", "other"].map(|tenant| admin.with(&key(&fleet, tenant, "submit")));
    let unserved = lines(2).replace("\"demo\"", "\"unserved\"");
    let waiting: Vec<String> = (0..20).map(|_| acme.batch(unserved.as_bytes(), "24h")).collect();
    eventually("all wait in progress", || {
        waiting.iter().all(|id| state(&acme, id) == "in_progress")
    });
    let _worker = fleet.worker(&[]);
    let served = other.batch(lines(3).as_bytes(), "24h");
    assert_eq!(other.finished(&served)["status"], "completed");
    assert!(waiting.iter().all(|id| state(&acme, id) == "in_progress"));
    let held = fleet.sql("SELECT count(*) FROM batches WHERE lease_until IS NOT NULL");
    assert!(held.trim().parse::<u32>().unwrap() <= 16);
}

/// Returns the number of backends that a trigger keeps asleep.
fn asleep(fleet: &Fleet) -> u32 {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    fleet.sql(count).trim().parse().unwrap()
}

/// Waits until a driver is stopped in a step; kills it, ends its statement and its leases, and starts the next.
fn kill_in_step(fleet: &Fleet, admin: &mut Admin, step: &str) {
    eventually(step, || asleep(fleet) > 0);
    admin.signal(Signal::Kill);
    fleet
        .sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'");
    eventually("the statement has ended", || asleep(fleet) == 0);
    fleet.sql("UPDATE batches SET lease_until = 0 WHERE lease_until IS NOT NULL");
    *admin = Admin::start(fleet, &[]);
}

#[test]
fn driver_killed_in_every_kind_of_step_loses_and_doubles_nothing() {
    const LINES: usize = 40;
    let fleet = Fleet::start();
    let worker = fleet.worker(&[]);
    let mut admin = Admin::start(&fleet, &[]);
    let key = admin.first_key.clone().unwrap();
    // The first save in each state sleeps, inside its transaction.
    for state in ["validating", "in_progress", "finalizing", "cancelling"] {
        fleet.sql(&format!("CREATE SEQUENCE stall_{state}"));
    }
    fleet.sql(
        "CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF OLD.batch IS DISTINCT FROM NEW.batch AND OLD.lease_until IS NOT NULL
                AND NEW.lease_until IS NOT NULL AND nextval('stall_' || OLD.state) = 1 THEN
                 PERFORM pg_sleep(50);
             END IF;
             RETURN NEW; END $$;
         CREATE TRIGGER stall BEFORE UPDATE ON batches FOR EACH ROW EXECUTE FUNCTION stall()",
    );
    let content = lines(LINES);
    let id = admin.with(&key).batch(content.as_bytes(), "24h");
    for step in ["validates", "submits or counts", "writes output"] {
        kill_in_step(&fleet, &mut admin, step);
    }
    let caller = admin.with(&key);
    let batch = caller.finished(&id);
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), embedded(&content));
    assert_eq!(fleet.rows(&["all_jobs"]), LINES as u64, "no line became two jobs");
    let outputs = "SELECT count(*) FROM files WHERE purpose = 'batch_output' AND size_bytes > 0";
    assert_eq!(fleet.sql(outputs).trim(), "1");

    drop(worker);
    let id = caller.batch(content.as_bytes(), "24h");
    eventually("the batch is in progress", || state(&caller, &id) == "in_progress");
    cancel(&caller, &id);
    kill_in_step(&fleet, &mut admin, "ends a cancelled batch");
    let caller = admin.with(&key);
    let batch = caller.finished(&id);
    assert_eq!(
        (&batch["status"], &batch["request_counts"]["failed"]),
        (&json!("cancelled"), &json!(LINES))
    );
    assert_eq!(caller.lines(&batch["error_file_id"]).len(), LINES);
}

#[test]
fn batch_that_kills_its_driver_twice_fails_alone() {
    let (fleet, mut admin) = Admin::without_worker();
    let key = admin.first_key.clone().unwrap();
    let caller = admin.with(&key);
    let poison = caller.batch(lines(2).as_bytes(), "24h");
    let others: Vec<String> = (0..3).map(|_| caller.batch(lines(2).as_bytes(), "24h")).collect();
    // A driver that writes the output of this batch sleeps until it is killed.
    fleet.sql(&format!(
        "CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF NEW.filename LIKE '{poison}%' THEN PERFORM pg_sleep(50); END IF;
             RETURN NEW; END $$;
         CREATE TRIGGER stall BEFORE INSERT ON files FOR EACH ROW EXECUTE FUNCTION stall()"
    ));
    let _worker = fleet.worker(&[]);
    kill_in_step(&fleet, &mut admin, "writes the output");
    kill_in_step(&fleet, &mut admin, "writes the output again");
    let caller = admin.with(&key);
    let batch = caller.finished(&poison);
    assert_eq!(batch["status"], "failed", "{batch}");
    let error = &batch["errors"]["data"][0];
    assert_eq!(error["code"], "batch_stopped", "{error}");
    assert!(error["message"].as_str().unwrap().contains("2 times while it was writing its output"));
    assert!(batch["output_file_id"].is_null());
    for id in &others {
        let batch = caller.finished(id);
        assert_eq!(batch["status"], "completed", "{batch}");
        assert_eq!(caller.lines(&batch["output_file_id"]).len(), 2);
    }
}

#[test]
fn tenant_has_a_maximum_of_open_and_of_active_batches() {
    let fleet = two_models();
    let limits = ["--max-open-batches", "3", "--max-active-batches", "1"];
    let admin = Admin::start(&fleet, &limits);
    let [acme, other] = ["acme", "other"].map(|tenant| admin.with(&key(&fleet, tenant, "submit")));
    let ids: Vec<String> = (0..3).map(|_| acme.batch(lines(2).as_bytes(), "24h")).collect();
    let file = acme.upload(lines(2).as_bytes()).json()["id"].clone();
    let asked = json!({
        "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h",
    });
    let refused = acme.post("/v1/batches", &asked);
    assert_eq!(refused.error(), (429, "too_many_batches".to_owned()));
    assert!(refused.header("retry-after").is_some());
    other.batch(lines(2).as_bytes(), "24h");
    let in_progress =
        || ids.iter().filter(|id| state(&acme, id) == "in_progress").collect::<Vec<_>>();
    eventually("one batch is in progress", || !in_progress().is_empty());
    let lines_of =
        |id: &str| acme.get(&format!("/v1/batches/{id}")).json()["request_counts"]["total"].clone();
    eventually("the others are valid", || ids.iter().all(|id| lines_of(id) == 2));
    let [first] = in_progress()[..] else { panic!("more than one batch is in progress") };
    let others = ids.iter().filter(|&id| id != first);
    assert!(others.clone().all(|id| state(&acme, id) == "validating"));
    cancel(&acme, first);
    assert_eq!(acme.finished(first)["status"], "cancelled");
    eventually("another batch is in progress", || in_progress().len() == 1);
    assert_eq!(acme.post("/v1/batches", &asked).status, 200, "one batch is finished");
}

#[test]
fn large_file_is_validated_in_steps() {
    let (fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    const LINES: usize = 20_500;
    let content = lines(LINES);
    let good = caller.batch(content.as_bytes(), "24h");
    let repeated = format!("{content}{}", lines(1));
    let bad = caller.batch(repeated.as_bytes(), "24h");
    let batch = caller.finished(&bad);
    let error = &batch["errors"]["data"][0];
    assert_eq!(
        (&batch["status"], &error["line"]),
        (&json!("failed"), &json!(LINES + 1)),
        "{error}"
    );
    assert!(error["message"].as_str().unwrap().contains("same as in line 1"), "{error}");
    eventually("the batch is valid", || state(&caller, &good) == "in_progress");
    assert_eq!(caller.get(&format!("/v1/batches/{good}")).json()["request_counts"]["total"], LINES);
    // A service that starts deletes what the steps had no time for.
    let _second = Admin::start(&fleet, &[]);
    eventually("no custom_id is kept", || fleet.rows(&["batch_custom_ids"]) == 0);
    cancel(&caller, &good);
}

/// Returns the ids of an operator's list.
fn listed(operator: &Caller, query: &str) -> (Vec<String>, Value) {
    let found = operator.get(&format!("/admin/v1/batches?{query}"));
    assert_eq!(found.status, 200, "{query}: {}", found.text());
    let found = found.json();
    let id = |batch: &Value| batch["id"].as_str().unwrap().to_owned();
    (found["data"].as_array().unwrap().iter().map(id).collect(), found["next"].clone())
}

#[test]
fn operators_list_and_cancel_batches_of_all_tenants() {
    let (fleet, admin) = Admin::without_worker();
    let operator = admin.first();
    let [acme, other] = ["acme", "other"].map(|tenant| admin.with(&key(&fleet, tenant, "submit")));
    let [one, two, three, four] =
        [&acme, &other, &acme, &acme].map(|caller| caller.batch(lines(2).as_bytes(), "24h"));
    assert_eq!(listed(&operator, "tenant=acme").0, [&*four, &*three, &*one]);
    let (page, next) = listed(&operator, "limit=2");
    assert_eq!(page, [&*four, &*three]);
    let (page, next) = listed(&operator, &format!("limit=2&after={}", next.as_str().unwrap()));
    assert_eq!((page, next), (vec![two.clone(), one.clone()], Value::Null));
    for (query, param) in [("state=done", "state"), ("limit=0", "limit"), ("after=x", "after")] {
        let refused = operator.get(&format!("/admin/v1/batches?{query}"));
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)));
    }
    let path = |id: &str| format!("/admin/v1/batches/{id}/cancel");
    let cancelled = operator.post(&path(&one), &json!({}));
    assert_eq!((cancelled.status, &cancelled.json()["tenant"]), (200, &json!("acme")));
    assert_eq!(acme.finished(&one)["status"], "cancelled");
    assert_eq!(listed(&operator, "state=cancelled").0, [&*one]);
    let unknown = "batch_01990000000070008000000000000000";
    assert_eq!(operator.post(&path(unknown), &json!({})).error(), (404, "not_found".to_owned()));
    assert_eq!(acme.post(&path(&three), &json!({})).status, 403);
    assert_eq!(acme.get("/admin/v1/batches").status, 403);

    // From the command line.
    let (code, stdout, stderr) = fleet.run(&["batches", "list", "--tenant", "other", "--json"]);
    assert_eq!((code, stdout.lines().count()), (Some(0), 1), "{stderr}");
    assert!(stdout.contains(&two));
    let (code, _, stderr) = fleet.run(&["batches", "cancel", &two]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(other.finished(&two)["status"], "cancelled");
    assert_eq!(fleet.run(&["batches", "cancel", unknown]).0, Some(2));
    let (_, stdout, _) = fleet.run(&["batches", "list", "--state", "cancelled"]);
    assert!(stdout.contains(&one) && stdout.contains(&two) && !stdout.contains(&three), "{stdout}");

    // On the dashboard.
    let pages = admin.with("");
    let [all, own] = [admin.first_key.clone().unwrap(), key(&fleet, "other", "submit")]
        .map(|key| pages.log_in(&key));
    let page = pages.page("/dashboard/batches?tenant=acme", &all).text();
    assert!(page.contains(&three) && !page.contains(&two), "{page}");
    assert!(!pages.page("/dashboard/batches?tenant=acme", &own).text().contains(&three));
    assert_eq!(pages.page(&format!("/dashboard/batches/{three}"), &own).status, 404);
    let page = pages.page(&format!("/dashboard/batches/{three}"), &all).text();
    assert!(page.contains("Cancel batch") && !page.contains("/dashboard/files/"), "{page}");
    let path = format!("/dashboard/batches/{three}/cancel");
    assert_eq!(pages.form(&path, &all, crate::rig::OURS, "").status, 303);
    assert_eq!(acme.finished(&three)["status"], "cancelled");
    let log = operator.get("/admin/v1/audit").json().to_string();
    for id in [&one, &two, &three] {
        assert!(log.contains(&format!("\"target\":\"{id}\"")), "{id}: {log}");
    }
    assert_eq!(log.matches("batch.cancel").count(), 3, "{log}");
    assert_eq!(state(&acme, &four), "in_progress");
}

#[test]
fn tenants_with_many_batches_leave_turns_to_others() {
    let (fleet, admin) = Admin::without_worker();
    let [acme, other] = ["acme", "other"].map(|tenant| admin.with(&key(&fleet, tenant, "submit")));
    // A limit that the first batch exceeds: its lines are refused again and again.
    assert_eq!(fleet.run(&["queue", "limit", "demo@i2_s", "2000"]).0, Some(0));
    let many: Vec<String> = (0..30).map(|_| acme.batch(lines(200).as_bytes(), "24h")).collect();
    let late = other.batch(lines(2).as_bytes(), "24h");
    eventually("the other tenant's batch is valid", || state(&other, &late) == "in_progress");
    assert!(many.iter().all(|id| state(&acme, id) != "completed"));
}
