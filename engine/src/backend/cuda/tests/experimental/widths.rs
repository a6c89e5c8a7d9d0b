//! Two layers of the 2B model's widths: every kernel that its steps launch, at the sizes it is launched with.

use std::sync::Arc;

use super::{
    CudaOptions, HeadMode, KvBlocks, KvType, Limits, LogitsFor, Part, SamplingParams,
    equality::check,
    is_emulated, load, options, part,
    sampling::{DrawOf, draw_on_both},
    tokens,
};
use crate::{
    backend::{
        Backend,
        cpu::{self, CpuOptions},
        cuda::tuning::Tuning,
    },
    files::{self, Model},
    kv::{BLOCK_TOKENS, BlockId},
    sampling::TokenCounts,
};

/// Sizes of the steps; widths are the same everywhere.
struct Sizes {
    vocab: usize,
    /// Tokens of each prompt, and prompts. Contexts longer than a prompt repeat its blocks.
    prompt: usize,
    prompts: usize,
    /// Rows of a prefill step.
    chunk: usize,
    /// Sequences of the decode steps.
    decodes: &'static [usize],
}

/// On a device: the 2B model's vocabulary, 512-row chunks, up to 256 decodes.
const ON_DEVICE: Sizes = Sizes {
    vocab: 128_256,
    prompt: 384,
    prompts: 4,
    chunk: 512,
    decodes: &[1, 8, 64, 128, 192, 256],
};
/// In emulation: fewer rows and a smaller vocabulary, because an emulated row takes some 60 ms.
const EMULATED: Sizes = Sizes { vocab: 2048, prompt: 36, prompts: 2, chunk: 72, decodes: &[1, 12] };

/// Most decodes for which one kernel for scores and values is compared with two.
const SHORT_DECODES: usize = 8;
/// Position of the first decode; the others' are up to 63 later.
const CONTEXT: usize = 304;

#[test]
fn steps_of_the_2b_models_widths_equal_the_cpus() {
    let sizes = if is_emulated() { EMULATED } else { ON_DEVICE };
    let folder = tempfile::tempdir().expect("a folder for a model");
    let mut config = files::shape("bitnet-2b").expect("a known shape");
    (config.layer_count, config.vocab_size, config.context_length) = (2, sizes.vocab, 512);
    files::synth(&config, folder.path(), 11).expect("the folder is writable");
    let model = Arc::new(Model::open(folder.path()).expect("the model opens"));
    let prompt_blocks = sizes.prompt.div_ceil(BLOCK_TOKENS);
    let most = sizes.decodes.iter().copied().max().expect("there are decodes");
    let block_count = sizes.prompts * prompt_blocks + most;
    let (kv, head) = (KvType::F16, HeadMode::Exact);
    let blocks = KvBlocks::Exactly(block_count);
    let options = CudaOptions { blocks, ..options(kv, head) };
    let limits = Limits { rows: sizes.chunk.max(most), ..Limits::default() };
    let Some(mut cuda) = load(&model, options, limits) else { return };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = CpuOptions { threads, kv, head, ..CpuOptions::new(block_count) };
    let mut cpu = cpu::load(Arc::clone(&model), options).expect("the CPU runs the model");
    // With products of warpgroups, which few rows do not have by default, and then as by default.
    cuda.set_tuning(Tuning { wgmma_rows: 65, ..Tuning::EXPERIMENTAL }).expect("the device works");
    prefill(&sizes, cpu.as_mut(), &mut cuda);
    cuda.set_tuning(Tuning::EXPERIMENTAL).expect("the device works");
    prefill(&sizes, cpu.as_mut(), &mut cuda);
    for &count in sizes.decodes {
        let decodes: Vec<Part> = (0..count)
            .map(|i| {
                let (decode, from) = decode(&sizes, i);
                let own = *decode.blocks.last().expect("a position has a block");
                for backend in [cpu.as_mut(), &mut cuda as &mut dyn Backend] {
                    backend.copy_block(from, own).expect("it is copied");
                }
                decode
            })
            .collect();
        // The second step replays the recording of the first.
        for step in ["first", "again"] {
            check(&format!("{count} decodes, {step}"), cpu.as_mut(), &mut cuda, &decodes);
        }
        if count <= SHORT_DECODES {
            for short_blocks in [0, 1 << 20] {
                let tuning = Tuning { short_blocks, ..Tuning::EXPERIMENTAL };
                cuda.set_tuning(tuning).expect("the device works");
                let what = format!("{count} decodes, {short_blocks} blocks");
                check(&what, cpu.as_mut(), &mut cuda, &decodes);
            }
            cuda.set_tuning(Tuning::EXPERIMENTAL).expect("the device works");
        }
        check_draws(cpu.as_mut(), &mut cuda, decodes);
    }
}

