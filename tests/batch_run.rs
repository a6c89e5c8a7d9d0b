//! `tritmill batch run` as a process: files in, files out, with kills and interruptions in between.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod support;

use std::{collections::HashMap, fs};

use serde_json::{Value, json};
use support::{Random, Scratch, chat, lines_of, without_created};

#[test]
fn answers_have_the_form_of_openai() {
    let scratch = Scratch::new();
    let completion = json!({ "custom_id": "c", "method": "POST", "url": "/v1/completions",
        "body": { "prompt": "once", "max_tokens": 3, "n": 2, "logprobs": 1, "ignore_eos": true } });
    let mut logprobs = chat("l", 4);
    logprobs["body"]["logprobs"] = json!(true);
    logprobs["body"]["top_logprobs"] = json!(2);
    scratch.write_input(&[completion, logprobs, json!({ "prompt": "hello", "max_tokens": 2 })]);
    let run = scratch.run(&["--json"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let answers = scratch.answers_by_id();
    assert_eq!(answers.len(), 3);
    let body = &answers["c"]["response"]["body"];
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["choices"].as_array().unwrap().len(), 2);
    assert_eq!(body["usage"]["completion_tokens"], 6);
    assert_eq!(body["choices"][1]["logprobs"]["tokens"].as_array().unwrap().len(), 3);
    let choice = &answers["l"]["response"]["body"]["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    let first = &choice["logprobs"]["content"][0];
    assert_eq!(first["top_logprobs"].as_array().unwrap().len(), 2);
    let plain = &answers["line-3"]["response"];
    assert_eq!(plain["status_code"], 200);
    assert_eq!(plain["body"]["object"], "chat.completion", "a question has a message");
    assert!(plain["body"]["choices"][0]["message"]["content"].is_string(), "{plain}");
    let summary = run.summary();
    assert_eq!((&summary["lines"], &summary["completed"]), (&json!(3), &json!(3)));
    assert_eq!((&summary["failed"], &summary["resumed"]), (&json!(0), &json!(0)));
    assert!(summary["tokens"].as_u64().unwrap() > 0);
}

#[test]
fn run_killed_twenty_times_gives_the_answers_of_an_undisturbed_run() {
    const LINES: usize = 2000;
    let input: Vec<Value> =
        (0..LINES).map(|i| chat(&format!("id-{i}"), 2 + i as u64 % 7)).collect();
    let undisturbed = Scratch::new();
    undisturbed.write_input(&input);
    assert_eq!(undisturbed.run(&[]).code, Some(0));

    let scratch = Scratch::new();
    scratch.write_input(&input);
    let mut random = Random::new(0x5EED);
    for kill in 0..20 {
        let answered = scratch.output_lines();
        // At least one more line, so that every kill hits a run that has written something.
        let ahead = 1 + random.below(LINES / 25);
        let mut child = scratch.spawn(&[]);
        let killed = child.kill_when(|| scratch.output_lines() >= answered + ahead);
        assert!(killed || kill > 10, "the run ended before kill {kill}");
        if !killed {
            break;
        }
    }
    let last = scratch.run(&["--json"]);
    assert_eq!(last.code, Some(0), "{}", last.stderr);
    let summary = last.summary();
    assert!(summary["resumed"].as_u64().unwrap() > 0, "{summary}");
    assert_eq!(summary["completed"], LINES);

    assert_eq!(scratch.output_lines(), LINES, "every custom_id exactly once");
    let (ours, theirs) = (scratch.answers_by_id(), undisturbed.answers_by_id());
    assert_eq!(ours.len(), LINES);
    for (id, answer) in &theirs {
        assert_eq!(without_created(&ours[id]), without_created(answer), "{id}");
    }
    let again = scratch.run(&["--json"]).summary();
    assert_eq!((&again["resumed"], &again["tokens"]), (&json!(LINES), &json!(0)));
}

#[test]
fn structured_answers_match_whatever_is_killed() {
    const LINES: usize = 150;
    let schema = json!({ "type": "object", "required": ["day", "kind"], "additionalProperties": false, "properties":
        { "day": { "type": "integer", "minimum": 1, "maximum": 31 }, "kind": { "enum": ["a", "b", "c"] } } });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
    let line = |i: usize| {
        let mut line = chat(&format!("id-{i}"), 300);
        line["body"]["ignore_eos"] = json!(false);
        match i % 3 {
            0 => line["body"]["response_format"] = format.clone(),
            1 => line["body"]["guided_regex"] = json!("[0-9]{3}-(x|y)"),
            _ => line["body"]["max_tokens"] = json!(5),
        }
        line
    };
    let input: Vec<Value> = (0..LINES).map(line).collect();
    let undisturbed = Scratch::new();
    undisturbed.write_input(&input);
    assert_eq!(undisturbed.run(&[]).code, Some(0));
    let scratch = Scratch::new();
    scratch.write_input(&input);
    for kill in 1..4 {
        let mut child = scratch.spawn(&[]);
        child.kill_when(|| scratch.output_lines() >= kill * LINES / 5);
    }
    assert_eq!(scratch.run(&[]).code, Some(0));
    let (ours, theirs) = (scratch.answers_by_id(), undisturbed.answers_by_id());
    assert_eq!(ours.len(), LINES);
    for i in 0..LINES {
        let id = format!("id-{i}");
        let answer = &ours[&id];
        assert_eq!(without_created(answer), without_created(&theirs[&id]), "{id}");
        let choice = &answer["response"]["body"]["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        match i % 3 {
            0 => {
                let value: Value = serde_json::from_str(text).unwrap();
                assert!((1..=31).contains(&value["day"].as_i64().unwrap()), "{text}");
                assert!(["a", "b", "c"].contains(&value["kind"].as_str().unwrap()), "{text}");
            }
            1 => assert!(text.len() == 5 && text.as_bytes()[3] == b'-', "{text}"),
            _ => {}
        }
    }
}

#[test]
fn kill_while_the_input_is_read_loses_nothing() {
    let scratch = Scratch::new();
    let input: Vec<Value> = (0..300).map(|i| chat(&format!("id-{i}"), 2)).collect();
    scratch.write_input(&input);
    let mut child = scratch.spawn(&[]);
    child.kill_when(|| scratch.store().exists());
    let run = scratch.run(&["--json"]);
    assert_eq!((run.code, run.summary()["completed"].as_u64()), (Some(0), Some(300)));
    assert_eq!(scratch.output_lines(), 300);
}

#[test]
fn malformed_lines_are_errors_and_the_others_are_answered() {
    let scratch = Scratch::new();
    let mut random = Random::new(7);
    let mut bytes = Vec::new();
    let mut good = 0_u64;
    for number in 1..=10_020_u64 {
        if number % 501 == 0 {
            good += 1;
            bytes.extend(chat(&format!("good-{number}"), 2).to_string().into_bytes());
        } else {
            bytes.extend(support::malformed(number, &mut random));
        }
        bytes.push(b'\n');
    }
    fs::write(scratch.input(), bytes).unwrap();
    let run = scratch.run(&["--json"]);
    assert_eq!(run.code, Some(2), "{}", run.stderr);
    let summary = run.summary();
    assert_eq!(summary["lines"], 10_020);
    assert_eq!((&summary["completed"], &summary["failed"]), (&json!(good), &json!(10_020 - good)));
    let mut numbers = Vec::new();
    for line in lines_of(&scratch.output()) {
        if line["response"]["status_code"] == 200 {
            continue;
        }
        let error = match line["error"].is_null() {
            true => &line["response"]["body"]["error"],
            false => &line["error"],
        };
        let number = error["line"].as_u64().unwrap();
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("line {number}")), "{message}");
        numbers.push(number);
    }
    numbers.sort_unstable();
    let expected: Vec<u64> = (1..=10_020).filter(|number| number % 501 != 0).collect();
    assert_eq!(numbers, expected);
}

