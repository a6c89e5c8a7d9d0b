//! Random walks through grammars: every answer matches, by another parser's judgement.

use serde_json::{Value, json};
use tritmill_grammar::{Compiler, Constraint, Grammar, Word};

/// End of text.
const END: u32 = 0;

/// Tokens: the end, a special one, every byte, and some texts of several bytes.
fn vocabulary() -> Vec<(bool, Vec<u8>)> {
    let texts = [
        "true", "false", "null", "\": ", "\", \"", "{\"", "\"}", "12", "ab", "2024-", " \"", "é",
        "[", "]}",
    ];
    let special = [(true, b"<end>".to_vec()), (true, b"<tool>".to_vec())];
    let bytes = (0..=255u8).map(|byte| (false, vec![byte]));
    let texts = texts.iter().map(|text| (false, text.as_bytes().to_vec()));
    special.into_iter().chain(bytes).chain(texts).collect()
}

fn compiler() -> Compiler {
    let vocabulary = vocabulary();
    let words = vocabulary.iter().map(|(special, bytes)| match special {
        true => Word::Special,
        false => Word::Text(bytes),
    });
    Compiler::new(words, &[END]).expect("there is an end")
}

fn allowed(constraint: &Constraint) -> Vec<u32> {
    let is_set = |token: &u32| constraint.allowed()[*token as usize / 32] >> (token % 32) & 1 == 1;
    (0..vocabulary().len() as u32).filter(is_set).collect()
}

/// Looks ahead, at what may follow a token and a few more. Returns what may follow the token.
fn look_ahead(constraint: &Constraint, token: u32, random: &mut fastrand::Rng) -> Vec<u32> {
    let (mut ahead, mut next, mut first) = (constraint.look_ahead(), token, None);
    for _ in 0..random.usize(1..5) {
        ahead.advance(next).expect("the token is allowed");
        if ahead.has_ended() {
            break;
        }
        ahead.find_allowed().expect("something may follow");
        let tokens = allowed(&ahead);
        next = tokens[random.usize(..tokens.len())];
        first.get_or_insert(tokens);
        if next == END {
            break;
        }
    }
    first.unwrap_or_default()
}

/// Draws tokens until the answer ends; an end that is allowed is taken soon.
fn answer(compiler: &Compiler, grammar: &Grammar, random: &mut fastrand::Rng) -> Vec<u8> {
    let (vocabulary, mut bytes) = (vocabulary(), Vec::new());
    let mut constraint = compiler.compile(grammar).expect("it was checked");
    for _ in 0..20_000 {
        if constraint.has_ended() {
            return bytes;
        }
        let mut tokens = allowed(&constraint);
        assert!(!tokens.contains(&1), "special tokens are not text");
        // Closing is as likely as everything else: walks end.
        let closing: Vec<u32> = tokens
            .iter()
            .copied()
            .filter(|token| {
                let bytes = &vocabulary[*token as usize].1;
                *token == END
                    || bytes.ends_with(b"\"")
                    || bytes.ends_with(b"}")
                    || bytes.ends_with(b"]")
            })
            .collect();
        if !closing.is_empty() && random.bool() {
            tokens = closing;
        }
        let token = tokens[random.usize(..tokens.len())];
        if token == END {
            return bytes;
        }
        bytes.extend_from_slice(&vocabulary[token as usize].1);
        let ahead = look_ahead(&constraint, token, random);
        assert!(constraint.allows(token));
        constraint.advance(token).expect("the token is allowed");
        constraint.find_allowed().expect("something may follow");
        assert!(constraint.has_ended() || allowed(&constraint) == ahead);
        if random.bool() {
            constraint.set_allowed(constraint.allowed().to_vec());
        }
    }
    panic!("no end: {}", String::from_utf8_lossy(&bytes));
}

fn answers(grammar: &Grammar, count: usize) -> Vec<String> {
    grammar.check().expect("it can be used");
    let (compiler, mut random) = (compiler(), fastrand::Rng::with_seed(7));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("answers are UTF-8");
    (0..count).map(|_| text(answer(&compiler, grammar, &mut random))).collect()
}

