//! The nemesis injects faults at seeded moments and repairs them later.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
    str::FromStr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Random, Signal};

use super::{
    Cluster,
    fleet::{LEASE, Process},
};

/// Longest pause between two faults.
const PAUSE_MS: u64 = 1500;
const LEASE_MS: u64 = LEASE.as_millis() as u64;

/// Which processes a nemesis disturbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    /// Workers, producers, servers and connections.
    All,
    /// Producers, servers and connections: whatever happens, the workers do their jobs.
    Servers,
}

impl Faults {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Servers => "servers",
        }
    }
}

impl FromStr for Faults {
    type Err = anyhow::Error;

    fn from_str(word: &str) -> anyhow::Result<Self> {
        match word {
            "all" => Ok(Self::All),
            "servers" => Ok(Self::Servers),
            _ => bail!("--faults is all or servers, not {word}"),
        }
    }
}

/// What ends a fault.
enum Repair {
    /// Lets a frozen process continue.
    Thaw(u32),
    StartRedis,
    StartPostgres,
    /// Removes the delay of the proxy with this index.
    RemoveDelay(usize),
    /// Lets the data of the proxy with this index pass.
    EndSilence(usize),
}

pub struct Nemesis {
    faults: Faults,
    random: Random,
    next_fault_at: Instant,
    repairs: Vec<(Instant, Repair)>,
    /// The `pg_dump` that was started last.
    dump: Option<Process>,
    /// Faults by kind.
    counts: BTreeMap<&'static str, u32>,
}

impl Nemesis {
    pub fn new(seed: u64, faults: Faults) -> Self {
        let next_fault_at = Instant::now() + Duration::from_secs(1);
        let random = Random::new(seed);
        let counts = BTreeMap::new();
        Self { faults, random, next_fault_at, repairs: Vec::new(), dump: None, counts }
    }

    /// Returns a random time between two bounds in milliseconds.
    fn time_between(&mut self, from_ms: u64, to_ms: u64) -> Duration {
        Duration::from_millis(from_ms + self.random.below((to_ms - from_ms) as usize) as u64)
    }

    fn count(&mut self, fault: &'static str) {
        *self.counts.entry(fault).or_default() += 1;
    }

    /// Makes the repairs that are due, and injects a fault if one is due.
    pub fn act(&mut self, cluster: &mut Cluster) -> anyhow::Result<()> {
        self.repair_due(cluster, Instant::now())?;
        if Instant::now() < self.next_fault_at {
            return Ok(());
        }
        self.next_fault_at = Instant::now() + self.time_between(50, PAUSE_MS);
        let redis_down = self.repairs.iter().any(|(_, it)| matches!(it, Repair::StartRedis));
        let store_down = self.repairs.iter().any(|(_, it)| matches!(it, Repair::StartPostgres));
        match self.random.below(100) {
            0..32 if self.faults == Faults::All => self.kill_worker(cluster),
            32..44 if self.faults == Faults::All => self.freeze_worker(cluster),
            44..56 => self.kill_producer(cluster),
            56..60 if !redis_down => {
                self.count("redis killed and emptied");
                cluster.redis.kill();
                cluster.redis.delete_data()?;
                self.repair_after(Repair::StartRedis, 50, 2000);
            }
            60..64 if !redis_down => {
                self.count("redis killed");
                cluster.redis.kill();
                self.repair_after(Repair::StartRedis, 50, 2000);
            }
            64..69 if !store_down => {
                self.count("postgres killed");
                cluster.postgres.kill();
                self.repair_after(Repair::StartPostgres, 50, 3000);
            }
            69..72 if !store_down => {
                self.count("postgres away for longer than a lease");
                cluster.postgres.kill();
                self.repair_after(Repair::StartPostgres, LEASE_MS, LEASE_MS * 4);
            }
            72..75 if !store_down && !redis_down => {
                self.count("both servers killed");
                cluster.redis.kill();
                cluster.postgres.kill();
                self.repair_after(Repair::StartRedis, 50, LEASE_MS * 2);
                self.repair_after(Repair::StartPostgres, 50, LEASE_MS * 2);
            }
            75..80 => {
                self.count("a server hangs with its connections open");
                let proxy = self.random.below(2);
                cluster.proxies[proxy].set_silent(true);
                self.repair_after(Repair::EndSilence(proxy), 500, LEASE_MS * 4);
            }
            80..83 if !store_down => self.dump(cluster)?,
            83..92 => {
                self.count("connections closed");
                cluster.proxies[self.random.below(2)].close_connections();
            }
            92..100 => {
                self.count("connections delayed");
                let (proxy, delay) = (self.random.below(2), self.time_between(20, 300));
                cluster.proxies[proxy].set_delay(delay);
                self.repair_after(Repair::RemoveDelay(proxy), 200, 2000);
            }
            _ => {}
        }
        Ok(())
    }

