//! `tritmill model inspect`: what is in a model file.

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use tritmill_engine::files::Model;

use crate::{options, output};

const EXAMPLES: &str = "\
Examples:
  tritmill model inspect ./bitnet-2b
  tritmill model inspect model.gguf --json | jq '.tensors[] | select(.type == \"I2_S\")'";

/// Arguments of `model inspect`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// A Hugging Face folder, a .gguf file, or `demo`
    #[arg(value_name = "PATH")]
    model: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Opens, reads and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = options::open(&arguments.model)?;
    let fingerprint = model.fingerprint()?.to_string();
    if arguments.json {
        print_json(&model, &fingerprint)?
    } else {
        print(&model, &fingerprint)?
    }
    Ok(ExitCode::SUCCESS)
}

fn size_bytes(model: &Model) -> u64 {
    model.tensors().iter().map(|tensor| tensor.size_bytes).sum()
}

fn print_json(model: &Model, fingerprint: &str) -> anyhow::Result<()> {
    let config = model.config();
    output::line(json!({
        "name": model.name(),
        "container": model.container(),
        "fingerprint": fingerprint,
        "size_bytes": size_bytes(model),
        "config": {
            "architecture": config.architecture,
            "hidden_size": config.hidden_size,
            "layer_count": config.layer_count,
            "head_count": config.head_count,
            "kv_head_count": config.kv_head_count,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "context_length": config.context_length,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "activation": format!("{:?}", config.activation),
            "sub_norms": config.sub_norms,
            "linear_norm_eps": config.linear_norm_eps,
            "tied_head": config.tied_head,
            "bos_token": config.bos_token,
            "eos_tokens": config.eos_tokens,
        },
        "chat_template": model.chat_template().is_some(),
        "tensors": model.tensors(),
    }))?;
    Ok(())
}

fn print(model: &Model, fingerprint: &str) -> anyhow::Result<()> {
    let config = model.config();
    let field = |name: &str, value: String| output::line(format_args!("{name:<14} {value}"));
    field("name", model.name().to_owned())?;
    field("container", model.container().to_owned())?;
    field("fingerprint", fingerprint.to_owned())?;
    field("architecture", config.architecture.clone())?;
    let (heads, kv_heads, head_dim) = (config.head_count, config.kv_head_count, config.head_dim);
    field("layers", config.layer_count.to_string())?;
    field("hidden", config.hidden_size.to_string())?;
    field("heads", format!("{heads} of {head_dim}, {kv_heads} for keys and values"))?;
    field("intermediate", format!("{}, {:?}", config.intermediate_size, config.activation))?;
    let head = if config.tied_head { "the embedding" } else { "its own" };
    field("vocabulary", format!("{}, head: {head}", config.vocab_size))?;
    field("context", format!("{} tokens", config.context_length))?;
    let chat = if model.chat_template().is_some() { "yes" } else { "no" };
    field("chat template", chat.to_owned())?;
    let count = model.tensors().len();
    field("tensors", format!("{count}, {}", output::bytes(size_bytes(model))))?;
    let name_width = model.tensors().iter().map(|tensor| tensor.name.len()).max().unwrap_or(0);
    for tensor in model.tensors() {
        let shape = format!("{:?}", tensor.shape);
        let size = output::bytes(tensor.size_bytes);
        let (name, type_name) = (&tensor.name, &tensor.type_name);
        output::line(format_args!("  {name:<name_width$}  {type_name:<6} {shape:<16} {size:>12}"))?;
    }
    Ok(())
}
