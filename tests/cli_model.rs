//! The `model` and `bench` commands on the golden models, with valid and invalid arguments.

mod program;

use std::fs;

use program::{fails, golden, json, run};
use serde_json::Value;

const FORMATS: [&str; 3] = ["i2_s", "tl1", "tl2"];
/// Margin of a greedy token, in logits, above which the order of a sum cannot change the choice.
const MARGIN_MIN: f64 = 0.25;

/// Returns a prompt of `bitnet-tiny`'s reference outputs.
fn prompt(index: usize) -> (String, Value) {
    let cases = fs::read(golden("bitnet-tiny/cases.json")).expect("the golden data is there");
    let cases: Value = serde_json::from_slice(&cases).expect("and is JSON");
    let prompt = cases["prompts"][index].clone();
    let ids: Vec<String> =
        prompt["ids"].as_array().expect("ids").iter().map(Value::to_string).collect();
    (ids.join(","), prompt)
}

#[test]
fn logits_match_the_reference_in_every_format() {
    let (ids, prompt) = prompt(2);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut files = Vec::new();
    for format in FORMATS {
        let out = folder.path().join(format);
        let model = golden("bitnet-tiny");
        let arguments = ["model", "logits", "--model", &model, "--tokens", &ids, "--kv", "f32"];
        let more = ["--format", format, "--top", "10", "--json", "--out"];
        let answer = json(&[&arguments[..], &more, &[out.to_str().expect("UTF-8")]].concat());
        let positions = prompt["ids"].as_array().expect("ids").len();
        assert_eq!(answer["positions"], positions);
        assert_eq!(answer["vocab"], 1024);
        let expect = prompt["last_top10"].as_array().expect("the reference's best");
        let top = answer["top"].as_array().expect("the best");
        assert_eq!(top.len(), 10);
        for (ours, reference) in top.iter().zip(expect) {
            let value = |of: &Value| of["logit"].as_f64().expect("a number");
            assert!((value(ours) - value(reference)).abs() < 1e-3, "{ours} for {reference}");
        }
        let bytes = fs::read(&out).expect("the file was written");
        assert_eq!(bytes.len(), positions * 1024 * 4);
        files.push(bytes);
    }
    assert!(files.iter().all(|file| *file == files[0]), "the formats differ");
}

#[test]
fn logits_do_not_depend_on_the_thread_count() {
    let (ids, _) = prompt(3);
    let model = golden("bitnet-tiny");
    let arguments = ["model", "logits", "--model", &model, "--tokens", &ids, "--json"];
    let with = |threads| json(&[&arguments[..], &["--threads", threads]].concat());
    assert_eq!(with("1"), with("3"));
}

#[test]
fn greedy_tokens_match_the_reference_in_every_format() {
    let (ids, prompt) = prompt(1);
    let list = |name: &str| prompt["greedy"][name].as_array().expect("one for each step");
    // Below the margin, the last bit of a sum may decide; the tokens up to there must be equal.
    let decided =
        list("margin").iter().take_while(|margin| margin.as_f64() > Some(MARGIN_MIN)).count();
    assert!(decided > 0, "the first margin of the reference is large");
    let expect = &list("ids")[..decided];
    let model = golden("bitnet-tiny");
    let mut answers = Vec::new();
    for format in FORMATS {
        let arguments = ["model", "generate", "--model", &model, "--tokens", &ids, "--kv", "f32"];
        let more = ["--max-tokens", "48", "--ignore-eos", "--format", format, "--json"];
        let answer = json(&[&arguments[..], &more].concat());
        let tokens = answer["tokens"].as_array().expect("tokens");
        assert_eq!(tokens.len(), 48);
        assert_eq!(answer["finish_reason"], "length");
        assert!(answer["text"].is_string());
        assert_eq!(tokens[..decided], *expect);
        answers.push(answer);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "the formats differ");
}

#[test]
fn text_prompt_and_its_tokens_give_the_same_answer() {
    let (ids, prompt) = prompt(2);
    let model = golden("bitnet-tiny");
    let text = prompt["text"].as_str().expect("text");
    let from = |kind: &str, prompt: &str| {
        let sampling = ["--max-tokens", "8", "--temperature", "0.9", "--seed", "5", "--json"];
        let arguments = ["model", "generate", "--model", &model, kind, prompt];
        json(&[&arguments[..], &sampling].concat())
    };
    assert_eq!(from("--prompt", text), from("--tokens", &ids));
}

