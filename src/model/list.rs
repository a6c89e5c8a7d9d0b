//! `tritmill model list`: the published models that this build can load.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use serde_json::{Value, json};
use tritmill_hub::{FAMILIES, Family, Reference, Settings, cached};

use crate::output;

const EXAMPLES: &str = "\
Examples:
  tritmill model list
  tritmill model list --json | jq -r 'select(.path) | .repository'

The memory is that of the weights with the default options; the KV cache comes on top. Sizes follow
from the shapes of the models. Other repositories with these layouts can be pulled too.";

/// Arguments of `model list`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the models.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let settings = Settings::from_env()?;
    let mut rows = Vec::new();
    for family in FAMILIES {
        let reference = reference(family)?;
        let path = cached(&settings, &reference);
        rows.push((family, reference, path));
    }
    if arguments.json {
        for family in &rows {
            output::json(row(family))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let widest = |of: fn(&Family) -> &str| FAMILIES.iter().map(|family| of(family).len()).max();
    let names = widest(|family| family.name).unwrap_or(0);
    let formats = widest(|family| family.format).unwrap_or(0);
    let references = rows.iter().map(|(_, reference, _)| argument(reference).len()).max();
    let references = references.unwrap_or(0);
    let head = ["MODEL", "DOWNLOAD", "MEMORY", "FORMAT", "CACHED", "PULL"];
    let [model, download, memory, format, in_cache, command] = head;
    output::line(format_args!(
        "{model:<names$}  {download:>9}  {memory:>9}  {format:<formats$}  {in_cache:<6}  {command:<width$}  LICENCE",
        width = references + PULL.len(),
    ))?;
    for (family, reference, path) in &rows {
        let (download, memory) = (gigabytes(family.download_bytes), gigabytes(family.memory_bytes));
        let in_cache = if path.is_some() { "yes" } else { "no" };
        let (name, format, licence) = (family.name, family.format, family.licence);
        let argument = argument(reference);
        output::line(format_args!(
            "{name:<names$}  {download:>9}  {memory:>9}  {format:<formats$}  {in_cache:<6}  {PULL}{argument:<references$}  {licence}"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The command before its argument.
const PULL: &str = "tritmill model pull ";

fn reference(family: &Family) -> anyhow::Result<Reference> {
    let reference = Reference::new(family.repository)?;
    Ok(match family.file {
        Some(file) => reference.with_file(file)?,
        None => reference,
    })
}

/// Returns the reference as an argument of `model pull`, which takes it with and without prefix.
fn argument(reference: &Reference) -> String {
    reference.to_string().trim_start_matches(tritmill_hub::PREFIX).to_owned()
}

/// Formats a size as the hub does.
fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

fn row((family, reference, path): &(&Family, Reference, Option<PathBuf>)) -> Value {
    json!({
        "name": family.name,
        "repository": family.repository,
        "file": family.file,
        "format": family.format,
        "download_bytes": family.download_bytes,
        "memory_bytes": family.memory_bytes,
        "licence": family.licence,
        "model": reference.to_string(),
        "command": format!("{PULL}{}", argument(reference)),
        "path": path,
    })
}
