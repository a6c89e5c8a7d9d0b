//! The pages of jobs: search, and actions on all jobs that match.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use crate::{
    fleet::{Fleet, eventually, questions},
    pages::Visitor,
    rig::{Admin, Caller, OURS, key, question},
};

/// Encodes text for a form.
fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Submits `count` questions, which stay queued: no worker runs.
fn submit(fleet: &Fleet, count: usize) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("in.jsonl");
    let lines = questions(count).replace("\"body\":{", "\"body\":{\"model\":\"demo\",");
    std::fs::write(&file, lines).unwrap();
    let (code, _, said) = fleet.run(&["submit", file.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
}

/// Number of jobs on a page of the list.
fn listed(page: &str) -> usize {
    page.matches("href=\"/dashboard/jobs/0").count()
}

#[test]
fn jobs_are_found_by_parts_of_their_names_and_by_time() {
    let (fleet, admin) = Admin::without_worker();
    submit(&fleet, 12);
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let found = |query: &str| listed(&visitor.sees(&format!("/dashboard/jobs?{query}")));
    assert_eq!(found("custom_id=q1"), 1);
    assert_eq!(found("custom_id=q1*"), 3);
    assert_eq!(found("custom_id=*"), 12);
    let id = fleet.sql("SELECT min(id::text) FROM open_jobs");
    assert_eq!(found(&format!("id={}", id.trim())), 1);
    assert_eq!(found(&format!("id={}", &id[..2])), 12);
    assert_eq!(found(&format!("id={}&custom_id=q1*", &id[..2])), 3);
    assert_eq!(found("id=f"), 0);
    assert_eq!(found("from=2026-01-01T00:00&custom_id=q2"), 1);
    assert_eq!(found("to=2026-01-01T00:00"), 0);
    for (query, field) in [("id=x", "id_prefix"), ("from=now", "from"), ("to=2026-13-01", "to")] {
        let page = visitor.client.page(&format!("/dashboard/jobs?{query}"), &visitor.session);
        assert_eq!(page.status, 400, "{query}");
        assert!(page.text().contains(&format!("{field} must be")), "{}", page.text());
    }
    let api = admin.first();
    let counted = |query: &str| {
        api.get(&format!("/admin/v1/jobs/count?{query}")).json()["jobs"].as_u64().unwrap()
    };
    assert_eq!(counted("custom_id_prefix=q1"), 3);
    assert_eq!(counted(&format!("id_prefix={}", &id[..2])), 12);
    assert_eq!(counted("worker=none"), 0);
    let refused = api.get("/admin/v1/jobs?id_prefix=x");
    assert_eq!(refused.json()["error"]["param"], "id_prefix");
}

#[test]
fn jobs_are_found_by_metadata_of_their_own_or_their_batch() {
    let (fleet, _worker, admin) = Admin::with_worker();
    let (caller, acme) = (admin.first(), admin.with(&key(&fleet, "acme", "submit")));
    for (client, run) in [(&caller, "7"), (&caller, "8"), (&acme, "7")] {
        let body = question(json!({ "metadata": { "run": run } }));
        assert_eq!(client.post("/v1/chat/completions", &body).status, 200);
    }
    // The helper's batches have the metadata `for: a test`; a line has its own.
    let lines = questions(3).replacen("\"body\":{", "\"body\":{\"metadata\":{\"run\":\"7\"},", 1);
    let lines = lines.replace("\"body\":{", "\"body\":{\"model\":\"demo\",");
    let batch = caller.batch(lines.as_bytes(), "1h");
    caller.finished(&batch);
    let [visitor, other] = [admin.first_key.clone().unwrap(), key(&fleet, "other", "submit")]
        .map(|key| Visitor::new(&admin, &key));
    let found = |query: &str| listed(&visitor.sees(&format!("/dashboard/jobs?{query}")));
    assert_eq!(found("metadata=run%3D7"), 3);
    assert_eq!(found("metadata=run%3D7&tenant=acme"), 1);
    assert_eq!(found("metadata=run%3D8"), 1);
    assert_eq!(found("metadata=for%3Da+test"), 3);
    assert_eq!(found("metadata=for%3Da+test&state=failed"), 0);
    assert_eq!(found("metadata=for%3Da"), 0);
    assert_eq!(listed(&other.sees("/dashboard/jobs?metadata=for%3Da+test")), 0);
    let page = visitor.client.page("/dashboard/jobs?metadata=run", &visitor.session);
    assert_eq!(page.status, 400);
    let href = "href=\"/dashboard/jobs?metadata=for%3Da%20test\"";
    assert!(visitor.sees(&format!("/dashboard/batches/{batch}")).contains(href));
    let batches = |pair: &str| visitor.sees(&format!("/dashboard/batches?metadata={pair}"));
    assert!(batches("for%3Da+test").contains(&batch) && !batches("for%3Db").contains(&batch));
    let api = |client: &Caller, path: &str| {
        client.get(&format!("/admin/v1/{path}")).json()["data"].as_array().unwrap().len()
    };
    assert_eq!(api(&caller, "jobs?metadata=run%3D7"), 3);
    assert_eq!(api(&acme, "jobs?metadata=run%3D7"), 1);
    assert_eq!(api(&caller, "batches?metadata=for%3Da%20test"), 1);
    assert_eq!(api(&caller, "batches?metadata=for%3Db"), 0);
    let refused = caller.get("/admin/v1/jobs?metadata=run");
    assert_eq!(refused.json()["error"]["param"], "metadata");
    // An action on all that match would leave some out.
    fleet.sql(
        "INSERT INTO batches (id, tenant, state, input_file_id, batch)
         SELECT gen_random_uuid(), tenant, state, input_file_id, batch
         FROM batches, generate_series(1, 20)",
    );
    let refused = caller.get("/admin/v1/jobs/count?metadata=for%3Da%20test");
    assert!(refused.text().contains("more than 20 batches"), "{}", refused.text());
}

#[test]
fn matching_jobs_are_cancelled_after_a_confirmation_that_says_how_many() {
    let (fleet, admin) = Admin::without_worker();
    submit(&fleet, 12);
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let list = visitor.sees("/dashboard/jobs?custom_id=q1*");
    assert!(list.contains("/dashboard/jobs/matching/cancel?custom_id=q1%2A"), "{list}");
    assert!(!visitor.sees("/dashboard/jobs").contains("matching/cancel"), "not without a filter");
    let asked = visitor.sees("/dashboard/jobs/matching/cancel?custom_id=q1*");
    assert!(asked.contains("Cancel 3 jobs"), "{asked}");
    visitor.does("/dashboard/jobs/matching/cancel", "custom_id=q1*");
    let states = || fleet.sql("SELECT state, count(*) FROM all_jobs GROUP BY 1 ORDER BY 1");
    assert_eq!(states().trim(), "cancelled|3\nqueued|9");
    let log = fleet.sql("SELECT action, detail->'asked'->>'custom_id' FROM audit LIMIT 1");
    assert_eq!(log.trim(), "jobs.cancel|q1*");
    // Jobs that ended are not counted, and a filter is required.
    let asked = visitor.sees("/dashboard/jobs/matching/cancel?custom_id=q1*");
    assert!(asked.contains("Cancel 0 jobs") && !asked.contains("<button class=\"danger\">"));
    for form in ["", "custom_id="] {
        let (path, session) = ("/dashboard/jobs/matching/cancel", &visitor.session);
        assert_eq!(visitor.client.form(path, session, OURS, form).status, 400);
    }
    assert_eq!(states().trim(), "cancelled|3\nqueued|9");
}

#[test]
fn matching_dead_letters_are_retried_in_steps() {
    let (fleet, admin) = Admin::without_worker();
    submit(&fleet, 4);
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    fleet.sql(
        "WITH ended AS (DELETE FROM open_jobs WHERE custom_id <> 'q0' RETURNING *)
         INSERT INTO jobs (id, model, format, tenant, priority, state, cost, attempts_max,
                           submitted_at, custom_id, job, error_code)
         SELECT id, model, format, tenant, priority, 'failed', cost, attempts_max, submitted_at,
                custom_id, job, 'engine_failed' FROM ended",
    );
    let path = "/dashboard/jobs/matching/retry";
    assert!(visitor.sees(&format!("{path}?error=engine_failed")).contains("Retry 3 jobs"));
    assert!(visitor.sees(&format!("{path}?custom_id=q*")).contains("Retry 3 jobs"));
    // The rest of a retry that stopped at the middle one.
    let middle = fleet.sql("SELECT id FROM jobs WHERE custom_id = 'q2'");
    let rest = format!("error=engine_failed&after={}", middle.trim());
    assert!(visitor.sees(&format!("{path}?{rest}")).contains("Retry 1 job<"));
    visitor.does(path, &rest);
    let open = || fleet.sql("SELECT custom_id, state FROM open_jobs ORDER BY 1, 2");
    assert_eq!(open().trim(), "q0|queued\nq1|queued");
    visitor.does(path, "error=engine_failed");
    assert_eq!(fleet.rows(&["open_jobs"]), 5);
    assert_eq!(fleet.rows(&["jobs"]), 3, "dead letters are kept");
}

/// Id of the job with a name.
fn job_of(fleet: &Fleet, custom_id: &str) -> String {
    let found = format!("SELECT id FROM all_jobs WHERE custom_id = '{custom_id}' ORDER BY id");
    fleet.sql(&found).lines().next().unwrap().to_owned()
}

#[test]
fn job_is_run_again_as_it_was_or_edited() {
    let (fleet, admin) = Admin::without_worker();
    submit(&fleet, 1);
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let page = format!("/dashboard/jobs/{}", job_of(&fleet, "q0"));
    visitor.does(&format!("{page}/rerun"), "");
    let prompts = "SELECT count(DISTINCT job), count(*) FROM open_jobs WHERE custom_id = 'q0'";
    assert_eq!(fleet.sql(prompts).trim(), "2|2", "two jobs, which differ in their ids");
    let form = visitor.sees(&format!("{page}/edit"));
    let (_, request) = form.split_once("required>").unwrap();
    let request = request.split("</textarea>").next().unwrap().replace("&#34;", "\"");
    let mut request: Value = serde_json::from_str(&request).unwrap();
    assert_eq!(request["model"], "demo@i2_s");
    assert_eq!(request["max_tokens"], 12);
    let rerun = |request: &Value| {
        let form = format!("request={}", encoded(&request.to_string()));
        visitor.client.form(&format!("{page}/rerun"), &visitor.session, OURS, &form)
    };
    // What the API refuses is shown by its field, with what was typed.
    for (field, value, said) in [
        ("temperature", json!(9), "temperature must be"),
        ("model", json!("none"), "no such model"),
        ("colour", json!("red"), "colour"),
    ] {
        let mut wrong = request.clone();
        wrong[field] = value;
        let refused = rerun(&wrong);
        assert_eq!(refused.status, 400, "{field}");
        let text = refused.text();
        assert!(text.contains("role=\"alert\"") && text.contains(said), "{field}: {text}");
        assert!(text.contains("Invoice 0 was paid"), "{text}");
    }
    assert_eq!(rerun(&json!(7)).status, 400);
    assert_eq!(fleet.rows(&["open_jobs"]), 2);
    request["max_tokens"] = json!(3);
    request["messages"][0]["content"] = json!("Paid on the 3rd of March, 2024");
    let done = rerun(&request);
    assert_eq!(done.status, 303, "{}", done.text());
    let to = done.header("location").unwrap();
    let edited = visitor.sees(to);
    assert!(edited.contains("Paid on the 3rd of March"), "{edited}");
    assert!(fleet.sql("SELECT string_agg(action, ' ') FROM audit").contains("job.rerun job.rerun"));
    // Another tenant neither sees the form nor runs the job.
    let other = Visitor::new(&admin, &key(&fleet, "other", "submit"));
    assert_eq!(other.client.page(&format!("{page}/edit"), &other.session).status, 404);
    let refused = other.client.form(&format!("{page}/rerun"), &other.session, OURS, "");
    assert_eq!(refused.status, 404);
}

#[test]
fn waiting_job_runs_now_with_another_priority() {
    let (fleet, admin) = Admin::without_worker();
    submit(&fleet, 2);
    fleet.sql(
        "UPDATE open_jobs SET state = 'scheduled', run_at = submitted_at + 3600000
         WHERE custom_id = 'q0'",
    );
    let visitor = Visitor::new(&admin, admin.first_key.as_deref().unwrap());
    let [waiting, queued] = ["q0", "q1"].map(|name| job_of(&fleet, name));
    let page = visitor.sees(&format!("/dashboard/jobs/{waiting}"));
    assert!(page.contains("Run now") && page.contains("Set priority"), "{page}");
    let page = visitor.sees(&format!("/dashboard/jobs/{queued}"));
    assert!(!page.contains("Run now") && !page.contains("Set priority"), "{page}");
    assert!(page.contains("only scheduled and retrying jobs can change theirs"), "{page}");
    visitor.does(&format!("/dashboard/jobs/{waiting}/priority"), "priority=high");
    assert!(visitor.sees(&format!("/dashboard/jobs/{waiting}")).contains("· high ·"));
    let api = admin.first();
    let low = json!({ "priority": "low" });
    for (path, body) in [("priority", &low), ("run-now", &json!({}))] {
        let refused = api.post(&format!("/admin/v1/jobs/{queued}/{path}"), body);
        assert_eq!(refused.error(), (409, "not_waiting".to_owned()), "{path}");
        assert_eq!(api.post("/admin/v1/jobs/none/run-now", &json!({})).status, 404);
    }
    let wrong =
        api.post(&format!("/admin/v1/jobs/{waiting}/priority"), &json!({ "priority": "x" }));
    assert_eq!(wrong.json()["error"]["param"], "priority");
    assert_eq!(api.post(&format!("/admin/v1/jobs/{waiting}/priority"), &low).status, 200);
    visitor.does(&format!("/dashboard/jobs/{waiting}/run-now"), "");
    let _worker = fleet.worker(&[]);
    eventually("both are answered", || {
        fleet.sql("SELECT count(*) FROM jobs WHERE state = 'completed'").trim() == "2"
    });
    let log = visitor.sees("/dashboard/audit");
    assert!(log.contains("job.run_now") && log.contains("job.priority"), "{log}");
}
