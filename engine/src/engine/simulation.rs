//! Random runs of engines with too few blocks: for any order of submissions, cancellations, deadlines,
//! failures, preemptions and forks, every request finishes exactly once with its expected tokens in every engine, and
//! every block is released.

use std::time::Duration;

use proptest::prelude::*;

use super::{testing::*, *};
use crate::{
    FinishReason, RequestError,
    kv::{BLOCK_TOKENS, LayerGroups},
    sampling::SamplingParams,
    scheduler::{Fork, Priority},
};

/// Most engines at once.
const ENGINES_MAX: usize = 4;

#[derive(Debug, Clone)]
enum Action {
    Submit(Box<Request>, Option<u64>),
    Cancel(prop::sample::Index),
    FailNextStep,
    Step(u8),
    Fork(Fork),
    ForkRequest(prop::sample::Index, Fork),
    Drop,
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
            top_k: if k < 6 { k } else { 0 },
            top_p: if matches!(k, 6 | 8 | 9 | 10) { 0.9 } else { 1.0 },
            min_p: if k == 7 { 0.1 } else { 0.0 },
            repetition_penalty: if k == 3 || k == 8 { 1.2 } else { 1.0 },
            frequency_penalty: if k == 9 { 0.4 } else { 0.0 },
            presence_penalty: if k == 10 { -0.3 } else { 0.0 },
            // With top-p, raised tokens may be beyond every look at the largest logits.
            logit_bias: match (k, min % 2) {
                (6, 1) => [(3, 5.0), (9, 6.0), (20, 7.0)].into(),
                _ => Default::default(),
            },
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
        6 => (1u8..12).prop_map(Action::Step),
        1 => kind().prop_map(Action::Fork),
        1 => (any::<prop::sample::Index>(), kind()).prop_map(|(at, kind)| Action::ForkRequest(at, kind)),
        1 => Just(Action::Drop),
    ]
}

fn kind() -> impl Strategy<Value = Fork> {
    prop::sample::select(vec![Fork::Shared, Fork::Deep])
}

fn engine_config() -> impl Strategy<Value = (EngineConfig, usize, LayerGroups)> {
    let numbers = (1usize..10, 1usize..80, 4usize..20);
    let recurrent = prop::option::weighted(0.4, (0usize..5, 0usize..3));
    let windows = prop::option::weighted(0.6, (1usize..4, 1usize..50, 1usize..3));
    (numbers, any::<bool>(), any::<bool>(), recurrent, windows).prop_map(
        |((max_sequences, token_budget, blocks), prefix_cache, has_target, kept, windows)| {
            let step_target = has_target.then_some(Duration::from_millis(150));
            let limits = EngineConfig { max_sequences, token_budget, ..config() };
            let (recurrent, (kept_states, spare_states)) = (kept.is_some(), kept.unwrap_or((0, 0)));
            let states = EngineConfig { recurrent, kept_states, spare_states, ..limits };
            // A model has recurrent layers or windows.
            let groups = windows.filter(|_| !recurrent).map_or(LayerGroups::ONE, |of| {
                let (windows, window, part) = of;
                LayerGroups { windows, window, part: part * BLOCK_TOKENS }
            });
            (EngineConfig { prefix_cache, step_target, ..states }, blocks * groups.count(), groups)
        },
    )
}

/// Compares the outcome of one request with its expected output.
fn check_outcome(harness: &Harness, id: RequestId, request: &Request) {
    let (output, error) = &harness.outputs[&id];
    assert!(!matches!(error, Some(RequestError::NoProgress { .. })), "{error:?}");
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

/// An engine, the requests that it got, and the number of its storage.
struct Life {
    harness: Harness,
    submitted: Vec<(RequestId, Request)>,
    storage: usize,
}

impl Life {
    fn apply(&mut self, action: Action) {
        let Self { harness, submitted, .. } = self;
        match action {
            Action::Submit(mut request, seconds) => {
                request.deadline = seconds.map(|s| harness.now + Duration::from_secs(s));
                submitted.push((harness.submit(&request), *request));
            }
            Action::Cancel(index) if !submitted.is_empty() => {
                harness.engine.cancel(index.get(submitted).0);
            }
            Action::FailNextStep => harness.fail_next_step(),
            Action::Step(count) => (0..count).for_each(|_| drop(harness.step())),
            Action::ForkRequest(index, kind) if !submitted.is_empty() => {
                let (id, request) = index.get(submitted).clone();
                if let Ok(fork) = harness.engine.fork_request(id, kind) {
                    submitted.push((fork, request));
                }
            }
            Action::Cancel(_) | Action::ForkRequest(..) | Action::Fork(_) | Action::Drop => {}
        }
    }

    fn fork(&mut self, kind: Fork, new_storage: usize) -> Self {
        let storage = if kind == Fork::Deep { new_storage } else { self.storage };
        Self { harness: self.harness.fork(kind), submitted: self.submitted.clone(), storage }
    }

    fn check(&self, blocks: usize) {
        assert_eq!(self.harness.outputs.len(), self.submitted.len());
        for (id, request) in &self.submitted {
            check_outcome(&self.harness, *id, request);
        }
        let stats = self.harness.engine.stats();
        assert_eq!(stats.blocks_used, 0);
        assert!(stats.blocks_cached <= blocks);
    }
}

/// Audits the engines of each storage together.
fn audit(lives: &[Life]) {
    for storage in lives.iter().map(|life| life.storage) {
        let of_storage = lives.iter().filter(|life| life.storage == storage);
        let all: Vec<_> = of_storage.map(|life| &life.harness.engine.scheduler).collect();
        Scheduler::audit_all(&all);
    }
}

/// Runs the engines until all are idle: in turns, or each on a thread.
fn run_all(lives: &mut [Life], on_threads: bool) {
    if on_threads {
        return std::thread::scope(|scope| {
            for life in lives {
                scope.spawn(|| life.harness.run_beside_others());
            }
        });
    }
    let mut steps = 0;
    while lives.iter().any(|life| !life.harness.engine.is_idle()) {
        lives.iter_mut().for_each(|life| drop(life.harness.step()));
        audit(lives);
        steps += 1;
        assert!(steps < 20_000, "the engines do not become idle");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_request_finishes_once_with_its_tokens_and_every_block_is_released(
        (config, blocks, groups) in engine_config(),
        actions in prop::collection::vec((action(), any::<prop::sample::Index>()), 1..60),
        (on_threads, ahead) in any::<(bool, bool)>(),
    ) {
        let harness = Harness::of(config, blocks, groups, ahead);
        let mut lives = vec![Life { harness, submitted: Vec::new(), storage: 0 }];
        for (number, (action, of)) in (1..).zip(actions) {
            let at = of.index(lives.len());
            match action {
                Action::Fork(kind) if lives.len() < ENGINES_MAX => {
                    let fork = lives[at].fork(kind, number);
                    lives.push(fork);
                }
                Action::Drop if lives.len() > 1 => drop(lives.swap_remove(at)),
                action => lives[at].apply(action),
            }
            audit(&lives);
        }
        run_all(&mut lives, on_threads);
        lives.iter().for_each(|life| life.check(blocks));
    }
}
