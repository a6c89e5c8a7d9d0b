//! Forks of engines and of requests: the same tokens in each, and no block lost.

use std::thread;

use super::*;
use crate::{engine::ForkError, scheduler::Fork};

const KINDS: [Fork; 2] = [Fork::Shared, Fork::Deep];

/// Submits requests and runs some steps.
fn started(config: EngineConfig, blocks: usize, requests: &[Request], steps: usize) -> Harness {
    let mut harness = Harness::new(config, blocks);
    requests.iter().for_each(|request| {
        harness.submit(request);
    });
    (0..steps).for_each(|_| {
        harness.step();
    });
    harness
}

/// Compares every output with the expected one; requests have the ids 0, 1, …
fn check(harness: &Harness, requests: &[Request]) {
    assert_eq!(harness.outputs.len(), requests.len());
    for ((_, (output, error)), request) in harness.outputs.iter().zip(requests) {
        assert!(error.is_none(), "{error:?}");
        assert_eq!(output.choices, expected(request));
    }
}

fn both_on_threads(one: &mut Harness, other: &mut Harness) {
    thread::scope(|scope| {
        scope.spawn(|| one.run_beside_others());
        scope.spawn(|| other.run_beside_others());
    });
}

#[test]
fn forks_on_two_threads_draw_the_same_tokens_and_release_every_block() {
    let mut requests = mixture();
    requests[3].sampling.n = 3;
    for (kind, config) in
        KINDS.map(|kind| (kind, config())).into_iter().chain([(Fork::Deep, recurrent())])
    {
        for (blocks, steps) in [(200, 0), (200, 7), (14, 12), (14, 40)] {
            let mut original = started(config, blocks, &requests, steps);
            let mut fork = original.fork(kind);
            both_on_threads(&mut original, &mut fork);
            check(&original, &requests);
            check(&fork, &requests);
            for engine in [&original.engine, &fork.engine] {
                assert_eq!(engine.stats().blocks_used, 0, "{kind:?}");
            }
        }
    }
}

#[test]
fn blocks_outlive_whichever_engine_is_dropped_first() {
    let requests = mixture();
    for kind in KINDS {
        for drops_original in [true, false] {
            let mut original = started(config(), 100, &requests, 9);
            let mut fork = original.fork(kind);
            let mut grandchild = fork.fork(Fork::Shared);
            let (dropped, mut kept) = match drops_original {
                true => (original, fork),
                false => (fork, original),
            };
            drop(dropped);
            kept.run_beside_others();
            check(&kept, &requests);
            grandchild.run_beside_others();
            check(&grandchild, &requests);
            assert_eq!(kept.engine.stats().blocks_used, 0);
        }
    }
}

#[test]
fn fork_keeps_the_state_and_counts_from_zero() {
    let requests = mixture();
    for kind in KINDS {
        let mut original = started(config(), 200, &requests, 9);
        let fork = original.fork(kind);
        let (old, new) = (original.engine.stats(), fork.engine.stats());
        assert!(old.steps == 9 && old.prefix_miss_tokens > 0);
        let gauges = |stats: EngineStats| {
            [stats.running, stats.pending, stats.blocks_used, stats.blocks_cached]
        };
        assert_eq!(gauges(old), gauges(new), "{kind:?}");
        assert_eq!((new.steps, new.generated_tokens, new.prefix_miss_tokens), (0, 0, 0));
        assert_eq!(new.finished + new.preemptions, 0);
        assert_eq!(
            fork.engine.pace.limits(3, 0, None),
            original.engine.pace.limits(3, 0, None),
            "measured times"
        );
    }
}

