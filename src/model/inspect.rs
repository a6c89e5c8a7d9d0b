//! `tritmill model inspect`: the contents of a model file.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use tritmill_engine::{
    config::Multipliers,
    files::{self, Inspection},
    load::{self, EngineOptions, ExpertBytes, ExpertsInFile},
};

use crate::{options::ModelOption, output};

const EXAMPLES: &str = "\
Examples:
  tritmill model inspect --model ./bitnet-2b
  tritmill model inspect --model model.gguf --json | jq '.tensors[] | select(.type == \"I2_S\")'";

/// Arguments of `model inspect`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Opens a model and prints its contents.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let inspection = files::inspect(&model)?;
    let options = EngineOptions::default();
    let run = Run {
        activations: options.activations(&model).to_string(),
        kernels: options.kernels(),
        numerics_class: load::numerics_class(&model, &options)?,
        weight_memory_bytes: load::memory_needed(&model, &options).weights,
        experts: load::expert_bytes(&model, &options).map(|bytes| {
            let in_file = load::experts_in_file(&model, &options);
            Experts::new(bytes, in_file)
        }),
    };
    if arguments.json {
        output::json(serde_json::to_value(Whole { inspection: &inspection, run: &run })?)?;
    } else {
        print(&inspection, &run)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// How a worker with default options runs the model on this machine.
#[derive(Debug, Serialize)]
struct Run {
    activations: String,
    kernels: String,
    numerics_class: String,
    /// Packed weights, all of which stay in memory.
    weight_memory_bytes: u64,
    /// The part of these that are experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<Experts>,
}

#[derive(Debug, Serialize)]
struct Experts {
    memory_bytes: u64,
    memory_bytes_per_token: u64,
    /// Those in the packed file, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    packed_file_bytes: Option<u64>,
    /// What the system has of that in memory now, if it says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    packed_file_resident_bytes: Option<u64>,
}

impl Experts {
    fn new(ExpertBytes { all, of_token }: ExpertBytes, in_file: Option<ExpertsInFile>) -> Self {
        Self {
            memory_bytes: all,
            memory_bytes_per_token: of_token,
            packed_file_bytes: in_file.map(|experts| experts.bytes),
            packed_file_resident_bytes: in_file.and_then(|experts| experts.resident_bytes),
        }
    }
}

#[derive(Debug, Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    inspection: &'a Inspection,
    #[serde(flatten)]
    run: &'a Run,
}

fn print(model: &Inspection, run: &Run) -> anyhow::Result<()> {
    let config = &model.config;
    let field = |name: &str, value: String| output::line(format_args!("{name:<14} {value}"));
    field("name", model.name.clone())?;
    field("container", model.container.to_owned())?;
    field("fingerprint", model.fingerprint.to_string())?;
    field("architecture", model.architecture.clone())?;
    field("layers", config.layer_count.to_string())?;
    field("hidden", config.hidden_size.to_string())?;
    let (heads, kv_heads, head_dim) = (config.head_count, config.kv_head_count, config.head_dim);
    field("heads", format!("{heads} of {head_dim}, {kv_heads} for keys and values"))?;
    field("intermediate", format!("{}, {}", config.intermediate_size, config.activation))?;
    let head = if config.tied_head { "tied to the embedding" } else { "separate" };
    field("vocabulary", format!("{}, head: {head}", config.vocab_size))?;
    field("context", format!("{} tokens", config.context_length))?;
    if !config.multipliers.is_none() {
        let Multipliers { embedding, residual, logit_divisor } = config.multipliers;
        let factors =
            format!("embedding × {embedding}, blocks × {residual}, logits ÷ {logit_divisor}");
        field("factors", factors)?;
    }
    if !config.linear_biases.is_empty() {
        let linears =
            config.linear_biases.iter().map(|linear| format!("{linear:?}").to_lowercase());
        field("biases", linears.collect::<Vec<_>>().join(", "))?;
    }
    let chat = if model.has_chat_template { "yes" } else { "no" };
    field("chat template", chat.to_owned())?;
    let (ternary, dense) = (model.ternary_parameter_count, model.dense_parameter_count);
    field("parameters", format!("{ternary} ternary, {dense} dense"))?;
    field("weights", format!("{} of memory, packed", output::bytes(run.weight_memory_bytes)))?;
    if let (Some(experts), Some(sizes)) = (&config.experts, &run.experts) {
        let (all, of_token) = (sizes.memory_bytes, sizes.memory_bytes_per_token);
        let (all, of_token) = (output::bytes(all), output::bytes(of_token));
        let (count, used) = (experts.count, experts.used);
        let text =
            format!("{count} a layer, {used} a token: {all} of the weights, {of_token} a token");
        field("experts", text)?;
        if let Some(bytes) = sizes.packed_file_bytes {
            let (bytes, resident) =
                (output::bytes(bytes), sizes.packed_file_resident_bytes.map(output::bytes));
            let resident = resident.map_or(String::new(), |part| format!(", {part} in memory now"));
            field("packed file", format!("{bytes} of experts{resident}"))?;
        }
    }
    field("activations", run.activations.clone())?;
    field("kernels", run.kernels.clone())?;
    field("numerics class", run.numerics_class.clone())?;
    for part in &model.skipped {
        let (tensors, count, purpose) = (&part.tensors, part.count, part.purpose);
        field("not read", format!("{tensors} ({count} tensors): {purpose}"))?;
    }
    let (count, size) = (model.tensors.len(), output::bytes(model.size_bytes));
    field("tensors", format!("{count}, {size}"))?;
    let name_width = model.tensors.iter().map(|tensor| tensor.name.len()).max().unwrap_or(0);
    for tensor in &model.tensors {
        let shape = format!("{:?}", tensor.shape);
        let size = output::bytes(tensor.size_bytes);
        let (name, type_name) = (&tensor.name, &tensor.type_name);
        output::line(format_args!("  {name:<name_width$}  {type_name:<6} {shape:<16} {size:>12}"))?;
    }
    Ok(())
}
