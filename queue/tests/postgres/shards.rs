//! Shards of jobs: every way to read a queued job returns the entry that its submitter made.

use std::{sync::atomic::Ordering, time::Duration};

use tritmill_queue::{Entry, Job, Prompt, Store, Timestamp};

use super::{
    conformance::{by, job, queue},
    start_with_clock,
};

fn job_of(text: &str) -> Job {
    Job { prompt: Prompt::Text(text.into()), ..job() }
}

#[tokio::test]
async fn entries_keep_the_shard_of_their_prompt() {
    let (_server, store, now) = start_with_clock().await;
    let (plain, lost) = (job_of("plain"), job_of("lost"));
    let due = Timestamp(now.load(Ordering::SeqCst)).after(Duration::from_secs(60));
    let later = Job { run_at: Some(due), ..job_of("later") };
    store.submit(&[plain.clone(), lost.clone(), later.clone()]).await.unwrap();
    let sorted = |mut entries: Vec<Entry>| {
        entries.sort_by_key(|entry| entry.id);
        entries
    };
    let expected = sorted(vec![plain.entry(), lost.entry()]);
    assert_ne!(expected[0].shard_key, expected[1].shard_key);
    assert_eq!(store.queued(&queue(), None, 10).await.unwrap(), expected);
    assert_eq!(sorted(store.queued_heads(&queue(), 10, 10).await.unwrap().1), expected);
    now.fetch_add(30_000, Ordering::SeqCst);
    assert_eq!(sorted(store.unannounced(&queue()).await.unwrap().entries), expected);
    assert_eq!(store.claim(&[lost.id], by("a")).await.unwrap().len(), 1);
    // Every second, or reconcilers take it for an outage and extend the lease.
    let mut queued = Vec::new();
    for _ in 0..90 {
        queued.extend(store.reconcile().await.unwrap().queued);
        now.fetch_add(1000, Ordering::SeqCst);
    }
    assert_eq!(sorted(queued), sorted(vec![lost.entry(), later.entry()]));
}
