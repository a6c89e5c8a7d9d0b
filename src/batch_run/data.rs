//! Sources and sinks of `tritmill batch run` that are not plain local lines.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};
use tokio::runtime::Runtime;
use tritmill_data::{Address, Columns, DataError, DataRun, DataSettings, EndpointOfRows, Format};

use super::{BatchRunArgs, display::Display};

/// How rows become requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Rows (CSV, Parquet, folders)")]
pub struct RowOptions {
    /// Column with the prompt, a text or a list of messages [default: prompt, text or messages, the first that is there]
    #[arg(long, value_name = "COLUMN")]
    prompt_column: Option<String>,
    /// Column with the custom_id [default: row- and the number of the row]
    #[arg(long, value_name = "COLUMN")]
    id_column: Option<String>,
    /// Endpoint that answers rows [default: chat]; lines of JSON are rows then, and OUT is written at the end
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<RowEndpoint>,
    /// More fields of each request, such as '{"max_tokens": 64}', in place of its own
    #[arg(long, value_name = "JSON")]
    body: Option<String>,
    /// Files of a folder to read: those with this name, such as train or test [default: train, if there is such a file]
    #[arg(long, value_name = "NAME")]
    split: Option<String>,
    /// Format of IN, if its name does not tell it: jsonl, csv, tsv, parquet
    #[arg(long, value_name = "FORMAT")]
    input_format: Option<Format>,
    /// Format of OUT, if its name does not tell it: jsonl, csv, tsv, parquet
    #[arg(long, value_name = "FORMAT")]
    output_format: Option<Format>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RowEndpoint {
    Chat,
    Completions,
    Embeddings,
}

/// Returns source and sink of the command.
pub fn settings(args: &BatchRunArgs) -> anyhow::Result<DataSettings> {
    let RowOptions { prompt_column, id_column, body, split, .. } = args.rows.clone();
    let body = match body.as_deref().map(serde_json::from_str::<Value>).transpose() {
        Ok(None) => Map::new(),
        Ok(Some(Value::Object(fields))) => fields,
        Ok(Some(_)) => bail!("--body must be a JSON object"),
        Err(error) => bail!("--body is not JSON: {error}"),
    };
    let endpoint = match args.rows.endpoint.unwrap_or(RowEndpoint::Chat) {
        RowEndpoint::Chat => EndpointOfRows::Chat,
        RowEndpoint::Completions => EndpointOfRows::Completions,
        RowEndpoint::Embeddings => EndpointOfRows::Embeddings,
    };
    let of_lines = args.rows.endpoint.is_some();
    Ok(DataSettings {
        input: address(&args.input)?,
        output: address(&args.output)?,
        input_format: args.rows.input_format,
        output_format: args.rows.output_format,
        split,
        columns: Columns { prompt: prompt_column, id: id_column, endpoint, body, of_lines },
        state: args.state.clone(),
        restart: args.restart,
    })
}

fn address(path: &std::path::Path) -> Result<Address, DataError> {
    // A path that is not UTF-8 has no scheme.
    path.to_str().map_or_else(|| Ok(Address::Path(path.to_owned())), Address::parse)
}

/// Reads the source into local lines and lets the run answer those. Returns `None` if IN and OUT are local lines already.
pub fn open(
    args: &mut BatchRunArgs,
    runtime: &Runtime,
    display: &mut Display,
) -> anyhow::Result<Option<DataRun>> {
    let settings = settings(args)?;
    if settings.is_plain() {
        return Ok(None);
    }
    let run = DataRun::open(settings, runtime.handle(), &mut |lines| display.rows(lines))?;
    args.input = run.input();
    if run.has_own_output() {
        (args.output, args.state, args.ordered) = (run.output(), None::<PathBuf>, true);
    }
    Ok(Some(run))
}

/// Takes the answers to the sink and reports a source that ended in the middle.
pub fn finish(mut run: DataRun, runtime: &Runtime) -> anyhow::Result<()> {
    if let Some(old) = run.finish(runtime.handle())? {
        note!("the old output is kept as {}", old.display());
    }
    match run.take_ended() {
        None => Ok(()),
        Some((ended, lines)) => {
            let (what, run) = words(&ended);
            Err(ended).context(format!(
                "IN {what}: its first {lines} rows are answered, {run} the same command again for the rest"
            ))
        }
    }
}

/// Refuses a source that ended in the middle: a server would answer a part of the lines, and then refuse the whole.
pub fn must_be_whole(run: &mut DataRun) -> anyhow::Result<()> {
    match run.take_ended() {
        None => Ok(()),
        Some((ended, lines)) => {
            let (what, run) = words(&ended);
            Err(ended).context(format!(
                "IN {what}, after {lines} rows: nothing was sent, {run} the same command again"
            ))
        }
    }
}

/// Returns how a source ended, and what to do.
fn words(ended: &DataError) -> (&'static str, &'static str) {
    match ended.is_transient() || ended.is_cut() {
        true => ("ended in the middle", "run"),
        false => ("cannot be read to its end", "mend it and run"),
    }
}

/// Returns whether the reader of standard output closed it.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<DataError>().is_some_and(DataError::is_closed_pipe)
}
