//! A tour of the dashboard with a real browser, with screenshots of every page.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    browser::Window,
    fleet::{Fleet, eventually, questions},
    rig::{Admin, Caller, key},
};

/// Pages for operators and the names of their screenshots.
const PAGES: [(&str, &str); 17] = [
    ("/dashboard/overview", "overview"),
    ("/dashboard/batches", "batches"),
    ("/dashboard/jobs", "jobs"),
    ("/dashboard/jobs/matching/cancel?custom_id=q*", "jobs-cancel"),
    ("/dashboard/jobs/matching/retry?state=failed", "jobs-retry"),
    ("/dashboard/jobs?metadata=for%3Da%20test", "jobs-metadata"),
    ("/dashboard/workers", "workers"),
    ("/dashboard/tenants", "tenants"),
    ("/dashboard/tenants/default", "tenant"),
    ("/dashboard/tenants/acme", "tenant-other"),
    ("/dashboard/files", "files"),
    ("/dashboard/schedules", "schedules"),
    ("/dashboard/notices", "notices"),
    ("/dashboard/dead-letters", "dead-letters"),
    ("/dashboard/integrity", "integrity"),
    ("/dashboard/keys", "keys"),
    ("/dashboard/audit", "audit"),
];
const QUEUE: &str = "/dashboard/queues/demo%40i2%5Fs";

async fn log_in(window: &Window, key: &str) {
    window.go("/").await;
    window.sees("h1", "Log in").await;
    window.picture("login").await;
    window.fill("#key", "tm-wrong").await;
    window.click("button.main").await;
    window.sees(".problem", "not valid").await;
    assert_eq!(window.errors().await.len(), 1, "one error: the refused login");
    window.fill("#key", key).await;
    window.click("button.main").await;
    window.sees("h1", "Overview").await;
}

/// Progress of the batch, in percent.
async fn progress(window: &Window) -> u64 {
    // A live update may replace the bar at any moment.
    loop {
        let bar = window.find("[role=progressbar]").await;
        if let Ok(Some(now)) = bar.attr("aria-valuenow").await {
            return now.parse().unwrap();
        }
    }
}

/// Pauses or resumes the demo queue.
fn set_queue(fleet: &Fleet, verb: &str) {
    let (code, _, said) = fleet.run(&["queue", verb, "demo@i2_s"]);
    assert_eq!(code, Some(0), "{said}");
}

