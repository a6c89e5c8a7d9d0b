//! What is checked before a device is trusted, and before a step runs.

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

/// A device that norms wrongly does not start, whatever its products are.
#[test]
fn the_self_test_sees_linears_norms() {
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
    cuda.device.write(norm, bytemuck::cast_slice(&wrong)).expect("it is the norm's place");
    let refused = self_test::run(&mut cuda, &model).expect_err("it norms wrongly");
    assert!(
        matches!(refused, CudaLoadError::SelfTest { linear: Linear::Down, rows: 1 }),
        "{refused}"
    );
}

/// Kernels that store and look at keys at once must not meet a sequence twice.
#[test]
fn a_step_with_a_sequence_twice_is_refused() {
    let model = model("llama-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    let (blocks, tokens) = ([BlockId(0), BlockId(1)], tokens(15, 1));
    let chunk = |tokens, position| {
        let logits = LogitsFor::Largest(1);
        Chunk { tokens, position, blocks: &blocks, logits }
    };
    let mut step = |chunks: &[Chunk<'_>]| cuda.step(chunks, &mut Logits::default());
    step(&[chunk(&tokens[..], 0)]).expect("a prompt");
    let twice = step(&[chunk(&[5], 15), chunk(&[6], 16)]);
    assert!(matches!(twice, Err(StepError::SharedBlock { block: BlockId(0) })), "{twice:?}");
    step(&[chunk(&[5], 15)]).expect("one after the other is what a sequence is");
    step(&[chunk(&[6], 16)]).expect("one after the other is what a sequence is");
}
