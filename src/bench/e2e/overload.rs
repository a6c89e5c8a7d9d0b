//! `tritmill bench e2e --overload`: ten times as many requests as the service can answer, each with a deadline.
//!
//! First callers that wait for each other's answers measure the capacity. Then requests begin at fixed times,
//! whatever becomes of those before. A request is refused with status 429 or accepted; an accepted one meets its
//! deadline if the caller has the whole answer in time. The capacity is measured again afterwards, because a virtual
//! machine is not equally fast all the time; goodput is compared with the mean of the two.

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use parking_lot::Mutex;
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tritmill_client::http::HttpClient;

use super::{
    Arguments, Work,
    counts::{Counts, End},
    target::Target,
};
use crate::{bench::queue::percentile, block_on, output};

/// Offered requests for each that the service can answer.
const TIMES: f64 = 10.0;
/// Shortest measurement of the capacity, unless --seconds is less, and longest one with its warm-up.
const CAPACITY_FOR: Duration = Duration::from_secs(15);
const CAPACITY_WITHIN: Duration = Duration::from_secs(600);
/// Answers that measure the capacity, as a multiple of the callers.
const ROUNDS: usize = 3;
/// Deadline without --deadline: this many times the time of an answer in a full worker, and the shortest one.
const DEADLINE_TIMES: f64 = 4.0;
const DEADLINE_MIN: Duration = Duration::from_secs(2);
/// Requests that may be open at once.
const OPEN_MAX: usize = 20_000;
/// Time between two looks at what is due.
const TICK: Duration = Duration::from_millis(5);
/// Time after its deadline until an accepted request must have some answer.
const GRACE: Duration = Duration::from_secs(15);
const ENDPOINT: &str = "/v1/completions";

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let context = arguments.model.open()?.config().clone();
    let needed = arguments.prompt.get() + arguments.generate().get();
    ensure!(needed <= context.context_length, "the model's context has fewer than {needed} tokens");
    let work = Work {
        jobs: 1 << 30,
        prompt: arguments.prompt.get(),
        generate: arguments.generate().get(),
        vocab_size: context.vocab_size,
    };
    block_on(async {
        let target = Target::start(arguments).await?;
        let measured = tokio::select! {
            measured = measure(&target, arguments, work) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        let stopped = target.stop().await;
        let measured = measured?;
        stopped?;
        print(arguments, &measured)
    })
}

/// What sends requests.
#[derive(Clone)]
struct Sender {
    client: HttpClient,
    url: String,
    key: String,
    model: String,
    work: Arc<Work>,
    next: Arc<AtomicUsize>,
}

impl Sender {
    /// Sends a request with a prompt of its own; the service has its own time limit without a deadline.
    async fn ask(&self, deadline: Option<Duration>) -> End {
        let asked = self.try_ask(deadline, self.next.fetch_add(1, Ordering::Relaxed));
        let limit = deadline.map_or(CAPACITY_WITHIN, |deadline| deadline + GRACE);
        match timeout(limit, asked).await {
            Ok(Ok(end)) => end,
            Ok(Err(error)) => End::Failed(output::one_line(&error)),
            Err(_) => End::Expired,
        }
    }

    async fn try_ask(&self, deadline: Option<Duration>, index: usize) -> anyhow::Result<End> {
        let body = json!({
            "model": self.model, "prompt": self.work.prompt(0, index),
            "max_tokens": self.work.generate, "ignore_eos": true, "temperature": 0,
        });
        let mut request = self.client.request(Method::POST, &self.url)?.bearer_auth(&self.key);
        request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        if let Some(deadline) = deadline {
            request = request.header("x-request-timeout", deadline.as_secs_f64().to_string());
        }
        let started = Instant::now();
        let answer = self.client.send(request, CAPACITY_WITHIN).await?;
        let status = answer.status().as_u16();
        let body: Value = serde_json::from_slice(&answer.bytes().await?)?;
        Ok(match status {
            200 => {
                let tokens = body["usage"]["completion_tokens"].as_u64();
                ensure!(
                    tokens == Some(self.work.generate as u64),
                    "{tokens:?} tokens in an answer"
                );
                End::Answered(started.elapsed())
            }
            429 => End::Refused(body["error"]["code"].as_str().unwrap_or("429").to_owned()),
            504 => End::Expired,
            _ => End::Failed(format!("status {status}: {}", body["error"]["message"])),
        })
    }
}

