//! What waits in a queue, over all its shards, and whether a submission fits its limits.

use std::time::Duration;

use redis::{FromRedisValue as _, Value};

use super::{
    inner::{Inner, refusal, unavailable},
    keys, scripts,
};
use crate::{
    dispatch::{
        Backlog, BacklogByPriority, Demand, DispatchError, Limit, Missing, PriorityBacklog, Quotas,
        backlog::Turns,
    },
    job::{Priority, QueueName},
};

/// Bounds of the time after which to try again.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Time after which to try again while the rate is unknown.
const RETRY_DEFAULT: Duration = Duration::from_secs(1);

/// Tenants of each priority that are searched for the oldest entry.
const TENANTS_SEARCHED: usize = 128;

/// Values of the script's answer before those of priorities, and for each priority.
const OF_QUEUE: usize = 5;
const OF_PRIORITY: usize = 4;

/// What waits in a queue.
#[derive(Debug, Default)]
struct Usage {
    entries: i64,
    tokens: i64,
    /// Tokens acknowledged per millisecond; 0 if unknown.
    rate: f64,
    /// Tokens of each of the demand's tenants.
    tenants: Vec<i64>,
    backlog: BacklogByPriority,
}

/// A tenant of a demand: the tokens that it asks for, and its quota.
struct TenantDemand {
    tokens: u64,
    quota: Option<u64>,
}

impl Usage {
    /// Adds a shard's counts; `None` if they are not as the script returns them.
    fn add(&mut self, counts: &[Value], demands: &[TenantDemand]) -> Option<()> {
        let number = |at: usize| i64::from_redis_value_ref(counts.get(at)?).ok();
        let [entries, tokens, missing, missing_tokens] =
            [number(0)?, number(1)?, number(3)?, number(4)?];
        self.entries += entries + missing;
        self.tokens += tokens + missing_tokens;
        self.rate += f64::from_redis_value_ref(counts.get(2)?).ok()?.max(0.0);
        let mut parts = [[0; OF_PRIORITY]; Priority::ALL.len()];
        for (priority, part) in parts.iter_mut().enumerate() {
            for (at, value) in part.iter_mut().enumerate() {
                *value = number(OF_QUEUE + OF_PRIORITY * priority + at)?.max(0).unsigned_abs();
            }
        }
        let mut backlog = backlog_by_priority(&parts, demands);
        let lowest = backlog.part_mut(Priority::Low);
        lowest.entries += missing.unsigned_abs();
        lowest.tokens += missing_tokens.unsigned_abs();
        lowest.before += missing_tokens.unsigned_abs();
        self.backlog.merge(&backlog);
        let of_tenants = OF_QUEUE + OF_PRIORITY * parts.len();
        for (at, sum) in self.tenants.iter_mut().enumerate() {
            *sum += number(of_tenants + at)?;
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
        demands: &[TenantDemand],
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
        demands.iter().zip(&self.tenants).find_map(|(one, waiting)| {
            let quota = one.quota?;
            let beyond = waiting.saturating_add(signed(one.tokens)).saturating_sub(signed(quota));
            let is_beyond = beyond > 0 && (entries > 1 || *waiting > 0);
            is_beyond.then(|| (Limit::Tenant(quota), self.wait_for(beyond as f64)))
        })
    }
}

/// Returns what waits in a shard, from `entries, tokens, active tenants, tokens of the tenant that asks` of each priority.
fn backlog_by_priority(
    parts: &[[u64; OF_PRIORITY]; 3],
    demands: &[TenantDemand],
) -> BacklogByPriority {
    let part = |[entries, tokens, tenants, waiting]: [u64; OF_PRIORITY]| {
        let turns = match demands {
            [one] => Some(Turns { tenants, waiting, asked: one.tokens }),
            _ => None,
        };
        PriorityBacklog::of(entries, tokens, turns)
    };
    BacklogByPriority { parts: parts.map(part) }
}

impl Inner {
    /// Checks the limits of a queue without adding anything; returns what waits.
    pub(super) async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<BacklogByPriority, DispatchError> {
        let shards = u64::from(self.shards);
        let own = self.limit.tokens.saturating_mul(shards);
        let tokens_max = demand.part_of(quotas.tokens.map_or(own, |quota| quota.min(own)));
        let entries_max =
            demand.entries_of(self.limit.entries.saturating_mul(usize::from(self.shards)));
        let demands = demand.tokens.iter().map(|(tenant, tokens)| {
            let quota = quotas.of_tenant(tenant).map(|quota| demand.part_of(quota));
            TenantDemand { tokens: *tokens, quota }
        });
        let demands: Vec<TenantDemand> = demands.collect();
        let tenants: Vec<String> =
            demand.tokens.keys().map(|tenant| keys::escape(&tenant.0)).collect();
        let mut usage = Usage { tenants: vec![0; tenants.len()], ..Usage::default() };
        let queue = &demand.queue;
        for prefix in self.prefixes(queue) {
            let run = self.connections.run_again(&scripts::ADMIT, &prefix, &tenants);
            let counts: Vec<Value> = run.await.map_err(|error| refusal(queue, error))?;
            usage.add(&counts, &demands).ok_or_else(|| {
                unavailable((redis::ErrorKind::UnexpectedReturnType, "not a queue's counts").into())
            })?;
        }
        match usage.excess(demand, entries_max, tokens_max, &demands) {
            None => Ok(usage.backlog),
            Some((limit, retry_after)) => {
                Err(DispatchError::Busy { queue: queue.clone(), limit, retry_after })
            }
        }
    }

