//! The ways a request finishes, and its output in each.

use super::*;

fn only(harness: &Harness, id: RequestId) -> (&Output, &Choice) {
    let output = harness.output(id);
    (output, &output.choices[0])
}

#[test]
fn cancelled_request_keeps_its_text_and_others_continue() {
    let mut harness = Harness::new(config(), 40);
    let (a, b) = (request(1, 20, 30), request(2, 20, 30));
    let ids = [harness.submit(&a), harness.submit(&b)];
    for _ in 0..5 {
        harness.step();
    }
    harness.engine.cancel(ids[0]);
    harness.run();
    harness.engine.cancel(ids[0]);
    assert!(harness.engine.is_idle(), "a finished request cannot be cancelled");
    let (_, choice) = only(&harness, ids[0]);
    assert_eq!(choice.finish_reason, FinishReason::Cancelled);
    assert_eq!(choice.tokens, expected(&a)[0].tokens[..5]);
    assert_eq!(harness.output(ids[1]).choices, expected(&b));
}

#[test]
fn pending_request_can_be_cancelled() {
    let config = EngineConfig { max_sequences: 1, ..config() };
    let mut harness = Harness::new(config, 40);
    let running = harness.submit(&request(1, 20, 30));
    let pending = harness.submit(&request(2, 20, 30));
    harness.step();
    harness.engine.cancel(pending);
    harness.step();
    let (output, choice) = only(&harness, pending);
    assert_eq!(choice.finish_reason, FinishReason::Cancelled);
    assert_eq!((output.completion_tokens, output.cached_tokens), (0, 0));
    harness.run();
    assert_eq!(only(&harness, running).1.finish_reason, FinishReason::Length);
}

#[test]
fn request_finishes_with_its_text_at_its_deadline() {
    let mut harness = Harness::new(config(), 40);
    let mut late = request(1, 20, 30);
    late.deadline = Some(harness.now + Duration::from_secs(4));
    let choice = &harness.complete(&late).choices[0];
    assert_eq!(choice.finish_reason, FinishReason::Deadline);
    assert_eq!(choice.tokens, expected(&late)[0].tokens[..3], "steps at 1, 2 and 3 seconds");
}

#[test]
fn request_with_a_past_deadline_finishes_without_running() {
    let mut harness = Harness::new(config(), 40);
    let mut late = request(1, 20, 30);
    late.deadline = Some(harness.now);
    let id = harness.submit(&late);
    let report = harness.step();
    assert_eq!(report.rows, 0);
    assert_eq!(only(&harness, id).1.finish_reason, FinishReason::Deadline);
}

#[test]
fn failed_step_fails_its_requests_and_the_engine_continues() {
    let config = EngineConfig { max_sequences: 2, ..config() };
    let mut harness = Harness::new(config, 40);
    let requests: Vec<Request> = (0..4).map(|kind| request(kind, 20, 10)).collect();
    let ids: Vec<RequestId> = requests.iter().map(|request| harness.submit(request)).collect();
    harness.step();
    harness.fail_next_step();
    let report = harness.step();
    assert!(report.failed);
    harness.run();
    for (index, (id, request)) in ids.iter().zip(&requests).enumerate() {
        let (output, error) = &harness.outputs[id];
        if index < 2 {
            assert!(matches!(error, Some(RequestError::Step(_))), "{error:?}");
            assert_eq!(output.choices[0].finish_reason, FinishReason::Failed);
            assert_eq!(output.choices[0].tokens, expected(request)[0].tokens[..1]);
        } else {
            assert!(error.is_none());
            assert_eq!(output.choices, expected(request));
        }
    }
    let stats = harness.engine.stats();
    assert_eq!((stats.failed_steps, stats.failed, stats.finished), (1, 2, 2));
}

#[test]
fn blocks_of_a_failed_step_leave_the_prefix_cache() {
    let mut harness = Harness::new(config(), 40);
    let request = request(1, 40, 30);
    harness.submit(&request);
    harness.step();
    harness.fail_next_step();
    harness.step();
    let output = harness.complete(&request);
    assert_eq!(output.cached_tokens, 0);
    assert_eq!(output.choices, expected(&request));
}

