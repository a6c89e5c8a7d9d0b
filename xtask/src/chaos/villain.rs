//! Does harm at seeded moments.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tritmill_servers::Signal;

use super::{Stage, fleet::LEASE};

/// Between two deeds, at most.
const PAUSE_MS: u64 = 1500;

/// Something that will be put right later.
enum Pending {
    Thaw(u32),
    StartRedis,
    StartPostgres,
    Hasten(usize),
}

/// The villain.
pub struct Villain {
    random: u64,
    next: Instant,
    pending: Vec<(Instant, Pending)>,
    counts: BTreeMap<&'static str, u32>,
}

impl Villain {
    pub fn new(seed: u64) -> Self {
        let next = Instant::now() + Duration::from_secs(1);
        Self { random: seed, next, pending: Vec::new(), counts: BTreeMap::new() }
    }

    /// SplitMix64.
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }

    fn count(&mut self, deed: &'static str) {
        *self.counts.entry(deed).or_default() += 1;
    }

    /// Does what is due.
    pub fn act(&mut self, stage: &mut Stage) -> anyhow::Result<()> {
        self.put_right(stage, Instant::now())?;
        if Instant::now() < self.next {
            return Ok(());
        }
        self.next = Instant::now() + self.ms(50, PAUSE_MS);
        let redis_down = self.pending.iter().any(|(_, what)| matches!(what, Pending::StartRedis));
        let store_down =
            self.pending.iter().any(|(_, what)| matches!(what, Pending::StartPostgres));
        match self.below(100) {
            0..40 => self.kill_worker(stage),
            40..55 => self.kill_producer(stage),
            55..70 => self.freeze_worker(stage),
            70..75 if !redis_down => {
                self.count("redis killed, back empty");
                stage.redis.kill();
                stage.redis.forget()?;
                self.later(Pending::StartRedis, 50, 2000);
            }
            75..80 if !redis_down => {
                self.count("redis killed, back with its file");
                stage.redis.kill();
                self.later(Pending::StartRedis, 50, 2000);
            }
            80..85 if !store_down => {
                self.count("postgres killed");
                stage.postgres.kill();
                self.later(Pending::StartPostgres, 50, 3000);
            }
            85..93 => {
                self.count("connections cut");
                let which = self.below(2);
                stage.proxies[usize::from(which == 1)].cut();
            }
            93..100 => {
                self.count("connections slowed");
                let (which, delay) = (usize::from(self.below(2) == 1), self.ms(20, 300));
                stage.proxies[which].delay(delay);
                self.later(Pending::Hasten(which), 200, 2000);
            }
            _ => {}
        }
        Ok(())
    }

    fn later(&mut self, what: Pending, from: u64, to: u64) {
        let at = Instant::now() + self.ms(from, to);
        self.pending.push((at, what));
    }

    fn kill_worker(&mut self, stage: &mut Stage) {
        let place = usize::try_from(self.below(stage.workers.len() as u64)).unwrap_or(0);
        if let Some(worker) = &mut stage.workers[place] {
            worker.scrape();
            worker.kill();
            self.count("workers killed");
            let owner = worker.owner.clone();
            stage.tally.killed(&owner, stage.postgres.port());
            stage.restart_at[place] = Some(Instant::now() + self.ms(0, 1500));
            stage.bury(place);
        }
    }

    fn kill_producer(&mut self, stage: &mut Stage) {
        let which = self.below(stage.producers.len().max(1) as u64);
        let place = usize::try_from(which).unwrap_or(0);
        if let Some(producer) = stage.producers.get_mut(place) {
            producer.kill();
            self.count("producers killed");
        }
    }

    /// Beyond its lease: it wakes up as a zombie.
    fn freeze_worker(&mut self, stage: &mut Stage) {
        let place = usize::try_from(self.below(stage.workers.len() as u64)).unwrap_or(0);
        if let Some(worker) = &stage.workers[place]
            && Signal::Stop.send(worker.child.id()).is_ok()
        {
            self.count("workers frozen");
            let lease = u64::try_from(LEASE.as_millis()).unwrap_or(u64::MAX);
            self.later(Pending::Thaw(worker.child.id()), lease, lease * 3);
        }
    }

    fn put_right(&mut self, stage: &mut Stage, now: Instant) -> anyhow::Result<()> {
        let (due, pending) =
            std::mem::take(&mut self.pending).into_iter().partition(|(at, _)| *at <= now);
        self.pending = pending;
        for (_, what) in due {
            match what {
                // It may have been killed meanwhile.
                Pending::Thaw(pid) => drop(Signal::Continue.send(pid)),
                Pending::StartRedis => stage.redis.restart()?,
                Pending::StartPostgres => stage.postgres.restart()?,
                Pending::Hasten(which) => stage.proxies[which].delay(Duration::ZERO),
            }
        }
        Ok(())
    }

    /// Puts everything right at once.
    pub fn relent(&mut self, stage: &mut Stage) -> anyhow::Result<()> {
        self.put_right(stage, Instant::now() + Duration::from_secs(3600))
    }

    /// What it did, for the record.
    pub fn deeds(&self) -> String {
        let deeds: Vec<String> =
            self.counts.iter().map(|(deed, count)| format!("{deed}: {count}")).collect();
        deeds.join(", ")
    }
}
