//! Results of batches while they run: pages, cursors, streams. Batches in lists, in the archive, and deleted.

use std::{io::Read as _, time::Duration};

use futures_util::TryStreamExt as _;
use serde_json::{Value, json};
use tritmill_client::{
    http::HttpClient,
    remote::{Api, BatchResult, ResultsQuery},
};
use tritmill_servers::Signal;

use crate::{
    batches::{by_name, lines},
    fleet::eventually,
    rig::{Admin, Answer, Caller},
};

/// The results of a page, without their cursors, and these.
fn results(answer: &Answer) -> (Vec<Value>, Vec<String>) {
    let result = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let cursor = line.as_object_mut().unwrap().remove("cursor").unwrap();
        (line, cursor.as_str().unwrap().to_owned())
    };
    answer.text().lines().filter(|line| !line.is_empty()).map(result).unzip()
}

fn pages(caller: &Caller, path: &str, limit: usize) -> Vec<Value> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let page = caller.get(&format!("{path}&limit={limit}&after={after}"));
        assert_eq!(page.status, 200, "{}", page.text());
        let (found, cursors) = results(&page);
        assert!(found.len() <= limit);
        page.header("x-next-after").unwrap().clone_into(&mut after);
        if let Some(last) = cursors.last() {
            assert!(*last == after || page.header("x-has-more") == Some("false"));
        }
        all.extend(found);
        if page.header("x-has-more") == Some("false") && page.header("x-incomplete").is_none() {
            return all;
        }
    }
}