/// Measurements.
struct Measured {
    /// Answers per second before and after the overload.
    capacities_per_s: [f64; 2],
    deadline: Duration,
    counts: Counts,
    took: Duration,
    /// Memory of the service before the overload, and the most during it.
    memory_before: u64,
    memory_peak: u64,
    /// The same of Redis, if it is used.
    redis: Option<(u64, u64)>,
}

async fn measure(target: &Target, arguments: &Arguments, work: Work) -> anyhow::Result<Measured> {
    let sender = Sender {
        client: HttpClient::of_trusted_server()?,
        url: format!("{}{ENDPOINT}", target.service.url),
        key: target.key.clone(),
        model: target.model.clone(),
        work: Arc::new(work),
        next: Arc::default(),
    };
    note!("measuring the capacity");
    let callers = 2 * arguments.batch().get();
    let lasts = Duration::from_secs(arguments.seconds.get());
    let capacity_per_s = capacity(&sender, callers, CAPACITY_FOR.min(lasts)).await?;
    let in_full_worker = 1.25 * arguments.batch().get() as f64 / capacity_per_s;
    let deadline = arguments.deadline.map_or_else(
        || Duration::from_secs_f64(DEADLINE_TIMES * in_full_worker).max(DEADLINE_MIN),
        Duration::from_secs_f64,
    );
    let rate = TIMES * capacity_per_s;
    note!(
        "offering {rate:.1} requests/s for {} s, each with {:.1} s",
        arguments.seconds,
        deadline.as_secs_f64()
    );
    let memory_before = target.memory_bytes()?;
    let redis_before = target.redis_bytes().await?;
    let peaks = Arc::new(Mutex::new((memory_before, redis_before)));
    let watching = async {
        loop {
            sleep(Duration::from_secs(1)).await;
            // A look that fails is left out.
            let (memory, redis) = (target.memory_bytes(), target.redis_bytes().await);
            let mut peaks = peaks.lock();
            peaks.0 = peaks.0.max(memory.unwrap_or(0));
            peaks.1 = peaks.1.max(redis.ok().flatten());
        }
    };
    let started = Instant::now();
    let counts = tokio::select! {
        counts = offer(&sender, rate, lasts, deadline) => counts?,
        () = watching => bail!("the watch ended"),
    };
    note!("all requests have ended after {:.1} s", started.elapsed().as_secs_f64());
    note!("measuring the capacity again");
    let capacity_after = capacity(&sender, callers, CAPACITY_FOR.min(lasts)).await?;
    let capacities_per_s = [capacity_per_s, capacity_after];
    let (memory_peak, redis_peak) = *peaks.lock();
    let redis = redis_before.zip(redis_peak);
    Ok(Measured {
        capacities_per_s,
        deadline,
        counts,
        took: lasts,
        memory_before,
        memory_peak,
        redis,
    })
}

/// Returns the answers per second while this many callers each ask again when they have an answer, over a time that is
/// long enough for some answers of each.
async fn capacity(sender: &Sender, callers: usize, at_least: Duration) -> anyhow::Result<f64> {
    let measured = timeout(CAPACITY_WITHIN, try_capacity(sender, callers, at_least)).await;
    measured.context("the service answers too slowly")?
}

async fn try_capacity(sender: &Sender, callers: usize, at_least: Duration) -> anyhow::Result<f64> {
    let mut asking = JoinSet::new();
    let ask = |asking: &mut JoinSet<End>| {
        let sender = sender.clone();
        asking.spawn(async move { sender.ask(None).await });
    };
    (0..callers).for_each(|_| ask(&mut asking));
    let (mut answers, mut measured, mut rate) = (0, None, None);
    while let Some(end) = asking.join_next().await {
        match end.context("a caller panicked")? {
            End::Answered(_) => {}
            End::Refused(why) | End::Failed(why) => bail!("without overload: {why}"),
            End::Expired => bail!("without overload: no answer"),
        }
        answers += 1;
        if let Some(rate) = rate {
            if asking.is_empty() {
                return Ok(rate);
            }
            continue;
        }
        ask(&mut asking);
        // The first answers of all callers warm up.
        if answers == callers {
            measured = Some(Instant::now());
        }
        if let Some(started) = measured
            && started.elapsed() >= at_least
            && answers >= callers * (1 + ROUNDS)
        {
            // The last answers are waited for: to drop their callers would cancel them.
            rate = Some((answers - callers) as f64 / started.elapsed().as_secs_f64());
        }
    }
    bail!("no callers")
}

