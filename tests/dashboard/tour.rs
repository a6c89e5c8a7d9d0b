//! A visit with a browser, the way people make it, and pictures of every page.

use serde_json::json;

use crate::{
    browser::Window,
    fleet::{Fleet, questions},
    rig::Admin,
};

async fn log_in(window: &Window, key: &str) {
    window.go("/").await;
    window.sees("h1", "Log in").await;
    window.picture("login").await;
    window.fill("#key", "tm-wrong").await;
    window.click("button.main").await;
    window.sees(".problem", "opens nothing").await;
    assert_eq!(window.complaints().await.len(), 1, "of the refusal, and nothing else");
    window.fill("#key", key).await;
    window.click("button.main").await;
}

/// Uploads a file of lines and waits until its bar is full; the batch's page.
async fn upload(window: &Window, lines: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dates.jsonl");
    let lines = questions(lines).replace("\"body\":{", "\"body\":{\"model\":\"demo\",");
    std::fs::write(&file, lines).unwrap();
    window.go("/dashboard/batches").await;
    let input = window.find("#file").await;
    input.send_keys(file.to_str().unwrap()).await.unwrap();
    window.click(".upload button.main").await;
    window.sees(".notice", "The file is here").await;
    let bar = "[role=progressbar]";
    let started = std::time::Instant::now();
    let mut seen = Vec::new();
    loop {
        let now = window.attribute(bar, "aria-valuenow").await.unwrap_or_default();
        let now: u64 = now.parse().unwrap_or_default();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        if now == 100 {
            break;
        }
        if seen.len() == 2 {
            window.picture("batch-running").await;
        }
        assert!(started.elapsed().as_secs() < 180, "{seen:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert!(seen.is_sorted() && seen.len() > 2, "the bar moves without a reload: {seen:?}");
    window.sees(".state", "completed").await;
    window.client.current_url().await.unwrap().path().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_visitor_works_with_the_dashboard() {
    let fleet = Fleet::start();
    let admin = Admin::start(&fleet, &[]);
    let Some(window) = Window::open(&admin.listen).await else { return };
    let _worker = fleet.worker(&[]);
    log_in(&window, admin.first_key.as_deref().unwrap()).await;
    window.go("/dashboard/batches").await;
    window.sees(".empty h2", "No batches").await;
    window.picture("batches-empty").await;
    let batch = upload(&window, 400).await;
    window.is_sound(&batch).await;
    window.picture("batch").await;
    let link = window.attribute(".files a.main", "href").await.unwrap();
    let script = "return fetch(arguments[0]).then((answer) => answer.text())";
    let content = window.client.execute(script, vec![json!(link)]).await.unwrap();
    assert_eq!(content.as_str().unwrap().lines().count(), 400);
    for (path, name) in [("/dashboard/batches", "batches"), ("/dashboard/keys", "keys")] {
        window.go(path).await;
        window.is_sound(path).await;
        window.picture(name).await;
        window.size(360, 780).await;
        window.is_sound(&format!("{path} at 360 pixels")).await;
        window.picture(&format!("{name}-360")).await;
        window.size(1280, 860).await;
    }
    window.close().await;
}
