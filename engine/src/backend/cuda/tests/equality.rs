//! Steps compared with the CPU's, bit by bit.

use std::sync::Arc;

use super::{
    BLOCKS, CudaOptions, HeadMode, KvType, Limits, LogitsFor, Part, load, model, options, part,
    run, small, tokens,
};
use crate::{
    backend::{
        Backend, PositionLogits,
        cpu::{self, CpuOptions},
    },
    files::{self, Model},
    kv::BlockId,
    sampling::Largest,
};

const MODELS: [&str; 4] = ["bitnet-tiny", "llama-tiny", "llama-norm-tiny", "bitnet-online-tiny"];

pub fn on_cpu(model: &Arc<Model>, options: CudaOptions) -> Box<dyn Backend> {
    let CudaOptions { kv, head, activations, .. } = options;
    let options = CpuOptions { kv, head, activations, ..CpuOptions::new(BLOCKS) };
    cpu::load(Arc::clone(model), options).expect("the CPU runs it")
}

/// Runs a step on both backends; compares all logits, or those that were asked for.
pub fn check(what: &str, cpu: &mut dyn Backend, cuda: &mut dyn Backend, parts: &[Part]) {
    let (mut want, mut got) = (run(cpu, parts), run(cuda, parts));
    assert_eq!(want.len(), got.len(), "{what}: positions");
    let wanted: Vec<Option<Largest>> = parts
        .iter()
        .flat_map(|part| match part.logits {
            LogitsFor::Nothing => vec![],
            LogitsFor::Last => vec![None],
            LogitsFor::All => vec![None; part.tokens.len()],
            LogitsFor::Largest(largest) => vec![Some(largest)],
            LogitsFor::Draws(rows) => rows.iter().map(|row| Some(row.largest())).collect(),
        })
        .collect();
    for (index, wanted) in wanted.into_iter().enumerate() {
        let (want, got) = (pairs(want.position(index)), pairs(got.position(index)));
        let Some(wanted) = wanted else {
            let differing = want.iter().zip(&got).position(|(a, b)| a != b);
            assert_eq!((want.len(), differing), (got.len(), None), "{what}: position {index}");
            continue;
        };
        assert_eq!(first(&want, &wanted), first(&got, &wanted), "{what}: position {index}");
        assert!(got.is_sorted_by(|a, b| a.0 < b.0), "{what}: by ascending token");
    }
}

/// Returns tokens and the bits of their logits.
pub fn pairs(position: PositionLogits<'_>) -> Vec<(u32, u32)> {
    match position {
        PositionLogits::All(all) => all.iter().zip(0..).map(|(l, id)| (id, l.to_bits())).collect(),
        PositionLogits::Largest(some) => some.iter().map(|t| (t.id, t.logit.to_bits())).collect(),
        PositionLogits::Drawn(_) => unreachable!("no draw has filters"),
    }
}

/// Returns the tokens that are asked for, and the bits of their logits.
pub fn first(pairs: &[(u32, u32)], wanted: &Largest) -> Vec<(u32, u32)> {
    let value = |(token, bits): &(u32, u32)| {
        let logit = f32::from_bits(*bits);
        wanted.noise.map_or(f64::from(logit), |noise| noise.add_to(*token, logit))
    };
    let mut values: Vec<f64> = pairs.iter().map(value).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    let least = values[wanted.count.clamp(1, values.len()) - 1] - f64::from(wanted.within);
    pairs.iter().copied().filter(|pair| value(pair) >= least).collect()
}

#[test]
fn prompts_and_continuations_equal_the_cpus() {
    for name in MODELS {
        let model = model(name);
        let options = options(KvType::F16, HeadMode::Exact);
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        let all = tokens(40, 1);
        for (range, logits) in
            [(0..19, LogitsFor::All), (19..20, LogitsFor::Last), (20..21, LogitsFor::largest(3))]
        {
            let what = format!("{name}: {range:?}");
            let parts = [part(&all[range.clone()], range.start, 0, logits)];
            check(&what, cpu.as_mut(), &mut cuda, &parts);
        }
    }
}

/// Prefills sequences of different lengths on both, then decodes one token of each.
fn check_decodes(name: &str, counts: &[usize], wanted: impl Fn(usize) -> LogitsFor<'static>) {
    let model = model(name);
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    for &count in counts {
        let blocks = |i: usize| (i * 2 % BLOCKS) as u32;
        let sequences: Vec<Vec<u32>> =
            (0..count).map(|i| tokens(1 + (i * 5 + 14) % 20, i as u32)).collect();
        let prompts: Vec<Part> = (0..count)
            .filter(|i| sequences[*i].len() > 1)
            .map(|i| {
                let (_, prompt) = sequences[i].split_last().expect("it is not empty");
                part(prompt, 0, blocks(i), LogitsFor::Nothing)
            })
            .collect();
        check(&format!("{name}: prompts of {count}"), cpu.as_mut(), &mut cuda, &prompts);
        let decodes: Vec<Part> = (0..count)
            .map(|i| {
                let (last, prompt) = sequences[i].split_last().expect("it is not empty");
                part(&[*last], prompt.len(), blocks(i), wanted(i))
            })
            .collect();
        check(&format!("{name}: {count} decodes"), cpu.as_mut(), &mut cuda, &decodes);
    }
}