/// Sends requests at this rate, and waits until all have ended.
async fn offer(
    sender: &Sender,
    rate: f64,
    lasts: Duration,
    deadline: Duration,
) -> anyhow::Result<Counts> {
    let counts = Arc::new(Mutex::new(Counts::default()));
    let (open, is_over) = (Arc::new(Semaphore::new(OPEN_MAX)), Arc::new(AtomicBool::new(false)));
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (started, mut sent) = (Instant::now(), 0_u64);
    while started.elapsed() < lasts {
        ticks.tick().await;
        let due = (started.elapsed().min(lasts).as_secs_f64() * rate) as u64;
        while sent < due {
            // Waits here if the service leaves so many without an answer.
            let permit = Arc::clone(&open).acquire_owned().await?;
            sent += 1;
            let (sender, counts) = (sender.clone(), Arc::clone(&counts));
            let is_over = Arc::clone(&is_over);
            tokio::spawn(async move {
                let end = sender.ask(Some(deadline)).await;
                counts.lock().count(end, deadline, is_over.load(Ordering::Relaxed));
                drop(permit);
            });
        }
    }
    is_over.store(true, Ordering::Relaxed);
    // Every request has a time limit.
    let _all = open.acquire_many(u32::try_from(OPEN_MAX)?).await?;
    let mut counts = std::mem::take(&mut *counts.lock());
    counts.offered = sent;
    counts.latencies.sort_unstable();
    Ok(counts)
}

fn print(arguments: &Arguments, measured: &Measured) -> anyhow::Result<ExitCode> {
    let Measured { capacities_per_s, deadline, counts, took, memory_before, memory_peak, redis } =
        measured;
    let tokens = arguments.generate().get() as f64;
    let capacity_per_s = capacities_per_s.iter().sum::<f64>() / 2.0;
    let [before, after] = capacities_per_s.map(|rate| rate * tokens);
    let (capacity, seconds) = (capacity_per_s * tokens, took.as_secs_f64());
    let goodput = counts.met_in_phase as f64 * tokens / seconds;
    let met = counts.met as f64 / counts.accepted().max(1) as f64;
    let [p50, p99] = [50, 99].map(|percent| {
        percentile(&counts.latencies, percent).map_or(0.0, |latency| latency.as_secs_f64())
    });
    if arguments.json {
        output::line(json!({
            "prompt": arguments.prompt, "generate": arguments.generate(),
            "batch": arguments.batch(), "seconds": seconds, "deadline_s": deadline.as_secs_f64(),
            "capacity_before_tokens_per_s": before, "capacity_after_tokens_per_s": after,
            "capacity_tokens_per_s": capacity, "capacity_requests_per_s": capacity_per_s,
            "offered": counts.offered, "offered_requests_per_s": counts.offered as f64 / seconds,
            "goodput_tokens_per_s": goodput, "goodput_share": goodput / capacity,
            "accepted": counts.accepted(), "met": counts.met, "met_share": met,
            "late": counts.late, "expired": counts.expired,
            "refused": counts.refused, "failed": counts.failed, "p50_s": p50, "p99_s": p99,
            "memory_before_bytes": memory_before, "memory_peak_bytes": memory_peak,
            "redis_before_bytes": redis.map(|(before, _)| before),
            "redis_peak_bytes": redis.map(|(_, peak)| peak),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format_args!(
        "capacity {before:.0} tokens/s before, {after:.0} after ({capacity_per_s:.1} requests/s); offered {:.1} requests/s for {seconds} s, \
         each with {:.1} s",
        counts.offered as f64 / seconds,
        deadline.as_secs_f64()
    ))?;
    output::line(format_args!(
        "goodput {goodput:.0} tokens/s, {:.1} % of the capacity; {} accepted, {:.2} % of them in time ({} late, {} \
         expired); p50 {p50:.2} s, p99 {p99:.2} s",
        100.0 * goodput / capacity,
        counts.accepted(),
        100.0 * met,
        counts.late,
        counts.expired
    ))?;
    for (what, counts) in [("refused", &counts.refused), ("failed", &counts.failed)] {
        for (why, count) in counts {
            output::line(format_args!("{what}: {count} {why}"))?;
        }
    }
    let (before, peak) = (output::bytes(*memory_before), output::bytes(*memory_peak));
    output::line(format_args!("memory of the service: {before} before, {peak} at most"))?;
    if let Some((before, peak)) = redis {
        let (before, peak) = (output::bytes(*before), output::bytes(*peak));
        output::line(format_args!("memory of Redis: {before} before, {peak} at most"))?;
    }
    Ok(ExitCode::SUCCESS)
}
