//! Tokenizers of strangers: what the library would panic at, or take endless memory for, is an error that names its key.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::{Value, json};
use support::{Folder, golden};
use tritmill_engine::{
    files::Model,
    tokenizer::{Tokenizer, TokenizerError},
};

const BYTES: &str = "bitnet-tiny/tokenizer.json";
const PIECES: &str = "../data/spm-bpe-bytes.tokenizer.json";

/// Returns the tokenizer of a file after an edit.
fn edited(file: &str, edit: impl FnOnce(&mut Value)) -> Result<Tokenizer, TokenizerError> {
    let mut json = serde_json::from_slice(&std::fs::read(golden(file)).unwrap()).unwrap();
    edit(&mut json);
    Tokenizer::from_json(json.to_string().as_bytes())
}

/// Checks that a file is refused after an edit, with an error that contains `expected`.
fn refused(file: &str, expected: &str, edit: impl FnOnce(&mut Value)) {
    let error = edited(file, edit).expect_err("the tokenizer must be refused").to_string();
    assert!(error.starts_with("tokenizer.json: "), "{error}");
    assert!(error.contains(expected), "{expected}: {error}");
}

#[test]
fn post_processors_that_cannot_be_followed_are_refused_by_their_place() {
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let second = json!({ "Sequence": { "id": "B", "type_id": 0 } });
    let token = |id: &str| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
    let template = |single: Value| {
        let (ids, tokens) = (vec![5; 33], vec!["<s>"; 33]);
        let special = json!({ "<s>": { "id": "<s>", "ids": ids, "tokens": tokens } });
        json!({ "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special })
    };
    let sequence = |list: Value| json!({ "type": "Sequence", "processors": list });
    for (processor, expected) in [
        (
            template(json!([token("zz"), text])),
            "post_processor.single[0].SpecialToken.id is \"zz\": special_tokens has no such token",
        ),
        (
            template(json!([text, second])),
            "post_processor.single[1].Sequence.id is \"B\": one text is the sequence A",
        ),
        (
            sequence(json!([{ "type": "ByteLevel" }, template(json!([text, second]))])),
            "post_processor.processors[1].single[1].Sequence.id is \"B\"",
        ),
        (template(json!([{ "Sequence": ["B", 0] }])), "single[0].Sequence.id is null"),
        (template(json!([text, "zz"])), "post_processor.single[1] is \"zz\": a piece"),
        (template(json!([token("<s>")])), "the text must be in it once"),
        (template(json!([text, text])), "the text must be in it once"),
        (template(json!([token("<s>"), text, token("<s>")])), "more than 64 tokens"),
        (
            sequence(json!([template(json!([text])), template(json!([text]))])),
            "a text goes through one template",
        ),
        // The library looks at the fields and not at the type.
        (
            json!({ "type": "ByteLevel", "single": [second], "pair": [], "special_tokens": {} }),
            "post_processor.single[0].Sequence.id is \"B\"",
        ),
        (json!([["</s>", 2], ["<s>", 0], true, true]), "a post-processor is an object"),
    ] {
        refused(BYTES, expected, |json| json["post_processor"] = processor.clone());
    }
    let framed = edited(BYTES, |json| {
        json["post_processor"] = template(json!([token("<s>"), text]));
    });
    assert_eq!(framed.unwrap().encode("", true).unwrap(), [5; 33]);
}

#[test]
fn tokens_around_a_text_that_the_model_lacks_are_refused_by_id() {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer.json", |json| {
        let template = &mut json["post_processor"]["processors"][1];
        template["special_tokens"]["<|begin_of_text|>"]["ids"] = json!([4_000_000_000u32]);
    });
    let error = Model::open(folder.path()).unwrap_err().to_string();
    let expected = "post_processor is 4000000000: no token of the vocabulary has this id";
    assert_eq!(error, format!("tokenizer.json: {expected}"));
}

