//! Writes a model as a Hugging Face folder with packed ternary weights.

use std::{io::Write, path::Path};

use super::target::{Report, Target, refuse};
use crate::{
    chat::SpecialTokens,
    config::{Linear, Norm},
    files::{
        encodings::{
            dense::{Dense, DenseType, f32_bytes},
            encode,
        },
        error::{ModelError, Problem},
        gguf::names::ROPE_DIVISORS,
        hugging_face::{
            config::WeightStorage,
            names::{linear_name, norm_name},
            rope,
            safetensors::Dtype,
            write::{self, FolderTexts, TensorPlan},
        },
        model::Model,
        roles::{biases, linears, norm_len},
    },
    formats::Scale,
};

/// The source of one tensor of the folder.
enum Source {
    Embedding,
    Head,
    Norm(Norm),
    Linear(usize, Linear),
    /// The scale of the preceding linear in the plan.
    ScaleOfLast,
}

/// Writes `model` as a folder.
pub(super) fn write(model: &Model, out: &Path) -> Result<Report, ModelError> {
    let config = model.config();
    let first = config.linears(0)[0];
    let refused = |problem| {
        let tensor = model.ternary_name(0, first).to_owned();
        Err(refuse(tensor, Target::Folder, Problem::Other(problem)))
    };
    if config.group_scales {
        return refused("packed folders have one scale per tensor");
    }
    if config.pooling.is_some() {
        return refused("embedding models are written as GGUF");
    }
    if let Some((layer, linear)) = biases(config).next() {
        let problem = Problem::Other("packed folders have no biases of linears");
        let tensor = &model.parts().tensors.biases[&(layer, linear)];
        return Err(refuse(tensor.name.clone(), Target::Folder, problem));
    }
    if rope::to_json(&config.rope_scaling).is_none() {
        let problem = Problem::Other("config.json has no divisors of RoPE frequencies");
        return Err(refuse(ROPE_DIVISORS.to_owned(), Target::Folder, problem));
    }
    let divides = matches!(model.ternary(0, Linear::Q)?.scale, Scale::Divide(_));
    let storage = if divides { WeightStorage::PackedDivide } else { WeightStorage::PackedMultiply };
    let (plan, sources): (Vec<_>, Vec<_>) = folder_plan(model)?.into_iter().unzip();
    let token_text = |id: Option<u32>| {
        id.and_then(|id| model.tokenizer().token_bytes(id))
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    };
    let mut special_tokens =
        model.chat_template().map_or_else(SpecialTokens::new, |t| t.special_tokens().clone());
    for (name, id) in [("bos_token", config.bos_token), ("eos_token", model.eos_token())] {
        special_tokens.extend(token_text(id).map(|text| (name.to_owned(), text)));
    }
    let texts = FolderTexts {
        tokenizer: model.tokenizer().json(),
        special_tokens,
        chat_template: model.chat_template().map(|template| template.source()),
    };
    let at = write::at(out);
    let mut scale = 0f32;
    write::write_folder(out, config, storage, &texts, &plan, |index, writer| {
        match sources[index] {
            Source::Embedding => write_dense(model.embedding(), writer).map_err(&at),
            Source::Head => write_dense(model.head(), writer).map_err(&at),
            Source::Norm(norm) => writer.write_all(&f32_bytes(&model.norm(norm)?)).map_err(&at),
            Source::Linear(layer, linear) => {
                let matrix = model.ternary(layer, linear)?;
                let (Scale::Multiply(value) | Scale::Divide(value)) = matrix.scale;
                scale = value;
                let packed = encode::encode_planar(&matrix.trits, matrix.rows, matrix.cols);
                writer.write_all(&packed).map_err(&at)
            }
            Source::ScaleOfLast => writer.write_all(&scale.to_le_bytes()).map_err(&at),
        }
    })?;
    Ok(Report { tensor_count: plan.len(), inexact_scale_count: 0 })
}

fn folder_plan(model: &Model) -> Result<Vec<(TensorPlan, Source)>, ModelError> {
    let config = model.config();
    let mut plan = Vec::new();
    let mut add = |name: String, dtype, shape: &[usize], source| {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        plan.push((TensorPlan { name, dtype, shape }, source));
    };
    let shape = [config.vocab_size, config.hidden_size];
    let (embedding, head) = (model.embedding().dtype, model.head().dtype);
    add("model.embed_tokens.weight".to_owned(), folder_type(embedding), &shape, Source::Embedding);
    if !config.tied_head {
        add("lm_head.weight".to_owned(), folder_type(head), &shape, Source::Head);
    }
    for norm in model.norms() {
        add(norm_name(norm), Dtype::F32, &[norm_len(config, norm)], Source::Norm(norm));
    }
    for (layer, linear) in linears(config) {
        let (rows, cols) = config.linear_shape(linear);
        if !rows.is_multiple_of(4) {
            let problem = Problem::NotAMultiple { what: "row count", value: rows as u64, of: 4 };
            let tensor = model.ternary_name(layer, linear).to_owned();
            return Err(refuse(tensor, Target::Folder, problem));
        }
        let name = linear_name(layer, linear);
        let scale = format!("{name}_scale");
        add(name, Dtype::U8, &[rows / 4, cols], Source::Linear(layer, linear));
        add(scale, Dtype::F32, &[1], Source::ScaleOfLast);
    }
    Ok(plan)
}

/// Returns the folder's type for a dense tensor: the tensor's own, or F32 for block quantizations
/// (F32 holds their dequantized values exactly).
fn folder_type(dtype: DenseType) -> Dtype {
    match dtype {
        DenseType::F16 => Dtype::F16,
        DenseType::Bf16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

fn write_dense(matrix: Dense<'_>, writer: &mut dyn Write) -> std::io::Result<()> {
    if matches!(matrix.dtype, DenseType::F32 | DenseType::F16 | DenseType::Bf16) {
        return writer.write_all(matrix.bytes);
    }
    let mut row = vec![0f32; matrix.cols];
    for index in 0..matrix.rows {
        matrix.row(index, &mut row);
        writer.write_all(&f32_bytes(&row))?;
    }
    Ok(())
}
