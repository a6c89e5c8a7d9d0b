//! Guarantees of the engine to its callers.

mod drafts;
mod endings;
mod forks;
mod stored;
mod structured;

use std::time::Duration;

use super::{testing::*, *};
use crate::{
    request::{Choice, FinishReason, Output, RequestError},
    sampling::SamplingParams,
    scheduler::Priority,
};

/// Requests with many lengths and kinds of sampling.
fn mixture() -> Vec<Request> {
    let lengths = [1, 15, 16, 17, 31, 32, 40, 64, 100];
    let of_length = |(kind, length): (usize, &usize)| {
        let mut request = request(kind as u32, *length, 10 + 5 * kind);
        let sampling = &mut request.sampling;
        match kind % 6 {
            0 => sampling.temperature = 0.0,
            4 => {
                (sampling.temperature, sampling.presence_penalty) = (0.0, -0.4);
                sampling.logit_bias = [(3, 2.5), (7, -1.0)].into();
            }
            5 => {
                (sampling.top_p, sampling.repetition_penalty) = (0.7, 0.8);
                sampling.logit_bias = [(5, 1.5)].into();
            }
            1 => (sampling.top_k, sampling.repetition_penalty) = (10, 1.3),
            2 => (sampling.top_p, sampling.presence_penalty) = (0.8, 0.5),
            _ => (sampling.min_p, sampling.frequency_penalty) = (0.05, 0.2),
        }
        request
    };
    lengths.iter().enumerate().map(of_length).collect()
}

/// Runs all of `requests` together and compares each with its expected choices.
fn check_together(config: EngineConfig, blocks: usize, requests: &[Request]) -> Harness {
    let mut harness = Harness::new(config, blocks);
    let ids: Vec<RequestId> = requests.iter().map(|request| harness.submit(request)).collect();
    harness.run();
    for (id, request) in ids.iter().zip(requests) {
        assert_eq!(harness.output(*id).choices, expected(request), "{request:?}");
    }
    harness
}

#[test]
fn tokens_are_the_same_alone_and_in_any_batch() {
    for request in mixture() {
        assert_eq!(Harness::new(config(), 40).choices(&request), expected(&request));
    }
    check_together(config(), 200, &mixture());
    let mut reversed = mixture();
    reversed.reverse();
    check_together(config(), 200, &reversed);
}

#[test]
fn tokens_are_the_same_for_any_chunking_of_prefill() {
    for token_budget in [1, 3, 7, 16, 1000] {
        let config = EngineConfig { token_budget, max_sequences: 1, ..config() };
        check_together(config, 40, &mixture());
        check_together(EngineConfig { max_sequences: 5, ..config }, 100, &mixture());
    }
}

#[test]
fn tokens_are_the_same_after_preemption() {
    // The longest request takes 10 blocks, so eight requests at once do not fit in 14.
    let harness = check_together(config(), 14, &mixture());
    assert!(harness.engine.stats().preemptions > 0);
    let without_cache = EngineConfig { prefix_cache: false, ..config() };
    let harness = check_together(without_cache, 14, &mixture());
    assert!(harness.engine.stats().preemptions > 0);
    assert_eq!(harness.engine.stats().prefix_hit_tokens, 0);
}

#[test]
fn tokens_are_the_same_from_a_cached_prefix() {
    let mut harness = Harness::new(config(), 100);
    for round in 0..3 {
        for request in mixture() {
            let output = harness.complete(&request);
            assert_eq!(output.choices, expected(&request));
            let length = request.prompt.len();
            let cached = if round == 0 { 0 } else { (length / 16 * 16).min(length - 1) };
            if round > 0 || length < 16 {
                assert_eq!(output.cached_tokens, cached);
            }
        }
    }
}

#[test]
fn fully_cached_prompt_computes_only_its_last_token() {
    let mut harness = Harness::new(config(), 40);
    let request = request(1, 32, 1);
    harness.choices(&request);
    let id = harness.submit(&request);
    let report = harness.step();
    assert_eq!((report.prefill_tokens, report.rows), (1, 1));
    assert_eq!(harness.output(id).cached_tokens, 31);
    assert_eq!(harness.output(id).choices, expected(&request));
}

#[test]
fn last_block_of_a_fully_cached_prompt_is_copied_while_others_read_it() {
    let mut harness = Harness::new(config(), 40);
    let request = request(1, 32, 20);
    let ids = [harness.submit(&request), {
        harness.step();
        harness.submit(&request)
    }];
    harness.step();
    assert_eq!(harness.control.lock().expect("no panic").copies, 1);
    harness.run();
    for id in ids {
        assert_eq!(harness.output(id).choices, expected(&request));
    }
    assert_eq!(harness.output(ids[1]).cached_tokens, 31);
}

#[test]
fn tenants_do_not_share_prefixes() {
    let mut harness = Harness::new(config(), 40);
    let mut request = request(1, 40, 2);
    harness.choices(&request);
    request.salt = b"another".to_vec();
    let output = harness.complete(&request);
    assert_eq!(output.cached_tokens, 0);
    assert_eq!(output.choices, expected(&request));
}

