//! When a worker is ready.

use super::*;

#[test]
fn worker_is_ready_while_it_reads_and_nothing_fails() {
    let metrics = Metrics::default();
    assert!(metrics.not_ready_reason().is_some());
    metrics.queue_read();
    assert_eq!(metrics.not_ready_reason(), None);
    metrics.dispatcher_failed();
    assert!(metrics.not_ready_reason().expect("not ready").contains("dispatcher failed 1 times"));
    metrics.queue_read();
    metrics.store_failed();
    // The queue can be read, and heartbeats are taken, but no job can be claimed.
    metrics.queue_read();
    metrics.heartbeat_recorded();
    assert!(metrics.not_ready_reason().expect("not ready").contains("store failed 1 times"));
    metrics.store_answered();
    assert_eq!(metrics.not_ready_reason(), None);
    let later = READ_LIMIT * 2 + Duration::from_secs(1);
    assert!(metrics.not_ready_reason_at(later).expect("not ready").contains("last read its queue"));
    metrics.set_in_flight(3, 0);
    assert_eq!(metrics.not_ready_reason_at(later), None, "a full worker does not read");
    metrics.set_draining();
    assert_eq!(metrics.not_ready_reason().as_deref(), Some("draining"));
    assert!(metrics.encode().contains("tritmill_worker_dependency_failures_total 2"));
}
