//! Event streams in Redis: reading, limits and expiry.

use std::time::Duration;

use tritmill_queue::{
    EventId, JobEvent, JobId, JobState, Part,
    events::{EventLimits, RedisEvents},
};
use tritmill_servers::Redis;

use crate::rig::{command, dispatcher};

const END: JobEvent = JobEvent::Finished { state: JobState::Completed };

fn delta(text: &str) -> JobEvent {
    let (part, text) = (Part::Content, text.to_owned());
    JobEvent::Delta { choice: 0, part, offset: 0, text, logprobs: None }
}

fn stream(job: JobId) -> String {
    format!("tm:events:{{{}}}:{job}", job.as_bytes()[15] % 64)
}

/// Jobs whose streams share a bucket.
fn jobs_of_a_bucket(count: usize) -> Vec<JobId> {
    let jobs = std::iter::repeat_with(JobId::generate);
    jobs.filter(|job| job.as_bytes()[15] % 64 == 7).take(count).collect()
}

async fn read(events: &RedisEvents, job: JobId) -> Vec<JobEvent> {
    let seen = events.read_events(job, EventId::default(), Duration::ZERO).await.unwrap();
    seen.into_iter().map(|(_, event)| event).collect()
}

/// Returns the milliseconds until the stream expires.
async fn ttl(redis: &Redis, job: JobId) -> i64 {
    command(redis, &["PTTL", &stream(job)]).await
}