#[test]
fn generated_blocks_are_reused_by_a_longer_prompt() {
    let mut harness = Harness::new(config(), 40);
    let mut next = request(3, 20, 30);
    let tokens = harness.choices(&next)[0].tokens.clone();
    next.prompt.extend(&tokens);
    let output = harness.complete(&next);
    assert_eq!(output.cached_tokens, 48, "49 of 50 positions were computed");
    assert_eq!(output.choices, expected(&next));
}

#[test]
fn choices_share_the_prompt_and_are_independent() {
    for (length, max_sequences) in [(1, 8), (20, 8), (32, 8), (20, 2), (33, 1)] {
        let mut request = request(2, length, 25);
        request.sampling.n = 5;
        let mut harness = Harness::new(EngineConfig { max_sequences, ..config() }, 60);
        let id = harness.submit(&request);
        let first = harness.step();
        assert_eq!(first.prefill_tokens, length, "the prompt is computed once");
        harness.run();
        let output = harness.output(id);
        assert_eq!(output.choices, expected(&request));
        assert_eq!((output.prompt_tokens, output.completion_tokens), (length, 125));
        request.sampling.n = 2;
        let fewer = Harness::new(config(), 60).choices(&request);
        assert_eq!(fewer, harness.output(id).choices[..2]);
    }
}

#[test]
fn different_choices_differ() {
    let mut request = request(2, 10, 25);
    request.sampling.n = 3;
    let choices = Harness::new(config(), 60).choices(&request);
    assert_ne!(choices[0].tokens, choices[1].tokens);
    assert_ne!(choices[1].tokens, choices[2].tokens);
}

#[test]
fn choices_are_correct_with_few_blocks() {
    let mut request = request(5, 30, 40);
    request.sampling.n = 6;
    let harness = check_together(config(), 7, &[request]);
    assert!(harness.engine.stats().preemptions > 0);
}

#[test]
fn decodes_come_before_prefill_within_the_budget() {
    let config = EngineConfig { token_budget: 10, max_sequences: 4, ..config() };
    let mut harness = Harness::new(config, 100);
    harness.submit(&request(1, 10, 50));
    harness.step();
    harness.submit(&request(2, 25, 50));
    for expected in [(1, 9), (1, 9), (1, 7), (2, 0)] {
        let report = harness.step();
        assert_eq!((report.decode_tokens, report.prefill_tokens), expected);
    }
}

#[test]
fn requests_are_served_by_priority_then_by_arrival() {
    let config = EngineConfig { max_sequences: 1, ..config() };
    let mut harness = Harness::new(config, 100);
    let order = [Priority::Low, Priority::Normal, Priority::High, Priority::High, Priority::Normal];
    let mut ids = Vec::new();
    for (kind, priority) in order.into_iter().enumerate() {
        ids.push(harness.submit(&Request { priority, ..request(kind as u32, 5, 1) }));
    }
    let mut ended = Vec::new();
    while !harness.engine.is_idle() {
        let report = harness.step();
        ended.extend(report.events.iter().filter_map(|event| match event {
            Event::Finished { id, .. } => Some(*id),
            _ => None,
        }));
    }
    assert_eq!(ended, [ids[2], ids[3], ids[1], ids[4], ids[0]]);
}

#[test]
fn low_priority_runs_while_high_priority_keeps_arriving() {
    let config = EngineConfig { max_sequences: 1, ..config() };
    let mut harness = Harness::new(config, 100);
    let low = harness.submit(&Request { priority: Priority::Low, ..request(0, 5, 1) });
    for kind in 0..40 {
        harness.submit(&Request { priority: Priority::High, ..request(kind, 5, 1) });
        harness.submit(&Request { priority: Priority::High, ..request(kind, 6, 1) });
        harness.step();
        if harness.outputs.contains_key(&low) {
            assert_eq!(kind, 16, "after sixteen of high priority");
            return;
        }
    }
    panic!("the request with low priority starved");
}

#[test]
fn steps_are_limited_while_the_highest_priority_decodes() {
    let step_target = Some(Duration::from_millis(150));
    let config = EngineConfig { token_budget: 512, step_target, ..config() };
    let mut harness = Harness::new(config, 200);
    let of = |priority, kind, tokens| Request { priority, ..request(kind, 150, tokens) };
    let first = harness.submit(&of(Priority::Normal, 0, 40));
    assert_eq!(harness.step().limits.prefill, None, "only a batch runs");
    let high = harness.submit(&of(Priority::High, 1, 20));
    let report = harness.step();
    assert_eq!(
        (report.limits.prefill, report.prefill_tokens),
        (None, 63),
        "its prompt has a whole step, but for the decode"
    );
    while !harness.deltas.contains_key(&(high, 0)) {
        harness.step();
    }
    for kind in 2..5 {
        harness.submit(&of(Priority::Normal, kind, 5));
    }
    let mut limited = Vec::new();
    while !harness.outputs.contains_key(&high) {
        let report = harness.step();
        assert_eq!(report.decode_tokens >= 2, harness.deltas[&(first, 0)].0.len() < 40);
        limited.push((report.limits.prefill.expect("limited"), report.prefill_tokens));
    }
    assert!(limited.iter().all(|(most, tokens)| tokens <= most), "{limited:?}");
    // 20 ms and 9 ms for each row: one tile fits, sixteen rows with the decodes.
    assert!(limited.iter().any(|(_, tokens)| *tokens == 14), "{limited:?}");
    assert_eq!(harness.step().limits.prefill, None, "full steps again");
    harness.run();
    assert_eq!(harness.output(high).choices, expected(&of(Priority::High, 1, 20)));
}