#[test]
fn prompt_over_the_context_is_an_error_with_its_line_number() {
    let scratch = Scratch::new();
    let mut long = chat("long", 2);
    long["body"]["messages"][0]["content"] = json!("word ".repeat(50_000));
    scratch.write_input(&[chat("a", 2), long, chat("b", 2)]);
    assert_eq!(scratch.run(&[]).code, Some(2));
    let answers = scratch.answers_by_id();
    assert_eq!(answers["a"]["response"]["status_code"], 200);
    let response = &answers["long"]["response"];
    assert_eq!(response["status_code"], 400);
    let error = &response["body"]["error"];
    assert_eq!((&error["code"], &error["line"]), (&json!("context_length_exceeded"), &json!(2)));
    assert!(error["message"].as_str().unwrap().starts_with("line 2: body.messages: "));
}

#[test]
fn only_changed_lines_run_again() {
    let scratch = Scratch::new();
    let mut input: Vec<Value> = (0..20).map(|i| chat(&format!("id-{i}"), 3)).collect();
    scratch.write_input(&input);
    assert_eq!(scratch.run(&[]).code, Some(0));
    let before = scratch.answers_by_id();
    input[3]["body"]["max_tokens"] = json!(5);
    input.remove(7);
    input.insert(0, chat("fresh", 3));
    input.push(chat("id-0", 4));
    scratch.write_input(&input);
    let run = scratch.run(&["--json"]);
    assert_eq!(run.code, Some(2), "the repeated custom_id is an error line");
    let summary = run.summary();
    assert_eq!((&summary["lines"], &summary["resumed"]), (&json!(21), &json!(18)));
    let lines = lines_of(&scratch.output());
    assert_eq!(lines.len(), 21);
    let duplicate = lines.iter().find(|line| !line["error"].is_null()).unwrap();
    assert_eq!(duplicate["error"]["param"], "custom_id");
    assert_eq!(duplicate["error"]["line"], 21);
    let good: HashMap<_, _> = lines
        .iter()
        .filter(|line| line["error"].is_null())
        .map(|line| (line["custom_id"].as_str().unwrap(), line))
        .collect();
    assert!(!good.contains_key("id-7") && good.contains_key("fresh"));
    assert_ne!(without_created(good["id-3"]), without_created(&before["id-3"]));
    assert_eq!(good["id-5"], &before["id-5"]);
}