#[test]
fn shared_fork_of_a_long_sequence_takes_two_blocks_at_most() {
    let config =
        EngineConfig { context_length: 4096, token_budget: 512, step_target: None, ..config() };
    for kind in KINDS {
        let mut original = started(config, 300, &[request(1, 2040, 30)], 8);
        let before = original.engine.stats().blocks_used;
        assert_eq!(before, 128);
        let mut fork = original.fork(kind);
        assert_eq!(original.engine.stats().blocks_used, before);
        original.step();
        fork.step();
        let (used, of_fork) =
            (original.engine.stats().blocks_used, fork.engine.stats().blocks_used);
        match kind {
            Fork::Shared => assert_eq!((used, of_fork), (before + 1, before + 1)),
            Fork::Deep => assert_eq!((used, of_fork), (before, before)),
        }
        both_on_threads(&mut original, &mut fork);
        assert_eq!(original.output(RequestId(0)).choices, fork.output(RequestId(0)).choices);
    }
}

#[test]
fn requests_wait_for_blocks_of_the_other_engine() {
    // Each engine alone fills the storage; together they cannot run at once.
    let requests: Vec<Request> = (0..4).map(|kind| request(kind, 100, 40)).collect();
    let mut original = Harness::new(config(), 10);
    let mut fork = original.fork(Fork::Shared);
    for request in &requests {
        original.submit(request);
        fork.submit(request);
    }
    for _ in 0..3 {
        original.step();
        fork.step();
        Scheduler::audit_all(&[&original.engine.scheduler, &fork.engine.scheduler]);
    }
    both_on_threads(&mut original, &mut fork);
    check(&original, &requests);
    check(&fork, &requests);
    assert_eq!(original.engine.stats().blocks_used, 0);
}

#[test]
fn sequence_that_fits_no_storage_is_refused_beside_a_fork() {
    let mut original = Harness::new(config(), 4);
    let mut fork = original.fork(Fork::Shared);
    let large = original.submit(&request(1, 60, 30));
    let small = fork.submit(&request(2, 20, 20));
    both_on_threads(&mut original, &mut fork);
    let (_, error) = &original.outputs[&large];
    assert!(matches!(error, Some(RequestError::OutOfBlocks { .. })), "{error:?}");
    assert_eq!(fork.output(small).choices, expected(&request(2, 20, 20)));
}

#[test]
fn forked_request_has_the_same_answer() {
    for (kind, of_model) in
        KINDS.into_iter().flat_map(|kind| [(kind, config()), (kind, recurrent())])
    {
        for (steps, blocks, max_sequences) in
            [(0, 100, 8), (1, 100, 8), (9, 100, 8), (9, 17, 8), (9, 100, 4), (60, 11, 3)]
        {
            let mut requests = mixture();
            requests[5].sampling.n = 3;
            requests[2].sampling.stop = vec!["a".to_owned()];
            let config = EngineConfig { max_sequences, token_budget: 20, ..of_model };
            let mut harness = started(config, blocks, &requests, steps);
            for id in (0..requests.len() as u64).map(RequestId) {
                if let Ok(fork) = harness.engine.fork_request(id, kind) {
                    assert_eq!(fork.0 as usize, requests.len());
                    requests.push(requests[id.0 as usize].clone());
                    harness.engine.scheduler.audit();
                }
            }
            harness.run();
            check(&harness, &requests);
        }
    }
}

#[test]
fn forked_request_shares_blocks_or_has_copies() {
    let kinds = KINDS.into_iter().zip([0, 4]);
    for ((kind, added), config) in kinds.flat_map(|kind| [(kind, config()), (kind, recurrent())]) {
        let mut harness = started(config, 40, &[request(1, 50, 30)], 5);
        assert_eq!(harness.engine.stats().blocks_used, 4);
        let fork = harness.engine.fork_request(RequestId(0), kind).expect("there is room");
        assert_eq!(harness.engine.stats().blocks_used, 4 + added);
        let report = harness.step();
        assert_eq!((report.decode_tokens, report.prefill_tokens), (2, 0), "nothing is repeated");
        let first = report.events.iter().find_map(|event| match event {
            Event::Delta { id, tokens, .. } if *id == fork => Some(tokens.len()),
            _ => None,
        });
        assert_eq!(first, Some(5), "what the original had is reported first");
        harness.run();
        check(&harness, &[request(1, 50, 30), request(1, 50, 30)]);
    }
}