#[test]
fn chat_answers_have_log_probabilities() {
    let model = golden("bitnet-tiny");
    let arguments = ["model", "generate", "--model", &model, "--chat", "--prompt", "Hello"];
    let more = ["--max-tokens", "4", "--ignore-eos", "--logprobs", "2", "--json"];
    let answer = json(&[&arguments[..], &more].concat());
    let logprobs = answer["logprobs"].as_array().expect("log-probabilities");
    assert_eq!(logprobs.len(), 4);
    for (token, logprob) in answer["tokens"].as_array().expect("tokens").iter().zip(logprobs) {
        assert_eq!(&logprob["token"], token);
        assert_eq!(logprob["top"].as_array().expect("the best two").len(), 2);
    }
}

#[test]
fn inspect_shows_shape_tensors_and_fingerprint() {
    let answer = json(&["model", "inspect", "--model", &golden("llama-tiny"), "--json"]);
    assert_eq!(answer["name"], "llama-tiny");
    assert_eq!(answer["config"]["layer_count"], 4);
    let fingerprint = answer["fingerprint"].as_str().expect("a fingerprint");
    assert!(fingerprint.len() == 64 && fingerprint.bytes().all(|c| c.is_ascii_hexdigit()));
    let tensors = answer["tensors"].as_array().expect("tensors");
    let head = tensors.iter().find(|tensor| tensor["name"] == "lm_head.weight");
    assert_eq!(head.expect("an untied head")["shape"].to_string(), "[1024,256]");
    let text = run(&["model", "inspect", "--model", &golden("llama-tiny")]);
    assert!(text.stdout.contains("lm_head.weight") && text.stdout.contains(fingerprint));
}

#[test]
fn inspect_shows_factors_and_biases() {
    let text = |file: &str| {
        let path = golden(&format!("group-linears/{file}.gguf"));
        run(&["model", "inspect", "--model", &path]).stdout
    };
    let (minicpm, llama) = (text("minicpm-tq2_0"), text("llama-tq2_0"));
    assert!(minicpm.contains("embedding × 12, blocks × 0.98"), "{minicpm}");
    assert!(minicpm.contains("logits ÷ 4") && !minicpm.contains("biases"), "{minicpm}");
    assert!(llama.contains("q, k, v, o, gate, up, down") && !llama.contains("factors"), "{llama}");
    // Two layers of 256 + 2 × 128 + 256 + 2 × 512 + 256 biases, five norms of 256, two tables.
    let dense = 2 * 2048 + 5 * 256 + 2 * 512 * 256;
    assert!(llama.contains(&format!("{dense} dense")), "{llama}");
}

#[test]
fn inspect_shows_how_much_memory_experts_take() {
    let model = golden("maple-tiny/maple-tiny-tq2_0.gguf");
    let answer = json(&["model", "inspect", "--model", &model, "--json"]);
    let bytes = |name: &str| answer["experts"][name].as_u64().expect("bytes");
    // Four layers of 8 experts of 3 matrices of 256 x 256, of 2 bits and an f16 scale for each group of 128 inputs.
    let all = 4 * 8 * 3 * 256 * (256 / 4 + 2 * 2);
    assert_eq!(bytes("memory_bytes"), all);
    assert_eq!(bytes("memory_bytes_per_token"), all / 8 * 3);
    assert!(answer["weight_memory_bytes"].as_u64() > Some(all), "{answer}");
    let text = run(&["model", "inspect", "--model", &model]).stdout;
    assert!(text.contains("8 a layer, 3 a token: 1.59 MiB of the weights"), "{text}");
    let other = json(&["model", "inspect", "--model", &golden("bitnet-tiny"), "--json"]);
    assert!(other["experts"].is_null() && other["weight_memory_bytes"].is_u64(), "{other}");
}

