//! Random models as GGUF files of the types in which they are published: `PQ2_0` with scales of groups, `TQ2_0` for mixtures of experts,
//! `I2_S` for embedding models. Folders of the same models would hold their weights as f16, eight times as large. Tables that are not
//! ternary are f16.

use std::{
    io::{BufWriter, Write},
    path::Path,
};

use half::f16;
use rayon::prelude::*;

use super::{
    random::{SplitMix, four_trits, mix},
    vocabulary::{BOS, CHAT_TEMPLATE, EOS, SPECIAL, byte_tokenizer},
};
use crate::{
    chat::ChatTemplate,
    config::{LayerTensor, ModelConfig, Norm},
    files::{
        convert::{
            gguf_metadata::{ModelDescription, metadata},
            target::Target,
        },
        encodings::{
            blocks::{PQ2_0_BLOCK, PQ2_0_BYTES, TQ_BLOCK, TQ2_0_BYTES},
            dense::{DenseType, f32_bytes},
            gguf_ternary::I2_S_TAIL,
        },
        error::ModelError,
        gguf::{
            names,
            write::{self, TensorPlan, matrix_plan},
        },
        partial::Partial,
        roles::{layer_tensor_shape, layer_tensors, linears, norm_len, norms},
    },
    tokenizer::Tokenizer,
};

/// Blocks generated from one counter value.
const PIECE_BLOCKS: usize = 2048;
/// Blocks generated and written at a time.
const WINDOW_BLOCKS: usize = 256 * PIECE_BLOCKS;

/// The random contents of a tensor.
enum Fill {
    /// Blocks of `PQ2_0` with scales around this one.
    Blocks(f32),
    /// Blocks of `TQ2_0`, so many a row, with scales around this one that all blocks of a row share.
    Rows { blocks: usize, scale: f32 },
    /// Codes of `I2_S`, and a scale after them.
    I2S(f32),
    /// f16 with mean 0 and about this standard deviation.
    Bell(f32),
    /// f32 around 1 or, for the final norm, around 0.
    Norm { len: usize, is_final: bool },
    /// f32 around a value, up to as far again.
    Around { len: usize, value: f32 },
}

/// Writes a random model.
pub(super) fn write(config: &ModelConfig, out: &Path, seed: u64) -> Result<(), ModelError> {
    let (block, expected) = match config.experts {
        Some(_) => (TQ_BLOCK, "a multiple of 256"),
        None => (PQ2_0_BLOCK, "a multiple of 128"),
    };
    for cols in linears(config).map(|(_, linear)| config.linear_shape(linear).1) {
        if !cols.is_multiple_of(block) {
            let (key, value) = ("input size of a linear".to_owned(), cols.to_string());
            return Err(ModelError::BadKey { key, value, expected });
        }
    }
    let Some(name) = out.file_stem().filter(|_| out.extension().is_some_and(|e| e == "gguf"))
    else {
        return Err(ModelError::NotNamedGguf { path: out.to_owned() });
    };
    let embeds = config.pooling.is_some();
    let tokenizer = Tokenizer::from_json(byte_tokenizer(embeds).to_string().as_bytes())?;
    let token = |name: &str, id: u32| {
        SPECIAL.get((id - BOS) as usize).map(|&text| (name.to_owned(), text.to_owned()))
    };
    let special = [token("bos_token", BOS), token("eos_token", EOS)].into_iter().flatten();
    let template = ChatTemplate::new(CHAT_TEMPLATE.to_owned(), special.collect());
    let described = ModelDescription {
        name: &name.to_string_lossy(),
        config,
        tokenizer: &tokenizer,
        chat_template: Some(&template),
        eos_token: Some(EOS),
    };
    let target = if embeds { Target::GgufI2S } else { Target::GgufPq2_0 };
    let metadata = metadata(&described, &config.architecture, target)?;
    let (plan, fills): (Vec<_>, Vec<_>) = plan(config).into_iter().unzip();
    let partial = Partial::create(out)?;
    let io = |error| partial.error(error);
    let mut writer = BufWriter::with_capacity(1 << 20, partial.file());
    write::write_header(&mut writer, &metadata, &plan).map_err(io)?;
    for (index, (tensor, fill)) in plan.iter().zip(&fills).enumerate() {
        let seed = mix(seed ^ mix(index as u64 + 1));
        match *fill {
            Fill::Blocks(scale) => {
                blocks(tensor.size_bytes, (Layout::Pq2_0, scale), seed, &mut writer)
            }
            Fill::I2S(scale) => i2_s(tensor.size_bytes, scale, seed, &mut writer),
            Fill::Rows { blocks: of_row, scale } => {
                blocks(tensor.size_bytes, (Layout::Tq2_0 { of_row }, scale), seed, &mut writer)
            }
            Fill::Bell(deviation) => bell(tensor.size_bytes, deviation, seed, &mut writer),
            Fill::Norm { len, is_final } => {
                writer.write_all(&f32_bytes(&norm(len, is_final, seed)))
            }
            Fill::Around { len, value } => {
                let share = norm(len, true, seed).into_iter().map(|x| value + 5.0 * value * x);
                writer.write_all(&f32_bytes(&share.collect::<Vec<f32>>()))
            }
        }
        .and_then(|()| write::write_padding(&mut writer, tensor.size_bytes))
        .map_err(io)?;
    }
    writer.flush().map_err(io)?;
    drop(writer);
    partial.finish()
}

