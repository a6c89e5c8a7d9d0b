//! Acknowledges, renews and hands back deliveries, and removes consumers that are gone.

use std::time::{Duration, Instant};

use redis::RedisResult;

use super::{inner::Inner, keys, scripts};
use crate::{dispatch::Delivery, job::QueueName};

/// Maximum number of deliveries that one script handles.
const BATCH: usize = 512;
/// Least time between two searches for dead consumers of a queue.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// Deliveries of one queue as a script's arguments `id place entry deliveries`, with their positions.
struct Group<'a> {
    prefix: &'a str,
    arguments: Vec<String>,
    /// Positions in the caller's list.
    positions: Vec<usize>,
}

/// Groups deliveries by queue; also returns the positions of deliveries of other dispatchers. The
/// arguments begin with the consumer.
fn group<'a>(consumer: &str, deliveries: &'a [Delivery]) -> (Vec<Group<'a>>, Vec<usize>) {
    let (mut groups, mut others): (Vec<Group<'a>>, _) = (Vec::new(), Vec::new());
    for (position, delivery) in deliveries.iter().enumerate() {
        let parts = keys::split(&delivery.receipt)
            .and_then(|(prefix, rest)| rest.rsplit_once(':').map(|parts| (prefix, parts)));
        let Some((prefix, (place, entry))) = parts else {
            others.push(position);
            continue;
        };
        let index = groups.iter().position(|group| group.prefix == prefix).unwrap_or_else(|| {
            let arguments = vec![keys::escape(consumer)];
            groups.push(Group { prefix, arguments, positions: Vec::new() });
            groups.len() - 1
        });
        let (id, deliveries) = (delivery.id.to_string(), delivery.deliveries.to_string());
        groups[index].arguments.extend([id, place.to_owned(), entry.to_owned(), deliveries]);
        groups[index].positions.push(position);
    }
    (groups, others)
}

impl Inner {
    pub(super) async fn acknowledge(
        &self,
        name: &str,
        deliveries: &[Delivery],
    ) -> RedisResult<usize> {
        let mut count = 0;
        for batch in deliveries.chunks(BATCH) {
            for group in group(name, batch).0 {
                let run = self.connections.run_again(
                    &scripts::ACKNOWLEDGE,
                    group.prefix,
                    &group.arguments,
                );
                let (mine, foreign): (usize, u64) = run.await?;
                self.count_foreign(group.prefix, foreign);
                count += mine;
            }
        }
        self.consumer(name).release(deliveries);
        let fenced = deliveries.len().saturating_sub(count) as u64;
        self.stats.lock().fenced_acknowledgements += fenced;
        if fenced > 0 {
            tracing::debug!(
                consumer = name,
                fenced,
                "acknowledgement of entries that belong to others refused"
            );
        }
        Ok(count)
    }

    pub(super) async fn hand_back(
        &self,
        name: &str,
        deliveries: &[Delivery],
    ) -> RedisResult<usize> {
        let mut count = 0;
        for batch in deliveries.chunks(BATCH) {
            for group in group(name, batch).0 {
                let script = &scripts::HAND_BACK;
                let run = self.connections.run_again(script, group.prefix, &group.arguments);
                let mine: usize = run.await?;
                self.wake(group.prefix, mine).await;
                count += mine;
            }
        }
        self.consumer(name).release(deliveries);
        Ok(count)
    }

    pub(super) async fn renew(
        &self,
        name: &str,
        deliveries: &[Delivery],
    ) -> RedisResult<Vec<Delivery>> {
        let mut lost = Vec::new();
        for batch in deliveries.chunks(BATCH) {
            let (groups, others) = group(name, batch);
            lost.extend(others.into_iter().map(|position| batch[position].clone()));
            for group in groups {
                let script = &scripts::RENEW;
                let run = self.connections.run_again(script, group.prefix, &group.arguments);
                let positions: Vec<usize> = run.await?;
                let delivery = |index: usize| batch.get(*group.positions.get(index)?).cloned();
                lost.extend(positions.into_iter().filter_map(delivery));
            }
        }
        self.consumer(name).release(&lost);
        Ok(lost)
    }

    pub(super) async fn sweep(&self, queue: &QueueName, idle: Duration) -> RedisResult<usize> {
        let mut count = 0;
        for prefix in self.prefixes(queue) {
            let mut cursor = "0".to_owned();
            loop {
                let arguments = [cursor, idle.as_millis().to_string()];
                let run = self.connections.run_again(&scripts::SWEEP, &prefix, &arguments);
                let (next, removed): (String, usize) = run.await?;
                count += removed;
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        self.stats.lock().consumers_removed += count as u64;
        Ok(count)
    }

    /// Returns whether it is time to search for dead consumers of this queue.
    pub(super) fn is_sweep_due(&self, queue: &QueueName) -> bool {
        let mut swept_at = self.swept_at.lock();
        let due = swept_at.get(queue).is_none_or(|last| last.elapsed() >= SWEEP_EVERY);
        if due {
            swept_at.insert(queue.clone(), Instant::now());
        }
        due
    }
}
