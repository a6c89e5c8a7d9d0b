//! Several models in one process, within a memory budget.

use std::{collections::HashMap, fs, path::Path, process::Command, time::Duration};

use serde_json::{Value, json};
use tempfile::TempDir;
use tritmill_servers::Signal;

use crate::{
    batches::by_name,
    fleet::{Fleet, WorkerProcess, eventually, series},
    rig::Caller,
    standalone::alone,
};

const WORDS: [&str; 7] =
    ["standalone", "--json", "--threads", "1", "--api", "127.0.0.1:0", "--kv-memory=8"];
/// Lines of a batch.
const LINES: usize = 60;

/// Returns the value of `--model` for a model by its name.
fn model(name: &str) -> String {
    match name {
        "demo" => name.to_owned(),
        _ => format!("{name}={}/engine/tests/golden/bitnet-tiny", env!("CARGO_MANIFEST_DIR")),
    }
}

/// Returns a process with both models and this memory.
fn both(mut command: Command, memory: u64) -> Command {
    command.args(["--model", &model("demo"), "--model", &model("tiny")]);
    command.args(["--memory", &memory.to_string()]);
    command.stderr(std::process::Stdio::piped());
    command
}

/// Returns the bytes that a model needs, rounded up, by the error of a start with too little memory.
fn need(folder: &Path, name: &str) -> u64 {
    let model = model(name);
    let words = [&WORDS[..], &["--model", &model, "--memory", "1K"]].concat();
    let refused = alone(folder, &words).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    for part in [&format!("model {name} does not fit"), "weights", "the budget is", "--kv q8"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    let (_, rest) = said.split_once("it needs ").unwrap();
    let mib: f64 = rest.split_once(" MiB").unwrap().0.parse().unwrap();
    (mib * f64::from(1 << 20)) as u64
}

/// Returns the budgets that hold one model at a time, and both.
fn budgets(folder: &Path) -> [u64; 2] {
    let (demo, tiny) = (need(folder, "demo"), need(folder, "tiny"));
    let one = demo.max(tiny);
    assert!(one + (1 << 20) < demo + tiny);
    [one, demo + tiny]
}

/// Returns the lines of a batch for a model.
fn lines(name: &str) -> String {
    let line = |index: usize| {
        let body = json!({
            "model": name,
            "messages": [{ "role": "user", "content": format!("Paid on March {}, 2024", index % 28) }],
            "max_tokens": 8,
            "temperature": 0,
        });
        let url = "/v1/chat/completions";
        let line = json!({ "custom_id": format!("{name}-{index}"), "method": "POST", "url": url, "body": body });
        format!("{line}\n")
    };
    (0..LINES).map(line).collect()
}

/// Returns the answers of a process with one model.
fn answers_alone(folder: &Path, name: &str) -> HashMap<String, Value> {
    let [input, output] = ["in", "out"].map(|file| folder.join(format!("{name}.{file}")));
    fs::write(&input, lines(name)).unwrap();
    let model = model(name);
    let path = model.split_once('=').map_or(model.as_str(), |(_, path)| path);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(["batch", "run", "--threads", "1", "--model", path, "--name", name]);
    command.arg(&input).arg("-o").arg(&output);
    command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
    assert!(command.output().unwrap().status.success());
    let text = fs::read_to_string(&output).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    by_name(&lines)
}

/// Returns the value of a metric of a model.
fn metric(service: &WorkerProcess, name: &str, model: &str) -> f64 {
    let (_, page) = service.get("/metrics");
    let name = format!("{name}{{queue=\"{model}@i2_s\"}}");
    series(&page, &name).unwrap_or_else(|| panic!("no {name} in {page}"))
}

/// Starts a service without servers, runs a batch for each model at once, and compares the answers.
fn answers_both(memory: u64) -> (WorkerProcess, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let service = WorkerProcess::start(both(alone(folder.path(), &WORDS), memory));
    let text = |name: &str| service.ready[name].as_str().unwrap().to_owned();
    assert_eq!(service.ready["workers"].as_array().unwrap().len(), 2, "{}", service.ready);
    let caller = Caller::new(text("api"), text("first_key"));
    let listed = caller.get("/v1/models").json();
    for name in ["demo", "tiny", "tiny@i2_s"] {
        let mut models = listed["data"].as_array().unwrap().iter();
        assert!(models.any(|model| model["id"] == name), "{name} in {listed}");
    }
    let batches = ["demo", "tiny"].map(|name| caller.batch(lines(name).as_bytes(), "24h"));
    for (name, batch) in ["demo", "tiny"].into_iter().zip(&batches) {
        let batch = caller.finished(batch);
        assert_eq!(batch["request_counts"]["completed"], LINES, "{batch}");
        let answered = by_name(&caller.lines(&batch["output_file_id"]));
        assert_eq!(answered, answers_alone(folder.path(), name));
    }
    eventually("it is ready", || service.get("/readyz").0 == 200);
    (service, folder)
}

#[test]
fn batches_of_two_models_are_answered_in_the_memory_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let [one, _] = budgets(folder.path());
    let (mut service, _folder) = answers_both(one);
    assert!(metric(&service, "tritmill_pool_unloads_total", "demo") >= 1.0);
    assert!(metric(&service, "tritmill_pool_loads_total", "tiny") >= 1.0);
    let answered = |model| metric(&service, "tritmill_worker_jobs_completed_total", model);
    assert_eq!((answered("demo"), answered("tiny")), (LINES as f64, LINES as f64));
    service.signal(Signal::Terminate);
    assert_eq!(service.wait(Duration::from_secs(60)), Some(0));
}

