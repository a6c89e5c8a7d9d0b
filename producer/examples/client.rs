//! Submits prompts to a fleet, prints the text of one while it is generated, and collects all results.
//!
//! ```sh
//! export REDIS_URL=redis://localhost DATABASE_URL=postgres://tritmill@localhost/tritmill
//! tritmill migrate && tritmill worker --model demo &
//! cargo run --example client -- demo "Paid on the 3rd of March, 2024" "Rechnung 82 vom 5. Okt. 98"
//! ```

use std::{io::Write as _, time::Duration};

use anyhow::Context as _;
use futures_util::StreamExt as _;
use tritmill_client::{Client, ClientError, Job, JobBuilder, JobEvent, JobId, Outcome};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().context("usage: client MODEL PROMPT…")?;
    let prompts: Vec<String> = arguments.collect();
    let redis = std::env::var("REDIS_URL").context("REDIS_URL is not set")?;
    let database = std::env::var("DATABASE_URL").context("DATABASE_URL is not set")?;

    let client = Client::connect(&redis, &database).await?;
    let jobs = prompts
        .iter()
        .map(|prompt| {
            JobBuilder::question(&model, prompt).temperature(0.0).max_tokens(32).stream().build()
        })
        .collect::<Result<Vec<_>, _>>()?;
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    submit(&client, &jobs).await?;

    if let Some(first) = ids.first() {
        follow(&client, *first).await?;
    }
    let mut results = std::pin::pin!(client.results(ids.clone()));
    while let Some(result) = results.next().await {
        let finished = result?;
        let index = ids.iter().position(|id| *id == finished.id).context("a job of ours")?;
        match finished.outcome {
            Some(Outcome::Completed(completion)) => {
                println!("{} → {}", prompts[index], completion.choices[0].text.trim());
            }
            other => println!("{} failed: {other:?}", prompts[index]),
        }
    }
    Ok(())
}

/// Submits jobs, and waits whenever the queue is full.
async fn submit(client: &Client, mut jobs: &[Job]) -> anyhow::Result<()> {
    loop {
        match client.submit_many(jobs).await {
            Ok(()) => return Ok(()),
            Err(ClientError::Busy { accepted, retry_after, .. }) => {
                jobs = &jobs[accepted..];
                tokio::time::sleep(retry_after.max(Duration::from_millis(100))).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Prints a job's text as it is generated.
async fn follow(client: &Client, id: JobId) -> anyhow::Result<()> {
    let mut events = std::pin::pin!(client.subscribe(id));
    while let Some(event) = events.next().await {
        if let JobEvent::Delta { text, .. } = event? {
            print!("{text}");
            std::io::stdout().flush()?;
        }
    }
    println!();
    Ok(())
}