#[test]
fn results_of_a_running_batch_are_paged_across_a_restart_without_loss() {
    let (fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let bad = "{\"custom_id\":\"bad\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"model\":\"demo\",\"messages\":[]}}\n";
    let id = caller.batch(format!("{}{bad}", lines(120)).as_bytes(), "24h");
    let path = format!("/v1/batches/{id}/results");
    let progress = || caller.get(&format!("/v1/batches/{id}")).json()["status"] == "in_progress";
    eventually("the batch is in progress", progress);
    let refused = || results(&caller.get(&path)).0.len() == 1;
    eventually("the refused line is there", refused);
    let early = caller.get(&path);
    assert_eq!(early.header("x-incomplete"), Some("true"));
    assert_eq!(early.header("content-type"), Some("application/x-ndjson"));
    let (found, cursors) = results(&early);
    assert_eq!(found[0]["custom_id"], "bad");
    assert_eq!(caller.get(&format!("{path}?order=lines")).text(), "", "line 1 has not ended");
    let worker = fleet.worker(&[]);
    let some = || !results(&caller.get(&format!("{path}?after={}", cursors[0]))).0.is_empty();
    eventually("a line ended", some);
    let first = caller.get(&format!("{path}?limit=1&after={}", cursors[0]));
    let after = results(&first).1.pop().unwrap();
    admin.signal(Signal::Kill);
    let second = Admin::start(&fleet, &[]);
    let again = second.with(caller.key());
    let rest = pages(&again, &format!("{path}?order=completion"), 7);
    let batch = again.finished(&id);
    assert_eq!(batch["request_counts"], json!({ "total": 121, "completed": 120, "failed": 1 }));
    let files =
        [again.lines(&batch["output_file_id"]), again.lines(&batch["error_file_id"])].concat();
    assert_eq!(by_name(&rest), by_name(&files), "the lines of the files, each once");
    let behind = pages(&again, &format!("{path}?order=completion"), 50);
    assert_eq!(behind, rest, "the order stays");
    let continued = results(&again.get(&format!("{path}?after={after}&limit=1000"))).0;
    assert_eq!(continued, rest[2..]);
    let in_order = results(&again.get(&format!("{path}?order=lines"))).0;
    let names: Vec<&Value> = in_order.iter().map(|line| &line["custom_id"]).collect();
    assert_eq!((names[0], names[119], names[120]), (&json!("q0"), &json!("q119"), &json!("bad")));
    let failed = results(&again.get(&format!("{path}?status=failed,expired"))).0;
    assert_eq!(failed.len(), 1);
    let searched = results(&again.get(&format!("{path}?search=Q11&status=succeeded"))).0;
    assert_eq!(searched.len(), 11, "q11 and q110 to q119");
    drop(worker);
}

#[test]
fn wrong_parameters_of_results_are_refused_by_name() {
    let (_fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let [id, other] = [1, 2].map(|count| caller.batch(lines(count).as_bytes(), "24h"));
    let path = format!("/v1/batches/{id}/results");
    let refused = |query: &str, param: &str| {
        let answer = caller.get(&format!("{path}?{query}"));
        assert_eq!(answer.error(), (400, "invalid_value".to_owned()), "{query}");
        assert_eq!(answer.json()["error"]["param"], param, "{query}");
    };
    refused("after=7", "after");
    refused(&format!("after={other}-c1"), "after");
    refused(&format!("after={id}-l1"), "after");
    refused("limit=0", "limit");
    refused("limit=10001", "limit");
    refused("status=done", "status");
    refused("order=random", "order");
    refused("follow=yes", "follow");
    refused(&format!("search={}", "x".repeat(513)), "search");
    assert_eq!(caller.get(&format!("{path}?unknown=1")).error().0, 400);
    let unknown = "/v1/batches/batch_00000000000000000000000000000000/results";
    assert_eq!(caller.get(unknown).error(), (404, "not_found".to_owned()));
}

#[test]
fn cancelled_batch_has_results_of_all_lines() {
    let (_fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let id = caller.batch(lines(3).as_bytes(), "24h");
    let path = format!("/v1/batches/{id}");
    eventually("the batch is in progress", || caller.get(&path).json()["status"] == "in_progress");
    caller.post(&format!("{path}/cancel"), &json!({}));
    let batch = caller.finished(&id);
    let (found, _) = results(&caller.get(&format!("{path}/results?status=cancelled")));
    assert_eq!(found, caller.lines(&batch["error_file_id"]));
    assert_eq!(found.len(), 3);
}

#[test]
fn followed_results_end_with_their_batch() {
    let (fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let id = caller.batch(lines(40).as_bytes(), "24h");
    let path = format!("/v1/batches/{id}/results?follow=true");
    let open = |headers: &str| {
        let mut stream = caller.open(caller.head("GET", &path, headers).as_bytes());
        std::thread::spawn(move || {
            stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            Answer::read(stream.by_ref())
        })
    };
    let (lines_of, events_of) = (open(""), open("Accept: text/event-stream\r\n"));
    let server = format!("http://{}", admin.listen);
    let stream = {
        let (id, key) = (id.clone(), caller.key().to_owned());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let api = Api::new(HttpClient::of_trusted_server().unwrap(), &server, &key).unwrap();
            let results = api.results(&id, ResultsQuery::default());
            runtime.block_on(results.try_collect::<Vec<BatchResult>>()).unwrap()
        })
    };
    let _worker = fleet.worker(&[]);
    let batch = caller.finished(&id);
    let file = by_name(&caller.lines(&batch["output_file_id"]));
    let (found, _) = results(&lines_of.join().unwrap());
    assert_eq!(by_name(&found), file);
    let events = events_of.join().unwrap();
    assert!(events.text().contains(&format!("id: {id}-c40\n")), "{}", events.text());
    let mut data = events.events();
    assert_eq!(data.pop().unwrap(), r#"{"status":"completed"}"#);
    assert_eq!(data.len(), 40);
    let streamed: Vec<Value> =
        stream.join().unwrap().into_iter().map(|result| Value::Object(result.line)).collect();
    assert_eq!(by_name(&streamed), file);
}

#[test]
fn batches_are_found_archived_and_deleted() {
    let (fleet, admin) = Admin::without_worker();
    let caller = admin.first();
    let id = caller.batch(lines(2).as_bytes(), "24h");
    let path = format!("/v1/batches/{id}");
    let listed = |query: &str| {
        let list = caller.get(&format!("/v1/batches?{query}")).json();
        let ids = list["data"].as_array().unwrap().iter().map(|batch| batch["id"].clone());
        ids.collect::<Vec<Value>>()
    };
    let here = vec![json!(id)];
    assert_eq!(listed("metadata[for]=a+test"), here);
    assert_eq!(listed("metadata%5Bfor%5D=a%20test&limit=1&order=asc"), here);
    assert!(listed("metadata[for]=another").is_empty());
    assert_eq!(listed(&format!("search={id}")), here);
    let refused = |query: &str, param: &str| {
        let answer = caller.get(&format!("/v1/batches?{query}"));
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(param)),
            "{query}"
        );
    };
    refused("status=done", "status");
    refused("archived=1", "archived");
    refused("from_ms=today", "from_ms");
    refused("metadata[]=1", "metadata");
    refused("limit=1&limit=2", "limit");
    assert_eq!(caller.get("/v1/batches?unknown=1").error().1, "invalid_query");
    let runs = (409, "batch_unfinished".to_owned());
    assert_eq!(caller.delete(&path).error(), runs);
    assert_eq!(caller.post(&format!("{path}/archive"), &json!({})).error(), runs);
    let worker = fleet.worker(&[]);
    let batch = caller.finished(&id);
    let archived = caller.post(&format!("{path}/archive"), &json!({})).json();
    assert!(archived["archived_at"].is_u64(), "{archived}");
    assert!(listed("").is_empty());
    assert_eq!(listed("archived=true&status=completed&model=demo"), here);
    let back = caller.post(&format!("{path}/unarchive"), &json!({})).json();
    assert_eq!(back["archived_at"], Value::Null);
    assert_eq!(listed(""), here);
    assert_eq!(
        caller.delete(&path).json(),
        json!({ "id": id, "object": "batch", "deleted": true })
    );
    for file in ["input_file_id", "output_file_id"] {
        let file = batch[file].as_str().unwrap();
        assert_eq!(caller.get(&format!("/v1/files/{file}")).status, 404);
    }
    assert_eq!(caller.get(&format!("{path}/results")).status, 404);
    eventually("its jobs are deleted", || fleet.rows(&["all_jobs", "batch_ends"]) == 0);
    drop(worker);
}