#[test]
fn deleted_files_and_torn_lines_are_restored() {
    let scratch = Scratch::new();
    scratch.write_input(&(0..10).map(|i| chat(&format!("id-{i}"), 3)).collect::<Vec<_>>());
    assert_eq!(scratch.run(&[]).code, Some(0));
    let whole = fs::read(scratch.output()).unwrap();

    scratch.run(&["--ordered"]);
    let run = scratch.run(&["--ordered", "--json"]);
    assert!(!run.stderr.contains("note:"), "nothing to restore: {}", run.stderr);
    let run = scratch.run(&["--json"]);
    assert_eq!(fs::read(scratch.output()).unwrap(), whole, "{}", run.stderr);
    let run = scratch.run(&["--json"]);
    assert!(!run.stderr.contains("note:"), "nothing to restore: {}", run.stderr);

    let mut longer = whole.clone();
    longer.extend_from_slice(b"{\"custom_id\":\"torn");
    fs::write(scratch.output(), longer).unwrap();
    let run = scratch.run(&[]);
    assert!(run.stderr.contains("incomplete line"), "{}", run.stderr);
    assert_eq!(fs::read(scratch.output()).unwrap(), whole);

    fs::write(scratch.output(), &whole[..whole.len() - 5]).unwrap();
    let run = scratch.run(&["--json"]);
    assert!(run.stderr.contains("incomplete line"), "{}", run.stderr);
    assert_eq!(fs::read(scratch.output()).unwrap(), whole);

    fs::remove_file(scratch.output()).unwrap();
    let run = scratch.run(&["--json"]);
    assert!(run.stderr.contains("writing it again"), "{}", run.stderr);
    assert_eq!(
        (run.summary()["resumed"].as_u64(), fs::read(scratch.output()).unwrap()),
        (Some(10), whole.clone())
    );

    let edited = String::from_utf8(whole.clone()).unwrap().replacen("id-", "ID-", 1);
    fs::write(scratch.output(), edited).unwrap();
    let run = scratch.run(&[]);
    assert!(run.stderr.contains("differs from the database"), "{}", run.stderr);
    assert_eq!(fs::read(scratch.output()).unwrap(), whole);

    fs::remove_file(scratch.store()).unwrap();
    let run = scratch.run(&["--json"]);
    assert!(run.stderr.contains("kept as"), "{}", run.stderr);
    assert_eq!(run.summary()["resumed"], 0);
    assert_eq!(fs::read(scratch.folder().join("out.jsonl.old")).unwrap(), whole);
    let again: Vec<Value> = lines_of(&scratch.output()).iter().map(without_created).collect();
    for line in lines_of(&scratch.folder().join("out.jsonl.old")) {
        assert!(again.contains(&without_created(&line)));
    }
}

