//! `tritmill bench e2e --waves`: interactive callers in bursts and idle phases beside work that never ends, in six
//! scenarios: how soon they are answered, and what the work gets done.
//!
//! The scenarios are those of llm-d's batch gateway (its `benchmarks/README.md`), as far as one service has them: there a gateway
//! holds requests back from a server, here the queue and the engine's steps do.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{
    Arguments,
    gaps::{Answers, BATCH_WITHIN, Bodies, ENDPOINT, ask},
    service::{ANSWER_WITHIN, Service},
};
use crate::{bench::queue::percentile, block_on, output};

/// Answers, one after the other, from which the default rates follow; the first one warms up.
const ALONE: usize = 4;
/// How many answers are asked for in the time of one: in a burst and in an idle phase.
const BURST: f64 = 1.5;
const IDLE: f64 = 0.15;
/// A step target that never ends a step early, in milliseconds.
const NO_TARGET: u32 = 600_000;

/// What runs beside the callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// Nothing.
    Alone,
    /// The same prompts as requests like those of the callers.
    Requests,
    /// A batch of lines of the tier `default`, which has the callers' priority.
    DefaultTier,
    /// A batch, and steps that are as long as their rows take.
    LongSteps,
    /// A batch.
    Batch,
    /// A batch with the window `background`.
    Background,
}

impl Scenario {
    pub const ALL: [Self; 6] = [
        Self::Alone,
        Self::Requests,
        Self::DefaultTier,
        Self::LongSteps,
        Self::Batch,
        Self::Background,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Alone => "callers alone",
            Self::Requests => "requests of the same kind",
            Self::DefaultTier => "batch, tier default",
            Self::LongSteps => "batch, no step target",
            Self::Batch => "batch",
            Self::Background => "batch, background",
        }
    }
}

/// Requests per second in both phases.
#[derive(Debug, Clone, Copy)]
struct Rates {
    burst: f64,
    idle: f64,
}

/// What a scenario measured.
struct Measured {
    scenario: Scenario,
    burst: Answers,
    idle: Answers,
    /// Callers that were refused or waited too long.
    failed: u64,
    /// None in the scenario without work.
    work: Option<Work>,
}

/// Tokens computed per second.
struct Work {
    /// Of the work, without callers.
    alone: f64,
    /// Of the work beside callers.
    beside: f64,
    /// Of the callers' prompts and answers.
    of_callers: f64,
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let bodies = Bodies::new(arguments)?;
    let measured = block_on(async {
        tokio::select! {
            measured = measure_all(arguments, &bodies) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        }
    });
    let (rates, measured) = measured?;
    print(arguments, rates, &measured)
}

async fn measure_all(
    arguments: &Arguments,
    bodies: &Bodies,
) -> anyhow::Result<(Rates, Vec<Measured>)> {
    let (mut rates, mut measured) = (None, Vec::new());
    for scenario in arguments.scenarios() {
        note!("{}", scenario.name());
        let target = match scenario {
            Scenario::LongSteps => NO_TARGET,
            _ => arguments.step_target,
        };
        let mut service = Service::start_stepping(arguments, target).await?;
        let model = service.api.models().await?.into_iter().next().context("nothing is served")?;
        let bodies = bodies.of(&model);
        let known = match rates {
            Some(known) => known,
            None => rates_of(&service, arguments, &bodies).await?,
        };
        rates = Some(known);
        let found = measure(&service, arguments, &bodies, scenario, known).await;
        // Fails if the process has ended.
        let _ = service.process.kill().await;
        measured.push(found?);
    }
    Ok((rates.context("no scenario was measured")?, measured))
}

/// The rates of the command line, or those that follow from the time of an answer.
async fn rates_of(
    service: &Service,
    arguments: &Arguments,
    bodies: &Bodies,
) -> anyhow::Result<Rates> {
    let mut times = Vec::new();
    for index in 0..ALONE {
        let started = Instant::now();
        ask(service, bodies.interactive(0, index), &mut Answers::default()).await?;
        times.push(started.elapsed().as_secs_f64());
    }
    let one = times[1..].iter().sum::<f64>() / (ALONE - 1) as f64;
    let burst = arguments.burst_rate.unwrap_or(BURST / one);
    Ok(Rates { burst, idle: arguments.idle_rate.unwrap_or(IDLE / one) })
}

