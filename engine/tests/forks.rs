//! Forks of an engine on a real model: original and forks, on threads at the same time and with too few blocks, give
//! the tokens and the bits of log-probabilities of an undisturbed engine.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{collections::BTreeMap, sync::Arc, thread, time::Instant};

use tritmill_engine::{
    Engine, EngineConfig, Event, Fork, Output, Request, RequestId, SamplingParams, TokenText,
    backend::cpu::{self, CpuOptions, KvType},
    files::Model,
};

const REQUESTS: usize = 12;

fn engine(model: &Arc<Model>, kv: KvType, block_count: usize) -> Engine {
    let options = CpuOptions { threads: 2, kv, ..CpuOptions::new(block_count) };
    let backend = cpu::load(Arc::clone(model), options).unwrap();
    let vocabulary: Arc<dyn TokenText> = Arc::clone(model) as _;
    let config = EngineConfig::new(model.config().context_length);
    Engine::new(backend, vocabulary, model.config().eos_tokens.clone(), config)
}

/// Greedy and sampled requests with penalties; every second one starts with the same 40 tokens.
fn request(index: usize) -> Request {
    let seed = index as u32;
    let shared = (0..40).map(|i| (i * 37 + 5) % 1000);
    let own = (0..10 + seed * 5 % 47).map(|i| (i * 7919 + seed * 104_729) % 1000);
    let prompt = if index.is_multiple_of(2) { shared.chain(own).collect() } else { own.collect() };
    let sampling = SamplingParams {
        max_tokens: 25 + index,
        temperature: if index.is_multiple_of(3) { 0.0 } else { 0.9 },
        top_k: 50,
        repetition_penalty: 1.2,
        frequency_penalty: 0.1,
        seed: u64::from(seed),
        n: 1 + index % 2,
        ignore_eos: true,
        logprobs: Some(3),
        ..SamplingParams::default()
    };
    Request { prompt, sampling, ..Request::default() }
}

/// Runs some steps, or until the engine is idle; returns the outputs of requests that finished.
fn run(engine: &mut Engine, steps: usize) -> BTreeMap<RequestId, Output> {
    let (now, mut outputs, mut step) = (Instant::now(), BTreeMap::new(), 0);
    while !engine.is_idle() && step < steps {
        for event in engine.step(now).events {
            match event {
                Event::Finished { id, output } => drop(outputs.insert(id, output)),
                Event::Failed { id, error, .. } => panic!("request {}: {error}", id.0),
                Event::Delta { .. } => {}
            }
        }
        step += 1;
    }
    outputs
}

/// Tokens, text, and the bits of log-probabilities.
fn bits(output: &Output) -> Vec<(Vec<u32>, String, Vec<u32>)> {
    let choices = output.choices.iter();
    let of_choice = choices.map(|choice| {
        let logprobs = choice.logprobs.iter().flatten().map(|l| l.logprob.to_bits());
        (choice.tokens.clone(), choice.text.clone(), logprobs.collect())
    });
    of_choice.collect()
}

fn submit_all(engine: &mut Engine) {
    for index in 0..REQUESTS {
        assert_eq!(engine.submit(request(index)).unwrap(), RequestId(index as u64));
    }
}

#[test]
fn forks_on_threads_and_with_few_blocks_change_no_bit() {
    let model = Arc::new(support::open("bitnet-tiny"));
    for kv in [KvType::F16, KvType::Q8] {
        let mut undisturbed = engine(&model, kv, 400);
        submit_all(&mut undisturbed);
        let want = run(&mut undisturbed, usize::MAX);
        for (kind, blocks, steps) in [
            (Fork::Shared, 400, 0),
            (Fork::Shared, 400, 12),
            (Fork::Shared, 20, 15),
            (Fork::Deep, 400, 12),
            (Fork::Deep, 20, 15),
        ] {
            let mut original = engine(&model, kv, blocks);
            submit_all(&mut original);
            let before = run(&mut original, steps);
            let mut first = original.fork(kind).unwrap();
            let mut second = first.fork(Fork::Shared).unwrap();
            assert_eq!(first.stats().steps, 0);
            let all = [&mut original, &mut first, &mut second];
            let outputs = thread::scope(|scope| {
                let threads = all.map(|engine| scope.spawn(|| run(engine, usize::MAX)));
                threads.map(|thread| thread.join().unwrap())
            });
            for (of_engine, after) in outputs.iter().enumerate() {
                for (id, want) in &want {
                    let got = before.get(id).or_else(|| after.get(id)).unwrap();
                    assert!(
                        bits(got) == bits(want),
                        "request {}, engine {of_engine}, {kv:?}, {kind:?}, {blocks} blocks",
                        id.0
                    );
                }
            }
            let preempted = [&original, &first, &second].iter().any(|e| e.stats().preemptions > 0);
            assert_eq!(preempted, blocks == 20);
            for engine in [original, first, second] {
                assert_eq!(engine.stats().blocks_used, 0, "every block is released");
            }
        }
    }
}

#[test]
fn forked_requests_change_no_bit() {
    let model = Arc::new(support::open("bitnet-tiny"));
    let mut engine = engine(&model, KvType::F16, 200);
    submit_all(&mut engine);
    let before = run(&mut engine, 12);
    let kinds = [Fork::Shared, Fork::Deep];
    let mut originals = BTreeMap::new();
    for id in (0..REQUESTS as u64).map(RequestId) {
        for kind in kinds {
            originals.insert(engine.fork_request(id, kind).unwrap(), id);
        }
    }
    assert!(before.is_empty());
    let outputs = run(&mut engine, usize::MAX);
    assert_eq!(outputs.len(), 3 * REQUESTS);
    for (fork, original) in originals {
        assert!(bits(&outputs[&fork]) == bits(&outputs[&original]), "request {}", original.0);
    }
    assert_eq!(engine.stats().blocks_used, 0);
}
