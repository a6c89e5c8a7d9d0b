//! `/v1/embeddings`: single calls, batches, and the dashboard, with an embedding model beside a model that generates.

use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;
use tritmill_queue::Vector;

use crate::{
    clients::embedding_model,
    rig::{Admin, Caller, OURS},
    standalone::alone,
};

const PATH: &str = "/v1/embeddings";

/// Starts a service with both models.
fn start() -> (TempDir, Admin) {
    let folder = tempfile::tempdir().unwrap();
    let words = ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0"];
    let models = ["--model", "demo", "--model", &embedding_model()];
    let service = Admin::run(alone(folder.path(), &[&words[..], &models].concat()));
    (folder, service)
}

fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    let vector = |one: &Value| serde_json::from_value(one["embedding"].clone()).unwrap();
    answer["data"].as_array().unwrap().iter().map(vector).collect()
}

fn ask(caller: &Caller, change: Value) -> Value {
    let mut body = json!({ "model": "embed" });
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    let answer = caller.post(PATH, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// Returns the vectors of texts by `tritmill model embed`, which engine tests compare with the reference.
fn by_command(texts: &[&str]) -> Vec<Vec<f32>> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
    let model = embedding_model();
    let (_, path) = model.split_once('=').unwrap();
    command.args(["model", "embed", "--json", "--model", path]);
    texts.iter().for_each(|text| {
        command.args(["--text", text]);
    });
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    serde_json::from_value(printed["vectors"].clone()).unwrap()
}

#[test]
fn vectors_have_the_same_bits_alone_in_lists_in_batches_and_by_command() {
    let (_folder, service) = start();
    let caller = service.first();
    let texts = ["The lighth", " harbour could hold forty", "rivers in France"];
    let answer = ask(&caller, json!({ "input": texts }));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("embed")));
    let expected = vectors(&answer);
    assert_eq!(expected, by_command(&texts));
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], usage["total_tokens"]);
    assert!(usage["prompt_tokens"].as_u64() > Some(10) && usage["completion_tokens"].is_null());
    for (index, text) in texts.iter().enumerate() {
        let alone = ask(&caller, json!({ "input": text, "encoding_format": "base64" }));
        let encoded = alone["data"][0]["embedding"].as_str().unwrap();
        assert_eq!(Vector::from_base64(encoded).unwrap().0, expected[index]);
    }
    // Tokens are taken as they are: with the end token they are those of the text.
    let plain = json!({ "model": "embed", "prompt": texts[0], "add_special_tokens": false });
    let tokenized = caller.post("/tokenize", &plain).json();
    let mut tokens: Vec<u64> = serde_json::from_value(tokenized["tokens"].clone()).unwrap();
    let without_end = ask(&caller, json!({ "input": tokens }));
    tokens.push(509);
    let with_end = ask(&caller, json!({ "input": [tokens] }));
    assert_eq!(vectors(&with_end), expected[..1]);
    assert_ne!(vectors(&without_end), expected[..1]);

    let line = |(index, text): (usize, &&str)| {
        let body = json!({ "model": "embed", "input": [text, "more"] });
        let id = format!("e{index}");
        format!("{}\n", json!({ "custom_id": id, "method": "POST", "url": PATH, "body": body }))
    };
    let mut content: String = texts.iter().enumerate().map(line).collect();
    let bad = json!({ "model": "embed", "input": "x", "dimensions": 4 });
    let bad = json!({ "custom_id": "bad", "method": "POST", "url": PATH, "body": bad });
    content.push_str(&bad.to_string());
    let batch = caller.finished(&caller.batch_for(PATH, content.as_bytes(), "24h"));
    assert_eq!(batch["request_counts"], json!({ "total": 4, "completed": 3, "failed": 1 }));
    let mut lines = caller.lines(&batch["output_file_id"]);
    lines.sort_by_key(|line| line["custom_id"].to_string());
    for (line, expected) in lines.iter().zip(&expected) {
        let body = &line["response"]["body"];
        assert_eq!((&vectors(body)[0], vectors(body).len()), (expected, 2));
        assert!(body["usage"]["prompt_tokens"].as_u64() > Some(3), "{body}");
    }
    let refused = &caller.lines(&batch["error_file_id"])[0];
    assert_eq!(refused["response"]["body"]["error"]["param"], "dimensions");
}