#[test]
fn converted_models_keep_their_fingerprint() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let model = golden("bitnet-tiny");
    let fingerprint = |model: &str| {
        let mut answer = json(&["model", "inspect", "--model", model, "--json"]);
        answer["fingerprint"].take()
    };
    let (gguf, back) = (path("tiny.gguf"), path("back"));
    let convert = |from: &str, to: &str, out: &str| {
        json(&["model", "convert", "--model", from, "--to", to, "-o", out, "--json"])
    };
    assert_eq!(convert(&model, "gguf-i2_s", &gguf)["inexact_scales"], 0);
    assert_eq!(fingerprint(&gguf), fingerprint(&model));
    convert(&gguf, "hf", &back);
    assert_eq!(fingerprint(&back), fingerprint(&model));
    let arguments = ["model", "convert", "--model", &model, "--to", "onnx", "-o", &back];
    fails(
        &arguments,
        "possible values: gguf-i2_s, gguf-tq2_0, gguf-q2_0, gguf-pq2_0, gguf-ptq1_0, hf",
    );
}

#[test]
fn synthetic_models_can_be_benchmarked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("small").to_str().expect("UTF-8").to_owned();
    let synth = ["model", "synth", "--shape", "bitnet-0.7b", "--layers", "1", "--out", &out];
    assert_eq!(json(&[&synth[..], &["--json"]].concat())["layer_count"], 1);
    let bench = ["bench", "engine", "--model", &out, "--batch", "1,3", "--prompt", "4"];
    let more = ["--generate", "2", "--repetitions", "1", "--json"];
    let answer = json(&[&bench[..], &more].concat());
    let rows = answer["rows"].as_array().expect("rows");
    let phases = rows.iter().map(|row| (row["phase"].as_str(), row["batch"].as_u64()));
    let expect = [("prefill", 1), ("prefill", 3), ("decode", 1), ("decode", 3)];
    assert!(phases.eq(expect.map(|(phase, batch)| (Some(phase), Some(batch)))));
    assert!(rows.iter().all(|row| row["tokens_per_s"].as_f64() > Some(0.0)));
    assert!(answer["weight_bytes"].as_u64() > Some(1 << 20));
    fails(&["model", "synth", "--shape", "gpt-5", "--out", &out], "bitnet-2b");
}

#[test]
fn embedding_models_are_benchmarked_by_texts() {
    let model = golden("bitnet-embedding-tiny/bitnet-embedding-tiny-i2_s.gguf");
    let bench = ["bench", "engine", "--model", &model, "--batch", "1,6", "--prompt", "20"];
    let more = ["--repetitions", "2", "--threads", "1"];
    let answer = json(&[&bench[..], &more, &["--json"]].concat());
    assert_eq!((answer["prompt"].as_u64(), answer["generate"].as_u64()), (Some(20), Some(0)));
    let rows = answer["rows"].as_array().expect("rows");
    let phases = rows.iter().map(|row| (row["phase"].as_str(), row["batch"].as_u64()));
    assert!(phases.eq([1, 6].map(|batch| (Some("embed"), Some(batch)))));
    for row in rows {
        let number = |name: &str| row[name].as_f64().expect("a number");
        assert!((number("texts_per_s") * 20.0 / number("tokens_per_s") - 1.0).abs() < 1e-6);
        assert!(number("texts_per_s") > 0.0 && row["weights_share_of_bandwidth"].is_null());
    }
    let text = run(&[&bench[..], &more].concat()).stdout;
    assert!(text.contains("texts/s") && text.contains("embed "), "{text}");
    let long = ["--prompt", "513"];
    fails(&[&bench[..6], &long].concat(), "513 tokens are more than the model's context of 512");
}

#[test]
fn http_requests_are_benchmarked_without_a_batch() {
    let words = "bench e2e --http --json --batch-lines 0 --callers 3 --generate 4 --batch 4 \
                 --threads 1 --kv-memory 64";
    let figures = json(&words.split_whitespace().collect::<Vec<_>>());
    assert_eq!((figures["requests"].as_u64(), figures["errors"].as_u64()), (Some(15), Some(0)));
    let number = |name: &str| figures[name].as_f64().expect("a number");
    assert!(number("p50_s") > 0.0 && number("p50_s") <= number("p99_s"), "{figures}");
    assert!(number("memory_bytes") > 1e6 && figures["batch_lines"].is_null(), "{figures}");
}