#[test]
fn decodes_of_few_sequences_equal_the_cpus() {
    for name in MODELS {
        check_decodes(name, &[1, 2, 7, 12], |i| match i % 4 {
            0 => LogitsFor::largest(1),
            1 => LogitsFor::Last,
            2 => LogitsFor::largest(20),
            _ => LogitsFor::Nothing,
        });
    }
}

#[test]
fn decodes_of_thirty_sequences_equal_the_cpus() {
    check_decodes("bitnet-tiny", &[30], |_| LogitsFor::largest(1));
}

/// Enough rows for the largest kernels of linears and of the screen.
#[test]
fn a_step_of_many_rows_equals_the_cpus() {
    let model = model("bitnet-online-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let limits = Limits { rows: 700, whole: 16, screened: 80, ..Limits::default() };
    let Some(mut cuda) = load(&model, options, limits) else { return };
    let mut cpu = on_cpu(&model, options);
    for (lengths, logits) in [
        (&[50, 20][..], LogitsFor::Last),
        (&[300, 250, 3], LogitsFor::largest(2)),
        (&[1; 70], LogitsFor::largest(3)),
    ] {
        let mut first_block = 0;
        let parts: Vec<Part> = lengths
            .iter()
            .enumerate()
            .map(|(i, len)| {
                let made = part(&tokens(*len, i as u32), 0, first_block, logits);
                first_block += made.blocks.len() as u32;
                made
            })
            .collect();
        check(&format!("{lengths:?}"), cpu.as_mut(), &mut cuda, &parts);
    }
}

#[test]
fn a_step_of_several_passes_equals_the_cpus() {
    let model = model("llama-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let limits = Limits { rows: 8, whole: 2, screened: 3, blocks: 4, recorded: 4 };
    let Some(mut cuda) = load(&model, options, limits) else { return };
    let mut cpu = on_cpu(&model, options);
    let prompts = [
        part(&tokens(21, 0), 0, 0, LogitsFor::All),
        part(&tokens(1, 1), 0, 2, LogitsFor::largest(4)),
        part(&tokens(3, 2), 0, 3, LogitsFor::Last),
        part(&tokens(6, 3), 0, 4, LogitsFor::Nothing),
    ];
    check("prompts", cpu.as_mut(), &mut cuda, &prompts);
    let decodes: Vec<Part> = [(21, 0), (1, 2), (3, 3), (6, 4)]
        .into_iter()
        .map(|(position, block)| part(&[7], position, block, LogitsFor::largest(5)))
        .collect();
    check("decodes", cpu.as_mut(), &mut cuda, &decodes);
}

#[test]
fn prompts_beside_decodes_and_shared_prefixes_equal_the_cpus() {
    let model = model("bitnet-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let prompt = tokens(32, 4);
    check("prefix", cpu.as_mut(), &mut cuda, &[part(&prompt, 0, 0, LogitsFor::Last)]);
    for backend in [cpu.as_mut(), &mut cuda as &mut dyn Backend] {
        backend.copy_block(BlockId(1), BlockId(9)).expect("it is copied");
        backend.copy_block(BlockId(1), BlockId(1)).expect("it is copied");
    }
    let shared = |last: u32, more: u32| vec![BlockId(0), BlockId(last), BlockId(more)];
    let mut steps = [
        // Two sequences continue after both blocks; one overwrites the last position of a copied
        // block.
        part(&tokens(5, 5), 32, 0, LogitsFor::largest(2)),
        part(&[3], 32, 0, LogitsFor::Last),
        part(&[4], 31, 0, LogitsFor::largest(1)),
        part(&tokens(17, 6), 0, 20, LogitsFor::All),
    ];
    steps[0].blocks = shared(1, 10);
    steps[1].blocks = shared(1, 11);
    steps[2].blocks = shared(9, 12);
    check("mixed", cpu.as_mut(), &mut cuda, &steps);
    let mut next = [
        part(&[9], 37, 0, LogitsFor::Last),
        part(&[9], 33, 0, LogitsFor::Last),
        part(&[9], 32, 0, LogitsFor::Last),
        part(&[9], 17, 20, LogitsFor::Last),
    ];
    for (next, step) in next.iter_mut().zip(&steps) {
        next.blocks.clone_from(&step.blocks);
    }
    check("decodes", cpu.as_mut(), &mut cuda, &next);
}

#[test]
fn every_kind_of_head_and_cache_equals_the_cpus() {
    let kinds = [
        ("bitnet-tiny", KvType::F32, HeadMode::Exact),
        ("bitnet-tiny", KvType::F16, HeadMode::Q8),
        ("bitnet-tiny", KvType::Q8, HeadMode::Exact),
        ("llama-tiny", KvType::F32, HeadMode::Full),
        ("llama-norm-tiny", KvType::Q8, HeadMode::Q8),
        ("gguf/synth-i2_s.gguf", KvType::F16, HeadMode::Exact),
        ("gguf/synth-i2_s-q6k.gguf", KvType::F16, HeadMode::Exact),
        ("gguf/synth-TQ1_0.gguf", KvType::F16, HeadMode::Q8),
    ];
    for (name, kv, head) in kinds {
        let (model, options) = (model(name), options(kv, head));
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        let what = format!("{name}, {kv:?}, {head:?}");
        let parts = [
            part(&tokens(18, 1), 0, 0, LogitsFor::All),
            part(&tokens(3, 2), 0, 4, LogitsFor::Last),
        ];
        check(&what, cpu.as_mut(), &mut cuda, &parts);
        let parts =
            [part(&[5], 18, 0, LogitsFor::largest(3)), part(&[6], 3, 4, LogitsFor::largest(1))];
        check(&what, cpu.as_mut(), &mut cuda, &parts);
        assert_eq!(
            crate::backend::cuda::kv_block_bytes(&model, kv),
            cpu::kv_block_bytes(&model, kv),
            "{what}"
        );
        let class = cuda.numerics_class().to_owned();
        assert_eq!(class.replace("/cuda", "/cpu"), cpu.numerics_class(), "{what}");
    }
}

/// Integer weights have one scale per 128 positions: sequences that end in the second and third of these segments,
/// and at the ends of segments.
#[test]
fn int8_caches_of_several_segments_equal_the_cpus() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::Q8, HeadMode::Exact));
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let (long, short) = (tokens(290, 1), tokens(126, 2));
    let steps = [
        [part(&long[..100], 0, 0, LogitsFor::Last), part(&short, 0, 30, LogitsFor::Last)],
        [part(&long[100..], 100, 0, LogitsFor::Last), part(&[5], 126, 30, LogitsFor::Last)],
        [part(&[6], 290, 0, LogitsFor::Last), part(&[7], 127, 30, LogitsFor::Last)],
        [part(&[8], 291, 0, LogitsFor::Last), part(&[9], 128, 30, LogitsFor::Last)],
    ];
    for (index, parts) in steps.iter().enumerate() {
        check(&format!("step {index}"), cpu.as_mut(), &mut cuda, parts);
    }
}

