//! Calls of tools: whatever a model draws, its calls have the arguments that their schemas describe.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{path::Path, sync::Arc};

use serde_json::{Value, json};
use tritmill_engine::{
    FinishReason, Grammar, Request, SamplingParams,
    chat::{AnswerLayout, CallSyntax, Calls, Function, Piece},
    files::Model,
    generate,
    load::{self, EngineOptions},
};

fn functions() -> Vec<Function> {
    let function = |name: &str, parameters: Value| Function { name: name.to_owned(), parameters };
    let place = json!({
        "type": "object",
        "$defs": { "days": { "type": "array", "items": { "type": "integer", "maximum": 9 }, "maxItems": 3 } },
        "properties": {
            "unit": { "enum": ["C", "F"] },
            "days": { "$ref": "#/$defs/days" },
            "exact": { "type": "boolean" },
        },
        "required": ["unit", "exact"],
        "additionalProperties": false,
    });
    vec![
        function("look_up", place),
        function(
            "now",
            json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        ),
    ]
}

/// An answer's calls, by name and arguments, and how it ended.
fn answer(calls: &Arc<Calls>, seed: u64) -> (Vec<(String, String)>, FinishReason) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bitnet-tiny");
    let model = Arc::new(Model::open(&golden).unwrap());
    let mut engine = load::engine(&model, &EngineOptions::default()).unwrap();
    let grammar: Grammar = calls.grammar(false);
    grammar.check().unwrap_or_else(|error| panic!("{error}: {grammar:?}"));
    let request = Request {
        prompt: vec![1, 2, 3],
        sampling: SamplingParams { max_tokens: 400, seed, ..SamplingParams::default() },
        constraint: Some(load::grammars(&model).unwrap().compile(&grammar).unwrap()),
        ..Request::default()
    };
    let output = generate::run(&mut engine, request, |_, _| {}).unwrap();
    let choice = &output.choices[0];
    let layout = AnswerLayout { calls: Some(Arc::clone(calls)), ..AnswerLayout::default() };
    let mut found: Vec<(String, String)> = Vec::new();
    for piece in layout.divide(&choice.text) {
        match piece {
            Piece::Call(name) => found.push((name, String::new())),
            Piece::Arguments(text) => found.last_mut().unwrap().1.push_str(&text),
            other => panic!("{other:?} in {:?}", choice.text),
        }
    }
    (found, choice.finish_reason)
}

#[test]
fn drawn_calls_have_arguments_of_their_schemas() {
    for syntax in [CallSyntax::Json, CallSyntax::Tags] {
        let calls = Arc::new(Calls { syntax, functions: functions(), one_call: true });
        let mut complete = 0;
        for seed in 0..12 {
            let (calls, reason) = answer(&calls, seed);
            if reason != FinishReason::Stop {
                continue;
            }
            complete += 1;
            let [(name, arguments)] = &calls[..] else { panic!("{calls:?}") };
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            match name.as_str() {
                "look_up" => {
                    assert!(arguments["exact"].is_boolean(), "{arguments}");
                    assert!(
                        ["C", "F"].contains(&arguments["unit"].as_str().unwrap()),
                        "{arguments}"
                    );
                    assert!(arguments.get("days").is_none_or(Value::is_array), "{arguments}");
                }
                "now" => assert_eq!(arguments, json!({})),
                other => panic!("{other}"),
            }
        }
        assert!(complete >= 6, "{syntax:?}: {complete}");
    }
}
