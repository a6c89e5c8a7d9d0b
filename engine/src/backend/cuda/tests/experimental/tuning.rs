//! Tuning constants change the speed and never the results.

use super::{
    HeadMode, KvType, Limits, LogitsFor, Part,
    equality::{first, pairs},
    load, model, options, part, run, tokens,
};
use crate::{
    backend::cuda::{backend::CudaBackend, sweep, tuning::Tuning},
    measure::{Phase, Workload},
    sampling::Largest,
};

#[test]
fn other_tunings_give_the_same_results() {
    let limits = Limits { rows: 256, whole: 16, screened: 80, ..Limits::default() };
    let kinds = [
        ("bitnet-online-tiny", KvType::F16),
        ("bitnet-tiny", KvType::Q8),
        ("qwen3-group-tiny", KvType::F16),
    ];
    for (name, kv) in kinds {
        let options = options(kv, HeadMode::Exact);
        let Some(cuda) = load(&model(name), options, limits) else { return };
        check_tunings(name, cuda);
    }
}

fn check_tunings(name: &str, mut cuda: CudaBackend) {
    let blocks = |i: usize| (i * 2 % 88) as u32;
    // One sequence is long enough for tiles of attention.
    let prompts: Vec<Part> = (0..36)
        .map(|i| (i, if i == 35 { 20 } else { 2 + i % 5 }))
        .map(|(i, len)| part(&tokens(len, i as u32), 0, blocks(i), LogitsFor::largest(2)))
        .collect();
    let decodes: Vec<Part> = (0..36)
        .map(|i| part(&[i as u32], 2 + i % 5, blocks(i), LogitsFor::largest(1 + i % 3)))
        .collect();
    // Candidates beyond the largest depend on the screen's digits; their logits do not.
    let mut results = |tuning| {
        cuda.set_tuning(tuning).expect("the device works");
        [&prompts[..], &decodes, &decodes[..3]].map(|parts| {
            let mut logits = run(&mut cuda, parts);
            (0..logits.len())
                .map(|index| first(&pairs(logits.position(index)), &Largest::logits(1)))
                .collect::<Vec<_>>()
        })
    };
    let expected = results(Tuning::EXPERIMENTAL);
    let never = 1 << 20;
    let most = Tuning {
        split_tasks: never,
        short_positions: never,
        short_blocks: never,
        one_digit_rows: never,
        few_rows: 64,
        large_tile_rows: never,
        wgmma_rows: never,
        overlap_rows: never,
        attention_tile_rows: never,
        shared_percent: 100,
    };
    for tuning in [
        Tuning {
            split_tasks: 0,
            short_positions: 0,
            short_blocks: 0,
            one_digit_rows: 0,
            few_rows: 0,
            large_tile_rows: 0,
            wgmma_rows: 0,
            overlap_rows: 0,
            attention_tile_rows: 0,
            shared_percent: 0,
        },
        most,
        Tuning { few_rows: 16, large_tile_rows: 65, ..most },
        Tuning { short_blocks: 0, ..most },
    ] {
        assert_eq!(results(tuning), expected, "{name}: {tuning:?}");
    }
}

#[test]
fn a_sweep_measures_every_constant() {
    let limits = Limits { rows: 256, whole: 16, screened: 16, ..Limits::default() };
    let options = options(KvType::Q8, HeadMode::Exact);
    let Some(mut cuda) = load(&model("bitnet-tiny"), options, limits) else { return };
    let workload = Workload {
        batches: vec![1, 3],
        prompt_tokens: 17,
        shared_tokens: 0,
        generate_tokens: 1,
        logits: LogitsFor::largest(1),
        repetitions: 1,
    };
    let measured = sweep::of_backend(&mut cuda, &workload, 0.0).expect("steps run");
    let compared: Vec<_> = measured.comparisons.iter().map(|c| (c.phase, c.rows)).collect();
    let (decode, prefill) = (Phase::Decode, Phase::Prefill);
    assert_eq!(compared[..4], [(decode, 1), (decode, 3), (decode, 1), (decode, 3)]);
    assert!(compared[4..].iter().all(|(phase, _)| *phase == prefill), "{compared:?}");
    let trials = measured.trials;
    assert!(trials.iter().all(|trial| trial.tokens_per_s > 0.0), "{trials:?}");
    let names = [
        "split_tasks",
        "short_positions",
        "short_blocks",
        "one_digit_rows",
        "few_rows",
        "large_tile_rows",
        "wgmma_rows",
        "overlap_rows",
        "attention_tile_rows",
        "shared_percent",
    ];
    for constant in names {
        let of: Vec<_> = trials.iter().filter(|trial| trial.constant == constant).collect();
        let is_decode = [
            "split_tasks",
            "short_positions",
            "short_blocks",
            "one_digit_rows",
            "overlap_rows",
            "shared_percent",
        ];
        let is_decode = is_decode.contains(&constant);
        assert!(of.iter().all(|trial| (trial.phase == Phase::Decode) == is_decode), "{of:?}");
        assert!(of.len() > 2 && of.iter().any(|trial| trial.is_default), "{of:?}");
    }
    assert_eq!(cuda.tuning, Tuning::EXPERIMENTAL, "the backend is left as it was");
}