    /// Starts a `pg_dump`, which locks every table against changes of its schema, unless one is running.
    fn dump(&mut self, cluster: &Cluster) -> anyhow::Result<()> {
        if let Some(dump) = &mut self.dump {
            let Some(status) = dump.0.try_wait()? else { return Ok(()) };
            // 1: Postgres was killed meanwhile.
            ensure!(matches!(status.code(), Some(0 | 1)), "pg_dump ended with {status}");
        }
        let port = cluster.postgres.port().to_string();
        let mut command = Command::new("pg_dump");
        command.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &port, "-Fc", "-f", "/dev/null"]);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        self.dump = Some(Process(command.spawn().context("cannot run pg_dump")?));
        self.count("pg_dump");
        Ok(())
    }

    fn repair_after(&mut self, repair: Repair, from_ms: u64, to_ms: u64) {
        let at = Instant::now() + self.time_between(from_ms, to_ms);
        self.repairs.push((at, repair));
    }

    fn kill_worker(&mut self, cluster: &mut Cluster) {
        let index = self.random.below(cluster.workers.len());
        if let Some(worker) = &mut cluster.workers[index] {
            worker.scrape();
            worker.process.kill();
            self.count("workers killed");
            let owner = worker.owner.clone();
            cluster.statistics.measure_recovery(&owner, cluster.postgres.port());
            cluster.restart_at[index] = Some(Instant::now() + self.time_between(0, 1500));
            cluster.remove_worker(index);
        }
    }

    fn kill_producer(&mut self, cluster: &mut Cluster) {
        let index = self.random.below(cluster.producers.len());
        if let Some(producer) = cluster.producers.get_mut(index) {
            producer.process.kill();
            self.count("producers killed");
        }
    }

    /// Freezes a worker for longer than its lease: it continues after its claims are lost.
    fn freeze_worker(&mut self, cluster: &mut Cluster) {
        let index = self.random.below(cluster.workers.len());
        if let Some(worker) = &cluster.workers[index]
            && Signal::Stop.send(worker.process.0.id()).is_ok()
        {
            self.count("workers frozen");
            self.repair_after(Repair::Thaw(worker.process.0.id()), LEASE_MS, LEASE_MS * 3);
        }
    }

    fn repair_due(&mut self, cluster: &mut Cluster, now: Instant) -> anyhow::Result<()> {
        let (due, later) =
            std::mem::take(&mut self.repairs).into_iter().partition(|(at, _)| *at <= now);
        self.repairs = later;
        for (_, repair) in due {
            match repair {
                // The process may have been killed in the meantime.
                Repair::Thaw(pid) => drop(Signal::Continue.send(pid)),
                Repair::StartRedis => cluster.redis.restart()?,
                Repair::StartPostgres => cluster.postgres.restart()?,
                Repair::EndSilence(proxy) => cluster.proxies[proxy].set_silent(false),
                Repair::RemoveDelay(proxy) => cluster.proxies[proxy].set_delay(Duration::ZERO),
            }
        }
        Ok(())
    }

    /// Makes all outstanding repairs now.
    pub fn repair_all(&mut self, cluster: &mut Cluster) -> anyhow::Result<()> {
        self.repair_due(cluster, Instant::now() + Duration::from_secs(3600))
    }

    /// Returns the number of faults of each kind.
    pub fn summary(&self) -> String {
        let counts = self.counts.iter().map(|(fault, count)| format!("{fault}: {count}"));
        counts.collect::<Vec<_>>().join(", ")
    }
}
