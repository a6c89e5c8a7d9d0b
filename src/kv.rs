//! `tritmill kv`: the KV blocks on disk of `--kv-cache-dir`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use serde_json::json;
use tritmill_engine::kv::disk::{BlockFolder, FolderLimits, FolderUse};

use crate::{byte_sizes, output};

/// Exit code if damaged files were found.
const EXIT_DAMAGED: u8 = 3;
/// No limits: for commands that write no blocks.
const UNLIMITED: FolderLimits = FolderLimits { bytes_max: u64::MAX, free_min: 0 };

/// Subcommands of `kv`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print how many KV blocks a folder has
    #[command(after_help = "\
Examples:
  tritmill kv inspect /var/cache/tritmill")]
    Inspect(Folder),
    /// Delete the KV blocks that were not used for longest
    #[command(after_help = "\
Examples:
  tritmill kv prune /var/cache/tritmill --bytes 5G

Workers that use the folder go on: blocks that are gone are computed again.")]
    Prune(PruneArguments),
    /// Read every KV block and delete damaged ones
    #[command(after_help = "\
Examples:
  tritmill kv verify /var/cache/tritmill

Workers check each block when they read it. Exit code 3 if damaged files were found.")]
    Verify(Folder),
}

/// A folder of KV blocks.
#[derive(Debug, Args)]
pub struct Folder {
    /// The folder of --kv-cache-dir
    #[arg(value_name = "DIR")]
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `kv prune`.
#[derive(Debug, Args)]
pub struct PruneArguments {
    #[command(flatten)]
    folder: Folder,
    /// Bytes that may stay: a number, or with K, M, G or T
    #[arg(long, value_name = "BYTES", value_parser = byte_sizes::parse)]
    bytes: u64,
}

impl Folder {
    fn open(&self) -> anyhow::Result<BlockFolder> {
        ensure!(self.path.is_dir(), "there is no folder {}", self.path.display());
        BlockFolder::open(&self.path, UNLIMITED).context("cannot read the KV blocks")
    }

    fn print(&self, what: &str, found: FolderUse) -> anyhow::Result<()> {
        let FolderUse { blocks, bytes } = found;
        match self.json {
            true => output::json(json!({ "blocks": blocks, "bytes": bytes }))?,
            false => output::line(format_args!("{what}{blocks} blocks, {}", output::bytes(bytes)))?,
        }
        Ok(())
    }
}

/// Runs the command.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Inspect(folder) => folder.print("", folder.open()?.usage())?,
        Command::Prune(PruneArguments { folder, bytes }) => {
            let mut blocks = folder.open()?;
            let deleted = blocks.prune(*bytes);
            if !folder.json {
                note!("deleted {} blocks", deleted.blocks);
            }
            folder.print("", blocks.usage())?;
        }
        Command::Verify(folder) => {
            let checked = folder.open()?.verify().context("cannot read the KV blocks")?;
            for path in &checked.damaged {
                note!("damaged, deleted: {}", path.display());
            }
            folder.print("good: ", checked.good)?;
            if !checked.damaged.is_empty() {
                return Ok(ExitCode::from(EXIT_DAMAGED));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
