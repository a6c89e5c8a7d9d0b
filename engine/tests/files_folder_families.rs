//! Keys and tensors of Hugging Face folders that only some families have.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::{Value, json};
use support::{Folder, config_refusal, parsed};
use tritmill_engine::{
    config::{LongFactors, RopeScaling},
    files::Model,
};

#[test]
fn missing_biases_are_refused_by_name() {
    for (key, tensor) in [("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")] {
        let folder = Folder::copy("llama-tiny");
        folder.edit_json("config.json", |config| config[key] = json!(true));
        let message = Model::open(folder.path()).unwrap_err().to_string();
        assert!(message.contains(&format!("model.layers.0.{tensor}.bias")), "{key}: {message}");
    }
}

#[test]
fn minicpm_needs_its_factors_and_stays_within_its_context() {
    let minicpm = |config: &mut Value| {
        (config["model_type"], config["quantization_config"]) = (json!("minicpm"), Value::Null);
        (config["scale_emb"], config["scale_depth"]) = (json!(12), json!(1.4));
        config["dim_model_base"] = json!(64);
    };
    let accepted = parsed("llama-tiny", minicpm).unwrap().model;
    let factors = accepted.multipliers;
    assert_eq!((factors.embedding, factors.residual, factors.logit_divisor), (12.0, 0.7, 4.0));
    for (key, value) in [
        ("scale_emb", Value::Null),
        ("scale_depth", Value::Null),
        ("dim_model_base", Value::Null),
        ("scale_emb", json!(-1)),
        ("scale_depth", json!(1e-30)),
        ("quantization_config", json!({ "quant_method": "bitnet" })),
    ] {
        let message = config_refusal("llama-tiny", |config| {
            minicpm(config);
            config[key] = value.clone();
        });
        assert!(message.contains(key), "{key}: {message}");
    }
    let longrope = |edit: fn(&mut Value)| {
        let mut scaling = json!({ "rope_type": "longrope", "long_factor": vec![2.0; 16] });
        scaling["short_factor"] = json!(vec![1.5; 16]);
        scaling["original_max_position_embeddings"] = json!(512);
        edit(&mut scaling);
        parsed("llama-tiny", |config| {
            minicpm(config);
            config["rope_scaling"] = scaling;
        })
    };
    let divisors = longrope(|_| {}).unwrap().model.rope_scaling;
    let long_factors = Some(LongFactors { original_context: 512, divisors: vec![2.0; 16] });
    assert_eq!(divisors, RopeScaling::Divisors { divisors: vec![1.5; 16], long_factors });
    let short = longrope(|scaling| scaling["long_factor"] = Value::Null).unwrap();
    let divisors = short.model.rope_scaling;
    assert_eq!(divisors, RopeScaling::Divisors { divisors: vec![1.5; 16], long_factors: None });
    let plain = longrope(|scaling| scaling["short_factor"] = json!(vec![1.0; 16]));
    assert!(plain.unwrap().model.rope_scaling.is_none());
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 5] = [
        ("original_max_position_embeddings", |s| {
            s["original_max_position_embeddings"] = json!(511)
        }),
        ("original_max_position_embeddings", |s| {
            s["original_max_position_embeddings"] = Value::Null
        }),
        ("short_factor", |s| s["short_factor"] = json!(vec![1.5; 15])),
        ("short_factor", |s| s["short_factor"] = json!(vec![0.0; 16])),
        ("other", |s| s["other"] = json!(1)),
    ];
    for (key, edit) in edits {
        let message = longrope(edit).unwrap_err().to_string();
        assert!(message.contains(key), "{key}: {message}");
    }
}
