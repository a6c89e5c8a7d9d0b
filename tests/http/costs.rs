//! Prices, costs of answers, estimates and budgets, with Postgres and Redis, and with SQLite in one process.

use serde_json::{Value, json};

use crate::{
    batches::lines,
    fleet::{Fleet, eventually},
    rig::{Admin, Answer, Caller, question},
    standalone::alone,
};

const ALONE: [&str; 10] = [
    "standalone",
    "--json",
    "--api",
    "127.0.0.1:0",
    "--price",
    "other,*,EUR,9,9",
    "--completion-windows",
    "1h,24h,background",
    "--overbooking",
    "100",
];

/// The cost of tokens at the prices of this test, in units of 10⁻⁹.
fn nanounits(usage: &Value, input: i64, cached: i64, output: i64) -> i64 {
    let count = |value: &Value| value.as_i64().unwrap();
    let cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
    (count(&usage["prompt_tokens"]) - cached_tokens) * input
        + cached_tokens * cached
        + count(&usage["completion_tokens"]) * output
}

fn nano(amount: &Value) -> i64 {
    (amount.as_f64().unwrap() * 1e9).round() as i64
}

fn refused(answer: &Answer, code: &str, param: &str) {
    assert_eq!((answer.status, answer.error().1.as_str()), (400, code), "{}", answer.text());
    assert_eq!(answer.json()["error"]["param"], param, "{}", answer.text());
}

fn prices_are_kept_with_answers(caller: &Caller) {
    let set = |body: Value| caller.post("/admin/v1/prices", &body);
    let price = json!({ "model": "*", "currency": "EUR", "input": 2, "cached_input": "1", "output": "4.5" });
    assert_eq!(set(price).status, 200);
    let batch =
        json!({ "model": "demo", "tier": "batch", "currency": "EUR", "input": 1, "output": 2 });
    assert_eq!(set(batch).status, 200);
    for (wrong, param) in [
        (json!({ "currency": "euro" }), "currency"),
        (json!({ "input": -1 }), "input"),
        (json!({ "output": "1e3" }), "output"),
        (json!({ "cached_input": 0.0000001 }), "cached_input"),
        (json!({ "tier": "gold" }), "tier"),
        (json!({ "model": "" }), "model"),
    ] {
        let mut body = json!({ "model": "demo", "currency": "EUR", "input": 1, "output": 1 });
        body.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        refused(&set(body), "invalid_value", param);
    }
    assert_eq!(caller.delete("/admin/v1/prices?model=unknown").status, 404);
    let listed = caller.get("/v1/prices").json();
    let written = listed["data"].as_array().unwrap().iter().find(|price| price["model"] == "*");
    assert_eq!(written.unwrap()["output"], "4.5", "{listed}");
    // A single request, by its tier.
    for (tier, answered) in [(json!(null), Value::Null), (json!("flex"), json!("flex"))] {
        let body = question(json!({ "service_tier": tier }));
        let answer = caller.post("/v1/chat/completions", &body).json();
        assert_eq!(answer["service_tier"], answered, "{answer}");
        let usage = &answer["usage"];
        assert_eq!(nano(&usage["cost"]), nanounits(usage, 2000, 1000, 4500), "{answer}");
        assert_eq!(usage["currency"], "EUR");
    }
    let wrong = caller.post("/v1/chat/completions", &question(json!({ "service_tier": "gold" })));
    refused(&wrong, "invalid_value", "service_tier");
    // A batch: each line, and all together.
    let id = caller.batch(lines(5).as_bytes(), "24h");
    let batch = caller.finished(&id);
    let output = caller.lines(&batch["output_file_id"]);
    let costs = output.iter().map(|line| {
        let usage = &line["response"]["body"]["usage"];
        assert_eq!(nano(&usage["cost"]), nanounits(usage, 1000, 1000, 2000), "{line}");
        nano(&usage["cost"])
    });
    let sum: i64 = costs.sum();
    let cost = &batch["usage"]["cost"];
    assert_eq!((&cost[0]["currency"], nano(&cost[0]["amount"])), (&json!("EUR"), sum));
    let change =
        json!({ "model": "demo", "tier": "batch", "currency": "EUR", "input": 100, "output": 100 });
    assert_eq!(set(change).status, 200);
    assert_eq!(caller.lines(&batch["output_file_id"]), output, "what was answered keeps its cost");

    let by_tier = || caller.get("/v1/costs?group_by=tier").json();
    let of = |answer: &Value, tier: &str| {
        let rows = answer["data"].as_array().unwrap().iter();
        rows.filter(|row| row["tier"] == tier)
            .map(|row| row["answers"].as_i64().unwrap())
            .sum::<i64>()
    };
    eventually("the answers are summed", || of(&by_tier(), "batch") == 5);
    let sums = by_tier();
    assert_eq!((of(&sums, "default"), of(&sums, "flex")), (1, 1), "{sums}");
    let batch_row = sums["data"].as_array().unwrap().iter().find(|row| row["tier"] == "batch");
    assert_eq!(nano(&batch_row.unwrap()["cost"]), sum);
    let csv = caller.get("/v1/costs?group_by=day,model,key,tier&format=csv");
    assert_eq!(csv.header("content-type"), Some("text/csv; charset=utf-8"));
    assert_eq!(csv.text().lines().count(), 4, "{}", csv.text());
    assert_eq!(caller.get("/v1/costs?month=2020-01").json()["data"], json!([]));
    for (query, param) in [
        ("month=2020", "month"),
        ("month=2020-01&from=2020-01-01", "month"),
        ("from=yesterday", "from"),
        ("from=2026-02-01&to=2026-01-01", "to"),
        ("group_by=color", "group_by"),
        ("format=xml", "format"),
    ] {
        refused(&caller.get(&format!("/v1/costs?{query}")), "invalid_value", param);
    }
}

