//! `tritmill batch run`: answers a file of requests.

mod data;
mod display;
mod server;

use std::{
    io::IsTerminal,
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tokio::sync::watch;
use tritmill_client::{BatchFileError, BatchProgress, Settings};
use tritmill_engine::load::EngineOptions;
use tritmill_queue::QueueName;
use tritmill_worker::{ServedModel, Stop};

use self::{data::RowOptions, display::Display, server::ServerOptions};
use crate::{
    answering::{self, Answerer},
    engines::Engines,
    memory::{Budget, Candidate},
    options::{self, CapacityOptions, MemoryOption, RunOptions},
    output,
    servers::Servers,
    signals::{EXIT_INTERRUPTED, Signals},
};

/// Exit code: some lines have errors.
const EXIT_ERROR_LINES: u8 = 2;

/// Answer a file of requests.
///
/// Each line of IN is an OpenAI batch request ({"custom_id", "method", "url", "body"} for
/// /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses or /v1/messages) or just {"prompt": "…"}: a question
/// for the model's chat template, answered as a chat completion. Each line has one line in OUT: an answer, or an error that names field and line.
///
/// Answers are also kept in OUT.tritmill. Stop the run at any time and continue it with the same command.
/// Lines may be added, changed or removed in between.
///
/// IN and OUT may also be s3://BUCKET/KEY, gs://…, az://… or https://… (credentials: the usual environment variables), be
/// compressed (gzip, zstd), and have rows: CSV, TSV, Parquet, and as IN a folder of these, such as a Hugging Face dataset.
/// Each row with a prompt becomes a request, and its other columns are carried to its answer. Such an IN is copied once to
/// OUT.tritmill-data as JSON lines, and such an OUT is written when all lines are answered, in the order of IN.
///
/// OUT may be - for standard output, or a pipe: then answers are kept in IN.tritmill, every run writes all of them, and the
/// run ends quietly when the reader closes the pipe.
///
/// With --server, lines become batches of a Tritmill server, and OUT is written when all batches are
/// finished, in the order of IN. The state is kept in OUT.tritmill-server: after an interruption, run the
/// same command again with an unchanged IN.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  tritmill batch run questions.jsonl -o answers.jsonl
  tritmill batch run in.jsonl -o out.jsonl --model ./bitnet-2b --ordered --json | tail -1
  tritmill batch run questions.jsonl.gz -o answers.jsonl.zst
  tritmill batch run s3://data/train.parquet -o s3://data/answers.parquet --prompt-column question --body '{\"max_tokens\": 64}'
  tritmill batch run in.jsonl -o out.jsonl --model ./bitnet-2b --device cuda:all
  tritmill batch run in.jsonl -o out.jsonl --model hf:microsoft/bitnet-b1.58-2B-4T-gguf --memory 2G
  tritmill batch run in.jsonl -o out.jsonl --retry-failed
  tritmill batch run in.jsonl -o - | jq -r .response.body.choices[0].message.content
  tritmill batch run in.jsonl -o out.jsonl --model bitnet-2b --redis redis://… --database postgres://…
  TRITMILL_KEY=tm-… tritmill batch run in.jsonl -o out.jsonl --server https://tritmill.example

Exit codes:
  0 all lines answered, 2 finished with error lines, 1 could not run, 130 interrupted")]
pub struct BatchRunArgs {
    /// Batch lines or rows: a file, a folder or an address; - reads standard input
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// Answers: a file or an address; - writes standard output
    #[arg(short, long, value_name = "OUT", allow_hyphen_values = true)]
    pub output: PathBuf,
    /// Folder for the answers so far [default: beside OUT, or beside IN if OUT is no file; without either, nothing is kept]
    #[arg(long, value_name = "FOLDER")]
    pub state: Option<PathBuf>,
    /// Model: a Hugging Face folder, a .gguf file, hf:ORG/NAME[@REVISION][:FILE] on the Hugging Face Hub, which is pulled
    /// first, or `demo`; with servers, the name of a served model
    #[arg(long, value_name = "PATH", default_value = "demo")]
    pub model: String,
    /// Name of the model in answers [default: name of the folder, file or repository]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Write answers in the order of the input instead of completion
    #[arg(long)]
    pub ordered: bool,
    /// Delete earlier answers and start over
    #[arg(long)]
    pub restart: bool,
    /// Run lines again that failed with a server error (status 500)
    #[arg(long)]
    pub retry_failed: bool,
    /// Print a summary as JSON, on standard error if OUT is -: {"lines","completed","failed","resumed","tokens","prompt_tokens",
    /// "cached_tokens","seconds"}
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub run: RunOptions,
    #[command(flatten)]
    pub capacity: CapacityOptions,
    #[command(flatten)]
    pub memory: MemoryOption,
    /// With servers: maximum attempts of a line; the death of its worker counts as one
    #[arg(long, value_name = "N", default_value = "5")]
    pub attempts: NonZeroU32,
    #[command(flatten)]
    pub servers: Servers,
    #[command(flatten)]
    server: ServerOptions,
    #[command(flatten)]
    rows: RowOptions,
}

/// Runs the command.
pub fn run(mut args: BatchRunArgs) -> anyhow::Result<ExitCode> {
    let summary = Summary::of(&args);
    let started = Instant::now();
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    // Options are refused before IN is read.
    args.server.given()?;
    let mut display = Display::new(None);
    let mut data = data::open(&mut args, &runtime, &mut display)?;
    // Before the model is loaded, which may take a while.
    let mut display = Display::new(input_bytes(&args.input)?);
    if let Some(server) = args.server.given()? {
        data.as_mut().map_or(Ok(()), data::must_be_whole)?;
        let code = server::run(&args, server, display, &runtime, summary)?;
        data.map_or(Ok(()), |data| data::finish(data, &runtime))?;
        return Ok(code);
    }
    let (queue, answerer) = match args.servers.given()? {
        None => local(&args)?,
        Some(servers) => {
            let queue = queue_of(args.name.as_ref().unwrap_or(&args.model), &args.run);
            let client = runtime.block_on(servers.client())?;
            (queue, Answerer::Remote { client, attempts_max: args.attempts.get() })
        }
    };
    let settings = Settings {
        input: args.input,
        output: args.output,
        state: args.state,
        ordered: args.ordered,
        restart: args.restart,
        retry_failed: args.retry_failed,
        identity: answerer.identity(&queue),
        queue,
    };
    let (stop, stopped) = watch::channel(Stop::No);
    let interrupted = stopped.clone();
    let progress = runtime.block_on(async {
        let signals = Signals::listen().context("cannot listen for signals")?;
        tokio::spawn(signals.stop(stop));
        answering::answer(settings, answerer, stopped, |update| display.show(update)).await
    });
    display.finish();
    let progress = match progress {
        Err(error) if is_closed_pipe(&error) => return Ok(ExitCode::SUCCESS),
        progress => progress?,
    };
    let interrupted =
        *interrupted.borrow() == Stop::Drain && progress.finished() < progress.lines.max(1);
    let finished = match data {
        Some(data) if !interrupted => data::finish(data, &runtime),
        Some(data) if data.has_own_output() => {
            note!("OUT is written when all lines are answered: run the same command again");
            Ok(())
        }
        _ => Ok(()),
    };
    summarize(&progress, started.elapsed(), summary)?;
    match finished {
        Err(error) if data::is_closed_pipe(&error) => return Ok(ExitCode::SUCCESS),
        finished => finished?,
    }
    Ok(match progress.failed {
        _ if interrupted => ExitCode::from(EXIT_INTERRUPTED),
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_ERROR_LINES),
    })
}

