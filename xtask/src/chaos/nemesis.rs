//! The nemesis injects faults at seeded moments and repairs them later.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
    str::FromStr,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tritmill_servers::{Random, Signal};

use super::{
    Cluster, TICK,
    fleet::{LEASE, Process},
    redis::Setup,
};

/// Longest pause between two faults.
const PAUSE_MS: u64 = 1500;
const LEASE_MS: u64 = LEASE.as_millis() as u64;
/// Longest time for what is left of a move of a slot when the faults end.
const MOVE_LIMIT: Duration = Duration::from_secs(60);

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
    /// Starts the node of Redis with this index.
    StartRedis(usize),
    /// Starts Postgres.
    StartPostgres,
    /// Moves the next keys of the slot that moves.
    MoveKeys,
    /// Removes the delay of the proxy with this index.
    RemoveDelay(usize),
    /// Lets the data of the proxy with this index pass.
    EndSilence(usize),
}

pub struct Nemesis {
    faults: Faults,
    redis: Setup,
    random: Random,
    next_fault_at: Instant,
    repairs: Vec<(Instant, Repair)>,
    /// The `pg_dump` that was started last.
    dump: Option<Process>,
    /// Faults by kind.
    counts: BTreeMap<&'static str, u32>,
}

impl Nemesis {
    pub fn new(seed: u64, faults: Faults, redis: Setup) -> Self {
        let next_fault_at = Instant::now() + Duration::from_secs(1);
        let random = Random::new(seed);
        let counts = BTreeMap::new();
        Self { faults, redis, random, next_fault_at, repairs: Vec::new(), dump: None, counts }
    }

    /// Returns the index of a random node of Redis.
    fn node(&mut self, cluster: &Cluster) -> usize {
        match cluster.redis.nodes().len() {
            // One node takes no random number.
            1 => 0,
            count => self.random.below(count),
        }
    }

    /// Returns the index of a random proxy.
    fn proxy(&mut self, cluster: &Cluster) -> usize {
        self.random.below(cluster.proxies.len())
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
        let redis_down = self.repairs.iter().any(|(_, it)| matches!(it, Repair::StartRedis(_)));
        let store_down = self.repairs.iter().any(|(_, it)| matches!(it, Repair::StartPostgres));
        let kinds = if self.redis == Setup::Server { 100 } else { 112 };
        match self.random.below(kinds) {
            0..32 if self.faults == Faults::All => self.kill_worker(cluster),
            32..44 if self.faults == Faults::All => self.freeze_worker(cluster),
            44..52 => self.kill_producer(cluster),
            52..56 => self.kill_admin(cluster),
            56..60 if !redis_down => {
                self.count("redis killed and emptied");
                let node = self.node(cluster);
                cluster.redis.kill_and_empty(node)?;
                self.repair_after(Repair::StartRedis(node), 50, 2000);
            }
            60..64 if !redis_down => {
                self.count("redis killed");
                let node = self.node(cluster);
                cluster.redis.kill(node);
                self.repair_after(Repair::StartRedis(node), 50, 2000);
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
                for node in 0..cluster.redis.nodes().len() {
                    cluster.redis.kill(node);
                    self.repair_after(Repair::StartRedis(node), 50, LEASE_MS * 2);
                }
                cluster.postgres.kill();
                self.repair_after(Repair::StartPostgres, 50, LEASE_MS * 2);
            }
            75..80 => {
                self.count("a server hangs with its connections open");
                let proxy = self.proxy(cluster);
                cluster.proxies[proxy].set_silent(true);
                self.repair_after(Repair::EndSilence(proxy), 500, LEASE_MS * 4);
            }
            80..83 if !store_down => self.dump(cluster)?,
            83..92 => {
                self.count("connections closed");
                cluster.proxies[self.proxy(cluster)].close_connections();
            }
            92..100 => {
                self.count("connections delayed");
                let (proxy, delay) = (self.proxy(cluster), self.time_between(20, 300));
                cluster.proxies[proxy].set_delay(delay);
                self.repair_after(Repair::RemoveDelay(proxy), 200, 2000);
            }
            100..112 if !redis_down => match self.redis {
                Setup::Server => {}
                Setup::Cluster => self.move_slot(cluster)?,
                Setup::Sentinel => self.kill_master(cluster)?,
            },
            _ => {}
        }
        Ok(())
    }

    /// Starts to move the slot of a queue to the other node.
    fn move_slot(&mut self, cluster: &mut Cluster) -> anyhow::Result<()> {
        if cluster.redis.open_slot(|count| self.random.below(count))? {
            self.count("slot moved to the other node");
            self.repair_after(Repair::MoveKeys, 50, 300);
        }
        Ok(())
    }

    /// Kills the master of a replica that lacks the last writes, for long enough that the replica
    /// becomes the master.
    fn kill_master(&mut self, cluster: &mut Cluster) -> anyhow::Result<()> {
        let moment = self.time_between(50, 500);
        if let Some(master) = cluster.redis.kill_master(moment)? {
            self.count("master killed before its replica had the last writes");
            self.repair_after(Repair::StartRedis(master), 3000, 6000);
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

    fn kill_admin(&mut self, cluster: &mut Cluster) {
        let after = self.time_between(0, 2000);
        if cluster.changed.kill_admin(after) {
            self.count("admins killed");
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
                Repair::StartRedis(node) => cluster.redis.restart(node)?,
                Repair::StartPostgres => cluster.postgres.restart()?,
                Repair::EndSilence(proxy) => cluster.proxies[proxy].set_silent(false),
                Repair::RemoveDelay(proxy) => cluster.proxies[proxy].set_delay(Duration::ZERO),
                Repair::MoveKeys => {
                    if cluster.redis.move_keys()? {
                        self.repair_after(Repair::MoveKeys, 20, 200);
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes all outstanding repairs now.
    pub fn repair_all(&mut self, cluster: &mut Cluster) -> anyhow::Result<()> {
        self.repair_due(cluster, Instant::now() + Duration::from_secs(3600))?;
        let started = Instant::now();
        // What is left is a slot that moves.
        while !self.repairs.is_empty() {
            ensure!(started.elapsed() < MOVE_LIMIT, "a slot has not moved in {MOVE_LIMIT:?}");
            self.repair_due(cluster, Instant::now())?;
            sleep(TICK);
        }
        Ok(())
    }

    /// Returns the number of faults of each kind.
    pub fn summary(&self) -> String {
        let counts = self.counts.iter().map(|(fault, count)| format!("{fault}: {count}"));
        counts.collect::<Vec<_>>().join(", ")
    }
}
