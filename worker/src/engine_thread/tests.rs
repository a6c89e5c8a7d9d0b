//! An engine thread beside a worker that reads too little, or goes away.

use std::path::Path;

use tritmill_engine::{
    files::Model,
    load::{self, EngineOptions},
};
use tritmill_queue::JobId;

use super::*;

fn thread(commands: usize, reports: usize, turn: Option<Turn>) -> EngineThread {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/bitnet-tiny");
    let model = Arc::new(Model::open(&golden).expect("the golden model"));
    let engine = load::engine(&model, &EngineOptions::default()).expect("an engine");
    let metrics = Arc::<Metrics>::default();
    metrics.set_devices(vec!["cpu".to_owned()]);
    EngineThread::with_capacity(engine, 0, turn, metrics, [commands, reports]).expect("a thread")
}

fn submit(thread: &EngineThread) -> bool {
    let request = Request { prompt: vec![1, 2], ..Request::default() };
    thread.submit(ClaimRef { id: JobId::generate(), epoch: 1, claim_id: 1 }, vec![request], true)
}

#[test]
fn full_commands_are_refused_and_unread_reports_are_kept() {
    let mut thread = thread(4, 1, None);
    // The engine waits for its reports to be read, so its commands fill up.
    let mut accepted = 0;
    let mut refused = 0;
    while refused < 100 {
        match submit(&thread) {
            true => accepted += 1,
            false => {
                refused += 1;
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    for _ in 0..accepted {
        while !matches!(thread.reports.blocking_recv(), Some(Report::Ended(..))) {}
    }
    assert!(submit(&thread), "there is room again");
}

#[test]
fn thread_that_waits_for_room_ends_when_it_is_dropped() {
    let thread = thread(4, 1, None);
    assert!(submit(&thread));
    while thread.reports.is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    drop(thread);
}

#[test]
fn engine_waits_for_its_turn_and_ends_while_it_waits() {
    let turns = Turns::shared();
    let turn = turns.turn("cpu").expect("shared");
    assert!(turns.turn("cuda:0").expect("another device").try_lock().is_some());
    let other_engine = turn.lock();
    let mut first = thread(4, 8, turns.turn("cpu"));
    let second = thread(4, 8, turns.turn("cpu"));
    assert!(submit(&first) && submit(&second));
    thread::sleep(Duration::from_millis(30));
    assert!(first.reports.is_empty() && first.running_step().is_none());
    drop(second);
    drop(other_engine);
    while !matches!(first.reports.blocking_recv().expect("it runs"), Report::Ended(..)) {}
}