/// Uploads a batch to a paused queue, resumes the queue, and waits until the batch is complete.
async fn upload_a_batch(window: &Window, fleet: &Fleet, lines: usize) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dates.jsonl");
    let content = questions(lines).replace("\"body\":{", "\"body\":{\"model\":\"demo\",");
    std::fs::write(&file, content).unwrap();
    window.go("/dashboard/batches").await;
    window.sees(".empty h2", "No batches").await;
    window.picture("batches-empty").await;
    let input = window.find("#file").await;
    input.send_keys(file.to_str().unwrap()).await.unwrap();
    window.click(".upload button.main").await;
    window.sees(".notice", "The file is uploaded").await;
    window.sees(".state", "in progress").await;
    // A reload of the page would lose this variable.
    window.client.execute("window.sameVisit = true", vec![]).await.unwrap();
    let mut seen = vec![progress(window).await];
    assert_eq!(seen, [0], "the queue is paused");
    window.picture("batch-waiting").await;
    set_queue(fleet, "resume");
    let started = Instant::now();
    while seen.last() != Some(&100) {
        let now = progress(window).await;
        if seen.last() != Some(&now) {
            seen.push(now);
            window.picture("batch-running").await;
        }
        assert!(started.elapsed() < Duration::from_secs(180), "{seen:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(seen.is_sorted(), "{seen:?}");
    let same = window.client.execute("return window.sameVisit === true", vec![]).await.unwrap();
    assert_eq!(same, true, "the bar changes without a reload");
    window.sees(".state", "completed").await;
    window.is_sound("the batch").await;
    window.picture("batch").await;
    let link = window.find(".files a.main").await.attr("href").await.unwrap().unwrap();
    let script = "return fetch(arguments[0]).then((answer) => answer.text())";
    let content = window.client.execute(script, vec![json!(link)]).await.unwrap();
    assert_eq!(content.as_str().unwrap().lines().count(), lines);
}

/// Opens a job of the list and its answer.
async fn open_a_job(window: &Window) {
    window.go("/dashboard/jobs?state=completed").await;
    window.click("tbody a.id").await;
    window.sees(".state", "completed").await;
    window.sees(".steps", "Answered").await;
    window.sees("[data-live=text] pre", "2024").await;
    window.is_sound("the job").await;
    window.picture("job").await;
}

/// Edits the request of a job, first wrongly, and runs it.
async fn run_a_job_again(window: &Window) {
    window.go("/dashboard/jobs?state=completed").await;
    window.click("tbody a.id").await;
    window.click("a[href$='/edit']").await;
    window.picture("job-edit").await;
    let prompt =
        r#"{"model": "demo", "messages": [{"role": "user", "content": "Due 4 March 2024"}]"#;
    window.fill("#request", &format!("{prompt}, \"temperature\": 9}}")).await;
    window.click("form[action$=rerun] button").await;
    window.sees(".problem", "temperature must be").await;
    assert_eq!(window.errors().await.len(), 1, "one error: the refused request");
    window.picture("job-edit-refused").await;
    window.fill("#request", &format!("{prompt}, \"temperature\": 0}}")).await;
    window.click("form[action$=rerun] button").await;
    window.sees(".notice", "This is the new job").await;
    window.sees("[data-live=text] pre", "2024-03-04").await;
    window.is_sound("the job that ran again").await;
}

/// Asks the playground, and sees what it refuses.
async fn ask_the_playground(window: &Window) {
    window.go("/dashboard/playground").await;
    window.picture("playground-empty").await;
    window.fill("#prompt", "Paid on the 3rd of March, 2024").await;
    window.fill("#temperature", "0").await;
    window.click("form[data-stream] button.main").await;
    window.sees("#answer", "2024-03-03").await;
    window.sees("#usage", "generated").await;
    window.is_sound("the playground").await;
    window.picture("playground").await;
    window.fill("#temperature", "9").await;
    window.click("form[data-stream] button.main").await;
    window.sees("#problem", "temperature must be").await;
    assert_eq!(window.errors().await.len(), 1, "one error: the refused prompt");
}

/// Opens the page of the only worker.
async fn open_a_worker(window: &Window) {
    window.go("/dashboard/workers").await;
    window.click("tbody td.id a").await;
    window.sees("[data-live=memory]", "Memory in use").await;
    window.sees("[data-live=tiers]", "on its device alone").await;
    window.is_sound("the worker").await;
    window.picture("worker").await;
}

/// Opens a scheduled job, which may change its priority.
async fn open_a_scheduled_job(window: &Window, fleet: &Fleet) {
    let id = fleet.sql(
        "INSERT INTO open_jobs (id, model, format, tenant, priority, state, cost, attempts_max,
                                submitted_at, run_at, job)
         SELECT gen_random_uuid(), model, format, tenant, priority, 'scheduled', cost, attempts_max,
                submitted_at, submitted_at + 3600000, job
         FROM jobs WHERE state = 'completed' LIMIT 1 RETURNING id",
    );
    window.go(&format!("/dashboard/jobs/{}", id.split_whitespace().next().unwrap())).await;
    window.sees(".hint", "scheduled or retrying").await;
    window.is_sound("the scheduled job").await;
    window.picture("job-scheduled").await;
}

/// Watches a queued job run and finish without a reload.
async fn watch_a_job(window: &Window, fleet: &Fleet) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("one.jsonl");
    std::fs::write(&file, "{\"prompt\": \"Paid on the 3rd of March, 2024\"}\n").unwrap();
    let (code, submitted, said) = fleet.run(&["submit", file.to_str().unwrap(), "--stream"]);
    assert_eq!(code, Some(0), "{said}");
    let submitted: Value = serde_json::from_str(&submitted).unwrap();
    window.go(&format!("/dashboard/jobs/{}", submitted["id"].as_str().unwrap())).await;
    window.sees("[data-live=text]", "Nothing yet").await;
    let _worker = fleet.worker(&[]);
    window.sees("[data-live=text] pre", "2024-03-03").await;
    window.sees(".state", "completed").await;
}

/// Submits requests that fail permanently.
fn fail_some(caller: &Caller, count: usize) {
    let message = json!([{ "role": "user", "content": "x ".repeat(20_000) }]);
    for _ in 0..count {
        let body = json!({ "model": "demo", "messages": message });
        assert_eq!(caller.post("/v1/chat/completions", &body).status, 400);
    }
}

