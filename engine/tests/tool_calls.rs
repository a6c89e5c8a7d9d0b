//! Calls of tools: whatever a model draws, its calls have the arguments that their schemas describe.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{path::Path, sync::Arc};

use serde_json::{Value, json};
use tritmill_engine::{
    FinishReason, Grammar, Request, SamplingParams,
    chat::{self, AnswerLayout, CallSyntax, Calls, Function, Piece},
    files::Model,
    generate,
    load::{self, EngineOptions},
};
use tritmill_grammar::{Compiler, Word};

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

/// Draws an answer that begins with these bytes, token by token, as far as the grammar allows. Returns the text.
fn text_after(grammar: &Grammar, first: &str, seed: usize) -> String {
    grammar.check().unwrap_or_else(|error| panic!("{error}: {grammar:?}"));
    let words: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    let words = words.iter().map(|word| Word::Text(word)).chain([Word::Special]);
    let compiler = Compiler::new(words, &[256]).unwrap();
    let mut constraint = compiler.compile(grammar).unwrap();
    let mut bytes = Vec::new();
    for place in 0..2000 {
        if constraint.has_ended() || constraint.allows(256) {
            break;
        }
        let forced = first.as_bytes().get(place).map(|byte| u32::from(*byte));
        let allowed: Vec<u32> = (0..256).filter(|token| constraint.allows(*token)).collect();
        // ASCII alone, so that texts end soon.
        let ascii = allowed.iter().copied().filter(|token| (32..123).contains(token));
        let ascii: Vec<u32> = ascii.collect();
        let some = if ascii.is_empty() { &allowed } else { &ascii };
        let token = forced.unwrap_or_else(|| some[(place * 7919 + seed) % some.len()]);
        assert!(
            constraint.allows(token),
            "{:?} after {:?}",
            token,
            String::from_utf8_lossy(&bytes)
        );
        constraint.advance(token).unwrap();
        constraint.find_allowed().unwrap();
        bytes.push(token as u8);
    }
    String::from_utf8(bytes).unwrap()
}

#[test]
fn constrained_answers_may_begin_with_thinking_or_not() {
    let schema = json!({
        "type": "object", "properties": { "day": { "enum": ["Monday", "Friday"] } },
        "required": ["day"], "additionalProperties": false,
    });
    let choice = Grammar::Choice(vec!["yes".to_owned(), "no".to_owned()]);
    let calls = Calls { syntax: CallSyntax::Json, functions: functions(), one_call: true };
    let layout = AnswerLayout {
        may_think: true,
        calls: Some(Arc::new(calls.clone())),
        ..AnswerLayout::default()
    };
    let grammars = [
        (chat::text_after_thinking(&Grammar::of_schema(&schema)), "{"),
        (chat::text_after_thinking(&choice), "y"),
        (chat::calls_after_thinking(calls.grammar(false)), "<tool_call>"),
        (chat::calls_after_thinking(calls.or_text(&Grammar::of_schema(&schema))), "{"),
    ];
    for (index, (grammar, begin)) in grammars.iter().enumerate() {
        for think in ["", "<think>a {\"day\": <b>\n</think>\n\n", "<think></think>"] {
            let text = text_after(grammar, &format!("{think}{begin}"), index);
            let pieces = layout.divide(&text);
            let thought = matches!(&pieces[0], Piece::Reasoning(thought) if !thought.is_empty());
            assert_eq!(thought, think.contains('a'), "{text:?}");
            let content: String = pieces
                .iter()
                .filter_map(|piece| match piece {
                    Piece::Content(text) => Some(text.as_str()),
                    _ => None,
                })
                .collect();
            match index {
                1 => assert_eq!(content, "yes"),
                2 => {
                    assert!(matches!(&pieces[pieces.len() - 1], Piece::Arguments(_)), "{pieces:?}")
                }
                _ => {
                    let value: Value = serde_json::from_str(&content).unwrap();
                    assert!(
                        ["Monday", "Friday"].contains(&value["day"].as_str().unwrap()),
                        "{content}"
                    );
                }
            }
        }
    }
    let expression = Grammar::Regex("a+".to_owned());
    assert_eq!(chat::text_after_thinking(&expression), expression);
}
