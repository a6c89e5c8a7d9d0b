//! Checks a submission against the limits of a queue, over all its shards.

use std::time::Duration;

use redis::{FromRedisValue as _, Value};

use super::{Inner, feed::refusal, keys, scripts, unavailable};
use crate::{
    dispatch::{Demand, DispatchError, Limit, Line, LinePart, Quotas},
    job::Priority,
};

/// Bounds of the time after which to try again.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Time after which to try again while the rate is unknown.
const RETRY_DEFAULT: Duration = Duration::from_secs(1);

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
    line: Line,
}

/// A tenant of a demand: the tokens that it asks for, and its quota.
struct Asking {
    demand: u64,
    quota: Option<u64>,
}

impl Usage {
    /// Adds a shard's counts; `None` if they are not as the script returns them.
    fn add(&mut self, counts: &[Value], asked: &[Asking]) -> Option<()> {
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
        let mut line = line(tokens, &parts, asked);
        let lowest = line.of(Priority::Low);
        lowest.entries += missing.unsigned_abs();
        lowest.tokens += missing_tokens.unsigned_abs();
        lowest.before += missing_tokens.unsigned_abs();
        self.line.merge(&line);
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
        asking: &[Asking],
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
        asking.iter().zip(&self.tenants).find_map(|(one, waiting)| {
            let quota = one.quota?;
            let beyond = waiting.saturating_add(signed(one.demand)).saturating_sub(signed(quota));
            let is_beyond = beyond > 0 && (entries > 1 || *waiting > 0);
            is_beyond.then(|| (Limit::Tenant(quota), self.wait_for(beyond as f64)))
        })
    }
}

/// Returns what waits in a shard with this many tokens, from `entries, tokens, active tenants, tokens of the
/// tenant that asks` of each priority.
///
/// Programs of 0.1 count tokens without their priority, when they add them as well as when they take them. So a
/// priority has the tokens that are counted for it, and its entries' share of those that are counted for none; if
/// more tokens are counted for priorities than wait, each of these has less in proportion.
fn line(tokens: i64, parts: &[[u64; OF_PRIORITY]; 3], asked: &[Asking]) -> Line {
    let tokens = tokens.max(0) as f64;
    let counted = parts.iter().map(|[_, tokens, ..]| tokens).sum::<u64>() as f64;
    let entries: u64 = parts.iter().map(|[entries, ..]| entries).sum();
    let scale = if counted > tokens { tokens / counted } else { 1.0 };
    let rest_of_entry = (tokens - counted).max(0.0) / entries.max(1) as f64;
    let part = |[own_entries, own_tokens, tenants, of_tenant]: [u64; OF_PRIORITY]| {
        let tokens = own_tokens as f64 * scale + own_entries as f64 * rest_of_entry;
        let before = match asked {
            // Its turn comes when each of the others was served as much as it, or one entry.
            [one] => {
                let mean = tokens / own_entries.max(1) as f64;
                tokens.min(tenants as f64 * (of_tenant as f64 + mean.max(one.demand as f64)))
            }
            _ => tokens,
        };
        LinePart { entries: own_entries, tokens: tokens as u64, before: before as u64 }
    };
    Line { parts: parts.map(part) }
}

impl Inner {
    /// Checks the limits of a queue without adding anything; returns what waits.
    pub(super) async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<Line, DispatchError> {
        let shards = u64::from(self.shards);
        let own = self.limit.tokens.saturating_mul(shards);
        let tokens_max = demand.part_of(quotas.tokens.map_or(own, |quota| quota.min(own)));
        let entries_max =
            demand.entries_of(self.limit.entries.saturating_mul(usize::from(self.shards)));
        let asking = demand.tokens.iter().map(|(tenant, tokens)| {
            let quota = quotas.of(tenant).map(|quota| demand.part_of(quota));
            Asking { demand: *tokens, quota }
        });
        let asking: Vec<Asking> = asking.collect();
        let tenants: Vec<String> =
            demand.tokens.keys().map(|tenant| keys::escape(&tenant.0)).collect();
        let mut usage = Usage { tenants: vec![0; tenants.len()], ..Usage::default() };
        let queue = &demand.queue;
        for prefix in self.prefixes(queue) {
            let run = self.connections.run_again(&scripts::ADMIT, &prefix, &tenants);
            let counts: Vec<Value> = run.await.map_err(|error| refusal(queue, error))?;
            usage.add(&counts, &asking).ok_or_else(|| {
                unavailable((redis::ErrorKind::UnexpectedReturnType, "not a queue's counts").into())
            })?;
        }
        match usage.excess(demand, entries_max, tokens_max, &asking) {
            None => Ok(usage.line),
            Some((limit, retry_after)) => {
                Err(DispatchError::Busy { queue: queue.clone(), limit, retry_after })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{QueueName, Tenant};

    #[test]
    fn tokens_without_a_priority_are_shared_out() {
        let tokens = |tokens, parts| line(tokens, &parts, &[]).parts.map(|part| part.tokens);
        assert_eq!(tokens(60, [[1, 10, 1, 0], [2, 20, 1, 0], [3, 30, 1, 0]]), [10, 20, 30]);
        // Counted by programs of both releases, and of the older one alone.
        assert_eq!(tokens(120, [[1, 10, 1, 0], [2, 20, 1, 0], [3, 30, 1, 0]]), [20, 40, 60]);
        assert_eq!(tokens(60, [[1, 0, 1, 0], [2, 0, 1, 0], [3, 0, 1, 0]]), [10, 20, 30]);
        assert_eq!(tokens(-5, [[0; 4]; 3]), [0; 3]);
        assert_eq!(tokens(30, [[1, 10, 1, 0], [2, 20, 1, 0], [3, 30, 1, 0]]), [5, 10, 15]);
        // Added by programs of the older release, and none of another priority; of a negative count nothing is left.
        let line_of_old = [[10, 500, 1, 0], [50_000, 0, 1, 0], [0; 4]];
        assert_eq!(tokens(500_600, line_of_old), [600, 500_000, 0]);
    }

    #[test]
    fn a_tenant_waits_for_as_much_of_each_other_tenant() {
        let before = |of_tenant, demand| {
            let parts = [[0; 4], [100, 1000, 5, of_tenant], [0; 4]];
            line(1000, &parts, &[Asking { demand, quota: None }]).parts[1].before
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
            let asking = [Asking { demand: tokens, quota: Some(quota) }];
            usage.excess(&demand, entries_max as usize, tokens_max, &asking)
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
        let asking = [Asking { demand: 4000, quota: Some(2500) }];
        assert_eq!(first.excess(&demand, 100, MANY, &asking), None, "its only entry");
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