#[test]
fn ordered_output_holds_the_same_lines_in_input_order() {
    let scratch = Scratch::new();
    let mut random = Random::new(3);
    let input: Vec<Value> =
        (0..60).map(|i| chat(&format!("id-{i}"), 1 + random.below(20) as u64)).collect();
    scratch.write_input(&input);
    let mut text = fs::read_to_string(scratch.input()).unwrap();
    text.push_str("oops\n");
    fs::write(scratch.input(), text).unwrap();
    assert_eq!(scratch.run(&["--ordered"]).code, Some(2));
    let lines = lines_of(&scratch.output());
    let ids: Vec<String> =
        lines[..60].iter().map(|l| l["custom_id"].as_str().unwrap().into()).collect();
    assert_eq!(ids, (0..60).map(|i| format!("id-{i}")).collect::<Vec<_>>());
    assert_eq!(lines[60]["error"]["code"], "invalid_json");
    // A run without `--ordered` holds the same lines, and no job runs again.
    let run = scratch.run(&["--json"]);
    assert_eq!(run.summary()["resumed"], 60);
    let mut unordered = lines_of(&scratch.output());
    assert_eq!(unordered.len(), 61);
    unordered.retain(|line| !lines.contains(line));
    assert_eq!(unordered, Vec::<Value>::new());
}

#[test]
fn answers_do_not_depend_on_threads_or_formats() {
    let input: Vec<Value> = (0..12).map(|i| chat(&format!("id-{i}"), 6)).collect();
    let answers = |arguments: &[&str]| {
        let scratch = Scratch::new();
        scratch.write_input(&input);
        let run = scratch.run(&[&["--ordered"], arguments].concat());
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        lines_of(&scratch.output()).iter().map(without_created).collect::<Vec<_>>()
    };
    let expected = answers(&["--threads", "1"]);
    assert_eq!(answers(&["--threads", "2", "--format", "tl1"]), expected);
    assert_eq!(answers(&["--format", "tl2", "--max-sequences", "3"]), expected);
}

#[test]
fn second_run_on_the_same_output_is_refused() {
    let scratch = Scratch::new();
    scratch.write_input(&[chat("a", 2)]);
    let lock = fs::File::create(scratch.folder().join("out.jsonl.tritmill-lock")).unwrap();
    lock.try_lock().unwrap();
    let run = scratch.run(&[]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("another run"), "{}", run.stderr);
    drop(lock);
    assert_eq!(scratch.run(&[]).code, Some(0));
}

