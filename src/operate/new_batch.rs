//! `tritmill batches create`: a batch after another one, or of data where it lies.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use tritmill_admin::{
    data_urls::{InputUrl, OutputUrl},
    line_template::LineTemplate,
    store::{
        Batch, BatchId,
        after::After,
        audit::AuditEntry,
        batches::{BACKGROUND, Creation, MIXED, parse_window},
    },
};
use tritmill_client::Endpoint;
use tritmill_queue::{Priority, Tenant};

use crate::{keys::StoreOptions, output};

/// Most bytes of a file with a template.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// An earlier batch, and what makes a line from a line of it; or where the lines are read.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill batches create --after batch_0199f3c2… --template summary.json
  echo '{\"url\":\"/v1/chat/completions\",\"body\":{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",
    \"content\":\"Shorten: {{ previous.content }}\"}]}}' | tritmill batches create --after batch_0199f3c2… --template -
  tritmill batches create --tenant acme --input-url s3://data/acme/lines.jsonl.gz
  tritmill batches create --tenant acme --input-url s3://data/acme/train.parquet \\
    --input-options '{\"prompt_column\": \"question\", \"body\": {\"model\": \"demo\", \"max_tokens\": 64}}' \\
    --output-url s3://data/acme/answers.parquet

Prints the id of the batch. One after another one is of the same tenant, and begins when that has ended. `admin` or
`standalone` reads and writes the URLs, and must allow them: --allow-url.

Exit codes:
  0 the batch is created, 1 failure")]
pub struct NewBatchArguments {
    /// Id of the earlier batch, as printed by `tritmill batches list`; it may run
    #[arg(long, value_name = "ID", requires = "template", required_unless_present = "input_url")]
    after: Option<BatchId>,
    /// File with the template of the lines: a JSON object with url, body and perhaps custom_id; - reads standard input
    #[arg(long, value_name = "FILE", requires = "after")]
    template: Option<PathBuf>,
    /// Where the lines are read: s3://, gs://, az:// or https://; JSON lines, CSV, TSV or Parquet, plain, gzip or zstd
    #[arg(long, value_name = "URL", conflicts_with = "after")]
    input_url: Option<String>,
    /// How they are read: a JSON object with format, split, prompt_column, id_column and body (fields of each request)
    #[arg(long, value_name = "JSON", requires = "input_url")]
    input_options: Option<String>,
    /// Where the answers are written, too, when the batch ends: s3://, gs:// or az://; JSON lines, CSV, TSV or Parquet by its name
    #[arg(long, value_name = "URL")]
    output_url: Option<String>,
    /// Form of --output-url, if its name does not tell it: jsonl, csv, tsv, parquet
    #[arg(long, value_name = "FORMAT", requires = "output_url")]
    output_format: Option<String>,
    /// Tenant of a batch with --input-url
    #[arg(long, value_name = "NAME", default_value = "default", conflicts_with = "after")]
    tenant: String,
    /// Endpoint of a batch with --input-url, or `mixed`
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    #[arg(value_parser = endpoint, conflicts_with = "after")]
    endpoint: String,
    /// Time limit, as 24h, or background; after another batch from its end on. By default 24h, or that of the other batch
    #[arg(long, value_name = "TIME", value_parser = window)]
    completion_window: Option<String>,
    #[command(flatten)]
    store_options: StoreOptions,
}

/// Checks a completion window.
fn window(text: &str) -> Result<String, String> {
    let expected = "expected background, or a number and one of s, m, h, d, at most 365d";
    parse_window(text).map(|_| text.to_owned()).ok_or_else(|| expected.to_owned())
}

/// Checks an endpoint of batches.
fn endpoint(text: &str) -> Result<String, String> {
    match text == MIXED || Endpoint::of_batch(text).is_some() {
        true => Ok(text.to_owned()),
        false => Err(format!("expected {}, or '{MIXED}'", Endpoint::batch_paths())),
    }
}

impl NewBatchArguments {
    /// Creates the batch.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let lines = self.template.as_deref().map(read_template).transpose()?;
        let input_url = self.input_url()?;
        let output_url = self.output_url.clone();
        let output_url = output_url.map(|url| OutputUrl::parse(url, self.output_format.clone()));
        let output_url = output_url.transpose()?.map(Box::new);
        let store = self.store_options.open().await?;
        let now = store.now().await?;
        let mut new = match (self.after, lines, input_url) {
            (Some(after), Some(lines), None) => {
                let Some(earlier) = store.batch_of_any_tenant(after).await? else {
                    bail!("no batch {after}: see tritmill batches list");
                };
                lines.check_earlier(&earlier.endpoint, "")?;
                let window = self.completion_window;
                let window = window.unwrap_or_else(|| earlier.completion_window.clone());
                let (tenant, endpoint) = (earlier.tenant.clone(), lines.url().to_owned());
                Batch {
                    priority: earlier.priority,
                    mail_to: earlier.mail_to.clone(),
                    after: Some(Box::new(After::new(after, lines))),
                    ..Batch::new(tenant, endpoint, window, now)
                }
            }
            (_, _, input_url) => {
                let window = self.completion_window.unwrap_or_else(|| "24h".to_owned());
                Batch {
                    input_url: input_url.map(Box::new),
                    ..Batch::new(Tenant(self.tenant), self.endpoint, window, now)
                }
            }
        };
        if new.completion_window == BACKGROUND {
            new.priority = Priority::Low;
        }
        new.output_url = output_url;
        new.webhook = store.tenant_webhook(&new.tenant).await?;
        let id = new.id.to_string();
        let detail = json!({
            "tenant": new.tenant,
            "after": self.after.map(|id| id.to_string()),
            "input_url": new.input_url.as_ref().map(|input| input.shown()),
            "output_url": new.output_url.as_ref().map(|output| output.shown()),
        });
        let line = AuditEntry::from_command_line("batch.create", &id, detail);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        // Operators create batches of a tenant beyond its limit.
        let created = store.create_batch(&new, u32::MAX).await?;
        ensure!(created == Creation::New, "the earlier batch was deleted meanwhile");
        output::line(format_args!("{id}"))?;
        Ok(ExitCode::SUCCESS)
    }

    /// Returns where the lines are read, if they are not those of another batch.
    fn input_url(&self) -> anyhow::Result<Option<InputUrl>> {
        let Some(url) = self.input_url.clone() else { return Ok(None) };
        let options = self.input_options.as_deref().map(serde_json::from_str::<Value>).transpose();
        let options = options.context("--input-options is not JSON")?;
        Ok(Some(InputUrl::parse(url, options, &self.endpoint)?))
    }
}

/// Reads a template from a file or from standard input.
fn read_template(path: &Path) -> anyhow::Result<LineTemplate> {
    let mut text = String::new();
    match path.as_os_str() == "-" {
        true => io::stdin().lock().take(TEMPLATE_BYTES_MAX).read_to_string(&mut text),
        false => File::open(path)
            .and_then(|file| file.take(TEMPLATE_BYTES_MAX).read_to_string(&mut text)),
    }
    .with_context(|| format!("cannot read {}", path.display()))?;
    let lines = serde_json::from_str(&text).context("the template is not JSON")?;
    Ok(LineTemplate::parse(lines, MIXED, "")?)
}
