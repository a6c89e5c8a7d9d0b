//! The whole engine on a real model: other requests, preemption, prefix reuse and chunking change no token
//! and no bit of a log-probability.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tritmill_engine::{
    Engine, EngineConfig, Event, Output, Request, RequestId, SamplingParams,
    backend::cpu::{self, CpuOptions, KvType},
    files::Model,
    formats::Format,
    generate,
    kv::{
        blocks_for,
        disk::{BlockTiers, FolderLimits, TierOptions},
    },
};

const REQUESTS: usize = 24;

fn model() -> Arc<Model> {
    Arc::new(support::open("bitnet-tiny"))
}

fn engine(model: &Arc<Model>, kv: KvType, block_count: usize, config: EngineConfig) -> Engine {
    let options =
        CpuOptions { format: Format::Tl2, threads: 2, kv, ..CpuOptions::new(block_count) };
    let backend = cpu::load(Arc::clone(model), options).unwrap();
    let vocabulary: Arc<dyn tritmill_engine::TokenText> = Arc::clone(model) as _;
    Engine::new(backend, vocabulary, model.config().eos_tokens.clone(), config)
}

/// Greedy and sampled requests; every third one starts with the same 40 tokens.
fn request(index: usize) -> Request {
    let seed = index as u32;
    let shared = (0..40).map(|i| (i * 37 + 5) % 1000);
    let own = (0..10 + seed * 5 % 47).map(|i| (i * 7919 + seed * 104_729) % 1000);
    let prompt = if index.is_multiple_of(3) { shared.chain(own).collect() } else { own.collect() };
    let sampling = SamplingParams {
        max_tokens: 20 + index,
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
        top_k: 50,
        seed: u64::from(seed),
        n: 1 + index % 2,
        ignore_eos: true,
        logprobs: Some(3),
        ..SamplingParams::default()
    };
    Request { prompt, sampling, ..Request::default() }
}

fn run(engine: &mut Engine, indices: impl IntoIterator<Item = usize>) -> BTreeMap<usize, Output> {
    run_all(engine, indices.into_iter().map(|index| (index, request(index))))
}

fn run_all(
    engine: &mut Engine,
    requests: impl IntoIterator<Item = (usize, Request)>,
) -> BTreeMap<usize, Output> {
    let now = Instant::now();
    let ids: BTreeMap<RequestId, usize> =
        requests.into_iter().map(|(i, of)| (engine.submit(of).unwrap(), i)).collect();
    let mut outputs = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step(now).events {
            match event {
                Event::Finished { id, output } => {
                    outputs.insert(ids[&id], output);
                }
                Event::Failed { id, error, .. } => panic!("request {}: {error}", ids[&id]),
                _ => {}
            }
        }
    }
    outputs
}

/// Tokens and the bits of their log-probabilities.
fn bits(output: &Output) -> Vec<(Vec<u32>, Vec<u64>)> {
    output
        .choices
        .iter()
        .map(|choice| {
            let logprobs = choice.logprobs.iter().flatten().map(|l| f64::from(l.logprob).to_bits());
            (choice.tokens.clone(), logprobs.collect())
        })
        .collect()
}

#[test]
fn other_requests_preemption_and_prefix_reuse_change_no_bit() {
    for kv in [KvType::F16, KvType::Q8] {
        check_together(kv);
    }
}

fn check_together(kv: KvType) {
    let model = model();
    let context = model.config().context_length;
    let plain = EngineConfig { prefix_cache: false, ..EngineConfig::new(context) };
    let mut alone = engine(&model, kv, 64, plain);
    let want: BTreeMap<usize, _> =
        (0..REQUESTS).map(|i| (i, bits(&run(&mut alone, [i])[&i]))).collect();
    assert!(want.values().all(|choices| choices.iter().all(|c| c.0.len() >= 20)));
    assert_eq!(alone.stats().preemptions, 0);

    let cached = EngineConfig::new(context);
    for (blocks, config) in [
        (400, cached),
        (400, EngineConfig { token_budget: 24, max_sequences: 24, ..cached }),
        (20, cached),
        (20, EngineConfig { max_sequences: 7, ..plain }),
    ] {
        let mut engine = engine(&model, kv, blocks, config);
        // Twice, in different orders: the second run finds prefixes of the first.
        for order in [(0..REQUESTS).collect::<Vec<_>>(), (0..REQUESTS).rev().collect()] {
            let got = run(&mut engine, order);
            for (index, want) in &want {
                assert!(bits(&got[index]) == *want, "request {index}, {kv:?}, {blocks} blocks");
            }
        }
        let stats = engine.stats();
        assert_eq!(stats.blocks_used, 0, "blocks leaked");
        assert_eq!(stats.preemptions > 0, blocks == 20, "{} preemptions", stats.preemptions);
        assert_eq!(stats.prefix_hit_tokens > 0, config.prefix_cache);
    }
}

/// Decodes that begin with the same blocks attend together.
#[test]
fn sequences_with_a_common_prompt_change_no_bit() {
    let model = model();
    let long = |index: usize| {
        let Request { prompt, sampling, .. } = request(index);
        let common = if index == 5 { 150 } else { 290 };
        let first = (0..common).map(|i| (i * 31 + 7) % 1000);
        (index, Request { prompt: first.chain(prompt).collect(), sampling, ..Request::default() })
    };
    for kv in [KvType::F16, KvType::F32, KvType::Q8] {
        let config = EngineConfig::new(model.config().context_length);
        let mut alone = engine(&model, kv, 400, EngineConfig { prefix_cache: false, ..config });
        let mut together = engine(&model, kv, 400, config);
        let got = run_all(&mut together, (0..8).map(long));
        for index in 0..8 {
            let want = run_all(&mut alone, [long(index)]);
            assert!(bits(&got[&index]) == bits(&want[&index]), "request {index}, {kv:?}");
            assert!(got[&index].cached_tokens >= if index == 0 { 0 } else { 144 });
        }
    }
}