#[test]
fn answers_of_another_model_are_refused() {
    let scratch = Scratch::new();
    scratch.write_input(&[chat("a", 2)]);
    assert_eq!(scratch.run(&[]).code, Some(0));
    let other = scratch.run_model("llama-tiny", &[]);
    assert_eq!(other.code, Some(1));
    assert!(other.stderr.contains("--restart"), "{}", other.stderr);
    let restarted = scratch.run_model("llama-tiny", &["--restart", "--json"]);
    assert_eq!((restarted.code, restarted.summary()["resumed"].as_u64()), (Some(0), Some(0)));
    assert_eq!(scratch.answers_by_id()["a"]["response"]["body"]["model"], "llama-tiny");
}

#[test]
fn answers_with_other_limits_are_refused() {
    let scratch = Scratch::new();
    scratch.write_input(&[chat("a", 2)]);
    assert_eq!(scratch.run(&["--answer-tokens-max", "2"]).code, Some(0));
    for (other, now) in [
        (&["--answer-tokens-max", "3"][..], "--answer-tokens-max 3 and no --control-tokens"),
        (&["--control-tokens"], "no --answer-tokens-max and --control-tokens"),
    ] {
        let other = scratch.run(other);
        assert_eq!(other.code, Some(1), "{}", other.stderr);
        let problem = format!(
            "has answers made with --answer-tokens-max 2 and no --control-tokens; this run has {now}: run with --restart"
        );
        assert!(other.stderr.contains(&problem), "{}", other.stderr);
    }
    assert_eq!(scratch.run(&["--answer-tokens-max", "2"]).code, Some(0), "the same limits resume");
}

#[test]
fn kv_cache_in_8_bits_has_its_own_numerics_class() {
    let scratch = Scratch::new();
    scratch.write_input(&[chat("a", 2), chat("b", 5)]);
    assert_eq!(scratch.run(&["--kv", "q8"]).code, Some(0));
    assert_eq!(scratch.answers_by_id().len(), 2);
    let other = scratch.run(&["--kv", "f16"]);
    assert_eq!(other.code, Some(1));
    assert!(other.stderr.contains("/kv-q8-2/"), "{}", other.stderr);
    assert_eq!(scratch.run(&["--kv", "q8"]).code, Some(0), "the same class resumes");
}

#[test]
fn interrupted_run_writes_what_it_answered() {
    let scratch = Scratch::new();
    let input: Vec<Value> = (0..3000).map(|i| chat(&format!("id-{i}"), 8)).collect();
    scratch.write_input(&input);
    let mut child = scratch.spawn(&["--json"]);
    child.interrupt_when(|| scratch.output_lines() > 0);
    let run = child.wait();
    assert_eq!(run.code, Some(130), "{}", run.stderr);
    let summary = run.summary();
    let completed = summary["completed"].as_u64().unwrap();
    assert!(completed > 0 && completed < 3000, "{summary}");
    assert_eq!(scratch.output_lines() as u64, completed, "every answer is written");
    let text = fs::read_to_string(scratch.output()).unwrap();
    assert!(text.ends_with('\n'));
}

#[test]
fn empty_input_gives_empty_output() {
    let scratch = Scratch::new();
    fs::write(scratch.input(), "\n \n").unwrap();
    assert_eq!(scratch.run(&[]).code, Some(0));
    assert_eq!(fs::read(scratch.output()).unwrap(), b"");
}

#[test]
fn missing_input_or_model_is_named_in_the_error() {
    let scratch = Scratch::new();
    let run = scratch.run(&[]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("in.jsonl"), "{}", run.stderr);
    scratch.write_input(&[chat("a", 2)]);
    let run = scratch.run_model("no-such-model", &[]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("no-such-model"), "{}", run.stderr);
    assert!(!scratch.output().exists());
}

#[test]
fn lines_are_read_from_standard_input() {
    let scratch = Scratch::new();
    scratch.write_input(&[chat("a", 2), chat("b", 3)]);
    let first = scratch.run_piped(&["--json"]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert_eq!(first.summary()["completed"], 2);
    scratch.write_input(&[chat("a", 2), chat("b", 3), chat("c", 2)]);
    let second = scratch.run_piped(&["--json"]).summary();
    assert_eq!((&second["completed"], &second["resumed"]), (&json!(3), &json!(2)));
}