#[test]
fn unusable_logits_fail_one_request_and_others_continue() {
    let mut harness = Harness::new(config(), 40);
    let good = request(1, 3, 20);
    let mut bad = request(2, 3, 20);
    bad.prompt[0] = POISON;
    bad.sampling.n = 2;
    let ids = [harness.submit(&bad), harness.submit(&good)];
    harness.run();
    let (output, error) = &harness.outputs[&ids[0]];
    assert!(matches!(error, Some(RequestError::Sample { position: POISON_AT, .. })), "{error:?}");
    assert_eq!(output.choices[0].tokens.len(), POISON_AT - 3);
    assert_eq!(harness.output(ids[1]).choices, expected(&good));
}

#[test]
fn sequence_larger_than_the_cache_fails_with_its_text() {
    let mut harness = Harness::new(config(), 3);
    let request = request(1, 40, 30);
    let id = harness.submit(&request);
    harness.run();
    let (output, error) = &harness.outputs[&id];
    assert!(matches!(error, Some(RequestError::OutOfBlocks { needed: 4, total: 3 })), "{error:?}");
    // 48 positions fit; the token drawn after the last position needs no position yet.
    assert_eq!(output.choices[0].tokens, expected(&request)[0].tokens[..9]);
}

#[test]
fn sequence_preempted_too_often_fails() {
    let config = EngineConfig { stall_limit: 0, ..config() };
    let mut harness = Harness::new(config, 8);
    let requests: Vec<Request> = (0..3).map(|kind| request(kind, 30, 40)).collect();
    let ids: Vec<RequestId> = requests.iter().map(|request| harness.submit(request)).collect();
    harness.run();
    let (output, error) = &harness.outputs[&ids[2]];
    assert!(matches!(error, Some(RequestError::NoProgress { stalls: 1 })), "{error:?}");
    let length = output.choices[0].tokens.len();
    assert_eq!(output.choices[0].tokens, expected(&requests[2])[0].tokens[..length]);
    assert_eq!(harness.output(ids[0]).choices, expected(&requests[0]));
}

#[test]
fn idle_engine_runs_no_step() {
    let mut harness = Harness::new(config(), 4);
    let report = harness.step();
    assert_eq!((report.rows, report.events.len()), (0, 0));
    assert_eq!(harness.engine.stats().steps, 0);
}

#[test]
fn max_tokens_is_capped_by_the_context() {
    let request = request(1, CONTEXT - 3, 50);
    let choices = Harness::new(config(), 40).choices(&request);
    assert_eq!(choices, expected(&request));
    assert_eq!(choices[0].tokens.len(), 3);
    assert_eq!(choices[0].finish_reason, FinishReason::Length);
}

#[test]
fn invalid_requests_are_refused_with_the_field() {
    let config = EngineConfig { max_requests: 1, ..config() };
    let mut engine = Harness::new(config, 4).engine;
    let mut refused = |change: &dyn Fn(&mut Request), field, message: &str| {
        let mut request = request(1, 10, 5);
        change(&mut request);
        let error = engine.submit(request).expect_err(message);
        assert_eq!(error.field(), Some(field));
        assert!(error.to_string().contains(message), "{error}");
    };
    refused(&|r| r.prompt.clear(), "prompt", "empty");
    refused(
        &|r| r.prompt = vec![1; CONTEXT],
        "prompt",
        "200 tokens, but this model's maximum context length is 200",
    );
    refused(&|r| r.prompt = vec![1; 65], "prompt", "65 tokens, the KV cache holds 64");
    refused(&|r| r.prompt[3] = VOCAB as u32, "prompt", "token 48, the vocabulary has 48");
    refused(&|r| r.sampling.stop_tokens = vec![99], "stop_tokens", "token 99");
    refused(&|r| r.sampling.logit_bias = [(77, 1.0)].into(), "logit_bias", "token 77");
    refused(&|r| r.sampling.top_p = -0.1, "top_p", "top_p is -0.1");
    assert!(engine.is_idle());
    engine.submit(request(1, 64, 1)).expect("the request fits");
    let error = engine.submit(request(1, 1, 1)).expect_err("one is the limit");
    assert_eq!((error.field(), error), (None, SubmitError::Full { requests: 1 }));
}