#[test]
fn models_that_fit_together_are_loaded_once() {
    let folder = tempfile::tempdir().unwrap();
    let [_, both] = budgets(folder.path());
    let (service, _folder) = answers_both(both);
    for model in ["demo", "tiny"] {
        assert_eq!(metric(&service, "tritmill_pool_loads_total", model), 1.0, "{model}");
        assert_eq!(metric(&service, "tritmill_pool_unloads_total", model), 0.0, "{model}");
    }
}

#[test]
fn model_that_waits_for_memory_is_served_and_listed() {
    let folder = tempfile::tempdir().unwrap();
    let [one, _] = budgets(folder.path());
    let fleet = Fleet::start();
    let command = fleet.command(&["worker", "--json", "--threads", "1", "--kv-memory=8"]);
    let mut worker = WorkerProcess::start(both(command, one));
    let listed = || -> Vec<Value> {
        let (_, listed, _) = fleet.run(&["workers", "list", "--json"]);
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let slots = |queue: &str| {
        let of_queue = listed().into_iter().find(|worker| worker["queue"] == queue);
        of_queue.and_then(|worker| worker["slots"].as_u64())
    };
    eventually("both are listed, and one is loaded", || {
        slots("demo@i2_s") > Some(0) && slots("tiny@i2_s") == Some(0)
    });
    let input = folder.path().join("in");
    for name in ["tiny", "demo", "tiny"] {
        let line = json!({ "prompt": "Paid on March 3, 2024", "max_tokens": 4 });
        fs::write(&input, format!("{line}\n")).unwrap();
        let words = ["submit", input.to_str().unwrap(), "--model", name];
        let (code, submitted, said) = fleet.run(&words);
        assert_eq!(code, Some(0), "{said}");
        assert!(!said.contains("no worker"), "{said}");
        let job: Value = serde_json::from_str(submitted.lines().next().unwrap()).unwrap();
        let words = ["watch", job["id"].as_str().unwrap(), "--timeout", "60"];
        let (code, finished, said) = fleet.run(&words);
        assert_eq!(code, Some(0), "{said}");
        assert!(finished.contains("\"completed\"") && !said.contains("no worker"), "{said}");
    }
    // An operator drains the process by any of its workers.
    let of_tiny = listed().into_iter().find(|worker| worker["queue"] == "tiny@i2_s").unwrap();
    let owner = of_tiny["owner"].as_str().unwrap();
    assert_eq!(fleet.run(&["workers", "drain", owner]).0, Some(0));
    assert_eq!(worker.wait(Duration::from_secs(60)), Some(0));
    assert!(listed().is_empty(), "they left the list");
}

#[test]
fn lines_that_wait_go_to_the_other_model_and_their_answers_say_it() {
    let folder = tempfile::tempdir().unwrap();
    let [_, enough] = budgets(folder.path());
    // Slow, so that lines wait when the time has come.
    let words = [&WORDS[..], &["--isa", "scalar", "--max-sequences", "1"]].concat();
    let service = crate::rig::Admin::run(both(alone(folder.path(), &words), enough));
    let caller = service.first();
    let slow = lines("demo").replace("\"max_tokens\":8", "\"max_tokens\":60,\"ignore_eos\":true");
    let file = caller.upload(slow.as_bytes()).json()["id"].clone();
    let asked = |escalation: Value| {
        json!({
            "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h",
            "escalation": escalation,
        })
    };
    let refused = |escalation: Value| {
        let answer = caller.post("/v1/batches", &asked(escalation));
        let error = answer.json()["error"].clone();
        (answer.status, error["code"].clone(), error["param"].clone())
    };
    let unknown = refused(json!({ "model": "none", "after": "1s" }));
    assert_eq!(unknown, (404, json!("model_not_found"), json!("escalation.model")));
    let schedule =
        json!({ "cron": "0 0 * * *", "batch": asked(json!({ "model": "none", "after": "1s" })) });
    let scheduled = caller.post("/v1/schedules", &schedule).json();
    assert_eq!(scheduled["error"]["code"], "model_not_found", "{scheduled}");
    let late = refused(json!({ "model": "tiny", "after": "1h" }));
    assert_eq!(late, (400, json!("invalid_value"), json!("escalation.after")));
    let escalation = json!({ "model": "tiny", "after": "1s" });
    let batch = caller.post("/v1/batches", &asked(escalation.clone())).json();
    assert_eq!(batch["escalation"], escalation, "{batch}");
    let batch = caller.finished(batch["id"].as_str().unwrap());
    let counts = json!({ "total": LINES, "completed": LINES, "failed": 0 });
    assert_eq!(batch["request_counts"], counts, "{batch}");
    let answers = by_name(&caller.lines(&batch["output_file_id"]));
    assert_eq!(answers.len(), LINES);
    let of = |model: &str| {
        let says = |answer: &&Value| answer["response"]["body"]["model"].as_str() == Some(model);
        answers.values().filter(says).count()
    };
    let (demo, tiny) = (of("demo"), of("tiny"));
    assert!(demo > 0 && tiny > 0 && demo + tiny == LINES, "{demo} and {tiny}");
    // A repeated request is answered, though the other model is not served any more.
    let key = service.first_key.clone().unwrap();
    let keyed = |service: &crate::rig::Admin, after: &str| {
        let body = asked(json!({ "model": "tiny", "after": after })).to_string();
        let caller = service.with(&key);
        let headers = format!(
            "Idempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        caller.send((caller.head("POST", "/v1/batches", &headers) + &body).as_bytes())
    };
    let first = keyed(&service, "20m").json()["id"].clone();
    drop(service);
    let service = crate::rig::Admin::run(alone(folder.path(), &words));
    let models = service.with(&key).get("/v1/models").text();
    assert!(!models.contains("tiny"), "{models}");
    assert_eq!(keyed(&service, "20m").json()["id"], first);
    assert_eq!(keyed(&service, "30m").error(), (409, "idempotency_conflict".to_owned()));
}