#[test]
fn answers_to_a_schema_are_what_it_describes() {
    let schema = json!({
        "type": "object",
        "properties": {
            "date": { "type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$" },
            "count": { "type": "integer", "minimum": 3, "maximum": 17 },
            "tags": { "type": "array", "items": { "enum": ["a", "b\"c"] }, "maxItems": 3 },
        },
        "required": ["date", "count", "tags"],
        "additionalProperties": false,
    });
    for text in answers(&Grammar::of_schema(&schema), 300) {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let object = value.as_object().expect("an object");
        assert_eq!(object.len(), 3, "{text}");
        let date = object["date"].as_str().expect("a string");
        assert!(date.len() == 7 && date.as_bytes()[4] == b'-', "{text}");
        assert!((3..=17).contains(&object["count"].as_i64().expect("an integer")), "{text}");
        let tags = object["tags"].as_array().expect("a list");
        assert!(tags.len() <= 3 && tags.iter().all(|tag| tag == "a" || tag == "b\"c"), "{text}");
    }
}

#[test]
fn integers_beyond_doubles_stay_within_their_bounds() {
    let schema = json!({
        "type": "object",
        "properties": {
            "near": { "type": "integer", "minimum": 9_007_199_254_740_993_u64, "maximum": 9_007_199_254_740_999_u64 },
            "above": { "type": "integer", "exclusiveMinimum": 9_007_199_254_740_992_u64, "maximum": 9_007_199_254_740_999_u64 },
            "any": { "type": ["integer", "null"], "minimum": i64::MIN, "maximum": i64::MAX },
        },
        "required": ["near", "above", "any"],
        "additionalProperties": false,
    });
    for text in answers(&Grammar::of_schema(&schema), 100) {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let near = value["near"].as_u64().expect("an integer");
        assert!((9_007_199_254_740_993..=9_007_199_254_740_999).contains(&near), "{text}");
        assert!(value["above"].as_u64().expect("an integer") > 9_007_199_254_740_992, "{text}");
        // A zero may have a sign, which `Value` has for doubles alone.
        let any = &value["any"];
        assert!(any.is_i64() || any.is_null() || any.as_f64() == Some(0.0), "{text}");
    }
}

#[test]
fn records_have_the_names_that_their_schema_lists() {
    let schema = json!({
        "type": "object",
        "propertyNames": { "type": "string", "enum": ["x", "y"] },
        "additionalProperties": { "type": "boolean" },
        "required": ["x", "y"],
    });
    for text in answers(&Grammar::of_schema(&schema), 50) {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let object = value.as_object().expect("an object");
        assert!(object.len() == 2 && object.values().all(Value::is_boolean), "{text}");
    }
}

#[test]
fn json_objects_are_json_objects() {
    for text in answers(&Grammar::JsonObject, 200) {
        // RFC 8259 sets no limit for numbers, so a value of 1e999 is one; `Value` has none for it.
        let syntax: Result<serde::de::IgnoredAny, _> = serde_json::from_str(&text);
        assert!(syntax.is_ok() && text.starts_with('{'), "{text}: {syntax:?}");
    }
}