async fn measure(
    service: &Service,
    arguments: &Arguments,
    bodies: &Bodies,
    scenario: Scenario,
    rates: Rates,
) -> anyhow::Result<Measured> {
    let mut measured = Measured {
        scenario,
        burst: Answers::default(),
        idle: Answers::default(),
        failed: 0,
        work: None,
    };
    let waves = async {
        for cycle in 0..2 * arguments.cycles.get() {
            let (rate, answers) = match cycle % 2 {
                0 => (rates.burst, &mut measured.burst),
                _ => (rates.idle, &mut measured.idle),
            };
            measured.failed +=
                phase(service, bodies, (cycle, rate), arguments.phase(), answers).await?;
        }
        anyhow::Ok(())
    };
    if scenario == Scenario::Alone {
        waves.await?;
        return Ok(measured);
    }
    let work = async {
        match scenario {
            Scenario::Requests => keep_asking(service, arguments, bodies).await,
            _ => keep_batch(service, arguments, bodies, scenario).await,
        }
    };
    let measuring = async {
        let begun = Instant::now();
        let before = service.tokens().await?;
        while service.tokens().await? < before + 2 * arguments.batch_prompt.get() as u64 {
            ensure!(begun.elapsed() < BATCH_WITHIN, "the work does not start");
            sleep(Duration::from_millis(200)).await;
        }
        // The first lines are computed while the others are still being checked.
        sleep(arguments.phase()).await;
        let (started, before) = (Instant::now(), service.tokens().await?);
        sleep(arguments.phase()).await;
        let alone = (service.tokens().await? - before) as f64 / started.elapsed().as_secs_f64();
        let (started, before) = (Instant::now(), service.tokens().await?);
        waves.await?;
        anyhow::Ok((alone, service.tokens().await? - before, started.elapsed()))
    };
    let (alone, tokens, time) = tokio::select! {
        done = measuring => done?,
        ended = work => return Err(ended.err().context("the work ended")?),
    };
    let own = measured.burst.computed(arguments) + measured.idle.computed(arguments);
    let rate = |tokens: u64| tokens as f64 / time.as_secs_f64();
    let (beside, of_callers) = (rate(tokens.saturating_sub(own)), rate(own));
    measured.work = Some(Work { alone, beside, of_callers });
    Ok(measured)
}

/// Runs a batch, and fails when it ends.
async fn keep_batch(
    service: &Service,
    arguments: &Arguments,
    bodies: &Bodies,
    scenario: Scenario,
) -> anyhow::Result<()> {
    let lines = (0..arguments.batch_lines()).map(|line| {
        let mut body = bodies.batch(line);
        if scenario == Scenario::DefaultTier {
            body["service_tier"] = json!("default");
        }
        body
    });
    let of = match scenario {
        Scenario::Background => ("background", "low"),
        _ => ("24h", "normal"),
    };
    let id = service.submit_batch(lines, ENDPOINT, of).await?.id;
    loop {
        sleep(Duration::from_secs(1)).await;
        let status = service.api.batch(&id).await?.status;
        let is_open = matches!(&*status, "validating" | "in_progress");
        ensure!(is_open, "the batch is {status}: increase --batch-lines");
    }
}

/// Callers come at a rate, whether others are still waiting or not. Ends when all are answered, or as long after the last one came as
/// they came; returns how many were not answered.
async fn phase(
    service: &Service,
    bodies: &Bodies,
    (cycle, rate): (usize, f64),
    length: Duration,
    answers: &mut Answers,
) -> anyhow::Result<u64> {
    let mut ticks = interval(Duration::try_from_secs_f64(1.0 / rate)?);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let (started, mut count, mut failed) = (Instant::now(), 0, 0);
    let mut asking = FuturesUnordered::new();
    loop {
        let is_over = started.elapsed() >= length;
        if is_over && asking.is_empty() {
            break;
        }
        if started.elapsed() >= 2 * length {
            failed += asking.len() as u64;
            break;
        }
        tokio::select! {
            () = sleep(Duration::from_secs(1)) => {}
            _ = ticks.tick(), if !is_over => {
                let body = bodies.interactive(2 + cycle, count);
                count += 1;
                asking.push(async move {
                    let mut answer = Answers::default();
                    ask(service, body, &mut answer).await.map(|()| answer)
                });
            }
            Some(done) = asking.next(), if !asking.is_empty() => match done {
                Ok(answer) => answers.add(answer),
                Err(error) => {
                    failed += 1;
                    note!("a caller was not answered: {error:#}");
                }
            },
        }
    }
    Ok(failed)
}