/// Draws with filters and penalties, from the whole vocabulary, after many changes.
fn check_draws(cpu: &mut dyn Backend, cuda: &mut dyn Backend, decodes: Vec<Part>) {
    let all = SamplingParams::default();
    let params = [
        SamplingParams { top_p: 0.9, ..all.clone() },
        SamplingParams { top_p: 0.9, repetition_penalty: 1.2, ..all.clone() },
        SamplingParams { repetition_penalty: 0.9, temperature: 0.0, ..all.clone() },
        SamplingParams { top_k: 40, top_p: 0.95, frequency_penalty: 0.5, ..all },
    ];
    let counts = params.each_ref().map(|params| {
        let mut counts = TokenCounts::new(params, &tokens(300, 5));
        tokens(40, 6).into_iter().for_each(|token| counts.add(token));
        counts
    });
    let draw = |(index, part): (usize, Part)| {
        let index = index % params.len();
        DrawOf { part, params: &params[index], counts: &counts[index] }
    };
    let draws: Vec<DrawOf<'_>> = decodes.into_iter().enumerate().map(draw).collect();
    let (_, of_device) = draw_on_both(cpu, cuda, &draws);
    assert!(of_device * 4 >= draws.len() * 3, "{of_device} of {}", draws.len());
}

/// Returns the blocks of a prompt.
fn blocks(sizes: &Sizes, prompt: usize) -> Vec<BlockId> {
    let count = sizes.prompt.div_ceil(BLOCK_TOKENS);
    (prompt * count..(prompt + 1) * count).map(|block| BlockId(block as u32)).collect()
}

/// Computes all prompts, laid end to end and cut into steps, each step twice.
fn prefill(sizes: &Sizes, cpu: &mut dyn Backend, cuda: &mut dyn Backend) {
    let total = sizes.prompts * sizes.prompt;
    for first in (0..total).step_by(sizes.chunk) {
        let rows = first..total.min(first + sizes.chunk);
        let parts: Vec<Part> = (rows.start / sizes.prompt..rows.end.div_ceil(sizes.prompt))
            .map(|prompt| {
                let origin = prompt * sizes.prompt;
                let start = rows.start.max(origin) - origin;
                let end = rows.end.min(origin + sizes.prompt) - origin;
                let tokens = &tokens(sizes.prompt, prompt as u32)[start..end];
                let mut part = part(tokens, start, 0, LogitsFor::largest(3));
                part.blocks = blocks(sizes, prompt);
                part.blocks.truncate(end.div_ceil(BLOCK_TOKENS));
                part
            })
            .collect();
        for step in ["first", "again"] {
            check(&format!("rows {rows:?}, {step}"), cpu, cuda, &parts);
        }
    }
}

/// Returns the decode of a sequence that continues a prompt, and the block to copy to the decode's last
/// block.
fn decode(sizes: &Sizes, index: usize) -> (Part, BlockId) {
    let position = CONTEXT + index % 64;
    let prompt = blocks(sizes, index % sizes.prompts);
    // If the prompt is shorter than the context, only its full blocks.
    let full = sizes.prompt / BLOCK_TOKENS;
    let before = position / BLOCK_TOKENS;
    let logits = if index % 32 == 5 { LogitsFor::Last } else { LogitsFor::largest(1 + index % 4) };
    let mut decode = part(&tokens(1, index as u32 + 9), position, 0, logits);
    decode.blocks = (0..before).map(|block| prompt[block % full]).collect();
    decode.blocks.push(BlockId((sizes.prompts * prompt.len() + index) as u32));
    (decode, prompt[before % full])
}
