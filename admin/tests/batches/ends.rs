//! Ends of lines: their numbers, and pages of results while lines end.

use std::collections::BTreeSet;

use tritmill_admin::{
    results::{self, ResultFilter, ResultPage},
    store::batch_ends::{EndOrder, EndsPage, KnownEnd, LineEnd},
};
use tritmill_queue::{
    JobState,
    store::{EndMark, Progress},
};

use super::*;

fn ended(line: u32, state: JobState, at: i64) -> LineEnd {
    LineEnd { line, state, ended_at: Timestamp(at), output: None }
}

fn of_text(line: u32, text: &str) -> LineEnd {
    LineEnd { output: Some(text.to_owned()), ..ended(line, JobState::Failed, 1) }
}

/// Adds ends to a claimed batch.
async fn add(store: &Arc<dyn TestStore>, held: &mut BatchClaim, ends: &[LineEnd]) -> bool {
    held.batch.last_end += ends.len() as u64;
    store.save_batch(held, BatchWrites { ends, ..BatchWrites::default() }).await.unwrap()
}

/// Numbers and lines of a page.
async fn listed(store: &Arc<dyn TestStore>, id: BatchId, page: EndsPage<'_>) -> Vec<(u64, u32)> {
    let found = store.ends(id, page).await.unwrap();
    found.into_iter().map(|(seq, end)| (seq, end.line)).collect()
}

/// All ends, in the order of completion.
pub const ALL: EndsPage<'_> = EndsPage {
    order: EndOrder::Completion,
    after: 0,
    until: u32::MAX as u64,
    states: &[],
    limit: 99,
};

#[tokio::test]
async fn ends_are_numbered_once_and_a_new_end_moves_its_line() {
    all(async |Rig { store, .. }| {
        let new = create(&store, &tenant("acme")).await;
        let other = create(&store, &tenant("acme")).await;
        let mut held = claim(&store).await.unwrap();
        let first = [
            ended(7, JobState::Completed, 5),
            of_text(2, "{\"a\":\"é\\u0000\"}"),
            ended(9, JobState::Failed, 5),
        ];
        assert!(add(&store, &mut held, &first).await);
        let again = BatchWrites { ends: &first, ..BatchWrites::default() };
        assert!(store.save_batch(&held, again).await.unwrap(), "as after a lost response");
        assert_eq!(listed(&store, new.id, ALL).await, [(1, 7), (2, 2), (3, 9)]);
        let read = store.ends(new.id, ALL).await.unwrap();
        assert_eq!(read.into_iter().map(|(_, end)| end).collect::<Vec<_>>(), first);
        assert!(add(&store, &mut held, &[ended(7, JobState::Failed, 8)]).await);
        assert_eq!(listed(&store, new.id, ALL).await, [(2, 2), (3, 9), (4, 7)]);
        let page = EndsPage { order: EndOrder::Lines, after: 2, limit: 1, ..ALL };
        assert_eq!(listed(&store, new.id, page).await, [(4, 7)]);
        let page = EndsPage { until: 3, states: &[JobState::Failed], ..ALL };
        assert_eq!(listed(&store, new.id, page).await, [(2, 2), (3, 9)]);
        assert!(listed(&store, other.id, ALL).await.is_empty());
        let mut known = store.known_ends(new.id, &[1, 2, 7]).await.unwrap();
        known.sort_by_key(|end| end.line);
        let of = |end: LineEnd| KnownEnd {
            line: end.line,
            state: end.state,
            ended_at: end.ended_at,
            has_output: end.output.is_some(),
        };
        assert_eq!(known, [of(first[1].clone()), of(ended(7, JobState::Failed, 8))]);
        let late = BatchClaim { epoch: held.epoch - 1, ..held.clone() };
        let ends = [ended(1, JobState::Completed, 9)];
        let along = BatchWrites { ends: &ends, ..BatchWrites::default() };
        assert!(!store.save_batch(&late, along).await.unwrap());
        assert_eq!(listed(&store, new.id, ALL).await.len(), 3, "a fenced step adds nothing");
    })
    .await;
}

/// Submits the jobs of `lines` lines of a batch and records that they are.
async fn submit(store: &Arc<dyn TestStore>, held: &mut BatchClaim, lines: u32) {
    let id = held.batch.id;
    let line = |line: u32| Job {
        id: id.job(line),
        custom_id: Some(format!("q{line}")),
        line_key: Some([u8::try_from(line % 256).unwrap(); 32]),
        line_shape: line.is_multiple_of(2).then_some("message"),
        ..job()
    };
    let jobs: Vec<Job> = (1..=lines).map(line).collect();
    held.batch.submitted = FilePosition { line: lines.into(), offset_bytes: 0 };
    held.batch.lines = lines.into();
    held.batch.enter(BatchState::InProgress, Timestamp(2));
    let along = BatchWrites { jobs: &jobs, ..BatchWrites::default() };
    assert!(store.save_batch(held, along).await.unwrap());
}