/// Keeps as many requests under way as the engine has places, until it is dropped.
async fn keep_asking(
    service: &Service,
    arguments: &Arguments,
    bodies: &Bodies,
) -> anyhow::Result<()> {
    let one = |index: usize| async move {
        let body: Value = bodies.batch(index);
        let url = format!("{}{ENDPOINT}", service.url);
        let request = service.client.request(Method::POST, &url)?.bearer_auth(&service.key);
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        let answer = service.client.send(request, 10 * ANSWER_WITHIN).await?;
        // A refused one tries again: it has no deadline.
        let is_refused = answer.status().as_u16() == 429 || answer.status().as_u16() == 503;
        ensure!(
            is_refused || answer.status().is_success(),
            "the service answered {}",
            answer.status()
        );
        answer.text().await?;
        if is_refused {
            sleep(Duration::from_secs(1)).await;
        }
        anyhow::Ok(())
    };
    let mut asking: FuturesUnordered<_> = (0..arguments.batch().get()).map(one).collect();
    for index in arguments.batch().get().. {
        let Some(done) = asking.next().await else { break };
        done?;
        asking.push(one(index));
    }
    Ok(())
}

fn print(arguments: &Arguments, rates: Rates, measured: &[Measured]) -> anyhow::Result<ExitCode> {
    let ms = |times: &[Duration], percent| {
        percentile(times, percent).map(|time| 1e3 * time.as_secs_f64())
    };
    if !arguments.json {
        output::line(format_args!(
            "{:.2} callers/s in bursts, {:.2} in idle phases of {} s each, {} cycles; milliseconds",
            rates.burst, rates.idle, arguments.phase_seconds, arguments.cycles
        ))?;
        output::line(format_args!(
            "{:26} {:>9} {:>17} {:>17} {:>17} {:>28}",
            "beside", "answers", "first, burst", "first, idle", "between tokens", "work, tokens/s"
        ))?;
        output::line(format_args!(
            "{:26} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>28}",
            "", "", "p50", "p99", "p50", "p99", "p50", "p99", "alone, beside + callers"
        ))?;
    }
    for one in measured {
        let sorted = |mut times: Vec<Duration>| {
            times.sort_unstable();
            times
        };
        let [burst, idle] = [&one.burst, &one.idle].map(|answers| sorted(answers.first.clone()));
        let gaps = sorted([&one.burst.gaps[..], &one.idle.gaps].concat());
        let figures =
            [&burst, &idle, &gaps].map(|times| [50, 99].map(|percent| ms(times, percent)));
        let answers = burst.len() + idle.len();
        if arguments.json {
            let pair = |[p50, p99]: [Option<f64>; 2]| json!({ "p50_ms": p50, "p99_ms": p99 });
            let [burst, idle, gaps] = figures.map(pair);
            output::line(json!({
                "scenario": one.scenario.name(), "answers": answers, "failed": one.failed,
                "burst_rate": rates.burst, "idle_rate": rates.idle,
                "first_burst": burst, "first_idle": idle, "gap": gaps,
                "work_alone_tokens_per_s": one.work.as_ref().map(|work| work.alone),
                "work_beside_tokens_per_s": one.work.as_ref().map(|work| work.beside),
                "callers_tokens_per_s": one.work.as_ref().map(|work| work.of_callers),
            }))?;
            continue;
        }
        let cells = figures.concat().into_iter().map(|value| match value {
            Some(value) => format!("{value:8.0}"),
            None => format!("{:>8}", "-"),
        });
        let work = one.work.as_ref().map_or_else(String::new, |work| {
            let Work { alone, beside, of_callers } = work;
            let percent = |rate: f64| 100.0 * rate / alone.max(1.0);
            format!(
                "{alone:.0}, {beside:.0} + {of_callers:.0} ({:.0} + {:.0} %)",
                percent(*beside),
                percent(*of_callers)
            )
        });
        let failed = if one.failed > 0 { format!(" ({} not)", one.failed) } else { String::new() };
        output::line(format_args!(
            "{:26} {:>9} {} {work:>28}",
            one.scenario.name(),
            format!("{answers}{failed}"),
            cells.collect::<Vec<_>>().join(" ")
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