#[test]
fn prompt_of_the_highest_priority_has_steps_almost_alone() {
    let step_target = Some(Duration::from_millis(150));
    let config = EngineConfig { token_budget: 64, step_target, ..config() };
    let mut harness = Harness::new(config, 200);
    let batch = [0, 1, 2].map(|kind| request(kind, 20, 30));
    let ids = batch.each_ref().map(|request| harness.submit(request));
    while !harness.deltas.contains_key(&(ids[2], 0)) {
        harness.step();
    }
    assert_eq!(harness.step().decode_tokens, 3);
    let high = harness.submit(&Request { priority: Priority::High, ..request(3, 150, 2) });
    let mut steps = Vec::new();
    while !harness.deltas.contains_key(&(high, 0)) {
        let report = harness.step();
        steps.push((report.prefill_tokens, report.decode_tokens));
    }
    assert_eq!(steps, [(63, 1), (63, 1), (24, 1)], "the decodes of the batch take turns");
    harness.run();
    for (id, request) in ids.iter().zip(&batch) {
        assert_eq!(harness.output(*id).choices, expected(request));
    }
}

/// The time of a step that the device still runs at its end is known with that of the step after it.
#[test]
fn times_of_steps_that_run_on_are_recorded_together() {
    let step_target = Some(Duration::from_millis(150));
    let config = EngineConfig { token_budget: 64, step_target, ..config() };
    let limits = |runs_on: [bool; 3]| {
        let mut harness = Harness::new(config, 200);
        let fresh = harness.engine.pace.limits(1, 0, None);
        harness.submit(&request(0, 150, 4));
        for is_running in runs_on {
            harness.control.lock().expect("no thread panicked").is_running = is_running;
            harness.step();
        }
        (fresh, harness.engine.pace.limits(1, 0, None))
    };
    let (fresh, each) = limits([false; 3]);
    assert_ne!(fresh, each, "the second step has enough rows to be measured");
    assert_eq!(limits([true, true, false]).1, each);
    assert_eq!(limits([true; 3]).1, fresh, "nothing is known yet");
}

#[test]
fn idle_engine_waits_for_rows_unless_a_caller_of_the_highest_priority_does() {
    let limit = config().wait_limit;
    let waits = |requests: &[(Priority, usize)]| {
        let mut harness = Harness::new(config(), 40);
        for (kind, (priority, length)) in (0..).zip(requests) {
            harness.submit(&Request { priority: *priority, ..request(kind, *length, 5) });
        }
        harness.engine.wait_for_more(Duration::ZERO)
    };
    assert_eq!(waits(&[]), None, "nothing to compute");
    assert_eq!(waits(&[(Priority::Normal, 10)]), Some(limit));
    assert_eq!(waits(&[(Priority::Normal, 10), (Priority::Low, 10)]), Some(limit));
    assert_eq!(waits(&[(Priority::Normal, 10), (Priority::Low, 22)]), None, "enough rows");
    assert_eq!(waits(&[(Priority::Normal, 10), (Priority::High, 10)]), None);
    let mut harness = Harness::new(config(), 40);
    harness.submit(&request(0, 10, 5));
    assert_eq!(harness.engine.wait_for_more(limit), None, "it has waited");
    harness.step();
    harness.submit(&request(1, 10, 5));
    assert_eq!(harness.engine.wait_for_more(Duration::ZERO), None, "a sequence is running");
}

#[test]
fn newest_of_the_lowest_priority_is_preempted() {
    let config = EngineConfig { prefix_cache: false, ..config() };
    let mut harness = Harness::new(config, 8);
    let mut submit =
        |kind, priority| harness.submit(&Request { priority, ..request(kind, 30, 60) });
    let oldest = submit(1, Priority::Low);
    let newest = submit(2, Priority::Low);
    let high = submit(3, Priority::High);
    let mut preempted = Vec::new();
    while !harness.engine.is_idle() {
        harness.step();
        for id in [oldest, newest, high] {
            let Some(active) = harness.engine.active.get(&id) else { continue };
            let state = harness.engine.scheduler.state(active.sequence(0));
            let started = harness.deltas.contains_key(&(id, 0));
            let pending = state == Some(crate::scheduler::State::Pending);
            if pending && started && !preempted.contains(&id) {
                preempted.push(id);
            }
        }
    }
    assert_eq!(preempted, [newest, oldest]);
}
