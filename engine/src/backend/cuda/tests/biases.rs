//! Models with biases of linears, compared with the CPU's, bit by bit.

use std::{fs, path::Path, sync::Arc};

use serde_json::{Value, json};

use super::{
    HeadMode, KvType, Limits, LogitsFor, Part,
    equality::{check, on_cpu},
    groups::{check_answers, with_digits},
    load, model, options, package, part, small, tokens_of,
};
use crate::{
    backend::cuda::{error::CudaLoadError, self_test},
    config::Linear,
    files::Model,
    kernels::Digits,
};

/// A model of GGUF with scales of groups and a bias in every linear.
const GROUPS: &str = "group-linears/llama-tq2_0.gguf";
/// Models with one scale per matrix: multiplied, divided, with norms of linears, and quantized at load.
const FOLDERS: [&str; 4] = ["bitnet-tiny", "llama-tiny", "llama-norm-tiny", "bitnet-online-tiny"];

/// Names of the linears in a folder, in the order of [`Linear::OF_ATTENTION`].
const MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Returns a golden model with biases of the linears in one or both blocks.
fn with_biases(name: &str, attention: bool, feed_forward: bool) -> Arc<Model> {
    let from = package().join("tests/golden").join(name);
    let folder = tempfile::tempdir().expect("a folder for a model");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(from.join(file), folder.path().join(file)).expect("the golden folder has it");
    }
    let read = |file: &str| fs::read(from.join(file)).expect("the golden folder has it");
    let write = |file: &str, bytes: &[u8]| {
        fs::write(folder.path().join(file), bytes).expect("the folder is writable");
    };
    let config = serde_json::from_slice::<Value>(&read("config.json"));
    let mut config = config.expect("the configuration is JSON");
    (config["attention_bias"], config["mlp_bias"]) = (json!(attention), json!(feed_forward));
    write("config.json", config.to_string().as_bytes());
    let has_bias = |linear: Linear| match linear {
        Linear::Gate | Linear::Up | Linear::Down => feed_forward,
        _ => attention,
    };
    write("model.safetensors", &add_biases(&read("model.safetensors"), &from, has_bias));
    let model = Arc::new(Model::open(folder.path()).expect("the model opens"));
    let want: Vec<Linear> =
        Linear::OF_ATTENTION.into_iter().filter(|linear| has_bias(*linear)).collect();
    assert_eq!(model.config().linear_biases, want);
    model
}

/// Appends biases, about as large as the outputs that they are added to, to a file of tensors.
fn add_biases(file: &[u8], folder: &Path, has_bias: impl Fn(Linear) -> bool) -> Vec<u8> {
    let model = Model::open(folder).expect("a golden model opens");
    let config = model.config();
    let len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let header = serde_json::from_slice::<Value>(&file[8..8 + len]);
    let mut header = header.expect("the header is JSON");
    let mut data = file[8 + len..].to_vec();
    for layer in 0..config.layer_count {
        for (linear, module) in Linear::OF_ATTENTION.into_iter().zip(MODULES) {
            if !has_bias(linear) {
                continue;
            }
            let (rows, _) = config.linear_shape(linear);
            let bias = |row: usize| ((row * 37 + layer * 11) % 101) as f32 * 0.023 - 1.1;
            let bytes: Vec<u8> = (0..rows).flat_map(|row| bias(row).to_le_bytes()).collect();
            let offsets = [data.len(), data.len() + bytes.len()];
            data.extend(bytes);
            header[format!("model.layers.{layer}.{module}.bias")] =
                json!({ "dtype": "F32", "shape": [rows], "data_offsets": offsets });
        }
    }
    let mut header = header.to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

#[test]
fn answers_with_biases_equal_the_cpus() {
    let options = options(KvType::F16, HeadMode::Exact);
    for name in FOLDERS {
        check_answers(&format!("{name}, all biases"), &with_biases(name, true, true), options);
    }
    for (attention, feed_forward) in [(true, false), (false, true)] {
        let what = format!("biases of attention {attention}, of feed-forward {feed_forward}");
        check_answers(&what, &with_biases("bitnet-tiny", attention, feed_forward), options);
    }
}

#[test]
fn answers_with_biases_and_scales_of_groups_equal_the_cpus() {
    for digits in Digits::ALL {
        let what = format!("{GROUPS}, {digits}");
        check_answers(&what, &model(GROUPS), with_digits(digits, KvType::F16));
    }
}

/// Enough rows for the kernels of many rows.
#[test]
fn many_rows_with_biases_equal_the_cpus() {
    let options = options(KvType::F16, HeadMode::Exact);
    let limits = Limits { rows: 300, whole: 16, screened: 80, ..Limits::default() };
    for model in [with_biases("bitnet-tiny", true, true), model(GROUPS)] {
        let Some(mut cuda) = load(&model, options, limits) else { return };
        let mut cpu = on_cpu(&model, options);
        for lengths in [&[50, 20][..], &[200, 90, 3]] {
            let mut first_block = 0;
            let parts: Vec<Part> = lengths
                .iter()
                .enumerate()
                .map(|(i, &length)| {
                    let tokens = tokens_of(&model, length, i as u32);
                    let part = part(&tokens, 0, first_block, LogitsFor::largest(2));
                    first_block += length.div_ceil(16) as u32;
                    part
                })
                .collect();
            check(&format!("{}: {lengths:?}", model.name()), cpu.as_mut(), &mut cuda, &parts);
        }
    }
}

/// A device with a wrong bias, in one of the last layer's matrices, does not pass.
#[test]
fn self_test_covers_biases() {
    for model in [with_biases("bitnet-tiny", true, true), model(GROUPS)] {
        let options = options(KvType::F16, HeadMode::Exact);
        let Some(mut cuda) = load(&model, options, small()) else { return };
        self_test::run(&mut cuda, &model).expect("it started");
        let linear = *cuda.weights.layers[cuda.shape.layers - 1].linear(Linear::Up);
        assert_ne!(linear.bias, 0, "the model's linears have biases");
        let last = linear.bias + 4 * (linear.rows - 1) as u64;
        cuda.device.write(last, &7f32.to_le_bytes()).expect("it is allocated");
        let refused = self_test::run(&mut cuda, &model).expect_err("the bias is wrong");
        assert!(
            matches!(refused, CudaLoadError::SelfTest { linear: Linear::Up, rows: 1 }),
            "{refused}"
        );
    }
}