    pub(super) async fn missing(
        &self,
        queue: &QueueName,
    ) -> Result<Option<Missing>, DispatchError> {
        let mut sum = Missing::default();
        for prefix in self.prefixes(queue) {
            let none = &[] as &[&str];
            let run = self.connections.run_again(&scripts::MISSING, &prefix, none);
            let found: Vec<u64> = run.await.map_err(unavailable)?;
            let [entries, tokens, refilling] = found[..] else { return Ok(None) };
            sum.entries += entries;
            sum.tokens += tokens;
            sum.refilling |= refilling == 1;
        }
        Ok(Some(sum))
    }

    pub(super) async fn set_missing(
        &self,
        queue: &QueueName,
        missing: Missing,
    ) -> Result<(), DispatchError> {
        // Shard 0 has the count of all.
        let (mut entries, mut tokens) = (missing.entries, missing.tokens);
        for prefix in self.prefixes(queue) {
            let values = [entries, tokens, u64::from(missing.refilling)];
            let set: Result<u64, _> =
                self.connections.run_again(&scripts::SET_MISSING, &prefix, &values).await;
            set.map_err(|error| refusal(queue, error))?;
            (entries, tokens) = (0, 0);
        }
        Ok(())
    }

    pub(super) async fn backlog(&self, queue: &QueueName) -> Result<Backlog, DispatchError> {
        let (mut sum, tenants) = (Backlog::default(), [TENANTS_SEARCHED.to_string()]);
        for prefix in self.prefixes(queue) {
            let run = self.connections.run_again(&scripts::BACKLOG, &prefix, &tenants);
            let (entries, tokens, oldest, rate, delayed): (usize, u64, i64, f64, usize) =
                run.await.map_err(unavailable)?;
            sum.entries += entries;
            sum.tokens += tokens;
            sum.oldest_ms = sum.oldest_ms.max(u64::try_from(oldest).ok());
            sum.delayed += delayed;
            if rate >= 0.0 {
                sum.drain_rate = Some(sum.drain_rate.unwrap_or(0.0) + rate);
            }
        }
        Ok(sum)
    }