/// Ends jobs of a batch with an answer.
async fn finish(store: &Arc<dyn TestStore>, id: BatchId, lines: impl IntoIterator<Item = u32>) {
    let ids: Vec<_> = lines.into_iter().map(|line| id.job(line)).collect();
    let claims = store.claim(&ids, by("w")).await.unwrap();
    let done: Vec<_> =
        claims.iter().map(|claim| finished(claim.claim_ref(), answer("yes"))).collect();
    assert_eq!(store.finish(&done).await.unwrap().len(), ids.len());
}

#[tokio::test]
async fn more_jobs_than_one_statement_counts_are_counted() {
    const LINES: u32 = 50_002;
    all(async |rig: Rig| {
        let store = &rig.store;
        create(store, &tenant("acme")).await;
        let mut held = claim(store).await.unwrap();
        let id = held.batch.id;
        submit(store, &mut held, LINES).await;
        finish(store, id, [1, 50_000, 50_001, LINES]).await;
        let counted = store.range_progress(id.all_jobs()).await.unwrap();
        let expected =
            Progress { completed: 4, queued: u64::from(LINES) - 4, ..Progress::default() };
        assert_eq!(counted, expected);
        let part = store.range_progress(id.jobs(2, 50_001)).await.unwrap();
        assert_eq!((part.completed, part.queued), (2, 49_998));
    })
    .await;
}

#[tokio::test]
async fn ends_of_jobs_are_found_from_a_mark_on() {
    all(async |rig: Rig| {
        let store = &rig.store;
        create(store, &tenant("acme")).await;
        let mut held = claim(store).await.unwrap();
        let id = held.batch.id;
        submit(store, &mut held, 6).await;
        let lines = |ends: &[tritmill_queue::store::JobEnd]| -> Vec<u32> {
            ends.iter().map(|end| id.line(end.id).unwrap()).collect()
        };
        finish(store, id, [4]).await;
        rig.advance(Duration::from_secs(60));
        finish(store, id, [1, 2]).await;
        store.cancel(&[id.job(3)]).await.unwrap();
        let first = store.ends_after(id.all_jobs(), EndMark::default(), 2).await.unwrap();
        assert_eq!(lines(&first.ends)[0], 4);
        let rest = store.ends_after(id.all_jobs(), first.ends[1].mark, 9).await.unwrap();
        let all: BTreeSet<u32> =
            [lines(&first.ends), lines(&rest.ends)].concat().into_iter().collect();
        assert_eq!((all, rest.ends.len()), (BTreeSet::from([1, 2, 4]), 1), "not the cancelled one");
        rig.advance(Duration::from_secs(60));
        // Looking again where nothing is new passes over nothing.
        let mut resume = rest.resume;
        for _ in 0..5 {
            resume = store.ends_after(id.all_jobs(), resume, 9).await.unwrap().resume;
        }
        finish(store, id, [6]).await;
        let later = store.ends_after(id.all_jobs(), resume, 9).await.unwrap();
        assert!(lines(&later.ends).ends_with(&[6]) && !lines(&later.ends).contains(&4));
        let ids = store.ids_in_range(id.jobs(2, 9), 3).await.unwrap();
        assert_eq!(ids, [id.job(2), id.job(3), id.job(4)], "in any state");
        let read = store.ended(&[id.job(4), id.job(5), id.job(3)]).await.unwrap();
        let read: Vec<_> = read
            .iter()
            .map(|end| {
                let shape = end.line_shape.as_deref();
                let name = end.custom_id.as_deref();
                (id.line(end.id), end.outcome.is_some(), name, end.line_key, shape)
            })
            .collect();
        let expected = |line: u32, has_outcome, name| {
            let shape = line.is_multiple_of(2).then_some("message");
            let key = Some([u8::try_from(line).unwrap(); 32]);
            (Some(line), has_outcome, Some(name), key, shape)
        };
        assert_eq!(read, [expected(3, false, "q3"), expected(4, true, "q4")]);
    })
    .await;
}

fn filter(order: EndOrder) -> ResultFilter {
    ResultFilter { order, states: Vec::new(), search: None }
}

/// The `custom_id`s of a page.
fn names(page: &ResultPage) -> Vec<String> {
    let name = |line: &results::ResultLine| {
        let line: serde_json::Value = serde_json::from_str(&line.text).unwrap();
        line["custom_id"].as_str().unwrap_or_default().to_owned()
    };
    page.lines.iter().map(name).collect()
}