#[test]
fn refusals_name_the_field_and_each_kind_of_model_refuses_the_others_endpoints() {
    let (_folder, service) = start();
    let caller = service.first();
    let refused = |path: &str, body: Value| {
        let answer = caller.post(path, &body);
        let error = &answer.json()["error"];
        assert_eq!(answer.status, 400, "{body}: {error}");
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (text("param"), text("code"), text("message"))
    };
    let of = |change: Value| {
        let mut body = json!({ "model": "embed", "input": "x" });
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let (param, code, _) = refused(PATH, body);
        (param, code)
    };
    let named = |param: &str, code: &str| (param.to_owned(), code.to_owned());
    assert_eq!(of(json!({ "dimensions": 8 })), named("dimensions", "unsupported_value"));
    let format = json!({ "encoding_format": "int8" });
    assert_eq!(of(format), named("encoding_format", "invalid_value"));
    assert_eq!(of(json!({ "input": null })), named("input", "missing_field"));
    assert_eq!(of(json!({ "input": [] })), named("input", "invalid_value"));
    assert_eq!(of(json!({ "input": ["a", ""] })), named("input[1]", "invalid_value"));
    assert_eq!(of(json!({ "input": [[1], 2] })), named("input[1]", "invalid_type"));
    assert_eq!(of(json!({ "input": vec!["a"; 2049] })), named("input", "invalid_value"));
    assert_eq!(of(json!({ "input": [1, 512] })), named("input", "invalid_value"));
    assert_eq!(of(json!({ "stream": true })), named("stream", "unsupported_value"));
    assert_eq!(of(json!({ "temperature": 1 })), named("temperature", "unknown_parameter"));
    // One text of several that is too long fails the request, whatever the others are.
    let long = json!({ "input": ["a", "x ".repeat(600)] });
    assert_eq!(of(long), named("input", "context_length_exceeded"));

    let (param, _, message) = refused(PATH, json!({ "model": "demo", "input": "x" }));
    assert_eq!(param, "model");
    assert!(message.contains("'demo' generates text"), "{message}");
    let chat = json!({ "model": "embed", "messages": [{ "role": "user", "content": "x" }] });
    let text = json!({ "model": "embed", "prompt": "x" });
    let response = json!({ "model": "embed", "input": "x" });
    for (path, body) in
        [("/v1/chat/completions", chat), ("/v1/completions", text), ("/v1/responses", response)]
    {
        let answer = caller.post(path, &body);
        assert!(answer.text().contains("use /v1/embeddings"), "{path}: {}", answer.text());
    }
}

#[test]
fn dashboard_shows_vectors_and_the_playground_makes_them() {
    let (_folder, service) = start();
    let caller = service.first();
    let visitor = service.with("");
    let session = visitor.log_in(caller.key());
    let form = "model=embed%40i2_s&task=embed&prompt=rivers+in+France&system=&schema=";
    let page = visitor.form("/dashboard/playground", &session, OURS, form);
    let expected = by_command(&["rivers in France"]);
    let first = format!("{} dimensions\n[{}", expected[0].len(), expected[0][0]);
    assert!(page.text().contains(&first), "{first}: {}", page.text());
    let headers = format!("{OURS}Accept: text/event-stream\r\n");
    let answer = visitor.form("/dashboard/playground", &session, &headers, form).json();
    assert_eq!(vectors(&answer), expected);

    let jobs = visitor.page("/dashboard/jobs", &session).text();
    let (_, link) = jobs.split_once("/dashboard/jobs/").unwrap();
    let id = link.split(['"', '?']).next().unwrap();
    let job = visitor.page(&format!("/dashboard/jobs/{id}"), &session).text();
    assert!(job.contains(&format!("{} dimensions", expected[0].len())), "{job}");
    let edit = visitor.page(&format!("/dashboard/jobs/{id}/edit"), &session).text();
    assert!(edit.contains("rivers in France") && edit.contains(PATH), "{edit}");
    let rerun = visitor.form(&format!("/dashboard/jobs/{id}/rerun"), &session, OURS, "request=");
    assert_eq!(rerun.status, 303, "{}", rerun.text());
}
