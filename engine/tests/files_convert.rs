//! Converting, synthesizing and describing models.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::path::Path;

use sha2::{Digest, Sha256};
use support::{Folder, RawGguf, check_same_weights, golden, messages, open};
use tempfile::TempDir;
use tritmill_engine::{
    config::{Experts, Linear, ModelConfig},
    files::{Model, ModelError, Target, convert, inspect, shape, shape_names, synth},
    formats::Scale,
};

/// Checks that weights, configuration, tokenizer and chat template are equal.
fn check_same(a: &Model, b: &Model) {
    check_same_weights(a, b);
    let text = "It's 12345 naïve <|eot_id|> lighthouses\n\n  日本";
    assert_eq!(
        a.tokenizer().encode(text, true).unwrap(),
        b.tokenizer().encode(text, true).unwrap()
    );
    let rendered =
        |model: &Model| model.chat_template().map(|t| t.render(&messages("hi"), true).unwrap());
    assert_eq!(rendered(a), rendered(b));
}

/// Converts a model, and checks that the result is the same model with the same fingerprint.
fn convert_exactly(model: &Model, target: Target, out: &Path) -> Model {
    assert_eq!(convert(model, target, out).unwrap().inexact_scale_count, 0, "{target}");
    let converted = Model::open(out).unwrap();
    check_same(model, &converted);
    assert_eq!(model.fingerprint().unwrap(), converted.fingerprint().unwrap(), "{target}");
    converted
}

#[test]
fn i2_s_keeps_the_fingerprint_of_a_folder_with_multiplied_scales() {
    let dir = TempDir::new().unwrap();
    let model = open("bitnet-tiny");
    let out = dir.path().join("converted.gguf");
    let converted = convert_exactly(&model, Target::GgufI2S, &out);
    assert_eq!(converted.name(), "converted");
    convert_exactly(&converted, Target::Folder, &dir.path().join("back"));
}

#[test]
fn dividing_scales_become_reciprocals_and_are_counted() {
    let dir = TempDir::new().unwrap();
    let mut config = shape("falcon3-1b").unwrap();
    shrink(&mut config);
    synth(&config, &dir.path().join("source"), 3).unwrap();
    let path = dir.path().join("source/config.json");
    let text =
        std::fs::read_to_string(&path).unwrap().replace("\"autobitlinear\"", "\"bitlinear\"");
    std::fs::write(&path, text).unwrap();
    let model = Model::open(&dir.path().join("source")).unwrap();

    for (target, file) in [(Target::GgufI2S, "a.gguf"), (Target::GgufTq2_0, "b.gguf")] {
        let out = dir.path().join(file);
        let report = convert(&model, target, &out).unwrap();
        assert_eq!(report.inexact_scale_count, config.layer_count * 7);
        let converted = Model::open(&out).unwrap();
        check_same(&model, &converted); // also checks that Q and K rows are not permuted
        let (a, b) =
            (model.ternary(0, Linear::Q).unwrap(), converted.ternary(0, Linear::Q).unwrap());
        let (Scale::Divide(a), Scale::Multiply(b)) = (a.scale, b.scale) else { panic!("scales") };
        assert!((a * b - 1.0).abs() < 1e-3);
        assert_ne!(model.fingerprint().unwrap(), converted.fingerprint().unwrap());
    }
}

#[test]
fn tq2_0_keeps_the_fingerprint_when_scales_fit_f16() {
    let dir = TempDir::new().unwrap();
    let model = open("gguf/synth-TQ1_0.gguf");
    convert_exactly(&model, Target::GgufTq2_0, &dir.path().join("converted.gguf"));
}

#[test]
fn online_folders_become_packed_ones() {
    let dir = TempDir::new().unwrap();
    let model = open("bitnet-online-tiny");
    convert_exactly(&model, Target::Folder, dir.path());
}

