//! Attention over int8 keys and values by tiles: its choice, and its results compared with the CPU's, bit by bit.

use std::sync::Arc;

use tempfile::TempDir;

use super::{
    HeadMode, KvType, LogitsFor, Part,
    equality::{check, on_cpu},
    load, model, options, part, small, tokens,
};
use crate::{
    backend::Chunk,
    files::{self, Model},
};

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

#[test]
fn long_pieces_over_int8_take_tiles() {
    let kernels = |model: &Model, kv: KvType, lengths: &[usize]| -> Option<Vec<&'static str>> {
        let cuda = load(model, options(kv, HeadMode::Exact), small())?;
        let parts: Vec<Part> = (0..)
            .zip(lengths)
            .map(|(i, len)| part(&tokens(*len, i), 0, 4 * i, LogitsFor::Last))
            .collect();
        let chunks: Vec<Chunk<'_>> = parts
            .iter()
            .map(|Part { tokens, position, blocks, logits }| Chunk {
                tokens,
                position: *position,
                blocks,
                logits: *logits,
            })
            .collect();
        let launches = cuda.launches(&chunks);
        Some(launches.iter().map(|l| l.kernel).filter(|name| name.starts_with("attend")).collect())
    };
    for (heads, kv_heads, head_dim, tile) in SHAPES {
        let (_folder, model) = with_heads(heads, kv_heads, head_dim);
        let Some(of_tiles) = kernels(&model, KvType::Q8, &[1, 16, 3]) else { return };
        assert_eq!(of_tiles, [tile]);
        assert_eq!(kernels(&model, KvType::Q8, &[15, 15]).expect("as before"), ["attend8_q8"]);
        let decodes = kernels(&model, KvType::Q8, &[1, 1]).expect("as before");
        assert!(["attend4_q8", "attend_values_q8"].contains(&decodes[0]), "{decodes:?}");
    }
    let f16 = kernels(&model("bitnet-tiny"), KvType::F16, &[40]).expect("as before");
    assert!(f16.iter().all(|kernel| *kernel == "attend8_f16"), "{f16:?}");
}