    pub(super) async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        let mut sum = 0;
        for prefix in self.prefixes(queue) {
            let mut command = redis::cmd("HGET");
            command.arg(format!("{prefix}:meta")).arg("entries");
            let waiting: Option<i64> =
                self.connections.query_again(&command).await.map_err(unavailable)?;
            sum += usize::try_from(waiting.unwrap_or(0)).unwrap_or(0);
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Tenant;

    #[test]
    fn a_tenant_waits_for_as_much_of_each_other_tenant() {
        let before = |of_tenant, tokens| {
            let parts = [[0; 4], [100, 1000, 5, of_tenant], [0; 4]];
            backlog_by_priority(&parts, &[TenantDemand { tokens, quota: None }]).parts[1].before
        };
        assert_eq!(before(0, 20), 100);
        assert_eq!(before(0, 1), 50, "one entry of each");
        assert_eq!(before(80, 20), 500);
        assert_eq!(before(960, 20), 1000);
    }

    #[test]
    fn a_wait_is_as_long_as_the_excess_takes_to_drain() {
        let wait = |rate, tokens| Usage { rate, ..Usage::default() }.wait_for(tokens);
        assert_eq!(wait(2.0, 6000.0), Duration::from_secs(3));
        assert_eq!((wait(2.0, 1.0), wait(1e-9, 6000.0)), (RETRY_MIN, RETRY_MAX));
        assert_eq!(wait(0.0, 6000.0), RETRY_DEFAULT, "unknown");
    }

    #[test]
    fn demands_wait_for_what_exceeds_each_limit() {
        let usage =
            Usage { entries: 90, tokens: 7000, rate: 1.0, tenants: vec![500], ..Usage::default() };
        let queue = QueueName { model: "m".into(), format: "f".into() };
        let excess = |entries, tokens, [entries_max, tokens_max, quota]: [u64; 3]| {
            let (queue, by_tenant) = (queue.clone(), [(Tenant::default(), tokens)].into());
            let demand = Demand { queue, entries, tokens: by_tenant, percent: 100 };
            let demands = [TenantDemand { tokens, quota: Some(quota) }];
            usage.excess(&demand, entries_max as usize, tokens_max, &demands)
        };
        const MANY: u64 = 1 << 40;
        let after = |seconds| Duration::from_secs(seconds);
        assert_eq!(excess(40, 4000, [130, 11_000, 4500]), None, "all are filled");
        // Three quarters of its entries.
        let entries = excess(40, 4000, [100, MANY, MANY]);
        assert_eq!(entries, Some((Limit::Entries(100), after(3))));
        assert_eq!(excess(40, 4000, [80, MANY, MANY]), Some((Limit::Entries(80), after(4))));
        let tokens = excess(40, 4000, [MANY, 9000, MANY]);
        assert_eq!(tokens, Some((Limit::Tokens(9000), after(2))));
        let tenant = excess(1, 4000, [MANY, MANY, 2500]);
        assert_eq!(tenant, Some((Limit::Tenant(2500), after(2))));
        let first = Usage { tenants: vec![0], ..usage };
        let demand = Demand {
            queue: queue.clone(),
            entries: 1,
            tokens: [(Tenant::default(), 4000)].into(),
            percent: 100,
        };
        let demands = [TenantDemand { tokens: 4000, quota: Some(2500) }];
        assert_eq!(first.excess(&demand, 100, MANY, &demands), None, "its only entry");
    }

    #[test]
    fn counts_of_shards_are_added() {
        let counts = |first: i64, rate| {
            let mut counts: Vec<Value> = (first..first + 19).map(Value::Int).collect();
            counts[2] = Value::Double(rate);
            counts
        };
        let mut usage = Usage { tenants: vec![0; 2], ..Usage::default() };
        usage.add(&counts(100, 1.5), &[]).expect("a shard");
        usage.add(&counts(200, 2.0), &[]).expect("a shard");
        // Those of the queue and missing ones.
        assert_eq!((usage.entries, usage.tokens), (100 + 103 + 200 + 203, 101 + 104 + 201 + 204));
        assert_eq!((usage.rate, &usage.tenants[..]), (3.5, &[117 + 217, 118 + 218][..]));
        assert!(usage.add(&counts(0, 1.0)[..18], &[]).is_none());
    }
}
