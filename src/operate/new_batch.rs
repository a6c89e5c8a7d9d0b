//! `tritmill batches create`: a batch after another one.

use std::{
    fs::File,
    io::{self, Read as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::json;
use tritmill_admin::{
    line_template::LineTemplate,
    store::{
        Batch, BatchId,
        after::After,
        audit::AuditEntry,
        batches::{BACKGROUND, Creation, MIXED, parse_window},
    },
};
use tritmill_queue::Priority;

use crate::{keys::StoreOptions, output};

/// Most bytes of a file with a template.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// An earlier batch, and what makes a line from a line of it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tritmill batches create --after batch_0199f3c2… --template summary.json
  echo '{\"url\":\"/v1/chat/completions\",\"body\":{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",
    \"content\":\"Shorten: {{ previous.content }}\"}]}}' | tritmill batches create --after batch_0199f3c2… --template -

The batch is of the same tenant. Prints its id. It begins when the earlier one has ended.

Exit codes:
  0 the batch is created, 1 failure")]
pub struct NewBatchArguments {
    /// Id of the earlier batch, as printed by `tritmill batches list`; it may run
    #[arg(long, value_name = "ID")]
    after: BatchId,
    /// File with the template of the lines: a JSON object with url, body and perhaps custom_id; - reads standard input
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
    /// Time limit from the end of the earlier batch on, as 24h, or background. By default that of the earlier batch
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

impl NewBatchArguments {
    /// Creates the batch.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { after, template, completion_window, store_options } = self;
        let mut text = String::new();
        match template.as_os_str() == "-" {
            true => io::stdin().lock().take(TEMPLATE_BYTES_MAX).read_to_string(&mut text),
            false => File::open(&template)
                .and_then(|file| file.take(TEMPLATE_BYTES_MAX).read_to_string(&mut text)),
        }
        .with_context(|| format!("cannot read {}", template.display()))?;
        let lines = serde_json::from_str(&text).context("the template is not JSON")?;
        let lines = LineTemplate::parse(lines, MIXED, "")?;
        let store = store_options.open().await?;
        let Some(earlier) = store.batch_of_any_tenant(after).await? else {
            bail!("no batch {after}: see tritmill batches list");
        };
        lines.check_earlier(&earlier.endpoint, "")?;
        let window = completion_window.unwrap_or_else(|| earlier.completion_window.clone());
        let priority = if window == BACKGROUND { Priority::Low } else { earlier.priority };
        let (tenant, endpoint) = (earlier.tenant.clone(), lines.url().to_owned());
        let new = Batch {
            priority,
            webhook: store.tenant_webhook(&tenant).await?,
            mail_to: earlier.mail_to.clone(),
            after: Some(Box::new(After::new(after, lines))),
            ..Batch::new(tenant, endpoint, window, store.now().await?)
        };
        let id = new.id.to_string();
        let detail = json!({ "tenant": new.tenant, "after": after.to_string() });
        let line = AuditEntry::from_command_line("batch.create", &id, detail);
        store.record_audit(&line).await.context("cannot write the audit log")?;
        // Operators create batches of a tenant beyond its limit.
        let created = store.create_batch(&new, u32::MAX).await?;
        ensure!(created == Creation::New, "batch {after} was deleted meanwhile");
        output::line(format_args!("{id}"))?;
        Ok(ExitCode::SUCCESS)
    }
}
