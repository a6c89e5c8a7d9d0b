//! The phases of `bench queue`: jobs are submitted, consumed with a fixed answer, and timed one at a time
//! on an idle queue.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tokio::{sync::mpsc, task::JoinSet};
use tritmill_client::{Client, JobBuilder};
use tritmill_queue::{
    Choice, Claim, ClaimRef, Claimant, Completion, Delivery, Dispatcher as _, FinishReason,
    FinishedAttempt, Job, JobId, Outcome, Pull, QueueName, Store as _, Usage,
    dispatch::RedisDispatcher, store::PostgresStore,
};

use crate::servers::ServerUrls;

/// Random digits at the end of an id.
const RANDOM_DIGITS: usize = 8;
/// Jobs deleted in one call.
const DELETE_CHUNK: usize = 1000;
/// Lease of a claim, longer than any phase.
const LEASE: Duration = Duration::from_secs(60);
/// Time limit for a consumer to get work that must be in the queue.
const PULL_WAIT: Duration = Duration::from_millis(100);
/// Time limit for the start of one job.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Time between two jobs on the idle queue: long enough that the store checks its connections first, as
/// on an idle queue.
const IDLE: Duration = Duration::from_millis(110);

/// What a consumer does at once.
#[derive(Debug, Clone, Copy)]
pub struct MicroBatch {
    /// Most jobs of one batch.
    pub max: usize,
    /// How often the jobs are renewed.
    pub renewals: usize,
}

/// The servers and the queue of this run.
#[derive(Clone)]
pub struct Bench {
    pub store: Arc<PostgresStore>,
    pub dispatcher: Arc<RedisDispatcher>,
    pub queue: QueueName,
}

impl Bench {
    /// Names a new queue, `bench-DIGITS@FORMAT`, on these servers.
    pub async fn open(servers: ServerUrls<'_>, format: &str) -> anyhow::Result<Self> {
        let id = JobId::generate().to_string();
        let model = format!("bench-{}", &id[id.len() - RANDOM_DIGITS..]);
        let queue = QueueName { model, format: format.to_owned() };
        let (store, dispatcher) = (servers.store().await?, servers.dispatcher().await?);
        dispatcher.ping().await.context("cannot use Redis")?;
        Ok(Self { store, dispatcher, queue })
    }

    /// Returns a client.
    pub fn client(&self) -> Client {
        Client::from_servers(self.store.clone(), self.dispatcher.clone())
    }

    /// Returns `count` jobs with a short prompt.
    pub fn jobs(&self, count: usize) -> anyhow::Result<Vec<Job>> {
        let name = self.queue.to_string();
        let job = |index: usize| {
            let prompt = format!("Invoice {index} was paid on the {} of March", 1 + index % 28);
            JobBuilder::text(&name, prompt).max_tokens(16).build()
        };
        (0..count).map(job).collect::<Result<_, _>>().context("cannot make a job")
    }

    /// Submits the jobs from several producers.
    pub async fn submit(&self, jobs: &[Job], producers: usize) -> anyhow::Result<()> {
        let mut tasks = JoinSet::new();
        for part in jobs.chunks(jobs.len().div_ceil(producers).max(1)) {
            let client = self.client();
            let part = part.to_vec();
            tasks.spawn(async move { client.submit_many(&part).await });
        }
        while let Some(submitted) = tasks.join_next().await {
            submitted.context("a producer panicked")?.context("cannot submit")?;
        }
        Ok(())
    }