#[test]
fn rows_of_incomplete_blocks_are_refused_with_the_tensor_name() {
    let dir = TempDir::new().unwrap();
    let model = open("llama-tiny"); // down: 704 = 5.5 * 128
    let out = dir.path().join("out.gguf");
    let error = convert(&model, Target::GgufI2S, &out).unwrap_err();
    let ModelError::Unconvertible { tensor, .. } = error else { panic!("{error}") };
    assert_eq!(tensor, "model.layers.0.mlp.down_proj.weight");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no file remains");
}

#[test]
fn norms_before_linears_are_refused_with_the_tensor_name() {
    let dir = TempDir::new().unwrap();
    let model = open("llama-norm-tiny");
    let error = convert(&model, Target::GgufI2S, &dir.path().join("out.gguf")).unwrap_err();
    assert!(error.to_string().contains("self_attn.q_proj.rms_norm.weight"), "{error}");
    convert_exactly(&model, Target::Folder, &dir.path().join("folder"));
}

fn shrink(config: &mut ModelConfig) {
    config.hidden_size = 256;
    config.head_count = 4;
    config.kv_head_count = 2;
    config.head_dim = 64;
    config.intermediate_size = 512;
    config.set_layer_count(2);
    config.vocab_size = 300;
    if let Some(delta) = &mut config.delta_net {
        (delta.attention_interval, delta.key_heads, delta.value_heads) = (2, 1, 2);
        config.rotary_dim = Some(16);
    }
    if let Some(Experts { count, used, clamp }) = &mut config.experts {
        (*count, *used) = (4, 2);
        assert_eq!(clamp.len(), 2);
        config.rotary_dim = Some(16);
    }
    if let Some(windows) = &mut config.windows {
        windows.layers = vec![true, false];
    }
    if let Some(rotation) = &mut config.rotation {
        (rotation.block, rotation.signs) = (128, vec![vec![-1.0; 256], vec![1.0; 512]]);
    }
}

#[test]
fn synthetic_models_of_every_family_open_and_depend_on_the_seed() {
    let dir = TempDir::new().unwrap();
    for name in shape_names() {
        let mut config = shape(name).unwrap();
        shrink(&mut config);
        let of_shape = dir.path().join(name);
        std::fs::create_dir(&of_shape).unwrap();
        let open = |folder: &str, seed| {
            let is_file = config.group_scales || config.pooling.is_some();
            let name = if is_file { format!("{folder}.gguf") } else { folder.into() };
            let path = of_shape.join(name);
            synth(&config, &path, seed).unwrap();
            Model::open(&path).unwrap()
        };
        let (a, b, c) = (open("a", 1), open("b", 1), open("c", 2));
        assert_eq!(*a.config(), config, "{name}");
        assert_eq!(a.fingerprint().unwrap(), b.fingerprint().unwrap());
        assert_ne!(a.fingerprint().unwrap(), c.fingerprint().unwrap());
        let down = config.linears(1).last().unwrap();
        let trits = a.ternary(1, *down).unwrap().trits;
        for value in [-1, 0, 1] {
            let share = trits.iter().filter(|&&t| t == value).count() as f64 / trits.len() as f64;
            assert!((share - 1.0 / 3.0).abs() < 0.02, "{value}: {share}");
        }
        let end = if config.pooling.is_some() { &[259][..] } else { &[] };
        let expected = [&[256, 104, 0xc3, 0xa9], end].concat();
        assert_eq!(a.tokenizer().encode("hé", true).unwrap(), expected);
    }
}