/// Blocks behind the windows are freed: fewer of them answer longer texts than blocks of all layers could, with the same bits.
#[test]
fn freed_windows_change_no_bit() {
    let model = Arc::new(support::open("maple-tiny/maple-tiny-tq2_0.gguf"));
    let long = |index: usize| {
        let Request { prompt, sampling, .. } = request(index);
        let first = (0..170).map(|i| (i * 31 + 7) % 500);
        let prompt = first.chain(prompt.into_iter().map(|token| token % 500)).collect();
        (index, Request { prompt, sampling, ..Request::default() })
    };
    let groups = cpu::layer_groups(&model);
    let config = EngineConfig { token_budget: 64, ..EngineConfig::new(1024) };
    let plain = EngineConfig { prefix_cache: false, ..config };
    let mut alone = engine(&model, KvType::F16, 600, plain);
    let want: BTreeMap<usize, _> =
        (0..8).map(|i| (i, bits(&run_all(&mut alone, [long(i)])[&i]))).collect();
    let few = groups.blocks_for(300, 64) + 4;
    assert!(few < groups.count() * blocks_for(300), "{few} blocks");
    for (blocks, config) in [(600, config), (few, config), (few, plain)] {
        let mut engine = engine(&model, KvType::F16, blocks, config);
        for _ in 0..2 {
            let got = run_all(&mut engine, (0..8).map(long));
            for (index, want) in &want {
                assert!(bits(&got[index]) == *want, "request {index}, {blocks} blocks");
            }
        }
        assert_eq!(engine.stats().blocks_used, 0, "blocks leaked");
        assert_eq!(engine.stats().prefix_hit_tokens > 0, config.prefix_cache);
    }
}

#[test]
fn blocks_from_disk_change_no_bit() {
    for kv in [KvType::F16, KvType::F32, KvType::Q8] {
        check_disk(kv);
    }
}

fn check_disk(kv: KvType) {
    let (model, folder) = (model(), tempfile::tempdir().unwrap());
    let config = EngineConfig::new(model.config().context_length);
    let limits = FolderLimits { bytes_max: 1 << 30, free_min: 0 };
    let disk = || BlockTiers::open(TierOptions::folder(folder.path(), limits)).unwrap();
    let shared = || (0..REQUESTS).step_by(3);
    let plain = EngineConfig { prefix_cache: false, ..config };
    let want = run(&mut engine(&model, kv, 400, plain), shared());
    // The second prompt that begins in the same way has its blocks written.
    let mut first = engine(&model, kv, 400, config);
    first.use_disk(disk());
    run(&mut first, shared());
    run(&mut first, shared());
    let started = Instant::now();
    while first.disk_stats().unwrap().written < 2 {
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", first.disk_stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    let mut second = engine(&model, kv, 400, config);
    second.use_disk(disk());
    let got = run(&mut second, shared());
    for (index, want) in &want {
        assert!(bits(&got[index]) == bits(want), "request {index}, {kv:?}");
        assert!(got[index].cached_tokens >= 32, "request {index}: {}", got[index].cached_tokens);
    }
    assert!(second.disk_stats().unwrap().hits >= 2);
    // Blocks of another element type are of another class.
    let other = if kv == KvType::Q8 { KvType::F16 } else { KvType::Q8 };
    let mut other = engine(&model, other, 400, config);
    other.use_disk(disk());
    run(&mut other, [0]);
    assert_eq!(other.disk_stats().unwrap().hits, 0);
}

#[test]
fn resumed_request_finishes_as_without_the_interruption() {
    let model = model();
    let answer = |request: Request| {
        let mut engine = engine(&model, KvType::F16, 64, EngineConfig::new(512));
        let output = generate::run(&mut engine, request, |_, _| {}).unwrap();
        (output, engine.stats().generated_tokens)
    };
    for index in [0, 1, 5] {
        let mut request = request(index);
        request.sampling.n = 1;
        request.sampling.logprobs = None;
        request.sampling.repetition_penalty = 1.3;
        request.sampling.frequency_penalty = 0.5;
        let (whole, generated) = answer(request.clone());
        let tokens = whole.choices[0].tokens.clone();
        // A stop string from the middle of the text, so that the text's state must be restored too.
        let text: Vec<char> = whole.choices[0].text.chars().collect();
        let stop: String = text[text.len() / 2..].iter().take(3).collect();
        let mut stopping = request.clone();
        stopping.sampling.stop = vec![stop];
        let (stopped, _) = answer(stopping.clone());
        for cut in [1, 7, tokens.len() - 1] {
            request.resume = tokens[..cut].to_vec();
            let (resumed, drawn) = answer(request.clone());
            assert_eq!(resumed.choices, whole.choices, "request {index} from token {cut}");
            assert_eq!(resumed.completion_tokens, whole.completion_tokens);
            assert_eq!(drawn, generated - cut as u64, "the tokens are not drawn again");
        }
        let stopped_tokens = stopped.choices[0].tokens.len();
        for cut in [1, stopped_tokens - 1, stopped_tokens] {
            stopping.resume = stopped.choices[0].tokens[..cut].to_vec();
            assert_eq!(answer(stopping.clone()).0.choices, stopped.choices, "{index}, {cut}");
        }
        request.resume = vec![u32::MAX];
        assert_eq!(answer(request).0.choices, whole.choices, "an invalid checkpoint is ignored");
    }
}