#[test]
fn expressions_choices_and_grammars_are_matched_as_a_whole() {
    let numbers = answers(&Grammar::Regex("[0-9]{2,3}(ab|é)".to_owned()), 100);
    for text in numbers {
        let digits = text.trim_end_matches("ab").trim_end_matches('é');
        assert!((2..=3).contains(&digits.len()) && digits.len() < text.len(), "{text}");
        assert!(digits.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
    }
    let texts = ["yes", "no", "a \"quoted\\ one\n", "né"].map(str::to_owned);
    let chosen = answers(&Grammar::Choice(texts.to_vec()), 100);
    assert!(chosen.iter().all(|text| texts.contains(text)), "{chosen:?}");
    assert!(texts.iter().all(|text| chosen.contains(text)), "each is possible");
    let lark = "start: \"(\" start \")\" | \"x\"".to_owned();
    for text in answers(&Grammar::Lark(lark), 50) {
        let depth = text.find('x').expect("one x");
        assert_eq!(text, format!("{}x{}", "(".repeat(depth), ")".repeat(depth)));
    }
}

#[test]
fn tokens_that_are_not_allowed_are_refused() {
    let grammar = Grammar::Choice(vec!["ab".to_owned()]);
    let mut constraint = compiler().compile(&grammar).expect("it can be used");
    let a = 2 + u32::from(b'a');
    assert!(allowed(&constraint).contains(&a));
    constraint.clone().advance(2 + u32::from(b'b')).expect_err("it begins with a");
    constraint.advance(a).expect("it begins with a");
    assert!(!constraint.has_ended() && constraint.is_stale());
    constraint.find_allowed().expect("something may follow");
    assert_eq!(allowed(&constraint), [2 + u32::from(b'b')]);
}

#[test]
fn what_cannot_be_used_is_refused_by_name() {
    let refused = |grammar: Grammar| grammar.check().expect_err("it cannot be used").to_string();
    let schema =
        json!({ "type": "object", "unevaluatedProperties": false, "dependentSchemas": {} });
    let problem = refused(Grammar::of_schema(&schema));
    assert!(problem.contains("dependentSchemas") || problem.contains("unevaluated"), "{problem}");
    let inside = json!({ "properties": { "a": { "items": { "type": "array", "contains": {} } } } });
    assert_eq!(
        refused(Grammar::of_schema(&inside)),
        "$.properties.a.items.contains is not supported"
    );
    assert_eq!(refused(Grammar::of_schema(&json!({ "$ref": "#" }))), "no text matches it");
    let count = json!({ "properties": { "a": { "type": "object", "minProperties": 2 } } });
    assert!(refused(Grammar::of_schema(&count)).starts_with("$.properties.a: minProperties"));
    assert!(refused(Grammar::JsonSchema("{".to_owned())).contains("no JSON"));
    assert!(refused(Grammar::JsonSchema("3".to_owned())).contains("object"));
    assert!(refused(Grammar::Regex("a(".to_owned())).contains("unclosed group"));
    assert!(!refused(Grammar::Lark("start: other".to_owned())).is_empty());
    assert!(refused(Grammar::Choice(vec![])).contains("one or more"));
    assert!(refused(Grammar::Regex("a".repeat(300_000))).contains("at most"));
    let end_missing = Compiler::new([Word::Text(b"a")].into_iter(), &[5]).expect_err("no end");
    assert!(end_missing.to_string().contains("end-of-text"));
}

#[test]
fn grammar_applies_after_a_text() {
    let token = |text: &[u8]| {
        vocabulary().iter().position(|(_, bytes)| bytes == text).expect("a token") as u32
    };
    let constraint = |regex: &str| {
        let grammar = Grammar::Regex(regex.to_owned());
        compiler().compile(&grammar).expect("it can be used").after(&["z", "b]"])
    };
    // The second text ends inside a token, and the grammar begins with the rest.
    let mut one = constraint("\\}xy?");
    for text in [&b"b"[..], b"]", b"z", b"ab"] {
        one.advance(token(text)).expect("any token may come");
        assert!(one.allows_all() && !one.is_stale());
    }
    one.advance(token(b"]}")).expect("any token may come");
    assert!(!one.allows_all());
    one.find_allowed().expect("something may follow");
    assert_eq!(allowed(&one), [token(b"x")]);
    one.clone().advance(token(b"y")).expect_err("it is x");
    // What the grammar refuses is text like any other: the last text may come once more.
    let mut other = constraint("x");
    for text in [&b"z"[..], b"b", b"]}", b"b"] {
        other.advance(token(text)).expect("any token may come");
        assert!(other.allows_all());
    }
    other.advance(token(b"]")).expect("any token may come");
    assert!(!other.allows_all());
    other.find_allowed().expect("something may follow");
    assert_eq!(allowed(&other), [token(b"x")]);
}