    /// Takes `count` jobs through pull, claim, renewals, finish and acknowledge.
    pub async fn consume(
        &self,
        count: usize,
        consumers: usize,
        batch: MicroBatch,
    ) -> anyhow::Result<()> {
        let left = Arc::new(AtomicUsize::new(count));
        let mut tasks = JoinSet::new();
        for number in 0..consumers {
            let (bench, left) = (self.clone(), Arc::clone(&left));
            tasks.spawn(async move {
                let name = format!("bench-{number}");
                while left.load(Ordering::Relaxed) > 0 {
                    let done = bench.turn(&name, batch).await?;
                    left.fetch_sub(done, Ordering::Relaxed);
                }
                anyhow::Ok(())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.context("a consumer panicked")??;
        }
        Ok(())
    }

    /// Runs one micro-batch and returns its number of jobs.
    async fn turn(&self, consumer: &str, batch: MicroBatch) -> anyhow::Result<usize> {
        let (claims, deliveries) = self.start(consumer, batch.max, PULL_WAIT).await?;
        let held: Vec<ClaimRef> = claims.iter().map(Claim::claim_ref).collect();
        if held.is_empty() {
            return Ok(0);
        }
        for _ in 0..batch.renewals {
            // As in the worker: first the store's lease, then the dispatcher's.
            let lost = self.store.renew(&held, LEASE).await?;
            ensure!(lost.is_empty(), "{} leases were lost", lost.len());
            let lost = self.dispatcher.renew(consumer, &deliveries).await?;
            ensure!(lost.is_empty(), "{} deliveries were lost", lost.len());
        }
        self.end(consumer, &held, &deliveries).await?;
        Ok(held.len())
    }

    /// Pulls and claims.
    pub async fn start(
        &self,
        consumer: &str,
        max: usize,
        wait: Duration,
    ) -> anyhow::Result<(Vec<Claim>, Vec<Delivery>)> {
        let pull = Pull { queue: &self.queue, consumer, max, wait, only: None };
        let deliveries = self.dispatcher.pull(pull).await?;
        if deliveries.is_empty() {
            return Ok((Vec::new(), deliveries));
        }
        let ids: Vec<JobId> = deliveries.iter().map(|delivery| delivery.id).collect();
        let claims = self.store.claim(&ids, Claimant::new(consumer, LEASE)).await?;
        let (wanted, got) = (deliveries.len(), claims.len());
        ensure!(got == wanted, "{got} of {wanted} jobs could be claimed: who else is here?");
        Ok((claims, deliveries))
    }

    /// Writes results and acknowledges.
    pub async fn end(
        &self,
        consumer: &str,
        held: &[ClaimRef],
        deliveries: &[Delivery],
    ) -> anyhow::Result<()> {
        let finish = |held: &ClaimRef| FinishedAttempt {
            claim: *held,
            outcome: self.outcome(),
            first_token: None,
        };
        let finished: Vec<FinishedAttempt> = held.iter().map(finish).collect();
        let settled = self.store.finish(&finished).await?.len();
        ensure!(settled == held.len(), "{settled} of {} results were written", held.len());
        let forgotten = self.dispatcher.acknowledge(consumer, deliveries).await?;
        ensure!(forgotten == held.len(), "{forgotten} of {} were acknowledged", held.len());
        Ok(())
    }

    /// Returns an answer of a few words.
    fn outcome(&self) -> Outcome {
        let text = "an answer of a few words".to_owned();
        let choice = Choice::new(0, text, FinishReason::Stop);
        Outcome::Completed(Completion {
            model: self.queue.model.clone(),
            fingerprint: "bench".to_owned(),
            choices: vec![choice],
            usage: Usage {
                prompt_tokens: 12,
                completion_tokens: 6,
                cached_tokens: 0,
                reasoning_tokens: 0,
            },
            ..Completion::default()
        })
    }

    /// Measures the time from the call of `submit` to the claim, for single jobs and one waiting
    /// consumer.
    pub async fn starts(&self, jobs: &[Job]) -> anyhow::Result<Vec<Duration>> {
        let (tell, mut started) = mpsc::channel(1);
        let (bench, count) = (self.clone(), jobs.len());
        // A task set ends with this function.
        let mut consumer = JoinSet::new();
        consumer.spawn(async move {
            for _ in 0..count {
                let (claims, deliveries) = bench.start("bench-idle", 1, START_LIMIT).await?;
                let at = Instant::now();
                ensure!(!claims.is_empty(), "no job came within {START_LIMIT:?}");
                let held: Vec<ClaimRef> = claims.iter().map(Claim::claim_ref).collect();
                bench.end("bench-idle", &held, &deliveries).await?;
                if tell.send(at).await.is_err() {
                    break;
                }
            }
            anyhow::Ok(())
        });
        let client = self.client();
        let mut latencies = Vec::with_capacity(count);
        for job in jobs {
            tokio::time::sleep(IDLE).await;
            let job = job.clone();
            let submitted = Instant::now();
            client.submit(job).await.context("cannot submit")?;
            let Some(at) = started.recv().await else { break };
            latencies.push(at.duration_since(submitted));
        }
        while let Some(ended) = consumer.join_next().await {
            ended.context("the consumer panicked")??;
        }
        if latencies.len() != count {
            bail!("{} of {count} jobs started", latencies.len());
        }
        Ok(latencies)
    }

    /// Deletes the jobs and keys of the run.
    pub async fn clean_up(&self, jobs: &[JobId]) -> anyhow::Result<()> {
        for chunk in jobs.chunks(DELETE_CHUNK) {
            let deleted = self.store.delete_jobs(chunk).await;
            deleted.context("cannot delete the benchmark's jobs")?;
        }
        let forgotten = self.dispatcher.forget_queue(&self.queue).await;
        forgotten.context("cannot delete the benchmark's queue in Redis")
    }
}