#[test]
fn steps_that_the_library_would_panic_at_are_refused_by_their_place() {
    let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    for (step, expected) in [
        (json!({ "type": "Prepend", "prepend": "" }), "normalizer.prepend is \"\""),
        (json!({ "type": "Other", "prepend": "" }), "normalizer.type is \"Other\""),
        (json!({ "type": "Split", "prepend": "" }), "normalizer.type is \"Split\""),
        (json!({ "type": "BertNormalizer", "prepend": "" }), "it needs clean_text"),
        (json!({ "prepend": "x" }), "a step is an object with a type"),
        (
            json!({ "type": { "Precompiled": null }, "precompiled_charsmap": "AAAA" }),
            "a step is an object with a type",
        ),
        (replace(json!({ "String": "" }), "a"), "normalizer.pattern is {\"String\":\"\"}"),
        (replace(json!({ "Regex": "" }), "a"), "normalizer.pattern is {\"Regex\":\"\"}"),
        (replace(json!({ "Regex": r"(?=a\K)" }), "a"), "normalizer.pattern is"),
        (replace(json!({ "String": "a" }), &"a".repeat(65)), "normalizer.content is"),
        (
            json!({ "type": "Sequence", "normalizers": [
                { "type": "NFC" },
                { "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "" }] },
            ] }),
            "normalizer.normalizers[1].normalizers[0].prepend is \"\"",
        ),
    ] {
        refused(BYTES, expected, |json| json["normalizer"] = step.clone());
    }
    let regex = json!({ "Regex": r"(?:(a\1|b)c)+" });
    for (step, expected) in [
        (json!({ "type": "FixedLength", "length": 0 }), "pre_tokenizer.length is 0"),
        (
            json!({ "type": { "FixedLength": null }, "length": 0 }),
            "a step is an object with a type",
        ),
        (
            json!({ "type": "Split", "pattern": regex, "behavior": "Removed", "invert": false }),
            "pre_tokenizer.pattern is",
        ),
    ] {
        refused(PIECES, expected, |json| json["pre_tokenizer"] = step.clone());
    }
    let mut nested = json!({ "type": "NFC" });
    for _ in 0..9 {
        nested = json!({ "type": "Sequence", "normalizers": [nested] });
    }
    refused(BYTES, "nested too deeply", |json| json["normalizer"] = nested);
}

#[test]
fn steps_that_make_texts_endless_are_refused_where_they_do() {
    let replace = |count: usize| {
        let content = "a".repeat(count);
        json!({ "type": "Replace", "pattern": { "String": "a" }, "content": content })
    };
    let sequence = |steps: Vec<Value>| json!({ "type": "Sequence", "normalizers": steps });
    let form = json!({ "type": "NFKD" });
    for (normalizer, expected) in [
        (sequence(vec![replace(1000); 4]), "normalizer.normalizers[0].content"),
        (sequence(vec![replace(32); 3]), "normalizer.normalizers[2] is"),
        // A form of compatibility is up to eleven times as long.
        (
            sequence(vec![replace(8), form.clone(), replace(8), form]),
            "normalizer.normalizers[3] is",
        ),
    ] {
        refused(BYTES, expected, |json| json["normalizer"] = normalizer);
    }
    refused(BYTES, "pre_tokenizer.pretokenizers[10] is", |json| {
        let step = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
        json["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": vec![step; 11] });
    });
    let usual = edited(PIECES, |json| {
        let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        json["normalizer"] = sequence(vec![json!({ "type": "Prepend", "prepend": "▁" }), spaces]);
        json["pre_tokenizer"] = Value::Null;
    });
    let text = "a tokenizer as Llama's";
    let expected = edited(PIECES, |_| {}).unwrap().encode(text, false).unwrap();
    assert_eq!(usual.unwrap().encode(text, false).unwrap(), expected);
}

/// The library gives no place to what it puts before a text in this way, and its next step would reach beyond the text.
#[test]
fn text_that_a_pattern_without_characters_puts_in_front_is_the_same_as_a_prefix() {
    let normalized = |first: Value| {
        let tokenizer = edited(PIECES, |json| {
            let steps = [first, json!({ "type": "Lowercase" }), json!({ "type": "NFKC" })];
            json["normalizer"] = json!({ "type": "Sequence", "normalizers": steps });
            json["pre_tokenizer"] = Value::Null;
        });
        tokenizer.unwrap()
    };
    let pattern = json!({ "Regex": "^" });
    let replaced = normalized(json!({ "type": "Replace", "pattern": pattern, "content": "▁▁" }));
    let prefixed = normalized(json!({ "type": "Prepend", "prepend": "▁▁" }));
    for text in ["", "A", "Ä", "Abc", "ＡbC ﬁn", "a\u{301}b"] {
        let expected = prefixed.encode(text, false).unwrap();
        assert_eq!(replaced.encode(text, false).unwrap(), expected, "{text:?}");
    }
}