#[tokio::test]
async fn results_come_in_the_order_of_their_numbers_or_of_lines_without_gaps() {
    all(async |Rig { store, .. }| {
        create(&store, &tenant("acme")).await;
        let mut held = claim(&store).await.unwrap();
        let id = held.batch.id;
        submit(&store, &mut held, 5).await;
        finish(&store, id, [4, 1]).await;
        let refused =
            of_text(2, r#"{"id":"r","custom_id":"q2","response":null,"error":{"code":"no Good"}}"#);
        assert!(add(&store, &mut held, &[ended(4, JobState::Completed, 9), refused]).await);
        let by_end = filter(EndOrder::Completion);
        let by_line = filter(EndOrder::Lines);
        let page = results::read(&*store, &held.batch, &by_end, 0, 9).await.unwrap();
        assert_eq!((names(&page), page.has_more), (vec!["q4".into(), "q2".into()], false));
        let page = results::read(&*store, &held.batch, &by_line, 0, 9).await.unwrap();
        assert_eq!(names(&page), [""; 0], "line 1 ended and has no number yet");
        assert_eq!(page.next.position, 0);
        assert!(add(&store, &mut held, &[ended(1, JobState::Completed, 9)]).await);
        let page = results::read(&*store, &held.batch, &by_line, 0, 9).await.unwrap();
        assert_eq!(names(&page), ["q1", "q2"], "line 3 runs");
        finish(&store, id, [3]).await;
        assert!(add(&store, &mut held, &[ended(3, JobState::Completed, 9)]).await);
        let page =
            results::read(&*store, &held.batch, &by_line, page.next.position, 1).await.unwrap();
        assert_eq!((names(&page), page.has_more), (vec!["q3".to_owned()], true));
        let search = ResultFilter { search: Some("NO good".into()), ..by_end.clone() };
        let page = results::read(&*store, &held.batch, &search, 0, 9).await.unwrap();
        assert_eq!((names(&page), page.next.position), (vec!["q2".to_owned()], 4));
        let search = ResultFilter { search: Some("YES".into()), ..by_end.clone() };
        let page = results::read(&*store, &held.batch, &search, 1, 9).await.unwrap();
        assert_eq!(names(&page), ["q1", "q3"]);
        let failed = ResultFilter { states: vec![JobState::Failed], ..by_line };
        let page = results::read(&*store, &held.batch, &failed, 0, 9).await.unwrap();
        assert_eq!((names(&page), page.next.position), (vec!["q2".to_owned()], 4));
        held.batch.enter(BatchState::Completed, Timestamp(9));
        let page = results::read(&*store, &held.batch, &by_end, 0, 2).await.unwrap();
        assert_eq!((names(&page).len(), page.has_more), (2, true));
        assert!(results::are_numbered(&held.batch));
        let earlier = Batch { last_end: 0, completed: 3, ..held.batch };
        assert!(!results::are_numbered(&earlier), "an earlier release ended it");
    })
    .await;
}

/// Lines of the concurrent test, and how many end at once.
const LINES: u32 = 2000;
const AT_ONCE: u32 = 37;

#[tokio::test]
async fn reader_beside_a_writer_sees_every_line_once() {
    all(async |Rig { store, .. }| {
        let acme = tenant("acme");
        create(&store, &acme).await;
        let mut held = claim(&store).await.unwrap();
        let id = held.batch.id;
        submit(&store, &mut held, LINES).await;
        let writer = {
            let (store, mut held) = (Arc::clone(&store), held.clone());
            tokio::spawn(async move {
                // Lines end in an order that is not that of the input.
                let mut order: Vec<u32> = (1..=LINES).collect();
                order.sort_by_key(|line| line.wrapping_mul(2_654_435_761));
                for lines in order.chunks(AT_ONCE as usize) {
                    finish(&store, id, lines.iter().copied()).await;
                    let ends: Vec<LineEnd> =
                        lines.iter().map(|line| ended(*line, JobState::Completed, 9)).collect();
                    assert!(add(&store, &mut held, &ends).await);
                }
                held.batch.enter(BatchState::Completed, Timestamp(9));
                assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
            })
        };
        let readers = [EndOrder::Completion, EndOrder::Lines].map(|order| {
            let (store, acme) = (Arc::clone(&store), acme.clone());
            tokio::spawn(async move {
                let (mut seen, mut position) = (Vec::new(), 0);
                loop {
                    let batch = store.batch(&acme, id).await.unwrap().unwrap();
                    let page =
                        results::read(&*store, &batch, &filter(order), position, 50).await.unwrap();
                    seen.extend(names(&page));
                    position = page.next.position;
                    if !page.has_more && batch.state.is_terminal() {
                        return seen;
                    }
                    tokio::task::yield_now().await;
                }
            })
        });
        writer.await.unwrap();
        for (reader, order) in readers.into_iter().zip([EndOrder::Completion, EndOrder::Lines]) {
            let seen = reader.await.unwrap();
            let expected: Vec<String> = (1..=LINES).map(|line| format!("q{line}")).collect();
            if order == EndOrder::Lines {
                assert_eq!(seen, expected);
            }
            let set: BTreeSet<String> = seen.iter().cloned().collect();
            assert_eq!((set.len(), seen.len()), (LINES as usize, LINES as usize));
        }
    })
    .await;
}