#[test]
fn unknown_request_and_full_engine_are_refused() {
    let config = EngineConfig { max_requests: 1, ..config() };
    let mut harness = started(config, 40, &[request(1, 20, 3)], 1);
    let fork = harness.engine.fork_request(RequestId(0), Fork::Shared);
    assert!(matches!(fork, Err(ForkError::Full { requests: 1 })), "{fork:?}");
    harness.run();
    let fork = harness.engine.fork_request(RequestId(0), Fork::Shared);
    assert!(matches!(fork, Err(ForkError::UnknownRequest { id: RequestId(0) })), "{fork:?}");
}

#[test]
fn failed_copies_leave_no_request_and_no_block() {
    let fail = |harness: &Harness| harness.control.lock().expect("no panic").fail_copy = true;
    let mut harness = started(config(), 40, &[request(1, 50, 30)], 5);
    fail(&harness);
    let fork = harness.engine.fork_request(RequestId(0), Fork::Deep);
    assert!(matches!(fork, Err(ForkError::Copy(_))), "{fork:?}");
    harness.engine.scheduler.audit();
    assert_eq!(harness.engine.stats().blocks_used, 4);
    // A copy before a write fails the step, as the backend does.
    let mut fork = harness.fork(Fork::Shared);
    fail(&harness);
    assert!(harness.step().failed);
    let (_, error) = &harness.outputs[&RequestId(0)];
    assert!(matches!(error, Some(RequestError::Step(_))), "{error:?}");
    fork.run();
    check(&fork, &[request(1, 50, 30)]);
}

#[test]
fn failed_copy_of_a_state_fails_its_request_alone() {
    let mut requests = [request(1, 20, 9), request(2, 30, 9)];
    requests[0].sampling.n = 2;
    let mut harness = started(recurrent(), 40, &requests, 0);
    harness.control.lock().expect("no panic").fail_copy = true;
    harness.run();
    let (_, error) = &harness.outputs[&RequestId(0)];
    assert!(matches!(error, Some(RequestError::Step(_))), "{error:?}");
    assert_eq!(harness.output(RequestId(1)).choices, expected(&requests[1]));
}

#[test]
fn shared_forks_have_states_of_their_own() {
    let requests = [request(1, 20, 9), request(2, 30, 40)];
    let mut harness = started(recurrent(), 40, &requests, 2);
    let mut fork = harness.fork(Fork::Shared);
    both_on_threads(&mut harness, &mut fork);
    let mut last = fork.fork(Fork::Shared);
    drop(harness);
    // The state after the prompt was kept before the forks.
    let before = last.engine.stats().prefill_tokens;
    last.submit(&requests[1]);
    last.run_beside_others();
    let computed = last.engine.stats().prefill_tokens - before;
    assert!(computed < 16, "{computed} tokens were computed again");
    check(&fork, &requests);
    let all = [&requests[..], &requests[1..]].concat();
    check(&last, &all);
}

#[test]
fn resumed_conversation_computes_only_what_no_block_has() {
    let mut harness = Harness::new(config(), 40);
    let whole = request(4, 40, 60);
    let tokens = harness.choices(&whole)[0].tokens.clone();
    let before = harness.engine.stats().prefill_tokens;
    let resumed = Request { resume: tokens[..50].to_vec(), ..whole.clone() };
    let id = harness.submit(&resumed);
    let report = harness.step();
    assert_eq!(report.prefill_tokens, 90 - 80, "five blocks of ninety tokens are there");
    while !harness.engine.is_idle() {
        for event in harness.engine.step(harness.now).events {
            if let Event::Finished { id: finished, output } = event {
                assert_eq!((finished, output.choices), (id, expected(&whole)));
            }
        }
    }
    assert_eq!(harness.engine.stats().prefill_tokens - before, 10);
}
