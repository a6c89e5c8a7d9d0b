//! How items are split among databases, and the answers of databases merged.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
};

use crate::{
    database_index::DatabaseIndex,
    dispatch::{Entry, Missing},
    job::{JobId, Priority, Tenant},
    store::{
        Page,
        history::{Point, QueueSnapshot, Snapshot},
        job_queries::{DeadLetterGroup, DeadLetterGroups, JobPage},
        queue_settings::QueueOverview,
    },
};

/// Splits items by their databases. Items of databases from `count` on are left out.
pub(super) fn split<I: Clone>(
    items: &[I],
    count: usize,
    database: impl Fn(&I) -> DatabaseIndex,
) -> Vec<(usize, Cow<'_, [I]>)> {
    let Some(first) = items.first().map(&database) else { return Vec::new() };
    if first.number() < count && items.iter().all(|item| database(item) == first) {
        return vec![(first.number(), Cow::Borrowed(items))];
    }
    let mut parts: BTreeMap<usize, Vec<I>> = BTreeMap::new();
    for item in items {
        parts.entry(database(item).number()).or_default().push(item.clone());
    }
    let existing = parts.into_iter().filter(|(index, _)| *index < count);
    existing.map(|(index, items)| (index, Cow::Owned(items))).collect()
}

/// Returns the database of an idempotency key.
pub(super) fn database_of_key(tenant: &Tenant, key: &str, count: usize) -> DatabaseIndex {
    let hash = blake3::hash([tenant.0.as_bytes(), b"\0", key.as_bytes()].concat().as_slice());
    DatabaseIndex::new(usize::from(hash.as_bytes()[0]) % count).unwrap_or_default()
}

/// Merges pages of a list in order of id.
pub(super) fn page<T, Id: Ord>(
    pages: Vec<Vec<T>>,
    page: Page<Id>,
    id: impl Fn(&T) -> Id,
) -> Vec<T> {
    let mut merged: Vec<T> = pages.into_iter().flatten().collect();
    match page.ascending {
        true => merged.sort_by_key(&id),
        false => merged.sort_by_key(|item| std::cmp::Reverse(id(item))),
    }
    merged.truncate(page.limit as usize);
    merged
}

/// Merges pages of jobs. Below the end of a database's scan, the jobs of that database are not known yet.
pub(super) fn jobs(pages: Vec<JobPage>, limit: u32) -> JobPage {
    let mut next = pages.iter().filter_map(|page| page.next).max();
    let mut jobs: Vec<_> = pages.into_iter().flat_map(|page| page.jobs).collect();
    jobs.retain(|job| next.is_none_or(|end| job.id >= end));
    jobs.sort_by_key(|job| std::cmp::Reverse(job.id));
    if jobs.len() > limit as usize {
        jobs.truncate(limit as usize);
        next = jobs.last().map(|job| job.id);
    }
    JobPage { jobs, next }
}

/// Merges the first jobs of a queue in the order of [`Store::queued_heads`](crate::Store::queued_heads).
pub(super) fn heads(
    parts: Vec<(Missing, Vec<Entry>)>,
    each: u32,
    limit: u32,
) -> (Missing, Vec<Entry>) {
    let (mut missing, mut entries) = (Missing::default(), Vec::new());
    for (part, heads) in parts {
        missing.entries += part.entries;
        missing.tokens += part.tokens;
        missing.refilling |= part.refilling;
        entries.extend(heads);
    }
    entries.sort_by_key(|entry| entry.id);
    let mut turns: HashMap<(Priority, Tenant), u32> = HashMap::new();
    let mut ordered = Vec::with_capacity(entries.len());
    for entry in entries {
        let turn = turns.entry((entry.priority, entry.tenant.clone())).or_default();
        if *turn < each {
            ordered.push((entry.priority, *turn, entry));
        }
        *turn += 1;
    }
    ordered.sort_by_key(|(priority, turn, entry)| (*priority, *turn, entry.id));
    let heads = ordered.into_iter().map(|(_, _, entry)| entry).take(limit as usize);
    (missing, heads.collect())
}

/// Merges groups of dead letters, the largest first.
pub(super) fn groups(parts: Vec<DeadLetterGroups>) -> DeadLetterGroups {
    let mut merged: BTreeMap<_, DeadLetterGroup> = BTreeMap::new();
    let mut or_more = false;
    for part in parts {
        or_more |= part.or_more;
        for group in part.groups {
            let key =
                (group.queue.clone(), group.error_code.clone(), group.error_signature.clone());
            match merged.get_mut(&key) {
                Some(known) => {
                    known.jobs += group.jobs;
                    known.first = known.first.min(group.first);
                    known.last = known.last.max(group.last);
                }
                None => drop(merged.insert(key, group)),
            }
        }
    }
    let mut groups: Vec<_> = merged.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.jobs));
    DeadLetterGroups { groups, or_more }
}

/// Merges queues: settings and workers are in the first database.
pub(super) fn overviews(parts: Vec<Vec<QueueOverview>>) -> Vec<QueueOverview> {
    let mut merged: BTreeMap<_, QueueOverview> = BTreeMap::new();
    for queue in parts.into_iter().flatten() {
        match merged.get_mut(&queue.settings.queue) {
            Some(known) => {
                known.progress.merge(&queue.progress);
                known.oldest_queued = known.oldest_queued.max(queue.oldest_queued);
                known.overdue += queue.overdue;
                known.workers += queue.workers;
            }
            None => drop(merged.insert(queue.settings.queue.clone(), queue)),
        }
    }
    merged.into_values().collect()
}

/// Merges the latest samples, which are taken one after the other.
pub(super) fn snapshots(parts: Vec<Option<Snapshot>>) -> Option<Snapshot> {
    let mut at = None;
    let mut merged: BTreeMap<_, QueueSnapshot> = BTreeMap::new();
    for snapshot in parts.into_iter().flatten() {
        at = at.max(Some(snapshot.at));
        for queue in snapshot.queues {
            match merged.get_mut(&queue.queue) {
                Some(known) => known.merge(&queue),
                None => drop(merged.insert(queue.queue.clone(), queue)),
            }
        }
    }
    Some(Snapshot { at: at?, queues: merged.into_values().collect() })
}

/// Merges samples of the same periods.
pub(super) fn points(parts: Vec<Vec<Point>>) -> Vec<Point> {
    let mut merged: BTreeMap<_, Point> = BTreeMap::new();
    for point in parts.into_iter().flatten() {
        match merged.get_mut(&point.at) {
            Some(known) => known.sample.merge_beside(&point.sample),
            None => drop(merged.insert(point.at, point)),
        }
    }
    merged.into_values().collect()
}

/// Sorts what belongs to jobs in the order in which the jobs were named.
pub(super) fn in_order_of<T>(ids: &[JobId], items: Vec<T>, id: impl Fn(&T) -> JobId) -> Vec<T> {
    let mut by_id: HashMap<JobId, T> = items.into_iter().map(|item| (id(&item), item)).collect();
    ids.iter().filter_map(|id| by_id.remove(id)).collect()
}

#[cfg(test)]
mod tests;
