//! Drafts: fewer steps, the same answers.

use super::*;

/// Runs requests one after another; returns the steps of each, and the engine's counters.
fn one_after_another(draft_tokens: usize, requests: &[Request]) -> (Vec<u64>, EngineStats) {
    on_backend(false, draft_tokens, requests)
}

/// The same on a backend that draws tokens by itself, or does not.
fn on_backend(draws: bool, draft_tokens: usize, requests: &[Request]) -> (Vec<u64>, EngineStats) {
    let mut harness = Harness::on(EngineConfig { draft_tokens, ..config() }, 60, draws);
    let mut steps = Vec::new();
    for request in requests {
        let before = harness.engine.stats().steps;
        assert_eq!(harness.choices(request), expected(request), "{request:?}");
        steps.push(harness.engine.stats().steps - before);
    }
    (steps, harness.engine.stats())
}

#[test]
fn repeated_requests_take_fewer_steps() {
    // The second of each pair is answered as the first one, whatever draws the tokens.
    let pairs: Vec<Request> =
        mixture().into_iter().flat_map(|request| [request.clone(), request]).collect();
    let (without, stats) = one_after_another(0, &pairs);
    assert_eq!((stats.drafted_tokens, stats.accepted_tokens), (0, 0));
    let (with, stats) = one_after_another(8, &pairs);
    let seconds = |steps: &[u64]| steps.iter().skip(1).step_by(2).sum::<u64>();
    assert!(2 * seconds(&with) < seconds(&without), "{with:?}, not {without:?}");
    assert!(stats.accepted_tokens > 100 && stats.drafted_tokens >= stats.accepted_tokens);
}

/// A backend that draws gets the changes of logits after each draft: of penalties that count it, and of masks that end with it.
#[test]
fn drafts_change_the_logits_of_draws_after_them() {
    let penalised = |seed| {
        let mut request = request(3, 20, 40);
        let sampling = &mut request.sampling;
        (sampling.seed, sampling.temperature, sampling.top_p) = (seed, 0.7, 0.9);
        match seed % 3 {
            0 => sampling.frequency_penalty = 0.4,
            1 => sampling.repetition_penalty = 0.8,
            // The end is likely, at once after the mask.
            _ => {
                (sampling.ignore_eos, sampling.min_tokens) = (false, 13);
                sampling.logit_bias = [(EOS, 6.0)].into();
            }
        }
        request
    };
    let requests: Vec<Request> =
        (0..12).map(penalised).flat_map(|request| [request.clone(), request]).collect();
    let (_, stats) = on_backend(true, 8, &requests);
    assert!(stats.accepted_tokens > 100, "{}", stats.accepted_tokens);
}

#[test]
fn answers_of_other_tenants_give_no_drafts() {
    let of_tenant = |tenant| Request { salt: vec![tenant], ..request(3, 20, 40) };
    let (_, stats) = one_after_another(8, &[of_tenant(1), of_tenant(2)]);
    assert_eq!(stats.accepted_tokens, 0);
    let (_, stats) = one_after_another(8, &[of_tenant(1), of_tenant(1)]);
    assert!(stats.accepted_tokens > 10);
}

#[test]
fn drafts_that_are_refused_leave_nothing_behind() {
    // Answers of different seeds begin with the same prompt and soon differ; blocks are few, so drafts lack some.
    for blocks in [6, 9, 30] {
        let mut requests: Vec<Request> = (0..12).map(|_| request(2, 40, 30)).collect();
        for (seed, request) in (0..).zip(&mut requests) {
            (request.sampling.seed, request.sampling.temperature) = (seed / 3, 0.2);
            request.sampling.n = 1 + seed as usize % 2;
        }
        let harness = check_together(config(), blocks, &requests);
        assert!(harness.engine.stats().drafted_tokens > 0, "{blocks} blocks");
        assert_eq!(harness.engine.stats().blocks_used, 0);
    }
}

#[test]
fn draws_that_top_p_leaves_undecided_are_made_from_all_logits() {
    let mut requests: Vec<Request> = (0..8).map(|kind| request(kind, 20, 40)).collect();
    for request in &mut requests {
        (request.sampling.temperature, request.sampling.top_p) = (0.4, 0.8);
    }
    let stats = check_together(config(), 100, &requests).engine.stats();
    let (undecided, all) = (stats.undecided_draws, stats.generated_tokens);
    assert!(undecided > 0 && undecided < all, "{undecided} of {all}");
}