#[test]
fn vocabularies_that_the_library_would_panic_at_are_refused_by_key() {
    refused(BYTES, "joins two tokens of the vocabulary to a third one", |json| {
        let vocab = json["model"]["vocab"].as_object().unwrap();
        let longest = vocab.keys().max_by_key(|token| token.len()).unwrap().clone();
        json["model"]["merges"].as_array_mut().unwrap().push(json!([longest, longest]));
    });
    refused(BYTES, "model.merges[1] is \"zz9 !\"", |json| {
        json["model"]["merges"] = json!(["Ġ t", "zz9 !"]);
    });
    refused(BYTES, "model.merges[0] is \"Ġ t t\": a merge is two tokens", |json| {
        json["model"]["merges"] = json!(["Ġ t t"]);
    });
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        let expected = format!("model.{key} is \"##\"");
        refused(BYTES, &expected, |json| json["model"][key] = json!("##"));
        assert!(edited(BYTES, |json| json["model"][key] = json!("")).is_ok());
    }
    refused(PIECES, "model.type is absent", |json| {
        json["model"] = json!({ "unk_token": "<unk>", "vocab": json["model"]["vocab"] });
    });
    let unigram = |unknown: Value, piece: String| {
        move |json: &mut Value| {
            json["added_tokens"] = json!([]);
            let vocab = json!([["<unk>", 0.0], ["▁", -1.0], [piece, -2.0]]);
            json["model"] = json!({ "type": "Unigram", "unk_id": unknown, "vocab": vocab });
        }
    };
    let why = "the vocabulary has no token for unknown characters";
    let expected = format!("model.unk_id is 9999: {why}");
    refused(PIECES, &expected, unigram(json!(9999), "a".to_owned()));
    let expected = format!("model.unk_id is absent: {why}");
    refused(PIECES, &expected, unigram(Value::Null, "a".to_owned()));
    refused(PIECES, "model.vocab[2] is", unigram(json!(0), "a".repeat(1025)));
    let longest = edited(PIECES, unigram(json!(0), "a".repeat(1024))).unwrap();
    assert_eq!(longest.encode(&"a".repeat(1024), false).unwrap(), [1, 2]);
}

#[test]
fn added_tokens_that_would_be_found_inside_characters_or_spaces_are_refused() {
    let added = |content: &str, lstrip: bool, normalized: bool| {
        json!({
            "id": 1024, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": false,
            "normalized": normalized, "special": false,
        })
    };
    let push = |json: &mut Value, token| json["added_tokens"].as_array_mut().unwrap().push(token);
    let expected = "added_tokens[5].content is \"   \": the normalizer leaves nothing of it";
    refused(BYTES, expected, |json| {
        json["normalizer"] = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
        push(json, added("   ", false, true));
    });
    let expected = "added_tokens[5].content is \" \": another token takes the spaces after it";
    refused(BYTES, expected, |json| {
        json["added_tokens"][0]["rstrip"] = json!(true);
        push(json, added(" ", true, false));
    });
    let alone = edited(BYTES, |json| push(json, added(" ", true, false))).unwrap();
    assert_eq!(alone.encode("  ", false).unwrap(), [1024, 1024]);
}

#[test]
fn list_in_the_place_of_a_tokenizer_is_refused_beside_a_configuration() {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer.json", |json| {
        let keys = ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"];
        let parts: Vec<Value> =
            keys.iter().chain(&["model"]).map(|key| json[*key].clone()).collect();
        *json = json!(parts);
    });
    folder.edit_json("tokenizer_config.json", |json| json["pad_token"] = json!("<pad>"));
    let error = Model::open(folder.path()).unwrap_err().to_string();
    assert!(error.starts_with("tokenizer.json is not valid: "), "{error}");
}