fn plan(config: &ModelConfig) -> Vec<(TensorPlan, Fill)> {
    let matrix = |name: String, rows, cols, scale| {
        (matrix_plan(name, rows, cols, DenseType::Pq2_0), Fill::Blocks(scale))
    };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let table = |name: &str| match config.ternary_tables {
        true => matrix(name.to_owned(), vocab, hidden, 0.03),
        false => (matrix_plan(name.to_owned(), vocab, hidden, DenseType::F16), Fill::Bell(0.03)),
    };
    let mut plan = vec![table(names::EMBEDDING)];
    if !config.tied_head {
        plan.push(table(names::HEAD));
    }
    for norm in norms(config) {
        let len = norm_len(config, norm);
        let (dims, size_bytes) = (vec![len as u64], 4 * len as u64);
        let name = match norm {
            Norm::FeedForward(layer) if config.delta_net.is_some() => {
                names::post_attention_norm_name(layer)
            }
            norm => names::norm_name(norm),
        };
        let fill = Fill::Norm { len, is_final: norm == Norm::Final };
        plan.push((TensorPlan { name, dims, type_id: 0, size_bytes }, fill));
    }
    for (layer, linear) in linears(config) {
        let (rows, cols) = config.linear_shape(linear);
        // Trits have variance 2/3: this scale preserves the variance of the activations.
        let scale = (1.5 / cols as f32).sqrt();
        let name = names::linear_name(layer, linear);
        if config.pooling.is_some() {
            let size_bytes = (rows * cols / 4 + I2_S_TAIL) as u64;
            let dims = vec![cols as u64, rows as u64];
            let scale = scale / 2.0;
            plan.push((TensorPlan { name, dims, type_id: 36, size_bytes }, Fill::I2S(scale)));
            continue;
        }
        let Some(experts) = &config.experts else {
            plan.push(matrix(name, rows, cols, scale));
            continue;
        };
        let mut entry = matrix_plan(name, rows, cols, DenseType::Tq2_0);
        if linear.is_of_experts() {
            let count = experts.count;
            entry.dims = [cols, rows / count, count].map(|dim| dim as u64).to_vec();
        }
        plan.push((entry, Fill::Rows { blocks: cols / TQ_BLOCK, scale }));
    }
    for (layer, tensor) in layer_tensors(config) {
        let (rows, cols) = layer_tensor_shape(config, tensor);
        let name = names::layer_tensor_name(layer, tensor);
        let vector = |value| {
            let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
            let len = rows * cols;
            let plan =
                TensorPlan { name: name.clone(), dims, type_id: 0, size_bytes: 4 * len as u64 };
            (plan, Fill::Around { len, value })
        };
        plan.push(match tensor {
            LayerTensor::Decay | LayerTensor::DecayBias => vector(-1.0),
            LayerTensor::Convolution => vector(0.5),
            LayerTensor::Router => {
                let deviation = 1.0 / (cols as f32).sqrt();
                (matrix_plan(name, rows, cols, DenseType::F16), Fill::Bell(deviation))
            }
            LayerTensor::DecayRate | LayerTensor::LearningRate => {
                let deviation = 1.0 / (cols as f32).sqrt();
                (matrix_plan(name, rows, cols, DenseType::F16), Fill::Bell(deviation))
            }
        });
    }
    plan
}

