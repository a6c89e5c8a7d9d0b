//! The four golden folders: weights, configuration, tokenizer and chat template, compared with the
//! records of the reference implementation (`tests/golden/README.md`).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::{Value, json};
use support::{Folder, MODELS, cases, hf_module, open, sha256};
use tritmill_engine::{
    chat::Message,
    config::{Activation, Linear},
    files::Model,
    formats::Scale,
};

fn check_weights(model: &Model, cases: &Value, expected_name: impl Fn(usize, Linear) -> String) {
    let unpacked = cases["unpacked_weights"].as_object().unwrap();
    let config = model.config();
    assert_eq!(unpacked.len(), config.layer_count * 7);
    for layer in 0..config.layer_count {
        for linear in Linear::OF_ATTENTION {
            let name = expected_name(layer, linear);
            let matrix = model.ternary(layer, linear).unwrap();
            let expected = &unpacked[&name];
            assert_eq!(expected["shape"][0], matrix.rows, "{name}");
            assert_eq!(expected["shape"][1], matrix.cols, "{name}");
            assert_eq!(expected["sha256_of_row_major_int8"], sha256(&matrix), "{name}");
            let (Scale::Multiply(scale) | Scale::Divide(scale)) = matrix.scale;
            let expected_scale = expected["weight_scale"].as_f64().unwrap() as f32;
            let ulps = expected_scale.to_bits().abs_diff(scale.to_bits());
            // The reference sums the mean of an online model in f32, in another order.
            let tolerance = if model.name() == "bitnet-online-tiny" { 4 } else { 0 };
            assert!(ulps <= tolerance, "{name}: {scale} is not {expected_scale}");
        }
    }
}

fn hf_name(layer: usize, linear: Linear) -> String {
    format!("model.layers.{layer}.{}.weight", hf_module(linear))
}

#[test]
fn unpacked_weights_of_every_folder_equal_the_reference() {
    for name in MODELS {
        let model = open(name);
        check_weights(&model, &cases(name), hf_name);
    }
}

#[test]
fn scale_is_multiplied_for_autobitlinear_and_divided_for_bitlinear() {
    for name in MODELS {
        let model = open(name);
        let divides = matches!(model.ternary(0, Linear::Q).unwrap().scale, Scale::Divide(_));
        assert_eq!(divides, name == "llama-tiny", "{name}");
    }
}

#[test]
fn configuration_follows_the_conventions_of_each_family() {
    let config = |name| open(name).config().clone();
    let bitnet = config("bitnet-tiny");
    assert_eq!((bitnet.hidden_size, bitnet.head_dim, bitnet.vocab_size), (256, 32, 1024));
    assert_eq!((bitnet.activation, bitnet.sub_norms), (Activation::SquaredRelu, true));
    assert_eq!((bitnet.tied_head, bitnet.linear_norm_eps), (true, None));
    assert_eq!((bitnet.bos_token, bitnet.eos_tokens.as_slice()), (Some(1019), &[1020, 1023][..]));

    let norm = config("llama-norm-tiny");
    assert_eq!((norm.rope_theta, norm.rms_norm_eps), (1_000_042.0, 1e-6));
    assert_eq!((norm.linear_norm_eps, norm.head_dim), (Some(1e-5), 64));
    assert_eq!((norm.activation, norm.sub_norms, norm.tied_head), (Activation::Silu, false, false));
    assert_eq!(config("bitnet-online-tiny").rope_theta, 10_000.0);
}

#[test]
fn tokenizer_encodes_and_decodes_every_case() {
    for name in MODELS {
        let model = open(name);
        for case in cases(name)["tokenizer"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids =
                |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
            let tokenizer = model.tokenizer();
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids("ids"), "{text:?}");
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids("ids_no_special"), "{text:?}");
            assert_eq!(tokenizer.decode(&ids("ids"), false), case["decoded"], "{text:?}");
            assert_eq!(
                tokenizer.decode(&ids("ids"), true),
                case["decoded_skip_special"],
                "{text:?}"
            );
        }
    }
}

#[test]
fn prompts_encode_to_the_recorded_ids() {
    for name in MODELS {
        let model = open(name);
        for prompt in cases(name)["prompts"].as_array().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(prompt["ids"].clone()).unwrap();
            let text = prompt["text"].as_str().unwrap();
            assert_eq!(model.tokenizer().encode(text, true).unwrap(), ids);
        }
    }
}

#[test]
fn chat_template_renders_every_case() {
    let mut count = 0;
    for name in MODELS {
        let model = open(name);
        for case in cases(name)["chat"].as_array().unwrap() {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            let text = model.chat_template().unwrap().render(&messages, prompt).unwrap();
            assert_eq!(case["rendered"], text);
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(model.tokenizer().encode(&text, false).unwrap(), ids);
            count += 1;
        }
    }
    assert_eq!(count, 8);
}

#[test]
fn model_without_a_template_has_none() {
    assert!(open("llama-norm-tiny").chat_template().is_none());
}

/// Makes a folder of 1bitLLM from one with dense weights: other keys, and other names of two norms.
fn one_bit_llm(folder: &Folder) {
    folder.edit_json("config.json", |config| {
        config["model_type"] = json!("llama");
        (config["weight_bits"], config["input_bits"]) = (json!(1), json!(8));
        config.as_object_mut().unwrap().shift_remove("quantization_config");
    });
    folder.edit_weights(|header, _| {
        let renamed = header.iter().map(|(name, entry)| {
            let name = name.replace("attn_sub_norm", "inner_attn_ln");
            (name.replace("ffn_sub_norm", "ffn_layernorm"), entry.clone())
        });
        *header = renamed.collect();
    });
}

#[test]
fn folders_of_1bitllm_are_quantized_as_online_models() {
    let online = Folder::copy("bitnet-online-tiny");
    online.edit_json("config.json", |config| config["hidden_act"] = json!("silu"));
    let expected = Model::open(online.path()).unwrap();
    let folder = Folder::copy("bitnet-online-tiny");
    folder.edit_json("config.json", |config| config["hidden_act"] = json!("silu"));
    one_bit_llm(&folder);
    let model = Model::open(folder.path()).unwrap();
    assert!(model.config().sub_norms && model.config().tied_head);
    support::check_same_weights(&model, &expected);
    assert_eq!(model.fingerprint().unwrap(), expected.fingerprint().unwrap());

    for (key, value) in
        [("weight_bits", json!(2)), ("input_bits", json!(16)), ("input_bits", json!(null))]
    {
        let other = Folder::copy("bitnet-online-tiny");
        one_bit_llm(&other);
        other.edit_json("config.json", |config| config[key] = value);
        let message = Model::open(other.path()).unwrap_err().to_string();
        assert!(message.contains("_bits"), "{message}");
    }
}
