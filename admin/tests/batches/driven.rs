//! A driver and a worker of the test answer batches that are paused, resumed, cancelled and retried.

use std::collections::HashMap;

use conformance::error;
use tokio::{sync::watch, task::JoinHandle, time::sleep};
use tritmill_admin::{
    App, Driver, FileContents, Models, Settings,
    chosen_lines::{ChosenLinesError, Problem, chosen_lines},
    store::{batch_ends::EndsPage, escalation::Escalation},
};
use tritmill_client::Client;
use tritmill_queue::{
    Dispatcher as _, ErrorKind, JobId, Progress, Pull, QueueName, dispatch::MemoryDispatcher,
    events::MemoryEvents, store::classes::RegisteredQueue,
};

use super::*;

/// How long the clock moves, and the worker rests, between two turns.
const TURN: Duration = Duration::from_millis(20);

/// A driver, and a worker that notes what it ran.
pub(super) struct Service {
    pub(super) rig: Rig,
    dispatcher: Arc<MemoryDispatcher>,
    stop: watch::Sender<bool>,
    driver: JoinHandle<()>,
    /// How often each line ran.
    runs: HashMap<String, u32>,
    /// How often each line was answered.
    pub(super) answers: HashMap<String, u32>,
}

impl Service {
    /// Starts a driver with a queue of this many entries.
    pub(super) fn start(rig: Rig, entries: usize) -> Self {
        Self::start_with(rig, entries, Settings::default())
    }

    /// The same with settings.
    pub(super) fn start_with(rig: Rig, entries: usize, settings: Settings) -> Self {
        let dispatcher = Arc::new(MemoryDispatcher::new(entries));
        let events = Arc::new(MemoryEvents::default());
        let client = Client::embedded(rig.store.clone(), dispatcher.clone(), events);
        let models = Models::fixed(vec![RegisteredQueue { queue: queue(), at: Timestamp(0) }]);
        let app = App::new(client, rig.store.clone(), models, settings);
        let (stop, stopped) = watch::channel(false);
        let driver = tokio::spawn(Driver::new(app, "driver".into(), stopped).run());
        let (runs, answers) = (HashMap::new(), HashMap::new());
        Self { rig, dispatcher, stop, driver, runs, answers }
    }

    pub(super) async fn stop(self) {
        self.halt().await;
    }

    /// Stops the driver; returns the store as it left it.
    pub(super) async fn halt(self) -> Rig {
        self.stop.send_replace(true);
        self.driver.await.unwrap();
        self.rig
    }

    /// Creates a batch of lines q1, q2, …
    pub(super) async fn batch(&self, owner: &Tenant, lines: u32) -> BatchId {
        self.batch_with(owner, lines, None).await
    }

    /// The same with an escalation.
    async fn batch_with(
        &self,
        owner: &Tenant,
        lines: u32,
        escalation: Option<Escalation>,
    ) -> BatchId {
        let store = &self.rig.store;
        let line = |number| {
            format!(
                "{{\"custom_id\":\"q{number}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\
                 \"body\":{{\"model\":\"tiny\",\"prompt\":\"a\"}}}}\n"
            )
        };
        let content: String = (1..=lines).map(line).collect();
        let input = file(owner);
        store.create_file(&input).await.unwrap();
        store.put_chunk(input.id, 0, ChunkContent::Bytes(content.as_bytes())).await.unwrap();
        store.complete_file(input.id, content.len() as u64, None).await.unwrap();
        let created_at = store.now().await.unwrap();
        let expires_at = created_at.after(Duration::from_secs(86_400));
        let new = Batch {
            created_at,
            expires_at,
            escalation,
            completion_window: "24h".to_owned(),
            ..batch(owner, input.id)
        };
        assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
        new.id
    }

    /// Lets time pass; the worker answers up to `max` lines. A line with a name in `failing` fails.
    pub(super) async fn turn(&mut self, max: usize, failing: &[&str]) {
        self.turn_of(&queue(), max, failing).await;
    }

