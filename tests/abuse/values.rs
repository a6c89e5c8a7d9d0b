//! Extreme values on the command line and in lines of a batch.

use serde_json::json;
use tritmill_client::{Client, JobBuilder};
use tritmill_queue::{Job, Tenant};

use crate::{
    fleet::Fleet,
    rig::{self, LINE},
};

#[test]
fn extreme_arguments_do_not_panic() {
    let fleet = Fleet::start();
    let (long, huge) = ("x".repeat(1000), u64::MAX.to_string());
    let job = "0199f3c2-0000-7000-8000-000000000000";
    let refused: &[&[&str]] = &[
        &["worker", "--slots", &huge],
        &["worker", "--slots", "0"],
        &["worker", "--max-sequences", &huge],
        &["worker", "--max-sequences", "-1"],
        &["worker", "--threads", "1000000"],
        &["worker", "--lease", "0"],
        &["worker", "--lease", "1e-9"],
        &["worker", "--lease", "inf"],
        &["worker", "--drain", "nan"],
        &["worker", "--drain", "-1"],
        &["worker", "--step-limit", "1e300"],
        &["worker", "--listen", "everywhere"],
        &["worker", "--name", &long],
        &["worker", "--name", ""],
        &["worker", "--name", "a\nb"],
        &["submit", "-", "--model", &long],
        &["submit", "-", "--model", ""],
        &["submit", "-", "--priority", "urgent"],
        &["submit", "-", "--format", "q4_0"],
        &["submit", "/nowhere/in.jsonl"],
        &["watch", job, "--timeout", &huge],
        &["watch", job, "--timeout", "-1"],
        &["watch", "no-id"],
        &["queue", "pause", "@"],
        &["queue", "pause", "a@b\tc"],
        &["queue", "pause", &format!("{long}@i2_s")],
        &["queue", "limit", "demo@i2_s", "99999999999999999999999"],
        &["dlq", "list", "demo@i2_s", "--limit", "-1"],
        &["dlq", "list", "demo"],
    ];
    for words in refused {
        let (code, stdout, stderr) = fleet.run(words);
        assert_eq!(code, Some(1), "{words:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{stderr}");
        assert_eq!(stdout, "", "{words:?}");
    }
    // An unusual name that is valid.
    let odd = "a{}:%\"' é@x";
    let queue = format!("{odd}@i2_s");
    for words in [
        &["queue", "pause", &queue][..],
        &["queue", "resume", &queue],
        &["queue", "limit", &queue, &huge],
        &["dlq", "list", &queue, "--limit", "4294967295"],
    ] {
        let (code, _, stderr) = fleet.run(words);
        assert_eq!(code, Some(0), "{words:?}: {stderr}");
    }
    let _worker = fleet.worker(&["--name", odd, "--drain", "86400"]);
    let (ids, _) = rig::submit(&fleet, LINE, &["--model", odd]);
    let (code, stdout, stderr) = fleet.run(&["watch", &ids[0], "--timeout", "60"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("2024-03-03"), "{stdout}");
    assert_eq!(rig::queue(&fleet, &queue)["completed"], 1);
}

#[test]
fn tenant_names_are_arbitrary_within_bounds() {
    let fleet = Fleet::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let submit = |name: &str| {
        let tenant = Tenant(name.to_owned());
        let job = JobBuilder::question("demo", "Paid on the 3rd of March, 2024").temperature(0.0);
        let job = Job { tenant, ..job.build().unwrap() };
        runtime.block_on(async {
            let client = Client::connect(&fleet.redis.url(), &fleet.postgres.url()).await.unwrap();
            client.submit(job).await.map(|id| id.to_string()).map_err(|error| error.to_string())
        })
    };
    let names = ["{a}:%", "", "é\n\t\u{1b}[31m", "' OR 1=1 --", "normal:default", &"t".repeat(512)];
    let ids: Vec<String> = names.iter().map(|name| submit(name).unwrap()).collect();
    for (name, expect) in [("a\0b", "NUL"), (&*"t".repeat(513), "the limit is 512")] {
        let error = submit(name).unwrap_err();
        assert!(error.contains("tenant") && error.contains(expect), "{error}");
    }
    // A job that was made without a builder is checked as well.
    let huge = runtime.block_on(async {
        let client = Client::connect(&fleet.redis.url(), &fleet.postgres.url()).await.unwrap();
        let mut job = JobBuilder::question("demo", "a").build().unwrap();
        (job.sampling.n, job.sampling.max_tokens) = (128, Some(1 << 20));
        client.submit(job).await.unwrap_err().to_string()
    });
    assert!(huge.contains("max_tokens must be at most 8192 with n 128"), "{huge}");
    let _worker = fleet.worker(&[]);
    let (code, stdout, stderr) = rig::watch(&fleet, &ids);
    assert_eq!((code, stdout.matches("2024-03-03").count()), (Some(0), 6), "{stderr}");
}

#[test]
fn oversized_lines_are_named_and_the_others_answered() {
    let folder = rig::folder();
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let long = json!({ "prompt": "word ".repeat(2000), "temperature": 0 });
    let chat = json!({
        "custom_id": "talk", "method": "POST", "url": "/v1/chat/completions",
        "body": { "messages": [{ "role": "user", "content": "word ".repeat(2000) }] },
    });
    let lines = [
        LINE.to_owned(),
        format!("{{\"prompt\": \"{}\"}}\n", "x".repeat(4 << 20)),
        format!("{{\"prompt\": {}1{}}}\n", "[".repeat(1000), "]".repeat(1000)),
        format!("{long}\n{chat}\n"),
        format!("{}\n", json!({ "prompt": "a", "max_tokens": u64::MAX })),
        format!("{}\n", json!({ "prompt": "a", "n": 4_000_000_000_u64 })),
        format!("{}\n", json!({ "prompt": "a", "stop": vec!["s".repeat(9000); 100] })),
        "{\"prompt\": \"\u{0}\"}\n".to_owned(),
        "{\"prompt\": \"\\u0000\", \"temperature\": 0}\n".to_owned(),
        LINE.to_owned(),
    ];
    let input = rig::file(folder.path(), "in", &lines.concat());
    let output = folder.path().join("out");
    let words = ["batch", "run", input.to_str().unwrap(), "-o", output.to_str().unwrap(), "--json"];
    let (code, _, stderr) = fleet.run(&words);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    let all = rig::text(&output);
    let answer = |name: &str| {
        all.lines().map(rig::json).find(|line| line["custom_id"] == name).unwrap_or_default()
    };
    for (name, code, param, part) in [
        ("line-4", "context_length_exceeded", "prompt", "512"),
        ("talk", "context_length_exceeded", "messages", "512"),
    ] {
        let error = answer(name)["response"]["body"]["error"].clone();
        assert_eq!((&error["code"], &error["param"]), (&json!(code), &json!(param)), "{name}");
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
    }
    for part in ["line 2 is 4194", "the limit is 4194304", "recursion limit", "max_tokens", "stop"]
    {
        assert!(all.contains(part), "{part}: {all}");
    }
    for name in ["line-1", "line-11"] {
        let text = answer(name)["response"]["body"]["choices"][0]["message"]["content"].clone();
        assert_eq!(text, "2024-03-03", "{name}: {all}");
    }
}
