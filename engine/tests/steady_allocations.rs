//! A step that only decodes sequences allocates no memory, also where a sequence takes its next KV block.
//!
//! Every allocation of the process counts: of the engine, the scheduler, the prefix cache, the sampler and the CPU
//! backend. See [`Engine::step_into`] for what is not included: the first steps of their size, log-probabilities,
//! penalties and blocks on disk.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tritmill_engine::{
    Engine, EngineConfig, Event, Request, SamplingParams, StepReport, TokenText,
    backend::cpu::{self, CpuOptions, KvType},
    files::Model,
};

/// The system's allocator, with a count of allocations.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call goes to the system's allocator, whose contract is the same.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's arguments.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's arguments.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's arguments.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's arguments.
        unsafe { System.dealloc(memory, layout) }
    }
}

const SEQUENCES: usize = 6;
/// Steps of the longest sequences, which give the buffers their sizes.
const WARM_UP_TOKENS: usize = 300;
const STEPS: usize = 200;

fn engine(model: &Arc<Model>, kv: KvType) -> Engine {
    // One thread: with more, a thread's first task of a kind may come at any time.
    let options = CpuOptions { kv, ..CpuOptions::new(300) };
    let backend = cpu::load(Arc::clone(model), options).unwrap();
    let vocabulary: Arc<dyn TokenText> = Arc::clone(model) as _;
    Engine::new(backend, vocabulary, vec![], EngineConfig::new(model.config().context_length))
}

fn submit(engine: &mut Engine, sampling: &SamplingParams, round: usize, max_tokens: usize) {
    for sequence in 0..SEQUENCES {
        let token = |at: usize| ((at * 7919 + sequence * 104_729 + round * 31) % 1000) as u32;
        let prompt = (0..5 + 9 * sequence).map(token).collect();
        let (seed, ignore_eos) = (sequence as u64, true);
        let sampling = SamplingParams { max_tokens, seed, ignore_eos, ..sampling.clone() };
        engine.submit(Request { prompt, sampling, ..Request::default() }).unwrap();
    }
}

fn check(model: &Arc<Model>, kv: KvType, sampling: &SamplingParams) {
    let (mut engine, mut report, now) = (engine(model, kv), StepReport::default(), Instant::now());
    // The same answers again need lists of the same lengths.
    for (round, max_tokens) in [(0, WARM_UP_TOKENS), (1, STEPS + 20)] {
        submit(&mut engine, sampling, round, max_tokens);
        while !engine.is_idle() {
            engine.step_into(now, &mut report);
        }
    }
    submit(&mut engine, sampling, 1, STEPS + 20);
    // The prompts, and the first tokens.
    for _ in 0..10 {
        engine.step_into(now, &mut report);
    }
    let (mut counts, mut tokens, blocks) =
        (Vec::with_capacity(STEPS), 0, engine.stats().blocks_used);
    for _ in 0..STEPS {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        engine.step_into(now, &mut report);
        counts.push(ALLOCATIONS.load(Ordering::Relaxed) - before);
        assert_eq!((report.sequences, report.decode_tokens), (SEQUENCES, SEQUENCES));
        tokens += report.events.iter().filter(|e| matches!(e, Event::Delta { .. })).count();
    }
    assert!(ALLOCATIONS.load(Ordering::Relaxed) > 0, "allocations are counted");
    assert_eq!(tokens, SEQUENCES * STEPS, "each step reports a token of each sequence");
    assert!(engine.stats().blocks_used >= blocks + SEQUENCES * STEPS / 16, "blocks were taken");
    assert_eq!(counts, [0; STEPS], "{kv:?}, {sampling:?}");
}

/// The same with drafts: the answers are those of before, and rows cost little.
fn check_with_drafts(model: &Arc<Model>, sampling: &SamplingParams) {
    let (mut engine, mut report) = (engine(model, KvType::F16), StepReport::default());
    let mut step = |engine: &mut Engine| {
        engine.step_into(Instant::now(), &mut report);
        let rows = report.decode_tokens as u64;
        engine.record_time(&report, Duration::from_micros(1000 + rows));
        rows as usize
    };
    for _ in 0..3 {
        submit(&mut engine, sampling, 1, STEPS);
        while !engine.is_idle() {
            step(&mut engine);
        }
    }
    submit(&mut engine, sampling, 1, STEPS);
    (0..10).for_each(|_| _ = step(&mut engine));
    for _ in 0..10 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let rows = step(&mut engine);
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "{sampling:?}");
        assert!(rows > 2 * SEQUENCES, "{rows} rows, drafts included");
    }
}

// The only test of this program: allocations of others would count.
#[test]
fn decode_steps_allocate_nothing() {
    let model = Arc::new(support::open("bitnet-tiny"));
    let greedy = SamplingParams::greedy(1);
    let sampled = SamplingParams { temperature: 0.8, top_p: 0.9, ..SamplingParams::default() };
    let among_few = SamplingParams { temperature: 0.8, top_k: 20, ..SamplingParams::default() };
    let stopping = SamplingParams { stop: vec!["never in it".to_owned()], ..sampled.clone() };
    for sampling in [greedy, sampled, among_few, stopping] {
        check(&model, KvType::F16, &sampling);
        check_with_drafts(&model, &sampling);
    }
    check(&model, KvType::Q8, &SamplingParams::greedy(1));
}
