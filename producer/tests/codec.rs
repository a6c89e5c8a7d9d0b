//! The batch-line codec: parsed lines, refused lines and answers.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use proptest::prelude::*;
use serde_json::{Value, json};
use tritmill_client::{LineReader, RawLine, Refusal, answer, parse_line};
use tritmill_queue::{
    Choice, Completion, FinishReason, Job, Outcome, Prompt, QueueName, Role, Timestamp,
    TokenLogprob, TopLogprob, Usage,
    store::{AnsweredLine, IngestedLine},
};

const LINE: u64 = 17;

fn parse(bytes: &[u8]) -> IngestedLine {
    let queue = QueueName { model: "tiny".into(), format: "i2_s".into() };
    parse_line(&RawLine { number: LINE, offset: 0, content: Ok(bytes.to_vec()) }, &queue)
}

fn job(line: &Value) -> Job {
    *parse(line.to_string().as_bytes()).content.expect("a job")
}

fn refusal(bytes: &[u8]) -> Refusal {
    serde_json::from_str(&parse(bytes).content.expect_err("a refusal")).unwrap()
}

fn chat(body: &Value) -> Value {
    json!({ "custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body })
}

fn with(name: &str, value: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    body[name] = value;
    chat(&body)
}

/// Checks that the body is refused with status 400 and the message names field and line.
fn check_bad_body(line: &Value, param: &str) {
    let refusal = refusal(line.to_string().as_bytes());
    assert_eq!((refusal.status, refusal.param.as_deref()), (Some(400), Some(param)), "{line}");
    let start = format!("line {LINE}: body.{param} ");
    assert!(refusal.message.starts_with(&start), "{}", refusal.message);
}

/// Checks that the line is refused because it is not a request.
fn check_not_a_request(line: &str, param: Option<&str>, code: &str) {
    let refusal = refusal(line.as_bytes());
    assert_eq!((refusal.status, refusal.param.as_deref()), (None, param), "{line}");
    assert_eq!((refusal.code.as_str(), refusal.line), (code, LINE), "{line}");
    assert!(refusal.message.contains(&LINE.to_string()), "{}", refusal.message);
}

#[test]
fn chat_request_becomes_a_job() {
    let body = json!({
        "model": "whatever", "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7, "n": 2,
        "stop": ["x", "y"], "seed": -1, "logprobs": true, "top_logprobs": 3,
        "logit_bias": { "12": -100, "7": 1.5 }, "presence_penalty": 1, "frequency_penalty": -2,
        "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [3], "min_tokens": 2,
        "ignore_eos": true, "user": "u", "metadata": { "k": "v" }, "store": true, "stream": false,
        "service_tier": "auto", "response_format": { "type": "text" }, "tools": null,
        "prediction": { "type": "content", "content": "a guess" },
        "messages": [
            { "role": "developer", "content": "be brief" },
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
        ],
    });
    let job = job(&chat(&body));
    let Prompt::Messages(conversation) = &job.prompt else { panic!("{:?}", job.prompt) };
    let messages = &conversation.messages;
    assert_eq!(
        (messages[0].role, messages[1].content.texts().concat()),
        (Role::Developer, "ab".into())
    );
    let sampling = &job.sampling;
    assert_eq!((sampling.max_tokens, sampling.n, sampling.top_k), (Some(7), 2, 0));
    assert_eq!(sampling.logit_bias, [(7, 1.5), (12, -100.0)]);
    assert_eq!((sampling.logprobs, sampling.stop.len()), (Some(3), 2));
    assert_eq!(job.seed, u64::MAX);
}

#[test]
fn plain_lines_and_completions_become_jobs() {
    let line = parse(br#"{"prompt":"once"}"#);
    assert_eq!((line.custom_id.as_deref(), line.shape), (Some("line-17"), "chat"));
    assert_eq!(parse(br#"{"prompt":[1,2]}"#).shape, "completion", "tokens are continued");
    assert_eq!(line.content.unwrap().prompt, Prompt::Question("once".into()));
    let named = parse(br#"{"custom_id":"mine","prompt":"once","max_tokens":3}"#);
    assert_eq!(named.custom_id.as_deref(), Some("mine"));
    assert_eq!(named.content.unwrap().sampling.max_tokens, Some(3));
    let mut line = json!({ "custom_id": "a", "method": "POST", "url": "/v1/completions" });
    line["body"] = json!({ "prompt": "once", "logprobs": 2, "echo": false, "best_of": 1 });
    assert_eq!(job(&line).prompt, Prompt::Text("once".into()));
    assert_eq!(job(&line).sampling.max_tokens, Some(16));
    line["body"] = json!({ "prompt": [1, 2, 3] });
    assert_eq!(job(&line).prompt, Prompt::Tokens(vec![1, 2, 3]));
}

#[test]
fn key_and_seed_depend_on_the_request_and_not_on_its_formatting() {
    let line = |text: &str| parse(text.as_bytes());
    let a = line(r#"{"custom_id":"a","prompt":"x","max_tokens":5}"#);
    let b = line(r#" { "max_tokens": 5, "prompt": "\u0078", "custom_id": "a" } "#);
    assert_eq!(a.key, b.key);
    assert_eq!(a.content.as_ref().unwrap().seed, b.content.unwrap().seed);
    for other in [
        r#"{"custom_id":"b","prompt":"x","max_tokens":5}"#,
        r#"{"custom_id":"a","prompt":"y","max_tokens":5}"#,
        r#"{"custom_id":"a","prompt":"x","max_tokens":6}"#,
    ] {
        assert_ne!(line(other).key, a.key, "{other}");
        assert_ne!(line(other).content.unwrap().seed, a.content.as_ref().unwrap().seed);
    }
}

#[test]
fn line_that_is_not_a_request_is_an_error_with_line_and_field() {
    check_not_a_request("hello", None, "invalid_json");
    check_not_a_request("{\"custom_id\":\"a\"", None, "invalid_json");
    check_not_a_request("[1]", None, "invalid_type");
    check_not_a_request("null", None, "invalid_type");
    check_not_a_request("{}", Some("custom_id"), "missing_field");
    check_not_a_request(r#"{"custom_id":7}"#, Some("custom_id"), "invalid_type");
    check_not_a_request(r#"{"custom_id":""}"#, Some("custom_id"), "invalid_value");
    check_not_a_request(r#"{"custom_id":"a\u0000"}"#, Some("custom_id"), "invalid_value");
    check_not_a_request(r#"{"custom_id":"a"}"#, Some("method"), "missing_field");
    check_not_a_request(r#"{"custom_id":"a","method":"GET"}"#, Some("method"), "invalid_method");
    check_not_a_request(r#"{"custom_id":"a","method":"POST"}"#, Some("url"), "missing_field");
    let moderations = r#"{"custom_id":"a","method":"POST","url":"/v1/moderations","body":{}}"#;
    check_not_a_request(moderations, Some("url"), "invalid_url");
    let start = r#"{"custom_id":"a","method":"POST","url":"/v1/completions""#;
    check_not_a_request(&format!("{start}}}"), Some("body"), "missing_field");
    check_not_a_request(&format!("{start},\"body\":[]}}"), Some("body"), "invalid_type");
    check_not_a_request(&format!("{start},\"body\":{{}},\"x\":1}}"), Some("x"), "unknown_field");
    check_not_a_request(&"[".repeat(100_000), None, "invalid_json");
    let long = format!(r#"{{"custom_id":"{}"}}"#, "x".repeat(600));
    check_not_a_request(&long, Some("custom_id"), "invalid_value");
}

#[test]
fn invalid_utf8_names_the_byte() {
    let refusal = refusal(b"{\"prompt\":\"\xFF\"}");
    assert_eq!(refusal.message, "line 17 is not UTF-8 at byte 11 (byte 11 of the file)");
}

#[test]
fn bad_body_is_a_400_that_names_the_parameter() {
    for (name, value) in [
        ("temperature", json!(3.5)),
        ("temperature", json!("hot")),
        ("top_p", json!(-0.1)),
        ("n", json!(0)),
        ("n", json!(1.5)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(1_000_000_000_000_u64)),
        ("max_completion_tokens", json!(0)),
        ("web_search_options", json!({ "search_context_size": "low" })),
        ("prediction", json!("a guess")),
        ("stream", json!(true)),
        ("stop", json!(7)),
        ("stop", json!([""])),
        ("stop[1]", json!(["a", 1])),
        ("logit_bias", json!([])),
        ("logit_bias.x", json!({ "x": 1 })),
        ("logit_bias", json!({ "1": 101 })),
        ("seed", json!(1.5)),
        ("logprobs", json!(5)),
        ("top_logprobs", json!(5)),
        ("tools", json!("x")),
        ("response_format.type", json!({ "type": "xml" })),
        ("guided_regex", json!("(")),
        ("frobnicate", json!(1)),
        ("messages", json!([])),
        ("messages", json!("hi")),
        ("messages[0]", json!(["hi"])),
        ("messages[0].role", json!([{ "content": "hi" }])),
        ("messages[0].role", json!([{ "role": "king", "content": "hi" }])),
        ("messages[0].content", json!([{ "role": "user" }])),
        (
            "messages[0].content[0].type",
            json!([{ "role": "user", "content": [{ "type": "image_url" }] }]),
        ),
        ("messages[0].tool_calls", json!([{ "role": "user", "content": "", "tool_calls": [1] }])),
    ] {
        let field = name.split(['[', '.']).next().unwrap();
        check_bad_body(&with(field, value), name);
    }
    check_bad_body(&chat(&json!({})), "messages");
    check_bad_body(&json!({ "prompt": ["a", "b"] }), "prompt");
    check_bad_body(&json!({ "prompt": "" }), "prompt");
    check_bad_body(&json!({ "prompt": { "text": "x" } }), "prompt");
}

#[test]
fn result_that_would_be_too_large_is_refused_with_the_fields() {
    let message = json!([{ "role": "user", "content": "hi" }]);
    let fields = json!({
        "messages": message, "n": 100, "max_tokens": 1000, "logprobs": true, "top_logprobs": 20,
    });
    let line = chat(&fields);
    check_bad_body(&line, "max_tokens");
    let message = refusal(line.to_string().as_bytes()).message;
    for part in [
        "body.max_tokens must be at most 499 with n 100 and top_logprobs 20",
        "1048576",
        "got 1000",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let plain = json!({ "prompt": "hi", "n": 100, "max_tokens": 10_486 });
    check_bad_body(&plain, "max_tokens");
}

#[test]
fn refusal_keeps_a_readable_custom_id() {
    let line = parse(with("temperature", json!(9)).to_string().as_bytes());
    assert_eq!(line.custom_id.as_deref(), Some("a"));
    assert_eq!(parse(b"{").custom_id, None);
}

fn finished(shape: &str, outcome: Outcome) -> Value {
    let answer = AnsweredLine {
        seq: 1,
        number: LINE,
        custom_id: Some("a".into()),
        key: vec![7; 32],
        shape: shape.into(),
        outcome: Some(outcome),
        finished_at: Timestamp(1_700_000_000_999),
        repeated: json!({ "temperature": 0.5 }).as_object().unwrap().clone(),
    };
    let line = answer::line(&answer);
    assert!(!line.contains('\n'));
    serde_json::from_str(&line).unwrap()
}

fn completion() -> Outcome {
    let token =
        |bytes: &[u8], top| TokenLogprob { token: 1, bytes: bytes.to_vec(), logprob: -0.5, top };
    let top = TopLogprob { token: 2, bytes: vec![0xE2, 0x82], logprob: f32::NEG_INFINITY };
    Outcome::Completed(Completion {
        model: "tiny".into(),
        fingerprint: "class".into(),
        choices: vec![Choice {
            logprobs: Some(vec![token("é".as_bytes(), vec![top]), token(b"!", vec![])]),
            ..Choice::new(0, "hé", FinishReason::Length)
        }],
        usage: Usage {
            prompt_tokens: 3,
            completion_tokens: 2,
            cached_tokens: 0,
            reasoning_tokens: 0,
        },
        ..Completion::default()
    })
}

#[test]
fn chat_answer_has_openais_shape() {
    let line = finished("chat", completion());
    assert_eq!((&line["custom_id"], &line["error"]), (&json!("a"), &Value::Null));
    assert_eq!(line["response"]["status_code"], 200);
    let body = &line["response"]["body"];
    assert_eq!(
        (&body["object"], &body["created"]),
        (&json!("chat.completion"), &json!(1_700_000_000))
    );
    assert_eq!(
        body["usage"],
        json!({ "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5 })
    );
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["content"], "hé");
    assert_eq!(choice["finish_reason"], "length");
    let first = &choice["logprobs"]["content"][0];
    assert_eq!((&first["token"], &first["bytes"]), (&json!("é"), &json!([0xC3, 0xA9])));
    assert_eq!(first["top_logprobs"][0]["logprob"], -9999.0);
}

#[test]
fn text_answer_has_openais_shape() {
    let body = finished("completion", completion())["response"]["body"].take();
    assert_eq!(body["object"], "text_completion");
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "hé");
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1]));
    // The drawn token is always there, besides the most probable ones.
    let top = json!({ "bytes:\\xe2\\x82": -9999.0, "é": -0.5 });
    assert_eq!(choice["logprobs"]["top_logprobs"][0], top);
}

#[test]
fn refusal_line_shows_its_kind() {
    let none: Value =
        serde_json::from_str(&answer::refusal_line(&[1; 32], None, &refusal(b"{"))).unwrap();
    assert_eq!((&none["response"], &none["error"]["line"]), (&Value::Null, &json!(LINE)));
    let bad = refusal(with("n", json!(0)).to_string().as_bytes());
    let line: Value =
        serde_json::from_str(&answer::refusal_line(&[1; 32], Some("a"), &bad)).unwrap();
    assert_eq!((&line["error"], &line["response"]["status_code"]), (&Value::Null, &json!(400)));
    assert_eq!(line["response"]["body"]["error"]["param"], "n");
}

proptest! {
    #[test]
    fn any_bytes_become_jobs_or_refusals_line_by_line(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut reader = LineReader::new(bytes.as_slice());
        let mut numbers = Vec::new();
        while let Some(line) = reader.next_line().unwrap() {
            let queue = QueueName { model: "tiny".into(), format: "i2_s".into() };
            let parsed = parse_line(&line, &queue);
            if let Err(refusal) = &parsed.content {
                let refusal: Refusal = serde_json::from_str(refusal).unwrap();
                prop_assert_eq!(refusal.line, line.number);
            }
            numbers.push(line.number);
        }
        prop_assert!(numbers.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn truncated_or_modified_request_never_panics(at in 0_usize..170, byte in any::<u8>()) {
        let body = json!({ "messages": [{ "role": "user", "content": "hi" }], "temperature": 0.5 });
        let mut bytes = chat(&body).to_string().into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = parse(&bytes);
        bytes.truncate(at);
        prop_assert!(parse(&bytes).content.is_err());
    }
}

#[test]
fn lines_for_responses_have_the_shape_of_responses_and_repeat_the_request() {
    let body = json!({
        "model": "m", "instructions": "Be brief.", "input": "hi", "temperature": 0.5,
        "max_output_tokens": 9, "metadata": { "a": "b" }, "service_tier": "flex",
    });
    let line = json!({ "custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body });
    let job = *parse(line.to_string().as_bytes()).content.unwrap();
    assert_eq!(job.sampling.max_tokens, Some(9));
    let repeated = ["instructions", "temperature", "max_output_tokens", "metadata"];
    assert!(repeated.iter().all(|name| job.echo[*name] == body[*name]), "{:?}", job.echo);
    for (field, value) in [
        ("stream", json!(true)),
        ("background", json!(true)),
        ("previous_response_id", json!("resp_1")),
        ("max_tokens", json!(5)),
    ] {
        let mut line = line.clone();
        line["body"][field] = value;
        let refused = refusal(line.to_string().as_bytes());
        assert_eq!(refused.param.as_deref(), Some(field), "{refused:?}");
    }

    let answer = finished("response", completion());
    let body = &answer["response"]["body"];
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!((&body["temperature"], &body["top_p"]), (&json!(0.5), &json!(1.0)));
    assert_eq!(body["output"][0]["content"][0]["text"], "hé");
    assert_eq!(body["usage"]["output_tokens"], 2);
    assert_eq!(body["id"], format!("resp_{}", "07".repeat(16)));
}