/// Opens a folder after edits of its tokenizer's configuration. `map` becomes `special_tokens_map.json`.
fn configured(edit: impl FnOnce(&mut Value), map: Option<Value>) -> Result<Model, String> {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer_config.json", |json| {
        // Otherwise the map is not read.
        json.as_object_mut().unwrap().shift_remove("added_tokens_decoder");
        edit(json);
    });
    if let Some(map) = map {
        std::fs::write(folder.path().join("special_tokens_map.json"), map.to_string()).unwrap();
    }
    Model::open(folder.path()).map_err(|error| error.to_string())
}

#[test]
fn keys_of_the_configuration_with_a_wrong_type_are_refused_by_name() {
    const TOKEN: &str = "expected a text, or an object with a text as content";
    const TEMPLATE: &str = "expected a text, or a list of named templates";
    const LIST: &str = "expected a list of tokens";
    for (key, value, expected) in [
        ("bos_token", json!(5), format!("bos_token is 5, {TOKEN}")),
        ("pad_token", json!([]), format!("pad_token is [], {TOKEN}")),
        ("eos_token", json!({ "content": 1 }), format!("eos_token is {{\"content\":1}}, {TOKEN}")),
        ("image_token", json!({}), format!("image_token is {{}}, {TOKEN}")),
        ("chat_template", json!(65536), format!("chat_template is 65536, {TEMPLATE}")),
        ("chat_template", json!(["a"]), format!("chat_template is [\"a\"], {TEMPLATE}")),
        ("additional_special_tokens", json!(7), format!("additional_special_tokens is 7, {LIST}")),
        ("extra_special_tokens", json!([7]), format!("extra_special_tokens is [7], {LIST}")),
    ] {
        let error = configured(|json| json[key] = value.clone(), None).unwrap_err();
        assert_eq!(error, format!("tokenizer_config.json: {expected}"));
    }
    let error = configured(|_| {}, Some(json!({ "pad_token": 7 }))).unwrap_err();
    assert_eq!(error, format!("special_tokens_map.json: pad_token is 7, {TOKEN}"));
}

#[test]
fn absent_and_described_values_of_the_configuration_are_read() {
    let model = configured(
        |json| {
            json["bos_token"] = Value::Null;
            json["eos_token"] = json!({ "content": "<|eot_id|>", "lstrip": false });
            json["add_bos_token"] = json!(true);
            json["additional_special_tokens"] = json!([{ "content": "<|eot_id|>" }]);
            json["extra_special_tokens"] = json!({ "image_token": "<|eot_id|>" });
            json["chat_template"] = json!([{ "name": "only", "template": "text" }]);
        },
        Some(json!({ "pad_token": null })),
    )
    .unwrap();
    let template = model.chat_template().unwrap();
    assert_eq!(template.source(), "text");
    let named = template.special_tokens().iter().map(|(name, text)| (&**name, &**text));
    let expected = [("eos_token", "<|eot_id|>"), ("image_token", "<|eot_id|>")];
    assert_eq!(named.collect::<Vec<_>>(), expected);
    let model = configured(|json| json["chat_template"] = Value::Null, None).unwrap();
    assert!(model.chat_template().is_none());
}

#[test]
fn special_tokens_that_the_vocabulary_lacks_are_refused_by_file_and_key() {
    let why = "the vocabulary has no such token";
    for (key, value, text) in [
        ("pad_token", json!("xxxxxxxxxx"), "xxxxxxxxxx"),
        ("eos_token", json!({ "content": "<|end|>" }), "<|end|>"),
        ("additional_special_tokens", json!(["<|eot_id|>", "<|a|>"]), "<|a|>"),
        ("extra_special_tokens", json!({ "image_token": "<|b|>" }), "<|b|>"),
    ] {
        let error = configured(|json| json[key] = value.clone(), None).unwrap_err();
        assert_eq!(error, format!("tokenizer_config.json: {key} is {text:?}: {why}"));
    }
    let error = configured(|_| {}, Some(json!({ "pad_token": "<|c|>" }))).unwrap_err();
    assert_eq!(error, format!("special_tokens_map.json: pad_token is \"<|c|>\": {why}"));
    // One that a file gives an id is another fault.
    let error = configured(
        |json| {
            json["pad_token"] = json!("<|d|>");
            json["added_tokens_decoder"] = json!({ "1024": { "content": "<|d|>" } });
        },
        None,
    );
    let expected = "token \"<|d|>\" has id 1024, outside the vocabulary of 1024";
    assert_eq!(error.unwrap_err(), expected);
}
