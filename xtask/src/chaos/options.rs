//! The options of `cargo xtask chaos`.

use anyhow::{Context as _, bail, ensure};

use super::{nemesis::Faults, redis::Setup};

pub const HELP: &str = "\
Runs workers, producers, Redis and Postgres, injects faults by seed, and then checks that no job is
lost, that no job has two results, and that every answer equals that of an undisturbed run. A batch of
the HTTP API is paused, resumed, retried and cancelled at random meanwhile.

Usage: cargo xtask chaos [OPTIONS]

  --minutes M    time of the faults (1)
  --seed S       the same seed gives the same faults (1)
  --workers N    number of workers (3)
  --attempts N   maximum number of attempts of each job (1000)
  --faults F     all; or servers: nothing happens to workers, and no job may spend an attempt (all)
  --redis R      server; cluster: two nodes and queues in four shards; sentinel: a master, a replica
                 and a Sentinel (server)

Faults:
  workers, producers and the admin are killed; a worker hangs for longer than its lease
  Redis is killed, or killed and emptied; Postgres is killed, also for longer than a lease; both
  a server hangs with its connections open; connections are closed or delayed
  pg_dump locks the tables
  with --redis cluster: the slot of a shard moves to the other node, a few keys at a time
  with --redis sentinel: the master is killed while its replica lacks the last writes; the replica
  becomes the master, and the old master returns as a replica

Example: cargo xtask chaos --minutes 30 --seed 7 --redis cluster
";

/// The options of a run.
#[derive(Debug, PartialEq)]
pub struct Options {
    pub minutes: f64,
    pub seed: u64,
    pub workers: usize,
    /// Maximum number of attempts of each job.
    pub attempts: u32,
    pub faults: Faults,
    pub redis: Setup,
}

pub fn parse(arguments: &[String]) -> anyhow::Result<Options> {
    let mut options = Options {
        minutes: 1.0,
        seed: 1,
        workers: 3,
        // Workers die so often here that jobs would use up the default number of attempts.
        attempts: 1000,
        faults: Faults::All,
        redis: Setup::Server,
    };
    let mut arguments = arguments.iter();
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        let number = || format!("{name} needs a number, not {value}");
        match name.as_str() {
            "--minutes" => options.minutes = value.parse().with_context(number)?,
            "--seed" => options.seed = value.parse().with_context(number)?,
            "--workers" => options.workers = value.parse().with_context(number)?,
            "--attempts" => options.attempts = value.parse().with_context(number)?,
            "--faults" => options.faults = value.parse()?,
            "--redis" => options.redis = value.parse()?,
            _ => bail!("unknown option {name}; cargo xtask chaos --help lists the options"),
        }
    }
    let minutes = options.minutes;
    ensure!(minutes > 0.0 && minutes < 10_000.0, "--minutes must be above 0 and below 10000");
    ensure!((1..=64).contains(&options.workers), "--workers must be from 1 to 64");
    ensure!(options.attempts > 0, "--attempts must be above 0");
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let words = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        let text =
            "--minutes 0.5 --seed 7 --workers 1 --attempts 3 --faults servers --redis cluster";
        let expected = Options {
            minutes: 0.5,
            seed: 7,
            workers: 1,
            attempts: 3,
            faults: Faults::Servers,
            redis: Setup::Cluster,
        };
        assert_eq!(parse(&words(text)).expect("all are given"), expected);
        for text in
            ["--minutes", "--minutes x", "--speed 1", "--minutes 0", "--faults none", "--redis two"]
        {
            assert!(parse(&words(text)).is_err(), "{text}");
        }
    }
}