#[tokio::test]
async fn late_subscriber_gets_events_from_the_start() {
    let redis = Redis::start().unwrap();
    let events = dispatcher(&redis).events();
    let (job, other) = (JobId::generate(), JobId::generate());
    events.publish(job, &[JobEvent::Queued, JobEvent::Started]).await.unwrap();
    events.publish(job, &[delta("Once ")]).await.unwrap();
    events.publish(other, &[JobEvent::Started, delta("Twice")]).await.unwrap();
    let seen = events.read_events(job, EventId::default(), Duration::ZERO).await.unwrap();
    let published: Vec<JobEvent> = seen.iter().map(|(_, event)| event.clone()).collect();
    assert_eq!(published, [JobEvent::Queued, JobEvent::Started, delta("Once ")]);
    // From where it was, it waits for more.
    let last = seen.last().unwrap().0;
    let waiting = {
        let events = events.clone();
        tokio::spawn(async move { events.read_events(job, last, Duration::from_secs(10)).await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _: String = command(&redis, &["XADD", &stream(job), "*", "event", "?"]).await;
    let end = JobEvent::Finished { state: JobState::Completed };
    events.publish(job, std::slice::from_ref(&end)).await.unwrap();
    let more = waiting.await.unwrap().unwrap();
    assert_eq!(more.into_iter().map(|(_, event)| event).collect::<Vec<_>>(), [end]);
    let expires: i64 = command(&redis, &["TTL", &stream(job)]).await;
    assert!(expires > 0);
    let none = events.read_events(JobId::generate(), EventId::default(), Duration::from_millis(20));
    assert!(none.await.unwrap().is_empty());
}

#[tokio::test]
async fn events_of_a_job_are_capped() {
    let redis = Redis::start().unwrap();
    let events = dispatcher(&redis).events();
    let job = JobId::generate();
    events.publish(job, &[JobEvent::Started]).await.unwrap();
    events.publish(job, &vec![delta("x"); 20_000]).await.unwrap();
    let kept: usize = command(&redis, &["XLEN", &stream(job)]).await;
    assert_eq!(kept, 16 << 10);
}

#[tokio::test]
async fn stream_lives_a_minute_after_the_end_and_events_that_follow_do_not_prolong_it() {
    let redis = Redis::start().unwrap();
    let events = dispatcher(&redis).events();
    let job = JobId::generate();
    events.publish(job, &[JobEvent::Started, delta("a")]).await.unwrap();
    assert!((60_001..=15 * 60_000).contains(&ttl(&redis, job).await), "while it runs");
    events.publish(job, &[END]).await.unwrap();
    let left = ttl(&redis, job).await;
    assert!((50_000..=60_000).contains(&left), "{left}");
    tokio::time::sleep(Duration::from_millis(20)).await;
    events.publish(job, &[delta("late")]).await.unwrap();
    assert!(ttl(&redis, job).await < left);
    assert_eq!(read(&events, job).await, [JobEvent::Started, delta("a"), END]);
    // Every key expires.
    let keys: Vec<String> = command(&redis, &["KEYS", "tm:events:*"]).await;
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in keys {
        let left: i64 = command(&redis, &["PTTL", &key]).await;
        assert!((1..=60_000).contains(&left), "{key}: {left}");
    }
}

#[tokio::test]
async fn streams_have_a_total_cap_that_frees_itself_when_they_expire() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let limits = EventLimits {
        // Four streams, or 64 KiB, in each bucket.
        streams: 4 * 64,
        bytes: 64 * (64 << 10),
        finished: Duration::from_millis(300),
        ..EventLimits::default()
    };
    let events = dispatcher.events().with_limits(limits);
    let jobs = jobs_of_a_bucket(12);
    // In number.
    for job in &jobs[..5] {
        events.publish(*job, &[JobEvent::Started, delta("a")]).await.unwrap();
    }
    assert_eq!(dispatcher.stats().events_dropped, 2);
    assert!(read(&events, jobs[4]).await.is_empty(), "a stream without its start has a gap");
    events.publish(jobs[3], &[delta("b")]).await.unwrap();
    assert_eq!(read(&events, jobs[3]).await.len(), 3, "streams that exist go on");
    for job in &jobs[..5] {
        events.publish(*job, &[END]).await.unwrap();
    }
    assert_eq!(read(&events, jobs[3]).await.len(), 4);
    tokio::time::sleep(Duration::from_millis(350)).await;
    // In bytes: the second stream is cut, gets no text after the gap, and its end.
    let (one, two) = (jobs[6], jobs[7]);
    events.publish(one, &[JobEvent::Started]).await.unwrap();
    events.publish(one, &vec![delta(&"x".repeat(1000)); 60]).await.unwrap();
    let large = delta(&"y".repeat(3000));
    let dropped = dispatcher.stats().events_dropped;
    events.publish(two, &[JobEvent::Started, delta("1"), large, delta("3")]).await.unwrap();
    events.publish(two, &[delta("4"), END]).await.unwrap();
    assert_eq!(read(&events, two).await, [JobEvent::Started, delta("1"), END]);
    assert_eq!(dispatcher.stats().events_dropped, dropped + 3);
    // The next attempt has all its text.
    events.publish(one, &[END]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(350)).await;
    let three = jobs[8];
    events.publish(three, &[JobEvent::Started]).await.unwrap();
    events.publish(three, &vec![delta(&"z".repeat(1000)); 70]).await.unwrap();
    events.publish(three, &[JobEvent::Queued, JobEvent::Started, delta("again")]).await.unwrap();
    assert_eq!(read(&events, three).await, [JobEvent::Queued, JobEvent::Started, delta("again")]);
    let total: String = command(&redis, &["HGET", "tm:events:{7}:sizes", "total"]).await;
    assert!(total.parse::<u64>().unwrap() < 1000, "{total}");
}

#[tokio::test]
async fn end_is_published_and_shortens_the_life_when_memory_is_full() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let (events, job) = (dispatcher.events(), JobId::generate());
    events.publish(job, &[JobEvent::Started]).await.unwrap();
    let _: String = command(&redis, &["CONFIG", "SET", "maxmemory", "1"]).await;
    assert!(events.publish(job, &[delta("a")]).await.is_err());
    events.publish(job, &[delta("b"), END]).await.unwrap();
    assert_eq!(read(&events, job).await, [JobEvent::Started, END]);
    assert!(ttl(&redis, job).await <= 60_000);
    assert_eq!(dispatcher.stats().events_dropped, 2);
}