/// Replays a group of dead letters, then a single one.
async fn replay_dead_letters(window: &Window, fleet: &Fleet) {
    window.go("/dashboard/dead-letters").await;
    window.sees("tbody", "context_length_exceeded").await;
    window.click("tbody form[action$=replay] button").await;
    window.sees(".notice", "2 dead letters submitted again").await;
    // The new jobs fail as well.
    eventually("the replays fail too", || {
        fleet.sql("SELECT count(*) FROM all_jobs WHERE state = 'failed'").trim() == "4"
    });
    window.sees("[data-name=Jobs]", "4").await;
    window.click("tbody a[href*='signature=']").await;
    window.sees("[data-live=count]", "4 match").await;
    window.click("tbody a.id").await;
    window.sees(".state", "failed").await;
    window.picture("job-failed").await;
    window.click("form[action$=replay] button").await;
    window.sees(".notice", "This is the new job").await;
    window.sees("dl.pairs", "Replay of").await;
}

async fn pause_a_queue(window: &Window, fleet: &Fleet) {
    window.go(QUEUE).await;
    window.sees("h1", "demo@i2_s").await;
    window.click("button[value=pause]").await;
    window.sees(".notice", "The queue is paused").await;
    window.sees("[data-live=state]", "paused").await;
    let paused = || fleet.sql("SELECT paused FROM queues WHERE model = 'demo'");
    assert_eq!(paused().trim(), "t");
    window.click("button[value=resume]").await;
    window.sees(".notice", "The queue is resumed").await;
    assert_eq!(paused().trim(), "f");
    window.fill("#tokens", "1,000,000").await;
    window.click("button[value=limit]").await;
    window.sees(".notice", "The limit is set").await;
    assert_eq!(window.attribute("#tokens", "value").await.as_deref(), Some("1,000,000"));
    window.is_sound("the queue").await;
    window.picture("queue").await;
}

/// Zooms into a chart, and out again; times are local.
async fn zoom_a_chart(window: &Window) {
    window.zone("Asia/Tokyo").await;
    window.go("/dashboard/overview").await;
    window.sees("p [data-zone]", "Asia/Tokyo").await;
    window.drag(".chart svg", 0.4, 0.9).await;
    window.find(".zoom a.button").await;
    let [from, shown] = [
        "return new URLSearchParams(location.search).get('from')",
        "return document.querySelector('#from').value",
    ];
    let from = window.client.execute(from, vec![]).await.unwrap();
    let shown = window.client.execute(shown, vec![]).await.unwrap();
    let hours = |time: &Value| time.as_str().unwrap()[11..13].parse::<u32>().unwrap();
    assert_eq!((hours(&from) + 9) % 24, hours(&shown), "nine hours ahead of UTC");
    window.picture("overview-zoomed").await;
    // The form sends what the address has.
    window.click(".zoom button.main").await;
    window.find(".zoom a.button").await;
    let same = "return new URLSearchParams(location.search).get('from')";
    assert_eq!(window.client.execute(same, vec![]).await.unwrap(), from);
    window.is_sound("the zoomed overview").await;
    window.click(".zoom a.button").await;
    window.find(".tabs a[aria-current]").await;
    window.zone("UTC").await;
}

/// Checks every page in a wide and a narrow window.
async fn look_around(window: &Window) {
    for (path, name) in PAGES {
        window.go(path).await;
        window.is_sound(path).await;
        window.picture(name).await;
        window.size(360, 780).await;
        window.is_sound(&format!("{path} at 360 pixels")).await;
        window.picture(&format!("{name}-360")).await;
        window.size(1280, 860).await;
    }
    window.go("/dashboard/jobs/none").await;
    window.sees("h1", "Not Found").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn browser_tour_of_the_dashboard() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let Some(window) = Window::open(&admin.listen).await else { return };
    // Paused before the worker starts: a running worker notices at its next heartbeat.
    set_queue(&fleet, "pause");
    let worker = fleet.worker(&[]);
    log_in(&window, admin.first_key.as_deref().unwrap()).await;
    upload_a_batch(&window, &fleet, 400).await;
    open_a_job(&window).await;
    fail_some(&admin.first(), 2);
    replay_dead_letters(&window, &fleet).await;
    pause_a_queue(&window, &fleet).await;
    run_a_job_again(&window).await;
    ask_the_playground(&window).await;
    open_a_worker(&window).await;
    zoom_a_chart(&window).await;
    key(&fleet, "acme", "submit");
    open_a_scheduled_job(&window, &fleet).await;
    look_around(&window).await;
    drop(worker);
    watch_a_job(&window, &fleet).await;
    window.click(".who button").await;
    window.sees("h1", "Log in").await;
    window.close().await;
}