/// Returns a greedy request that repeats one letter, by logit bias.
fn repeating(letter: u32, sampling: SamplingParams) -> Request {
    let sampling = SamplingParams { logit_bias: [(letter, 100.0)].into(), ..sampling };
    Request { prompt: prompt(1, 5), sampling, ..Request::default() }
}

#[test]
fn stop_token_ends_the_choice_and_is_not_in_the_text() {
    let sampling = SamplingParams { stop_tokens: vec![2], ..SamplingParams::greedy(9) };
    let choice = &Harness::new(config(), 9).choices(&repeating(2, sampling))[0];
    assert_eq!((choice.tokens.as_slice(), choice.text.as_str()), ([2].as_slice(), ""));
    assert_eq!(choice.finish_reason, FinishReason::Stop);
}

#[test]
fn end_of_sequence_respects_min_tokens_and_ignore_eos() {
    let answer = |sampling| Harness::new(config(), 9).choices(&repeating(EOS, sampling)).remove(0);
    let choice = answer(SamplingParams::greedy(9));
    assert_eq!((choice.tokens, choice.finish_reason), (vec![EOS], FinishReason::Stop));
    let choice = answer(SamplingParams { min_tokens: 4, ..SamplingParams::greedy(9) });
    assert_eq!((choice.tokens.len(), choice.finish_reason), (5, FinishReason::Stop));
    assert!(choice.tokens[..4].iter().all(|token| *token != EOS));
    let choice = answer(SamplingParams { ignore_eos: true, ..SamplingParams::greedy(9) });
    assert_eq!((choice.tokens, choice.text.as_str()), (vec![EOS; 9], ""));
    assert_eq!(choice.finish_reason, FinishReason::Length);
}

#[test]
fn stop_string_cuts_the_text_and_keeps_the_tokens() {
    let stop = vec!["ccc".to_owned()];
    let sampling = SamplingParams { stop: stop.clone(), ..SamplingParams::greedy(9) };
    let choice = &Harness::new(config(), 9).choices(&repeating(2, sampling))[0];
    assert_eq!((choice.tokens.as_slice(), choice.text.as_str()), ([2; 3].as_slice(), ""));
    assert_eq!(choice.finish_reason, FinishReason::Stop);
    let sampling = SamplingParams { stop, min_tokens: 5, ..SamplingParams::greedy(9) };
    let choice = &Harness::new(config(), 9).choices(&repeating(2, sampling))[0];
    assert_eq!((choice.tokens.as_slice(), choice.text.as_str()), ([2; 5].as_slice(), "cc"));
}

#[test]
fn text_equals_that_of_all_bytes_decoded_together() {
    // Token 26 is the first byte of a two-byte character.
    let choice = &Harness::new(config(), 9).choices(&repeating(26, SamplingParams::greedy(2)))[0];
    assert_eq!(choice.text, "\u{fffd}\u{fffd}");
    let letters = Letters::new();
    for mut request in mixture() {
        request.sampling.ignore_eos = false;
        let choice = &Harness::new(config(), 40).choices(&request)[0];
        let shown = choice.tokens.iter().filter(|token| !letters.is_special(**token));
        let bytes: Vec<u8> = shown.flat_map(|token| letters.bytes(*token)).copied().collect();
        assert_eq!(choice.text, String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn logprobs_describe_every_token_and_do_not_change_the_draw() {
    let mut request = request(4, 10, 12);
    request.sampling.top_k = 5;
    request.sampling.logit_bias = [(3, 2.0)].into();
    let plain = Harness::new(config(), 9).choices(&request);
    request.sampling.logprobs = Some(3);
    let choice = &Harness::new(config(), 9).choices(&request)[0];
    assert_eq!(choice.tokens, plain[0].tokens);
    let logprobs = choice.logprobs.as_ref().expect("logprobs were requested");
    assert_eq!(logprobs.len(), choice.tokens.len());
    for (entry, token) in logprobs.iter().zip(&choice.tokens) {
        assert_eq!((entry.token, entry.bytes.as_slice()), (*token, Letters::new().bytes(*token)));
        assert!(entry.logprob < 0.0 && entry.top.len() == 3);
        assert!(entry.top[0].logprob >= entry.logprob);
        assert!(entry.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
    }
}
