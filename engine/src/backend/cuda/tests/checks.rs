//! Checks before a model starts on a device, and before a step runs.

use super::{load, model, options, small, tokens};
use crate::{
    backend::{
        Backend as _, Chunk, Logits, LogitsFor, StepError,
        cpu::{HeadMode, KvType},
        cuda::{error::CudaLoadError, self_test},
    },
    config::Linear,
    kv::BlockId,
};

/// A device with correct products and wrong norms does not pass.
#[test]
fn self_test_covers_the_norms_of_linears() {
    let model = model("llama-norm-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    self_test::run(&mut cuda, &model).expect("it started");
    let last = cuda.shape.layers - 1;
    let (norm, cols) = {
        let linear = cuda.weights.layers[last].linear(Linear::Down);
        (linear.norm, linear.cols)
    };
    assert_ne!(norm, 0, "the model's linears have norms");
    let wrong: Vec<f32> = (0..cols).map(|i| if i == 3 { 9.0 } else { 1.0 }).collect();
    cuda.device.write(norm, bytemuck::cast_slice(&wrong)).expect("the norm is allocated");
    let refused = self_test::run(&mut cuda, &model).expect_err("the norm is wrong");
    assert!(
        matches!(refused, CudaLoadError::SelfTest { linear: Linear::Down, rows: 1 }),
        "{refused}"
    );
}

/// A device with wrong scales of groups, in one of the last layer's matrices, does not pass.
#[test]
fn self_test_covers_the_scales_of_groups() {
    let model = model("qwen3-yarn-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    self_test::run(&mut cuda, &model).expect("it started");
    let linear = *cuda.weights.layers[cuda.shape.layers - 1].linear(Linear::V);
    let groups = linear.groups.expect("the model has scales of groups");
    // The scale of the second output in the last group.
    let at = groups.scales + 2 * (16 * (linear.cols / groups.size - 1) + 1) as u64;
    cuda.device.write(at, &half::f16::from_f32(0.75).to_le_bytes()).expect("it is allocated");
    let refused = self_test::run(&mut cuda, &model).expect_err("the scale is wrong");
    assert!(matches!(refused, CudaLoadError::SelfTest { linear: Linear::V, rows: 1 }), "{refused}");
}

/// Kernels that store keys and read keys at once must not get a sequence twice.
#[test]
fn a_sequence_twice_in_a_step_is_refused() {
    let model = model("llama-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    let (blocks, tokens) = ([BlockId(0), BlockId(1)], tokens(15, 1));
    let chunk = |tokens, position| {
        let logits = LogitsFor::largest(1);
        Chunk { tokens, position, blocks: &blocks, logits, state: 0.into(), windows: &[] }
    };
    let mut step = |chunks: &[Chunk<'_>]| cuda.step(chunks, &mut Logits::default());
    step(&[chunk(&tokens[..], 0)]).expect("a prompt");
    let twice = step(&[chunk(&[5], 15), chunk(&[6], 16)]);
    assert!(matches!(twice, Err(StepError::SharedBlock { block: BlockId(0) })), "{twice:?}");
    step(&[chunk(&[5], 15)]).expect("one position after another is valid");
    step(&[chunk(&[6], 16)]).expect("one position after another is valid");
}