#[test]
fn invalid_arguments_are_refused() {
    let model = golden("bitnet-tiny");
    let logits = ["model", "logits", "--model", &model, "--tokens"];
    let check = |more: &[&str], message: &str| fails(&[&logits[..], more].concat(), message);
    check(&["1,x"], "invalid value 'x'");
    check(&["1", "--format", "q4"], "possible values: i2_s, tl1, tl2");
    check(&["1", "--threads", "0"], "invalid value '0'");
    check(&["1", "--isa", "sse"], "possible values: scalar, neon, avx2, avx512");
    check(&["1024"], "token 1024 is outside the vocabulary of 1024");
    check(&["1", "--out", "/nowhere/logits"], "cannot write /nowhere/logits");
    check(&[], "--tokens <IDS>");
    let generate = ["model", "generate", "--model", &model];
    let check = |more: &[&str], message: &str| fails(&[&generate[..], more].concat(), message);
    check(&[], "required arguments were not provided");
    check(&["--prompt", "a", "--tokens", "1"], "cannot be used with");
    check(&["--prompt", "a", "--temperature", "-1"], "temperature");
    check(&["--prompt", "a", "--top-p", "1.5"], "top_p is 1.5");
    check(&["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0");
    check(&["--prompt", "a", "--logit-bias", "7"], "expected ID=BIAS");
    check(&["--tokens", "5000"], "prompt has token 5000, the vocabulary has 1024");
    fails(&["bench", "kernels"], "on a GPU: --device cuda:0");
    fails(&["model", "fly"], "unrecognized subcommand 'fly'");
}

#[test]
fn invalid_models_are_refused_in_one_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let inspect = |name: &str, message: &str| {
        let output =
            fails(&["model", "inspect", "--model", path(name).to_str().expect("UTF-8")], message);
        assert_eq!(output.stderr.trim_end().lines().count(), 1, "{}", output.stderr);
    };
    inspect("missing", "missing");
    fs::write(path("text.gguf"), "not a model").expect("writable");
    inspect("text.gguf", "text.gguf");
    fs::create_dir(path("empty")).expect("writable");
    inspect("empty", "config.json");

    let copy = |name: &str| {
        fs::create_dir(path(name)).expect("writable");
        for file in fs::read_dir(golden("bitnet-tiny")).expect("readable") {
            let file = file.expect("readable");
            fs::copy(file.path(), path(name).join(file.file_name())).expect("writable");
        }
    };
    copy("torn");
    let weights = path("torn").join("model.safetensors");
    let bytes = fs::read(&weights).expect("copied");
    fs::write(&weights, &bytes[..bytes.len() / 2]).expect("writable");
    inspect("torn", "tensor model.");
    copy("garbled");
    fs::write(path("garbled").join("config.json"), "{\"hidden_size\": ").expect("writable");
    inspect("garbled", "config.json is not valid JSON");
}

#[test]
fn structured_answers_match_and_unusable_schemas_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("the folder is writable");
        path.to_str().expect("UTF-8").to_owned()
    };
    let schema = file(
        "schema",
        r#"{"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}, "b": {"type": "boolean"}},
            "required": ["a", "b"], "additionalProperties": false}"#,
    );
    let model = golden("bitnet-tiny");
    let arguments = ["model", "generate", "--model", &model, "--tokens", "5,6,7", "--json"];
    let with = |more: &[&str]| json(&[&arguments[..], &["--max-tokens", "100"], more].concat());
    for seed in ["1", "2", "3"] {
        let answer = with(&["--json-schema", &schema, "--temperature", "1", "--seed", seed]);
        assert_eq!(answer["finish_reason"], "stop", "{answer}");
        let text = answer["text"].as_str().expect("a text");
        let value: Value = serde_json::from_str(text).expect("JSON");
        assert!((1..=99).contains(&value["a"].as_i64().expect("an integer")), "{text}");
        assert!(value["b"].is_boolean() && value.as_object().expect("an object").len() == 2);
    }
    let choice = with(&["--choice", "left", "--choice", "right"]);
    assert!(["left", "right"].contains(&choice["text"].as_str().expect("a text")), "{choice}");
    let early = with(&["--choice", "left", "--min-tokens", "50"]);
    assert_eq!(early["text"], "left", "the grammar decides where an answer ends");
    let bad = file("bad", r#"{"type": "object", "dependentSchemas": {"a": {}}}"#);
    fails(&[&arguments[..], &["--json-schema", &bad]].concat(), "dependentSchemas");
}