    /// The same for the lines of a queue.
    async fn turn_of(&mut self, queue: &QueueName, max: usize, failing: &[&str]) {
        let store = &self.rig.store;
        self.rig.advance(TURN);
        let due = store.reconcile().await.unwrap().queued;
        self.dispatcher.requeue(&due).await.unwrap();
        let pull = Pull { queue, consumer: "w", max, wait: Duration::ZERO, only: None };
        let deliveries = self.dispatcher.pull(pull).await.unwrap();
        let ids: Vec<JobId> = deliveries.iter().map(|delivery| delivery.id).collect();
        let mut ended = Vec::new();
        let of_queue = Claimant { queue: Some(queue), ..by("w") };
        for claim in store.claim(&ids, of_queue).await.unwrap() {
            assert_eq!(claim.job.queue, *queue);
            let name = claim.job.custom_id.clone().unwrap();
            let outcome = match failing.contains(&name.as_str()) {
                true => error(ErrorKind::InvalidRequest),
                false => answer(&name),
            };
            *self.runs.entry(name.clone()).or_default() += 1;
            ended.push((name, finished(claim.claim_ref(), outcome)));
        }
        let attempts: Vec<_> = ended.iter().map(|(_, attempt)| attempt.clone()).collect();
        let settled = store.finish(&attempts).await.unwrap();
        for (name, attempt) in ended {
            let is_recorded = settled.iter().any(|settled| settled.id == attempt.claim.id);
            if is_recorded && !failing.contains(&name.as_str()) {
                *self.answers.entry(name).or_default() += 1;
            }
        }
        self.dispatcher.acknowledge("w", &deliveries).await.unwrap();
        sleep(TURN).await;
    }

    /// Takes turns until a batch is in a state; returns it.
    pub(super) async fn until(
        &mut self,
        id: BatchId,
        state: BatchState,
        failing: &[&str],
    ) -> Batch {
        self.turns(id, state, 4, failing).await
    }

    pub(super) async fn turns(
        &mut self,
        id: BatchId,
        state: BatchState,
        max: usize,
        failing: &[&str],
    ) -> Batch {
        for _ in 0..3000 {
            let batch = self.get(id).await;
            if batch.state == state {
                return batch;
            }
            self.turn(max, failing).await;
        }
        panic!("not {state:?}: {:?}", self.get(id).await);
    }

    pub(super) async fn get(&self, id: BatchId) -> Batch {
        self.rig.store.batch_of_any_tenant(id).await.unwrap().unwrap()
    }

    pub(super) async fn progress(&self, id: BatchId) -> Progress {
        self.rig.store.range_progress(id.all_jobs()).await.unwrap()
    }

    pub(super) async fn change(&self, id: BatchId, change: BatchChange) -> Batch {
        let tenant = self.get(id).await.tenant;
        match self.rig.store.change_batch(&tenant, id, &change, MANY).await.unwrap().unwrap() {
            Changed::Done(batch) => *batch,
            other => panic!("{change:?}: {other:?}"),
        }
    }

    /// Runs named lines again.
    pub(super) async fn retry(
        &self,
        id: BatchId,
        names: &[&str],
        answered: bool,
    ) -> Result<Batch, Problem> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let batch = self.get(id).await;
        let files = FileContents::new(self.rig.store.clone(), None);
        match chosen_lines(&files, &batch, &names, answered).await {
            Ok(lines) => Ok(self.change(id, BatchChange::Retry { lines, key: None }).await),
            Err(ChosenLinesError::Choice(error)) => Err(error.problem),
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns the lines that ended after a number, in order of the input.
    pub(super) async fn ended_after(&self, id: BatchId, after: u64) -> Vec<u32> {
        let page = EndsPage { after, ..ends::ALL };
        let found = self.rig.store.ends(id, page).await.unwrap();
        let mut lines: Vec<u32> = found.into_iter().map(|(_, end)| end.line).collect();
        lines.sort_unstable();
        lines
    }

    /// Returns the names of lines in a file, in order.
    pub(super) async fn names(&self, file: Option<FileId>) -> Vec<String> {
        let Some(file) = file else { return Vec::new() };
        let chunk = self.rig.store.chunk(file, 0).await.unwrap();
        let Some(StoredChunk::Bytes(bytes)) = chunk else { panic!("{chunk:?}") };
        let text = String::from_utf8(bytes).unwrap();
        let name = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["custom_id"].as_str().unwrap().to_owned()
        };
        text.lines().map(name).collect()
    }
}