/// Returns the size of the input, if it is a file.
fn input_bytes(input: &Path) -> anyhow::Result<Option<u64>> {
    if input.as_os_str() == "-" {
        if std::io::stdin().is_terminal() {
            note!("reading lines from the terminal until Ctrl-D");
        }
        return Ok(None);
    }
    let metadata = std::fs::metadata(input);
    let metadata = metadata.with_context(|| format!("cannot read {}", input.display()))?;
    Ok(metadata.is_file().then_some(metadata.len()))
}

fn queue_of(model: &str, run: &RunOptions) -> QueueName {
    QueueName { model: model.to_owned(), format: run.format.to_string() }
}

/// Loads the model for a worker in this process.
fn local(args: &BatchRunArgs) -> anyhow::Result<(QueueName, Answerer)> {
    let model = options::open(&args.model)?;
    let devices = args.run.device.one_kind().context("--device")?;
    let devices = devices.resolved(args.run.threads)?;
    let device = *devices.first().context("no device")?;
    let options = EngineOptions { device, ..args.capacity.apply(args.run.engine()) };
    let (name, device_count) = (&args.model, devices.len());
    let candidate = Candidate { name, model: &model, options, device_count };
    let (options, _) = Budget::from_option(&args.memory).fit(&[candidate])?.remove(0);
    let disk = args
        .capacity
        .tiers
        .open(args.capacity.tiers.host_bytes(args.run.device.has_gpu(), None))?;
    let engines = Engines::load(&model, &options, &args.run.device, disk.as_ref());
    let Engines { devices, numerics_class, .. } =
        engines.with_context(|| format!("cannot load model {}", args.model))?;
    let name = args.name.clone().unwrap_or_else(|| model.name().to_owned());
    let queue = queue_of(&name, &args.run);
    let limits = args.capacity.limits();
    let served = ServedModel::new(model, name, numerics_class).with_limits(limits);
    let max_sequences = options.max_sequences;
    Ok((queue, Answerer::Local { served, devices, max_sequences }))
}

/// Returns whether the reader of the output closed it. The answers are kept, and no message has a reader.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<BatchFileError>().is_some_and(BatchFileError::is_closed_pipe)
}

/// Where a summary as JSON goes, if it is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Summary {
    None,
    Stdout,
    /// Standard output has the answers.
    Stderr,
}

impl Summary {
    fn of(args: &BatchRunArgs) -> Self {
        let answers = ["-", "/dev/stdout"].map(Path::new);
        match args.json {
            false => Self::None,
            true if answers.contains(&args.output.as_path()) => Self::Stderr,
            true => Self::Stdout,
        }
    }
}

fn summarize(progress: &BatchProgress, elapsed: Duration, summary: Summary) -> anyhow::Result<()> {
    let seconds = elapsed.as_secs_f64();
    let BatchProgress { lines, completed, failed, resumed, tokens, .. } = *progress;
    note!(
        "{completed} of {lines} lines answered ({resumed} by earlier runs), {failed} error lines, \
         {tokens} tokens in {seconds:.1} s"
    );
    let json = json!({
        "lines": lines,
        "completed": completed,
        "failed": failed,
        "resumed": resumed,
        "tokens": tokens,
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "seconds": (seconds * 1000.0).round() / 1000.0,
    });
    match summary {
        Summary::None => {}
        Summary::Stdout => output::json(json)?,
        Summary::Stderr => note!("{json}"),
    }
    Ok(())
}