#[test]
fn numbers_of_layers_that_no_reader_takes_are_refused_before_anything_is_written() {
    let dir = TempDir::new().unwrap();
    for name in ["bitnet-2b", "bonsai-1.7b", "maple-20b-a1b", "bitnet-embedding-0.6b"] {
        for count in [0, 4097, 100_000_000_000] {
            let mut config = shape(name).unwrap();
            shrink(&mut config);
            config.layer_count = count;
            let error = synth(&config, &dir.path().join("out.gguf"), 1).unwrap_err().to_string();
            let expected = format!("key num_hidden_layers is {count}, expected 1 to 4096 layers");
            assert_eq!(error, expected, "{name}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn folders_with_files_of_something_else_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let mut config = shape("bitnet-2b").unwrap();
    shrink(&mut config);
    for file in [
        "chat_template.jinja",
        "special_tokens_map.json",
        "added_tokens.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "other.gguf",
        "README.md",
    ] {
        let folder = dir.path().join(format!("with {file}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join(file), "other").unwrap();
        let expected = format!(
            "{} has {file}, which is not of the model to write: use an empty folder",
            folder.display()
        );
        assert_eq!(synth(&config, &folder, 1).unwrap_err().to_string(), expected);
        let error = convert(&open("bitnet-tiny"), Target::Folder, &folder).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is written");
    }
}

#[test]
fn folder_is_written_again_over_its_own_files_and_what_a_crash_left() {
    let dir = TempDir::new().unwrap();
    let mut config = shape("bitnet-2b").unwrap();
    shrink(&mut config);
    let (again, once) = (dir.path().join("again"), dir.path().join("once"));
    synth(&config, &again, 1).unwrap();
    std::fs::write(again.join("model.safetensors.partial"), "the begin of a file").unwrap();
    std::fs::create_dir(again.join(".tritmill")).unwrap(); // Packed weights.
    config.layer_count = 1;
    synth(&config, &again, 2).unwrap();
    synth(&config, &once, 2).unwrap();
    let fingerprint = |folder: &Path| Model::open(folder).unwrap().fingerprint().unwrap();
    assert_eq!(fingerprint(&again), fingerprint(&once));
    assert_eq!(std::fs::read_dir(&again).unwrap().count(), 6);
}

#[test]
fn folder_that_was_not_written_to_its_end_is_the_older_model_or_none() {
    let dir = TempDir::new().unwrap();
    let mut config = shape("bitnet-2b").unwrap();
    shrink(&mut config);
    let folder = dir.path().join("folder");
    synth(&config, &folder, 1).unwrap();
    let older = Model::open(&folder).unwrap().fingerprint().unwrap();

    // The weights end early: a code of the source is no trit.
    let damaged = Folder::copy("bitnet-tiny");
    damaged.edit_weights(|header, data| {
        let offsets = &header["model.layers.3.mlp.down_proj.weight"]["data_offsets"];
        data[offsets[0].as_u64().unwrap() as usize] = 0b0000_0011;
    });
    let damaged = Model::open(damaged.path()).unwrap();
    assert!(convert(&damaged, Target::Folder, &folder).is_err());
    assert_eq!(Model::open(&folder).unwrap().fingerprint().unwrap(), older);

    // A file after the weights cannot be written.
    std::fs::remove_file(folder.join("tokenizer.json")).unwrap();
    std::fs::create_dir(folder.join("tokenizer.json")).unwrap();
    let error = synth(&config, &folder, 2).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }), "{error}");
    std::fs::remove_dir(folder.join("tokenizer.json")).unwrap();
    std::fs::copy(golden("bitnet-tiny/tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let error = Model::open(&folder).unwrap_err();
    assert!(
        matches!(&error, ModelError::MissingFile { file, .. } if file == "config.json"),
        "{error}"
    );
}

/// Benchmarks compare runs on synthetic models over time: the same seed must give the same bytes.
#[test]
fn synthetic_model_bytes_are_pinned() {
    let dir = TempDir::new().unwrap();
    let mut config = shape("bitnet-2b").unwrap();
    shrink(&mut config);
    synth(&config, dir.path(), 1).unwrap();
    let mut hash = Sha256::new();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        hash.update(std::fs::read(dir.path().join(name)).unwrap());
    }
    let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hash, "7d2f0a0d8a21cef27dc9c42dbfe0b45d0f7c5a3e300995327d215e22b266d0f1");
}

#[test]
fn inspection_lists_every_tensor_and_counts_parameters() {
    let model = open("gguf/bitnet-tiny-i2_s.gguf");
    let inspection = inspect(&model).unwrap();
    assert_eq!(inspection.tensors.len(), 46);
    assert_eq!(inspection.tensors[4].name, "blk.0.ffn_sub_norm.weight");
    assert_eq!(inspection.tensors[5].type_name, "I2_S");
    assert_eq!(inspection.tensors[5].size_bytes, 256 * 256 / 4 + 32);
    assert_eq!(
        inspection.ternary_parameter_count,
        4 * (256 * 256 * 2 + 64 * 256 * 2 + 3 * 256 * 640)
    );
    let json = serde_json::to_value(&inspection).unwrap();
    assert_eq!(json["config"]["activation"], "relu2");
    assert_eq!(json["fingerprint"].as_str().unwrap().len(), 64);
    assert_eq!(json["tensors"][0]["type"], "F32");
}

#[test]
fn vocabulary_of_bytes_is_the_same_tokenizer_with_any_pre_tokenizer() {
    let dir = TempDir::new().unwrap();
    let mut config = shape("bitnet-2b").unwrap();
    shrink(&mut config);
    let folder = dir.path().join("folder");
    synth(&config, &folder, 1).unwrap();
    let split = Model::open(&folder).unwrap();
    let path = folder.join("tokenizer.json");
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let byte_level = json["pre_tokenizer"]["pretokenizers"][1].clone();
    json["pre_tokenizer"] = byte_level;
    json["model"]["ignore_merges"] = false.into();
    std::fs::write(&path, json.to_string()).unwrap();
    let whole = Model::open(&folder).unwrap();
    check_same(&split, &whole);
    assert_eq!(split.fingerprint().unwrap(), whole.fingerprint().unwrap());

    convert_exactly(&whole, Target::GgufI2S, &dir.path().join("bytes.gguf"));
}

#[test]
fn demo_model_keeps_its_fingerprint_in_every_container() {
    let dir = TempDir::new().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/demo_model/model");
    let demo = Model::open(&demo).unwrap();
    for (target, name) in
        [(Target::GgufI2S, "a.gguf"), (Target::GgufTq2_0, "b.gguf"), (Target::Folder, "folder")]
    {
        convert_exactly(&demo, target, &dir.path().join(name));
    }
}

/// Adds vectors of f32, all with these values, to a file.
fn add_vectors(file: &mut RawGguf, names: &[(&str, usize)], value: impl Fn(usize) -> f32) {
    for &(name, len) in names {
        let mut tensor = file.tensor("output_norm.weight").clone();
        (tensor.name, tensor.dims) = (name.to_owned(), vec![len as u64]);
        tensor.bytes = (0..len).flat_map(|at| value(at).to_le_bytes()).collect();
        tensor.bytes.resize(tensor.bytes.len().next_multiple_of(32), 0);
        file.tensors.push(tensor);
    }
}

#[test]
fn biases_and_divisors_stay_beside_one_scale_per_matrix() {
    let dir = TempDir::new().unwrap();
    let mut file = RawGguf::read(&golden("../data/llama-tq2_0-q8_0.gguf"));
    let config = Model::open_gguf_bytes("plain", file.bytes(32)).unwrap().config().clone();
    let names: Vec<(String, usize)> = (0..config.layer_count)
        .flat_map(|layer| {
            [("attn_q", Linear::Q), ("attn_k", Linear::K), ("ffn_down", Linear::Down)].map(
                |(name, linear)| {
                    (format!("blk.{layer}.{name}.bias"), config.linear_shape(linear).0)
                },
            )
        })
        .collect();
    let names: Vec<(&str, usize)> = names.iter().map(|(name, len)| (&**name, *len)).collect();
    add_vectors(&mut file, &names, |at| 0.01 * at as f32 - 0.3);
    add_vectors(&mut file, &[("rope_freqs.weight", config.head_dim / 2)], |at| 1.0 + at as f32);
    let model = Model::open_gguf_bytes("biased", file.bytes(32)).unwrap();
    assert_eq!(model.config().linear_biases, [Linear::Q, Linear::K, Linear::Down]);
    for (target, name) in [(Target::GgufI2S, "a.gguf"), (Target::GgufTq2_0, "b.gguf")] {
        let out = dir.path().join(name);
        let copy = convert_exactly(&model, target, &out);
        assert_eq!(copy.bias(0, Linear::K).unwrap(), model.bias(0, Linear::K).unwrap());
        let (mut written, mut source) = (RawGguf::read(&out), file.clone());
        for name in ["blk.0.attn_q.bias", "blk.0.attn_k.bias", "rope_freqs.weight"] {
            assert_eq!(written.tensor(name).bytes, source.tensor(name).bytes, "{name}");
        }
    }
    let error =
        convert(&model, Target::Folder, &dir.path().join("folder")).unwrap_err().to_string();
    assert!(error.contains("blk.0.attn_q.bias") && error.contains("biases"), "{error}");
}

#[test]
fn architectures_without_biases_and_divisors_refuse_them_by_name() {
    let dir = TempDir::new().unwrap();
    let refused = |name: &str, len| {
        let mut file = RawGguf::read(&golden("gguf/bitnet-tiny-i2_s.gguf"));
        let names: Vec<String> = match name.contains("blk") {
            true => (0..4).map(|layer| name.replace('0', &layer.to_string())).collect(),
            false => vec![name.to_owned()],
        };
        let names: Vec<(&str, usize)> = names.iter().map(|name| (&**name, len)).collect();
        add_vectors(&mut file, &names, |at| 2.0 + at as f32);
        let model = Model::open_gguf_bytes("edited", file.bytes(32)).unwrap();
        let error = convert(&model, Target::GgufI2S, &dir.path().join("a.gguf")).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
        error.to_string()
    };
    let head_dim = open("bitnet-tiny").config().head_dim;
    assert!(refused("blk.0.attn_v.bias", 64).contains("no biases of linears"));
    assert!(refused("rope_freqs.weight", head_dim / 2).contains("no divisors"));
}

#[test]
fn blocks_with_several_scales_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |model: &Model, target| {
        let error = convert(model, target, &folder.path().join("copy.gguf")).unwrap_err();
        assert!(!folder.path().join("copy.gguf").exists());
        error.to_string()
    };
    let groups_of_128 = folder.path().join("pairs.gguf");
    convert(&open("group-linears/llama-tq2_0.gguf"), Target::GgufPq2_0, &groups_of_128).unwrap();
    let mut raw = RawGguf::read(&groups_of_128);
    let edit = |raw: &mut RawGguf, name: &str| {
        raw.tensor(name).bytes[170..172].copy_from_slice(&[1, 0x2c])
    };
    edit(&mut raw, "blk.1.ffn_up.weight");
    let model = Model::open_gguf_bytes("edited", raw.bytes(32)).unwrap();
    let error = refused(&model, Target::GgufTq2_0);
    assert!(
        error.contains("blk.1.ffn_up.weight") && error.contains("scales of its groups"),
        "{error}"
    );
    // Readers take equal scales in the first linear for one scale per matrix.
    let mut raw = RawGguf::read(&groups_of_128);
    for block in raw.tensor("blk.0.attn_q.weight").bytes.chunks_exact_mut(34) {
        block[..2].copy_from_slice(&[0, 0x2c]);
    }
    let model = Model::open_gguf_bytes("edited", raw.bytes(32)).unwrap();
    let error = refused(&model, Target::GgufTq2_0);
    assert!(error.contains("blk.0.attn_q.weight") && error.contains("all equal"), "{error}");
    let error = refused(&open("group-linears/llama-tq2_0.gguf"), Target::GgufI2S);
    assert!(error.contains("one scale per tensor"), "{error}");
}