/// The layout of random blocks.
#[derive(Clone, Copy)]
enum Layout {
    Pq2_0,
    /// With one scale for so many blocks after one another.
    Tq2_0 {
        of_row: usize,
    },
}

/// Writes random blocks: scales from half to one and a half of `scale`, about a third of each trit.
fn blocks(
    size: u64,
    (layout, scale): (Layout, f32),
    seed: u64,
    writer: &mut dyn Write,
) -> std::io::Result<()> {
    let trits = four_trits();
    let block_bytes = match layout {
        Layout::Pq2_0 => PQ2_0_BYTES,
        Layout::Tq2_0 { .. } => TQ2_0_BYTES,
    };
    let count = size as usize / block_bytes;
    let mut window = vec![0; WINDOW_BLOCKS.min(count) * block_bytes];
    for first in (0..count).step_by(WINDOW_BLOCKS) {
        let len = WINDOW_BLOCKS.min(count - first) * block_bytes;
        let pieces = window[..len].par_chunks_mut(PIECE_BLOCKS * block_bytes);
        pieces.enumerate().for_each(|(piece, bytes)| {
            let mut random = SplitMix(mix(seed ^ mix((first / PIECE_BLOCKS + piece) as u64)));
            for (index, block) in bytes.chunks_exact_mut(block_bytes).enumerate() {
                let (of_block, codes, byte) = match layout {
                    Layout::Pq2_0 => {
                        let (scale, codes) = block.split_at_mut(2);
                        (scale, codes, random.next()[0])
                    }
                    Layout::Tq2_0 { of_row } => {
                        let row = (first + piece * PIECE_BLOCKS + index) / of_row;
                        let (codes, scale) = block.split_at_mut(block_bytes - 2);
                        (scale, codes, SplitMix(mix(seed ^ row as u64)).next()[0])
                    }
                };
                let share = f32::from(byte) / 256.0;
                of_block.copy_from_slice(&f16::from_f32(scale * (0.5 + share)).to_le_bytes());
                random.bytes(codes, |byte| trits[usize::from(byte)]);
            }
        });
        writer.write_all(&window[..len])?;
    }
    Ok(())
}

/// Writes random codes of `I2_S`, about a third of each trit, and their scale.
fn i2_s(size: u64, scale: f32, seed: u64, writer: &mut dyn Write) -> std::io::Result<()> {
    let (trits, mut random) = (four_trits(), SplitMix(seed));
    let mut codes = vec![0; size as usize - I2_S_TAIL];
    random.bytes(&mut codes, |byte| trits[usize::from(byte)]);
    writer.write_all(&codes)?;
    let mut tail = [0; I2_S_TAIL];
    tail[..4].copy_from_slice(&scale.to_le_bytes());
    writer.write_all(&tail)
}

fn bell(size: u64, deviation: f32, seed: u64, writer: &mut dyn Write) -> std::io::Result<()> {
    let mut random = SplitMix(seed);
    let mut window = vec![0; 1 << 20];
    for first in (0..size).step_by(window.len()) {
        let len = window.len().min((size - first) as usize);
        for value in window[..len].as_chunks_mut::<2>().0 {
            let [a, b, c, d, ..] = random.next().map(f32::from);
            *value = f16::from_f32((a + b + c + d - 510.0) / 147.8 * deviation).to_le_bytes();
        }
        writer.write_all(&window[..len])?;
    }
    Ok(())
}

/// With a plain final norm, a random tied model only repeats its last token.
fn norm(len: usize, is_final: bool, seed: u64) -> Vec<f32> {
    let mut random = SplitMix(seed);
    let mut weight = || {
        let unit = f32::from(random.next()[0]) / 128.0 - 1.0;
        if is_final { 0.2 * unit } else { 1.0 + 0.1 * unit }
    };
    (0..len).map(|_| weight()).collect()
}
