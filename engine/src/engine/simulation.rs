//! Random runs of an engine with too few blocks: for any order of submissions, cancellations, deadlines,
//! failures and preemptions, every request finishes exactly once with its expected tokens, and every
//! block is released.

use std::time::Duration;

use proptest::prelude::*;

use super::{testing::*, *};
use crate::{sampler::SamplingParams, scheduler::Priority};

#[derive(Debug, Clone)]
enum Action {
    Submit(Box<Request>, Option<u64>),
    Cancel(prop::sample::Index),
    FailNextStep,
    Step(u8),
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let stops = prop::sample::subsequence(vec!["a", "th", "ä", "z."], 0..3);
    let numbers = (1usize..40, 0usize..6, 1usize..4, 0u64..4);
    let flags = (any::<bool>(), prop::sample::select(vec![0.0f32, 0.7, 1.0]), 0usize..12);
    (numbers, flags, stops).prop_map(|((max_tokens, min, n, seed), (ignore_eos, t, k), stops)| {
        SamplingParams {
            max_tokens,
            min_tokens: min.min(max_tokens),
            n,
            seed,
            ignore_eos,
            temperature: t,
            top_k: k,
            repetition_penalty: if k == 3 { 1.2 } else { 1.0 },
            stop: stops.iter().map(|stop| (*stop).to_owned()).collect(),
            logprobs: (k == 4).then_some(2),
            ..SamplingParams::default()
        }
    })
}

fn submission() -> impl Strategy<Value = Action> {
    let priority = prop::sample::select(Priority::ALL.to_vec());
    let deadline = prop::option::weighted(0.2, 0u64..60);
    // Few kinds of prompts and few salts, so that prefixes are shared.
    (0u32..4, 1usize..60, sampling(), priority, deadline, 0u8..2).prop_map(
        |(kind, length, sampling, priority, seconds, salt)| {
            let (prompt, salt) = (prompt(kind, length), vec![salt]);
            let request = Request { prompt, sampling, priority, salt, ..Request::default() };
            Action::Submit(Box::new(request), seconds)
        },
    )
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => submission(),
        1 => any::<prop::sample::Index>().prop_map(Action::Cancel),
        1 => Just(Action::FailNextStep),
        4 => (1u8..12).prop_map(Action::Step),
    ]
}

fn engine_config() -> impl Strategy<Value = (EngineConfig, usize)> {
    let numbers = (1usize..10, 1usize..80, 4usize..20);
    (numbers, any::<bool>(), any::<bool>()).prop_map(
        |((max_sequences, token_budget, blocks), prefix_cache, has_target)| {
            let step_target = has_target.then_some(Duration::from_millis(150));
            let limits = EngineConfig { max_sequences, token_budget, ..config() };
            (EngineConfig { prefix_cache, step_target, ..limits }, blocks)
        },
    )
}

/// Compares the outcome of one request with its expected output.
fn check_outcome(harness: &Harness, id: RequestId, request: &Request) {
    let (output, error) = &harness.outputs[&id];
    let expected = expected(request);
    assert_eq!(output.choices.len(), expected.len());
    for (choice, expected) in output.choices.iter().zip(&expected) {
        let length = choice.tokens.len();
        match choice.finish_reason {
            FinishReason::Stop | FinishReason::Length => {
                assert_eq!(choice.tokens, expected.tokens);
                assert_eq!(choice.text, expected.text);
                assert_eq!(choice.finish_reason, expected.finish_reason);
            }
            FinishReason::Cancelled | FinishReason::Deadline | FinishReason::Failed => {
                assert_eq!(choice.tokens, expected.tokens[..length]);
                let failed = choice.finish_reason == FinishReason::Failed;
                assert_eq!(failed, error.is_some());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_request_finishes_once_with_its_tokens_and_every_block_is_released(
        (config, blocks) in engine_config(),
        actions in prop::collection::vec(action(), 1..40),
    ) {
        let mut harness = Harness::new(config, blocks);
        let mut submitted: Vec<(RequestId, Request)> = Vec::new();
        for action in actions {
            match action {
                Action::Submit(mut request, seconds) => {
                    request.deadline = seconds.map(|s| harness.now + Duration::from_secs(s));
                    submitted.push((harness.submit(&request), *request));
                }
                Action::Cancel(index) if !submitted.is_empty() => {
                    harness.engine.cancel(index.get(&submitted).0);
                }
                Action::Cancel(_) => {}
                Action::FailNextStep => {
                    harness.fail_next_step();
                }
                Action::Step(count) => {
                    for _ in 0..count {
                        harness.step();
                    }
                }
            }
        }
        harness.run();
        prop_assert_eq!(harness.outputs.len(), submitted.len());
        for (id, request) in &submitted {
            check_outcome(&harness, *id, request);
        }
        let stats = harness.engine.stats();
        prop_assert_eq!(stats.finished + stats.failed, submitted.len() as u64);
        prop_assert!(stats.blocks_cached <= blocks);
    }
}
