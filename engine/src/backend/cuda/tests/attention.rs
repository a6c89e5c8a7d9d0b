//! Attention over int8 keys and values by tiles, and of short contexts by one kernel: the choice, and the results compared with the
//! CPU's, bit by bit.

use std::sync::Arc;

use tempfile::TempDir;

use super::{
    super::{backend::CudaBackend, load::start, tuning::Tuning},
    HeadMode, KvType, LogitsFor, Part, emulated_device,
    equality::{check, on_cpu},
    experimental as options, load, model, ordinals, part, small, tokens,
};
use crate::files::{self, Model};

/// Heads, KV heads and elements of a head, and the kernel for them: groups of 1, 3, 4, 5, 8 and 72 heads, elements that
/// are odd multiples of 16 and none at all.
const SHAPES: [(usize, usize, usize, &str); 6] = [
    (3, 1, 256, "attend_tile256_q8"),
    (8, 1, 144, "attend_tile256_q8"),
    (10, 2, 80, "attend_tile128_q8"),
    (4, 1, 128, "attend_tile128_q8"),
    (2, 2, 20, "attend_tile128_q8"),
    (72, 1, 16, "attend_tile128_q8"),
];

/// Writes a model of one layer with these heads; it lies in the folder.
pub fn with_heads(heads: usize, kv_heads: usize, head_dim: usize) -> (TempDir, Arc<Model>) {
    let folder = tempfile::tempdir().expect("a folder for a model");
    let mut config = files::shape("bitnet-2b").expect("a known shape");
    (config.hidden_size, config.layer_count, config.intermediate_size) = (64, 1, 64);
    (config.head_count, config.kv_head_count, config.head_dim) = (heads, kv_heads, head_dim);
    (config.vocab_size, config.context_length) = (1024, 400);
    files::synth(&config, folder.path(), 5).expect("a small model is written");
    let model = Arc::new(Model::open(folder.path()).expect("it opens"));
    (folder, model)
}

/// Long and short pieces beside decodes, in several segments of 128 positions.
#[test]
fn tiles_of_all_shapes_equal_the_cpus() {
    for (heads, kv_heads, head_dim, _) in SHAPES {
        let (_folder, model) = with_heads(heads, kv_heads, head_dim);
        let options = options(KvType::Q8, HeadMode::Exact);
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        let (long, short) = (tokens(300, 1), tokens(130, 2));
        let steps: [&[Part]; 4] = [
            &[part(&long[..69], 0, 0, LogitsFor::All), part(&short[..127], 0, 30, LogitsFor::Last)],
            &[part(&long[69..90], 69, 0, LogitsFor::All), part(&[5], 127, 30, LogitsFor::Last)],
            &[part(&long[90..270], 90, 0, LogitsFor::All), part(&[6], 128, 30, LogitsFor::Last)],
            &[part(&long[270..], 270, 0, LogitsFor::All), part(&[7, 8], 129, 30, LogitsFor::Last)],
        ];
        for (index, parts) in steps.iter().enumerate() {
            let what = format!("{heads} heads of {head_dim}, step {index}");
            check(&what, cpu.as_mut(), &mut cuda, parts);
        }
    }
}

/// Returns the kernels of attention that a step launches.
fn attention_kernels(cuda: &CudaBackend, parts: &[Part]) -> Vec<&'static str> {
    let launches = cuda.launches(&parts.iter().map(Part::chunk).collect::<Vec<_>>());
    launches.iter().map(|l| l.kernel).filter(|name| name.starts_with("attend")).collect()
}

/// On a device of an H100's size, contexts of up to so many positions take one kernel, and longer ones two.
#[test]
fn short_contexts_take_one_kernel() {
    for (heads, kv_heads, head_dim, kv) in
        [(4, 1, 128, KvType::F16), (10, 2, 80, KvType::Q8), (2, 2, 20, KvType::F32)]
    {
        let Some(device) = emulated_device(ordinals::LARGE) else { return };
        let (_folder, model) = with_heads(heads, kv_heads, head_dim);
        let options = options(kv, HeadMode::Exact);
        let mut cuda = start(&model, Box::new(device), options, small()).expect("it starts");
        let tuning = Tuning { short_positions: 256, ..Tuning::EXPERIMENTAL };
        cuda.set_tuning(tuning).expect("the device works");
        let mut cpu = on_cpu(&model, options);
        let (long, short) = (tokens(258, 1), tokens(104, 2));
        let prompt = |tokens: &[u32], block| part(tokens, 0, block, LogitsFor::Nothing);
        let prompts = [prompt(&long[..254], 0), prompt(&short[..100], 30)];
        check("prompts", cpu.as_mut(), &mut cuda, &prompts);
        for step in 0..4 {
            let decode = |tokens: &[u32], position: usize, block| {
                part(&tokens[position..=position], position, block, LogitsFor::largest(2))
            };
            let decodes = [decode(&long, 254 + step, 0), decode(&short, 100 + step, 30)];
            let kernels = attention_kernels(&cuda, &decodes);
            assert_eq!(kernels[0].starts_with("attend_short"), step < 2, "{kernels:?}");
            let what = format!("{heads} heads of {head_dim}, decode {step}");
            check(&what, cpu.as_mut(), &mut cuda, &decodes);
        }
    }
}

#[test]
fn long_pieces_over_int8_take_tiles() {
    let kernels = |cuda: &CudaBackend, lengths: &[usize]| {
        let parts: Vec<Part> = (0..)
            .zip(lengths)
            .map(|(i, len)| part(&tokens(*len, i), 0, 4 * i, LogitsFor::Last))
            .collect();
        attention_kernels(cuda, &parts)
    };
    for (heads, kv_heads, head_dim, tile) in SHAPES {
        let (_folder, model) = with_heads(heads, kv_heads, head_dim);
        let options = options(KvType::Q8, HeadMode::Exact);
        let Some(cuda) = load(&model, options, small()) else { return };
        assert_eq!(kernels(&cuda, &[1, 16, 3]), [tile]);
        assert_eq!(kernels(&cuda, &[15, 15]), ["attend8_q8"]);
        let decodes = kernels(&cuda, &[1, 1]);
        let of_decodes = ["attend4_q8", "attend_values_q8", "attend_short_q8"];
        assert!(of_decodes.contains(&decodes[0]), "{decodes:?}");
    }
    let options = options(KvType::F16, HeadMode::Exact);
    let cuda = load(&model("bitnet-tiny"), options, small()).expect("as before");
    assert_eq!(kernels(&cuda, &[40]), vec!["attend8_f16"; cuda.shape.layers]);
}