/// Shapes with sizes that are multiples of no tile.
#[test]
fn uneven_shapes_equal_the_cpus() {
    let folder = tempfile::tempdir().expect("a folder for a model");
    let mut config = files::shape("bitnet-3b").expect("a known shape");
    config.hidden_size = 148;
    config.layer_count = 2;
    (config.head_count, config.kv_head_count, config.head_dim) = (10, 2, 20);
    (config.intermediate_size, config.vocab_size, config.context_length) = (300, 610, 96);
    files::synth(&config, folder.path(), 3).expect("a small model is written");
    let model = Arc::new(Model::open(folder.path()).expect("it opens"));
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let all = tokens(60, 1).into_iter().map(|token| token % 600).collect::<Vec<_>>();
    for range in [0..40, 40..41, 41..45] {
        let parts = [part(&all[range.clone()], range.start, 0, LogitsFor::All)];
        check(&format!("{range:?}"), cpu.as_mut(), &mut cuda, &parts);
    }
    let parts = [part(&[3], 45, 0, LogitsFor::largest(2)), part(&[4], 0, 9, LogitsFor::largest(2))];
    check("decodes", cpu.as_mut(), &mut cuda, &parts);
}

/// Equal logits leave more candidates than fit.
#[test]
fn a_row_with_too_many_candidates_gets_all_logits() {
    let folder = tempfile::tempdir().expect("a folder for a model");
    let mut config = files::shape("bitnet-2b").expect("a known shape");
    (config.hidden_size, config.layer_count) = (64, 1);
    (config.head_count, config.kv_head_count, config.head_dim) = (2, 1, 32);
    (config.intermediate_size, config.vocab_size, config.context_length) = (64, 1024, 64);
    files::synth(&config, folder.path(), 3).expect("a small model is written");
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("it was just written");
    repeat_embedding(&mut bytes, 64 * 2);
    std::fs::write(&path, bytes).expect("the folder is writable");
    let model = Arc::new(Model::open(folder.path()).expect("it opens"));
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let logits = LogitsFor::largest(2);
    let parts = [part(&tokens(3, 1), 0, 0, logits), part(&tokens(2, 2), 0, 1, LogitsFor::Last)];
    check("equal logits", cpu.as_mut(), &mut cuda, &parts);
    let mut all = run(&mut cuda, &parts[..1]);
    assert!(pairs(all.position(0)).len() >= 128, "every logit occurs 128 times");
}

/// Makes every row of the embedding one of the first eight.
fn repeat_embedding(file: &mut [u8], row_bytes: usize) {
    let len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + len]).expect("a header");
    let offsets = &header["model.embed_tokens.weight"]["data_offsets"];
    let offset = |i: usize| offsets[i].as_u64().expect("an offset") as usize + 8 + len;
    let rows = &mut file[offset(0)..offset(1)];
    for row in 8..rows.len() / row_bytes {
        rows.copy_within(row % 8 * row_bytes..(row % 8 + 1) * row_bytes, row * row_bytes);
    }
}