fn batches_are_estimated(caller: &Caller) {
    let file = caller.upload(lines(40).as_bytes()).json()["id"].clone();
    let body = json!({
        "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "background",
    });
    let estimate = caller.post("/v1/batches/estimate", &body).json();
    assert_eq!((&estimate["lines"], &estimate["sampled_lines"]), (&json!(40), &json!(40)));
    assert!(estimate["max_output_tokens"].as_u64().unwrap() > 40, "{estimate}");
    assert!(nano(&estimate["max_cost"][0]["amount"]) > 0, "{estimate}");
    let gone = json!({ "input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h" });
    assert_eq!(caller.post("/v1/batches/estimate", &gone).status, 404);
    let batch = caller.post("/v1/batches", &body).json();
    let batch = caller.finished(batch["id"].as_str().unwrap());
    assert_eq!(
        (&batch["status"], &batch["completion_window"]),
        (&json!("completed"), &json!("background"))
    );
}

fn budgets_bound_new_work(caller: &Caller) {
    let keys = caller.get("/admin/v1/keys").json();
    let key = keys["data"][0]["id"].as_str().unwrap().to_owned();
    let set = |change: Value| {
        let mut body = json!({ "tenant": "default", "period": "month", "currency": "EUR" });
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        caller.post("/admin/v1/budgets", &body)
    };
    for (wrong, param) in [
        (json!({ "hard": -1 }), "hard"),
        (json!({ "soft": 2, "hard": 1 }), "soft"),
        (json!({ "period": "year", "hard": 1 }), "period"),
        (json!({ "key": "mine", "hard": 1 }), "key"),
    ] {
        refused(&set(wrong), "invalid_value", param);
    }
    let ask = || caller.post("/v1/chat/completions", &question(json!({})));
    assert_eq!(set(json!({ "soft": "0.000000001", "hard": 1000 })).status, 200);
    let budget = caller.get("/v1/budgets").json()["data"][0].clone();
    assert_eq!(
        (&budget["nearly_spent"], &budget["is_spent"]),
        (&json!(true), &json!(false)),
        "{budget}"
    );
    assert_eq!(ask().status, 200);
    let file = caller.upload(lines(1).as_bytes()).json()["id"].clone();
    let batch = json!({ "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h" });
    let keyed = |path: &str, body: &Value| {
        let body = body.to_string();
        let length = body.len();
        let headers = format!(
            "Idempotency-Key: before\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        );
        caller.send((caller.head("POST", path, &headers) + &body).as_bytes())
    };
    let (accepted, answered) =
        (keyed("/v1/batches", &batch), keyed("/v1/chat/completions", &question(json!({}))));
    assert_eq!((accepted.status, answered.status), (200, 200));
    assert_eq!(set(json!({ "key": key, "hard": "0.000000001" })).status, 200);
    eventually("the budget of the key is spent", || ask().status == 403);
    assert_eq!(ask().error(), (403, "budget_spent".to_owned()));
    assert!(ask().text().contains("the API key has spent"), "{}", ask().text());
    assert_eq!(caller.post("/v1/batches", &batch).status, 403);
    // What was accepted is accepted when it comes again.
    let again = keyed("/v1/batches", &batch);
    assert_eq!(
        (again.status, &again.json()["id"]),
        (200, &accepted.json()["id"]),
        "{}",
        again.text()
    );
    let again = keyed("/v1/chat/completions", &question(json!({})));
    assert_eq!(
        (again.status, &again.json()["id"]),
        (200, &answered.json()["id"]),
        "{}",
        again.text()
    );
    // Without bounds it is gone.
    assert_eq!(set(json!({ "key": key })).status, 200);
    eventually("there is no budget of the key", || ask().status == 200);
}

#[test]
fn answers_cost_what_their_price_was_and_budgets_hold() {
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let folder = tempfile::tempdir().unwrap();
    for admin in [Admin::start(&fleet, &[]), Admin::run(alone(folder.path(), &ALONE))] {
        let caller = &admin.first();
        prices_are_kept_with_answers(caller);
        batches_are_estimated(caller);
        budgets_bound_new_work(caller);
    }
}

#[test]
fn windows_are_those_that_the_operator_allows_and_the_workers_can_keep() {
    let folder = tempfile::tempdir().unwrap();
    let admin = Admin::run(alone(folder.path(), &ALONE));
    let caller = &admin.first();
    let create = |content: &str, window: &str| {
        let file = caller.upload(content.as_bytes()).json()["id"].clone();
        let body = json!({
            "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": window,
        });
        caller.post("/v1/batches", &body)
    };
    let other = create(&lines(1), "2h");
    refused(&other, "invalid_value", "completion_window");
    assert!(other.text().contains("must be one of 1h, 24h, background"), "{}", other.text());
    // The rate of the workers is measured while they are busy.
    let busy = create(&lines(2000), "24h").json();
    let few = caller.upload(lines(1).as_bytes()).json()["id"].clone();
    let asked = json!({
        "input_file_id": few, "endpoint": "/v1/chat/completions", "completion_window": "1h",
    });
    let seconds = || caller.post("/v1/batches/estimate", &asked).json()["seconds"].clone();
    eventually("the rate is measured", || seconds().is_u64());
    let huge = lines(20_000).replace("\"max_tokens\":14", "\"max_tokens\":60000");
    let full = create(&huge, "1h");
    refused(&full, "window_full", "completion_window");
    assert!(full.text().contains("the earliest that fits is "), "{}", full.text());
    assert_eq!(create(&lines(1), "background").status, 200);
    let busy = busy["id"].as_str().unwrap();
    caller.post(&format!("/v1/batches/{busy}/cancel"), &json!({}));
}

#[test]
fn a_full_queue_leaves_the_windows_of_another_model_open() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = format!("tiny={}/engine/tests/golden/bitnet-tiny", env!("CARGO_MANIFEST_DIR"));
    let models = ["--model", "demo", "--model", &tiny, "--kv-memory", "8"];
    let admin = Admin::run(alone(folder.path(), &[&ALONE[..], &models].concat()));
    let caller = &admin.first();
    let of = |model: &str, count: usize, max_tokens: u32| {
        let content = lines(count).replace("\"demo\"", &format!("\"{model}\""));
        let content = content.replace("\"max_tokens\":14", &format!("\"max_tokens\":{max_tokens}"));
        assert!(content.contains(model) && content.contains(&max_tokens.to_string()), "{content}");
        let file = caller.upload(content.as_bytes()).json()["id"].clone();
        move |window: &str| {
            json!({
                "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": window,
            })
        }
    };
    let models = ["demo", "tiny"];
    let busy = models.map(|model| caller.post("/v1/batches", &of(model, 6000, 14)("24h")).json());
    let estimate = |model: &str, count, max_tokens| {
        let asked = of(model, count, max_tokens)("24h");
        caller.post("/v1/batches/estimate", &asked).json()["seconds"].clone()
    };
    let seconds = |model: &str| estimate(model, 1, 14);
    eventually("the rates are measured", || models.iter().all(|model| seconds(model).is_u64()));
    // Eight hours of work for one model, by the rate of this machine.
    let some = estimate("demo", 2000, 1000).as_u64().unwrap().max(1);
    let hours = u32::try_from(8 * 3600 * 1000 / some).unwrap();
    let full = caller.post("/v1/batches", &of("demo", 2000, hours)("24h"));
    assert_eq!(full.status, 200, "{}", full.text());
    // Before its lines are checked, a batch counts for every model.
    let is_free = |model: &str| seconds(model).as_u64().is_some_and(|seconds| seconds < 3600);
    eventually("it is one model's", || !is_free("demo") && is_free("tiny"));
    refused(
        &caller.post("/v1/batches", &of("demo", 1, 14)("1h")),
        "window_full",
        "completion_window",
    );
    assert_eq!(caller.post("/v1/batches", &of("tiny", 1, 14)("1h")).status, 200);
    for batch in busy.iter().chain([&full.json()]) {
        caller.post(&format!("/v1/batches/{}/cancel", batch["id"].as_str().unwrap()), &json!({}));
    }
}
