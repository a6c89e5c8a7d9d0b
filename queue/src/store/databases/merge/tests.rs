//! Splits and merges of small lists.

use super::*;
use crate::{
    job::{JobState, QueueName, Timestamp},
    store::{history::Sample, job_queries::JobSummary},
};

fn database(number: usize) -> DatabaseIndex {
    DatabaseIndex::new(number).expect("there may be 64")
}

fn queue() -> QueueName {
    QueueName { model: "m".into(), format: "i2_s".into() }
}

/// An id of a database, at a time.
fn id(number: usize, at: i64) -> JobId {
    JobId::first_of(Timestamp(at)).in_database(database(number))
}

#[test]
fn items_are_split_by_the_databases_of_their_ids() {
    let ids = [id(0, 1), id(2, 2), id(0, 3), id(7, 4)];
    let parts = split(&ids, 3, |id| id.database());
    let parts: Vec<_> = parts.iter().map(|(index, ids)| (*index, ids.as_ref())).collect();
    assert_eq!(parts, [(0, &[ids[0], ids[2]][..]), (2, &[ids[1]][..])], "there is no eighth one");
    let same = [id(1, 1), id(1, 2)];
    assert!(matches!(&split(&same, 2, |id| id.database())[..], [(1, Cow::Borrowed(_))]));
    assert!(split(&same, 1, |id| id.database()).is_empty());
    assert!(split(&[] as &[JobId], 2, |id| id.database()).is_empty());
}

#[test]
fn keys_are_spread_and_stay() {
    let of = |key: &str, count| database_of_key(&Tenant("t".into()), key, count).number();
    let mut seen = [0; 4];
    (0..400).for_each(|key| seen[of(&key.to_string(), 4)] += 1);
    assert!(seen.iter().all(|keys| *keys > 50), "{seen:?}");
    assert_eq!(of("k", 1), 0);
    assert_eq!(of("k", 4), of("k", 4));
}

#[test]
fn pages_are_in_the_order_of_ids() {
    let pages = || vec![vec![id(0, 1), id(0, 4)], vec![id(1, 2), id(1, 3)]];
    let merged = |ascending| page(pages(), Page { after: None, limit: 3, ascending }, |id| *id);
    assert_eq!(merged(true), [id(0, 1), id(1, 2), id(1, 3)]);
    assert_eq!(merged(false), [id(0, 4), id(1, 3), id(1, 2)]);
}

#[test]
fn page_of_jobs_ends_where_a_scan_ended() {
    let summary = |id| JobSummary {
        id,
        tenant: Tenant::default(),
        queue: queue(),
        priority: Priority::Normal,
        state: JobState::Queued,
        attempts: 0,
        custom_id: None,
        owner: None,
        error_code: None,
        submitted_at: Timestamp(0),
        started_at: None,
        finished_at: None,
        prompt_tokens: 0,
        completion_tokens: 0,
    };
    let page_of =
        |ids: &[JobId], next| JobPage { jobs: ids.iter().map(|id| summary(*id)).collect(), next };
    let ids = |page: &JobPage| page.jobs.iter().map(|job| job.id).collect::<Vec<_>>();
    // The first database has looked at ids from 5 on only.
    let first = page_of(&[id(0, 9)], Some(id(0, 5)));
    let second = page_of(&[id(1, 8), id(1, 3)], None);
    let merged = jobs(vec![first.clone(), second.clone()], 10);
    assert_eq!((ids(&merged), merged.next), (vec![id(0, 9), id(1, 8)], Some(id(0, 5))));
    let merged = jobs(vec![first, second.clone()], 1);
    assert_eq!((ids(&merged), merged.next), (vec![id(0, 9)], Some(id(0, 9))));
    let merged = jobs(vec![second, page_of(&[], None)], 10);
    assert_eq!((ids(&merged), merged.next), (vec![id(1, 8), id(1, 3)], None));
}

#[test]
fn first_jobs_go_round_the_tenants_over_all_databases() {
    let entry = |database, at, tenant: &str, priority| Entry {
        id: id(database, at),
        queue: queue(),
        priority,
        tenant: Tenant(tenant.into()),
        cost: 1,
        shard_key: 0,
    };
    let missing = |entries| Missing { entries, tokens: 10 * entries, ..Missing::default() };
    let first = vec![entry(0, 9, "a", Priority::High), entry(0, 1, "a", Priority::Normal)];
    let second = vec![
        entry(1, 2, "a", Priority::Normal),
        entry(1, 3, "a", Priority::Normal),
        entry(1, 4, "b", Priority::Normal),
    ];
    let (total, found) = heads(vec![(missing(20), first), (missing(30), second)], 2, 10);
    assert_eq!((total.entries, total.tokens), (50, 500));
    let found: Vec<JobId> = found.iter().map(|entry| entry.id).collect();
    assert_eq!(found, [id(0, 9), id(0, 1), id(1, 4), id(1, 2)], "two of a tenant at most");
}

#[test]
fn samples_of_one_period_are_added_once() {
    let point = |at, queued, completed| Point {
        at: Timestamp(at),
        sample: Sample {
            looks: 2,
            covered_ms: 10_000,
            queued_sum: 2 * queued,
            queued_max: queued,
            completed,
            ..Sample::default()
        },
    };
    let merged = points(vec![vec![point(0, 4, 10), point(10, 1, 0)], vec![point(0, 6, 30)]]);
    assert_eq!(merged.len(), 2);
    let first = &merged[0].sample;
    assert_eq!((first.queued_mean(), first.queued_max, first.completed), (10.0, 10, 40));
    assert_eq!(first.per_second(first.completed), 4.0);
}

#[test]
fn dead_letters_with_the_same_error_are_one_group() {
    let group = |code: &str, jobs, first, last| DeadLetterGroup {
        queue: queue(),
        error_code: code.into(),
        error_signature: "s".into(),
        jobs,
        first,
        last,
    };
    let part = |groups| DeadLetterGroups { groups, or_more: false };
    let merged = groups(vec![
        part(vec![group("x", 5, id(0, 3), id(0, 9)), group("y", 2, id(0, 1), id(0, 1))]),
        part(vec![group("y", 4, id(1, 2), id(1, 8))]),
    ]);
    let expected = [group("y", 6, id(0, 1), id(1, 8)), group("x", 5, id(0, 3), id(0, 9))];
    assert_eq!(merged.groups, expected);
}