#[tokio::test]
async fn failed_and_named_lines_run_again_and_the_files_follow() {
    all(async |rig: Rig| {
        let (mut service, acme) = (Service::start(rig, 1000), tenant("acme"));
        let id = service.batch(&acme, 5).await;
        let first = service.until(id, BatchState::Completed, &["q2", "q4"]).await;
        assert_eq!((first.completed, first.failed), (3, 2));
        assert_eq!(service.names(first.error_file).await, ["q2", "q4"]);
        assert_eq!(service.ended_after(id, 0).await, [1, 2, 3, 4, 5]);
        let retried = service.change(id, BatchChange::retry_all()).await;
        assert_eq!(retried.output, first.output, "kept until the end");
        let second = service.until(id, BatchState::Completed, &["q4"]).await;
        assert_eq!((second.completed, second.failed), (4, 1));
        assert_eq!(service.names(second.output).await, ["q1", "q2", "q3", "q5"]);
        assert_eq!(service.names(second.error_file).await, ["q4"]);
        assert_eq!(service.ended_after(id, first.last_end).await, [2, 4], "they come again");
        assert_eq!(service.ended_after(id, 0).await, [1, 2, 3, 4, 5]);
        for old in [first.output, first.error_file].into_iter().flatten() {
            assert_eq!(service.rig.store.file(&acme, old).await.unwrap(), None, "replaced");
            service.rig.store.sweep_files().await.unwrap();
            assert_eq!(service.rig.store.chunk(old, 0).await.unwrap(), None);
        }
        // Two retries at once: the second is a pass of its own.
        service.change(id, BatchChange::retry_all()).await;
        assert_eq!(service.retry(id, &["q1"], false).await, Err(Problem::Answered));
        assert_eq!(service.retry(id, &["q1", "q9"], true).await, Err(Problem::Unknown));
        service.retry(id, &["q1"], true).await.unwrap();
        let third = service.until(id, BatchState::Completed, &[]).await;
        assert_eq!((third.completed, third.failed, third.error_file), (5, 0, None));
        assert_eq!(service.names(third.output).await, ["q1", "q2", "q3", "q4", "q5"]);
        assert_eq!(third.usage.unwrap().completion_tokens, 10);
        assert_eq!(service.ended_after(id, second.last_end).await, [1, 4]);
        let runs = [("q1", 2), ("q2", 2), ("q3", 1), ("q4", 3), ("q5", 1)];
        let runs = runs.map(|(name, runs)| (name.to_owned(), runs));
        assert_eq!(service.runs, HashMap::from(runs));
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn lines_that_wait_at_a_set_time_go_to_another_model() {
    all(async |rig: Rig| {
        // The queue has room for a part of the batch.
        let (mut service, acme) = (Service::start(rig, 6), tenant("acme"));
        let small = QueueName { model: "small".to_owned(), format: "i2_s".to_owned() };
        let after = "12h".to_owned();
        let escalation = Escalation { model: "small".to_owned(), queue: small.clone(), after };
        let id = service.batch_with(&acme, 20, Some(escalation)).await;
        while service.answers.len() < 3 {
            service.turn(1, &[]).await;
        }
        assert!(!service.get(id).await.steps.is_escalated);
        // One hour in which it is paused does not count.
        service.change(id, BatchChange::Pause { now: false }).await;
        service.rig.advance(Duration::from_secs(3600));
        service.change(id, BatchChange::Resume).await;
        service.rig.advance(Duration::from_secs(12 * 3600 - 60));
        for _ in 0..5 {
            service.turn(0, &[]).await;
        }
        assert!(!service.get(id).await.steps.is_escalated);
        service.rig.advance(Duration::from_secs(60));
        let mut turns = 0;
        while service.get(id).await.state != BatchState::Completed {
            // Neither loses nor doubles a line, whichever worker asks first.
            service.turn(2, &[]).await;
            service.turn_of(&small, 2, &[]).await;
            turns += 1;
            assert!(turns < 3000, "{:?}", service.get(id).await);
        }
        let batch = service.get(id).await;
        assert_eq!((batch.completed, batch.failed), (20, 0));
        assert!(service.answers.values().all(|times| *times == 1) && service.answers.len() == 20);
        let found = service.rig.store.ended_in_range(id.all_jobs()).await.unwrap();
        let mut by_model: HashMap<String, u32> = HashMap::new();
        for job in found {
            let record = service.rig.store.job(job.id).await.unwrap().unwrap();
            *by_model.entry(record.job.queue.model).or_default() += 1;
        }
        assert!(by_model["small"] >= 10, "{by_model:?}");
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn lines_that_a_cancelled_batch_never_reached_run_when_they_are_chosen() {
    all(async |rig: Rig| {
        // The queue has room for a part of the batch.
        let (mut service, acme) = (Service::start(rig, 4), tenant("acme"));
        let id = service.batch(&acme, 12).await;
        while service.progress(id).await.queued < 2 {
            service.turn(0, &[]).await;
        }
        service.change(id, BatchChange::Cancel).await;
        let cancelled = service.turns(id, BatchState::Cancelled, 0, &[]).await;
        assert_eq!((cancelled.completed, cancelled.failed), (0, 12));
        let reached = service.progress(id).await.cancelled;
        assert!((2..11).contains(&reached), "{reached}");
        assert!(service.runs.is_empty());
        // One that was cancelled, and one that was never reached.
        service.retry(id, &["q2", "q11"], false).await.unwrap();
        let some = service.until(id, BatchState::Completed, &[]).await;
        assert_eq!((some.completed, some.failed), (2, 10));
        assert_eq!(service.names(some.output).await, ["q2", "q11"]);
        assert_eq!(service.progress(id).await.cancelled, reached - 1, "the others stay");
        let open = service.retry(id, &["q12"], false).await.unwrap();
        assert_eq!(open.left_by, Some(BatchState::Cancelled));
        let more = service.until(id, BatchState::Completed, &[]).await;
        assert_eq!((more.completed, more.failed), (3, 9));
        // A cancelled batch is resumed with all that was cancelled or never reached.
        service.change(id, BatchChange::retry_all()).await;
        service.change(id, BatchChange::Cancel).await;
        service.until(id, BatchState::Cancelled, &[]).await;
        service.change(id, BatchChange::Resume).await;
        let all = service.until(id, BatchState::Completed, &[]).await;
        assert_eq!((all.completed, all.failed), (12, 0));
        assert!(service.answers.len() == 12 && service.answers.values().all(|times| *times == 1));
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn paused_batch_stands_still_and_random_changes_lose_and_double_nothing() {
    all(async |rig: Rig| {
        let (mut service, acme) = (Service::start(rig, 1000), tenant("acme"));
        let id = service.batch(&acme, 40).await;
        while service.answers.len() < 5 {
            service.turn(2, &[]).await;
        }
        let deadline = service.get(id).await.expires_at;
        service.change(id, BatchChange::Pause { now: false }).await;
        for _ in 0..75 {
            // Until the driver has seen it.
            service.turn(0, &[]).await;
        }
        let before = service.answers.len();
        for _ in 0..20 {
            service.turn(9, &[]).await;
        }
        assert_eq!(service.answers.len(), before);
        assert_eq!(service.get(id).await.completed, before as u64);
        assert_eq!(service.ended_after(id, 0).await.len(), before, "they can be read meanwhile");
        let resumed = service.change(id, BatchChange::Resume).await;
        assert!(resumed.expires_at > deadline);
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..25 {
            let change = match random.u32(..6) {
                0 => BatchChange::Cancel,
                1 => BatchChange::Pause { now: random.bool() },
                2 | 3 => BatchChange::Resume,
                _ => BatchChange::retry_all(),
            };
            service.rig.store.change_batch(&acme, id, &change, MANY).await.unwrap().unwrap();
            for _ in 0..random.u32(..25) {
                service.turn(random.usize(..2), &["q7"]).await;
            }
        }
        let batch = loop {
            let batch = service.get(id).await;
            match batch.state {
                BatchState::Completed if batch.failed == 0 => break batch,
                BatchState::Completed => service.change(id, BatchChange::retry_all()).await,
                BatchState::Paused | BatchState::Cancelled => {
                    service.change(id, BatchChange::Resume).await
                }
                _ => {
                    service.turn(4, &[]).await;
                    continue;
                }
            };
        };
        assert_eq!(batch.completed, 40);
        let names: Vec<String> = (1..=40).map(|line| format!("q{line}")).collect();
        assert_eq!(service.names(batch.output).await, names);
        assert!(service.answers.len() == 40 && service.answers.values().all(|times| *times == 1));
        service.stop().await;
    })
    .await;
}
