//! Checks a submission against the limits of a queue, over all its shards.

use std::time::Duration;

use redis::{FromRedisValue as _, Value};

use super::{Inner, feed::refusal, keys, scripts, unavailable};
use crate::{
    dispatch::{Demand, DispatchError, Limit, Quotas},
    job::Tenant,
};

/// Bounds of the time after which to try again.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Time after which to try again while the rate is unknown.
const RETRY_DEFAULT: Duration = Duration::from_secs(1);

/// What waits in a queue.
#[derive(Debug, Default)]
struct Usage {
    entries: i64,
    tokens: i64,
    /// Tokens acknowledged per millisecond; 0 if unknown.
    rate: f64,
    /// Tokens of each tenant asked for.
    tenants: Vec<i64>,
}

/// A tenant with a quota: its demand and its quota, in tokens.
struct Bounded<'a> {
    tenant: &'a Tenant,
    demand: u64,
    quota: u64,
}

impl Usage {
    /// Adds a shard's counts; `None` if they are not as the script returns them.
    fn add(&mut self, counts: &[Value]) -> Option<()> {
        let number = |at: usize| i64::from_redis_value_ref(counts.get(at)?).ok();
        self.entries += number(0)?;
        self.tokens += number(1)?;
        self.rate += f64::from_redis_value_ref(counts.get(2)?).ok()?.max(0.0);
        for (at, sum) in self.tenants.iter_mut().enumerate() {
            *sum += number(3 + at)?;
        }
        Some(())
    }

    /// Time until this many tokens have drained; an estimate while the rate is unknown.
    fn wait_for(&self, tokens: f64) -> Duration {
        let wait = Duration::try_from_secs_f64(tokens / self.rate / 1000.0);
        let wait = if self.rate > 0.0 { wait.unwrap_or(RETRY_MAX) } else { RETRY_DEFAULT };
        wait.clamp(RETRY_MIN, RETRY_MAX)
    }

    /// Returns the limit that a demand would exceed, and when to try again.
    fn excess(
        &self,
        demand: &Demand,
        entries_max: usize,
        tokens_max: u64,
        bounded: &[Bounded<'_>],
    ) -> Option<(Limit, Duration)> {
        let entries = i64::try_from(demand.entries).unwrap_or(i64::MAX);
        // A single entry always fits an empty queue: otherwise a large one would never be accepted.
        if entries == 0 || (entries == 1 && self.entries <= 0) {
            return None;
        }
        let signed = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let tokens = signed(demand.tokens.values().sum());
        let entries_left = signed(entries_max as u64).saturating_sub(self.entries);
        let tokens_left = signed(tokens_max).saturating_sub(self.tokens);
        if entries > entries_left {
            // Each excess entry is assumed to cost as much as the mean of these.
            let share = ((entries - entries_left) as f64 / entries as f64).min(1.0);
            return Some((Limit::Entries(entries_max), self.wait_for(tokens as f64 * share)));
        }
        if tokens > tokens_left {
            let beyond = tokens - tokens_left;
            return Some((Limit::Tokens(tokens_max), self.wait_for(beyond as f64)));
        }
        bounded.iter().zip(&self.tenants).find_map(|(one, waiting)| {
            let beyond =
                waiting.saturating_add(signed(one.demand)).saturating_sub(signed(one.quota));
            let is_beyond = beyond > 0 && (entries > 1 || *waiting > 0);
            is_beyond.then(|| (Limit::Tenant(one.quota), self.wait_for(beyond as f64)))
        })
    }
}

impl Inner {
    /// Checks the limits of a queue without adding anything.
    pub(super) async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<(), DispatchError> {
        let shards = u64::from(self.shards);
        let own = self.limit.tokens.saturating_mul(shards);
        let tokens_max = demand.part_of(quotas.tokens.map_or(own, |quota| quota.min(own)));
        let entries_max =
            demand.entries_of(self.limit.entries.saturating_mul(usize::from(self.shards)));
        let bounded = demand.tokens.iter().filter_map(|(tenant, tokens)| {
            let quota = demand.part_of(quotas.of(tenant)?);
            Some(Bounded { tenant, demand: *tokens, quota })
        });
        let bounded: Vec<Bounded<'_>> = bounded.collect();
        let tenants: Vec<String> = bounded.iter().map(|one| keys::escape(&one.tenant.0)).collect();
        let mut usage = Usage { tenants: vec![0; tenants.len()], ..Usage::default() };
        let queue = &demand.queue;
        for prefix in self.prefixes(queue) {
            let run = self.connections.run_again(&scripts::ADMIT, &prefix, &tenants);
            let counts: Vec<Value> = run.await.map_err(|error| refusal(queue, error))?;
            usage.add(&counts).ok_or_else(|| {
                unavailable((redis::ErrorKind::UnexpectedReturnType, "not a queue's counts").into())
            })?;
        }
        match usage.excess(demand, entries_max, tokens_max, &bounded) {
            None => Ok(()),
            Some((limit, retry_after)) => {
                Err(DispatchError::Busy { queue: queue.clone(), limit, retry_after })
            }
        }
    }
}
