//! Batches after other ones: their lines are made when the earlier batch has ended, also by several processes one after another.

use serde_json::{Value, json};
use tritmill_admin::{
    line_template::LineTemplate,
    store::{
        after::After, batches::BatchDeletion, files::FILE_CHUNK_BYTES, step_state::MakingState,
    },
};

use super::{driven::Service, *};

/// The template that asks about an earlier answer.
fn template() -> LineTemplate {
    let body =
        json!({ "model": "tiny", "prompt": "({{ previous.body.prompt }}) {{ previous.content }}" });
    of_lines(json!({ "url": "/v1/completions", "body": body }))
}

fn of_lines(lines: Value) -> LineTemplate {
    LineTemplate::parse(lines, "/v1/completions", "").unwrap()
}

/// A batch after another one, which is not created.
fn later(owner: &Tenant, earlier: BatchId, lines: LineTemplate) -> Batch {
    let after = Some(Box::new(After::new(earlier, lines)));
    Batch { after, ..batch(owner, FileId::generate()) }
}

async fn create_after(service: &Service, earlier: BatchId, lines: LineTemplate) -> BatchId {
    let owner = service.get(earlier).await.tenant;
    let new = later(&owner, earlier, lines);
    assert_eq!(service.rig.store.create_batch(&new, MANY).await.unwrap(), Creation::New);
    new.id
}

/// Returns the lines of a file.
pub(super) async fn content(store: &Arc<dyn TestStore>, file: FileId) -> Vec<Value> {
    let mut bytes = Vec::new();
    for number in 0.. {
        match store.chunk(file, number).await.unwrap() {
            Some(StoredChunk::Bytes(chunk)) => bytes.extend(chunk),
            None => break,
            other => panic!("{other:?}"),
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Creates a batch of a file of lines; returns it before it is driven.
async fn of_text(store: &Arc<dyn TestStore>, owner: &Tenant, text: &str) -> BatchId {
    let input = file(owner);
    store.create_file(&input).await.unwrap();
    for (number, chunk) in (0..).zip(text.as_bytes().chunks(FILE_CHUNK_BYTES)) {
        store.put_chunk(input.id, number, ChunkContent::Bytes(chunk)).await.unwrap();
    }
    store.complete_file(input.id, text.len() as u64, None).await.unwrap();
    let new = batch(owner, input.id);
    assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
    new.id
}

/// Lines that are refused, and so end without a worker.
pub(super) fn refused_lines(count: usize) -> String {
    let line = |number| {
        let body = json!({ "model": "tiny", "prompt": "a", "temperature": 9 });
        let line = json!({
            "custom_id": format!("q{number}"), "method": "POST", "url": "/v1/completions", "body": body,
        });
        format!("{line}\n")
    };
    (1..=count).map(line).collect()
}

#[tokio::test]
async fn batch_waits_for_another_of_its_tenant_which_is_kept_until_then() {
    all(async |Rig { store, .. }| {
        let (acme, hour) = (tenant("acme"), Duration::from_secs(3600));
        let earlier = create(&store, &acme).await;
        let foreign = later(&tenant("other"), earlier.id, template());
        assert_eq!(store.create_batch(&foreign, MANY).await.unwrap(), Creation::NoEarlier);
        let unknown = later(&acme, BatchId::generate(), template());
        assert_eq!(store.create_batch(&unknown, MANY).await.unwrap(), Creation::NoEarlier);
        let keyed =
            Batch { idempotency_key: Some("k".to_owned()), ..later(&acme, earlier.id, template()) };
        assert_eq!(store.create_batch(&keyed, MANY).await.unwrap(), Creation::New);
        let again = Batch { id: BatchId::generate(), ..keyed.clone() };
        let known = store.create_batch(&again, MANY).await.unwrap();
        assert_eq!(known, Creation::Known(Box::new(keyed.clone())));
        let second = later(&acme, keyed.id, template());
        assert_eq!(store.create_batch(&second, 2).await.unwrap(), Creation::Full);
        assert_eq!(store.create_batch(&second, MANY).await.unwrap(), Creation::New);
        // A process looks at those that wait; one of them it still has when the earlier batch ends.
        let mut claims = claim_of(&store, Claimable::Released, 3).await;
        let mut take = |id| {
            let at = claims.iter().position(|claim| claim.batch.id == id).unwrap();
            claims.remove(at)
        };
        let (mut first, waiting, behind) = (take(earlier.id), take(keyed.id), take(second.id));
        store.release_batch(second.id, behind.epoch, hour).await.unwrap();
        first.batch.enter(BatchState::Completed, Timestamp(5));
        assert!(store.save_batch(&first, BatchWrites::default()).await.unwrap());
        release(&store, &first).await;
        store.release_batch(keyed.id, waiting.epoch, hour).await.unwrap();
        let mut woken = claim(&store).await.unwrap();
        assert_eq!(woken.batch, keyed);
        assert!(claim(&store).await.is_none(), "the one behind it waits for it alone");
        // What it will be made of is kept.
        let refused = store.delete_batch(&acme, earlier.id).await.unwrap();
        assert_eq!(refused, BatchDeletion::Awaited(keyed.id));
        let in_use = store.delete_file(&acme, earlier.input).await.unwrap();
        assert_eq!(in_use, FileDeletion::InUse);
        // Its lines are made.
        let lines = file(&acme);
        store.create_file(&lines).await.unwrap();
        let files = [(lines.id, 1, None)];
        woken.batch.input = lines.id;
        woken.batch.after.as_mut().unwrap().made_at = Some(Timestamp(6));
        let writes = BatchWrites { files: &files, ..BatchWrites::default() };
        assert!(store.save_batch(&woken, writes).await.unwrap());
        assert_eq!(store.delete_file(&acme, lines.id).await.unwrap(), FileDeletion::InUse);
        assert_eq!(store.batch(&acme, keyed.id).await.unwrap().unwrap(), woken.batch);
        assert_eq!(store.delete_batch(&acme, earlier.id).await.unwrap(), BatchDeletion::Deleted);
        release(&store, &woken).await;
        // One that was cancelled waits no more, until it is resumed.
        let held = cancel(&store, &acme, second.id).await.unwrap();
        assert_eq!(held.awaited(), Some(keyed.id));
        let ids = [second.id, keyed.id];
        let mut both = claim_of(&store, Claimable::Released, 2).await;
        both.sort_by_key(|claim| ids.iter().position(|id| *id == claim.batch.id));
        both[0].batch.enter(BatchState::Cancelled, Timestamp(7));
        both[1].batch.enter(BatchState::Completed, Timestamp(7));
        for held in &both {
            assert!(store.save_batch(held, BatchWrites::default()).await.unwrap());
        }
        let resumed = change(&store, &acme, second.id, BatchChange::Resume).await.unwrap();
        assert!(matches!(resumed, Changed::Done(_)));
        let awaited = store.delete_batch(&acme, keyed.id).await.unwrap();
        assert_eq!(awaited, BatchDeletion::Awaited(second.id));
        cancel(&store, &acme, second.id).await;
    })
    .await;
}

#[tokio::test]
async fn chain_goes_on_with_the_lines_that_have_answers() {
    all(async |rig: Rig| {
        let (mut service, acme) = (Service::start(rig, 1000), tenant("acme"));
        let store = service.rig.store.clone();
        let first = service.batch(&acme, 5).await;
        let second = create_after(&service, first, template()).await;
        let third = create_after(&service, second, template()).await;
        for _ in 0..20 {
            service.turn(0, &[]).await;
        }
        for waiting in [second, third] {
            let waiting = service.get(waiting).await;
            assert_eq!((waiting.state, waiting.has_input()), (BatchState::Validating, false));
        }
        let ended = service.until(first, BatchState::Completed, &["q2"]).await;
        assert_eq!((ended.completed, ended.failed), (4, 1));
        let ended = service.until(second, BatchState::Completed, &["q4"]).await;
        assert_eq!((ended.completed, ended.failed, ended.total_lines()), (3, 2, 5));
        let began = ended.after.as_ref().unwrap().began_at.unwrap();
        assert_eq!(ended.expires_at, began.after(Duration::from_secs(86_400)));
        let made = content(&store, ended.input).await;
        assert_eq!(made.len(), 5);
        assert_eq!(
            made[0],
            json!({
                "custom_id": "q1", "method": "POST", "url": "/v1/completions",
                "body": { "model": "tiny", "prompt": "(a) q1" },
            })
        );
        assert_eq!(made[1]["row_error"]["code"], "previous_line_failed");
        let last = service.until(third, BatchState::Completed, &[]).await;
        assert_eq!((last.completed, last.failed, last.refused), (3, 2, 2));
        assert_eq!(service.names(last.output).await, ["q1", "q3", "q5"]);
        let errors = content(&store, last.error_file.unwrap()).await;
        for (line, name, cause) in [(0, "q2", "(previous_line_failed)"), (1, "q4", "(c): m")] {
            assert_eq!(errors[line]["custom_id"], name);
            assert_eq!(errors[line]["response"]["status_code"], 424);
            let error = &errors[line]["response"]["body"]["error"];
            assert_eq!(error["code"], "previous_line_failed");
            assert!(error["message"].as_str().unwrap().contains(cause), "{error}");
        }
        assert_eq!(content(&store, last.input).await[0]["body"]["prompt"], "((a) q1) q1");
        // What is retried afterwards is not followed; a retry of the later batch is its own.
        service.change(first, BatchChange::retry_all()).await;
        let retried = service.until(first, BatchState::Completed, &[]).await;
        assert_eq!(retried.completed, 5);
        service.change(second, BatchChange::retry_all()).await;
        let again = service.until(second, BatchState::Completed, &[]).await;
        assert_eq!((again.completed, again.failed), (4, 1));
        assert_eq!(service.get(third).await.completed, 3);
        // One that comes behind an ended batch begins at once.
        let late = create_after(&service, second, template()).await;
        let late = service.until(late, BatchState::Completed, &[]).await;
        assert_eq!((late.completed, late.failed), (4, 1));
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn what_an_earlier_batch_leaves_decides_how_the_later_one_ends() {
    all(async |rig: Rig| {
        let (mut service, acme) = (Service::start(rig, 4), tenant("acme"));
        let store = service.rig.store.clone();
        let codes = |lines: Vec<Value>| -> Vec<String> {
            let text = |line: &Value| line["row_error"]["message"].as_str().map(str::to_owned);
            let code = |text: String| text.split(['(', ')']).nth(1).unwrap_or_default().to_owned();
            lines.iter().filter_map(text).map(code).collect()
        };
        // Cancelled, with some answers; lines were never reached.
        let first = service.batch(&acme, 8).await;
        let second = create_after(&service, first, template()).await;
        while service.answers.len() < 2 {
            service.turn(1, &[]).await;
        }
        service.change(first, BatchChange::Cancel).await;
        let cancelled = service.turns(first, BatchState::Cancelled, 0, &[]).await;
        let ended = service.until(second, BatchState::Completed, &[]).await;
        assert_eq!((ended.completed, ended.total_lines()), (cancelled.completed, 8));
        assert!(ended.completed >= 2 && ended.completed + ended.failed == 8);
        let causes = codes(content(&store, ended.input).await);
        assert!(causes.len() as u64 == ended.failed, "{causes:?}");
        assert!(causes.iter().all(|cause| cause == "batch_cancelled"), "{causes:?}");
        // Expired.
        let first = service.batch(&acme, 3).await;
        let second = create_after(&service, first, template()).await;
        service.turns(first, BatchState::InProgress, 0, &[]).await;
        service.rig.advance(Duration::from_secs(90_000));
        service.turns(first, BatchState::Expired, 0, &[]).await;
        let ended = service.turns(second, BatchState::Completed, 0, &[]).await;
        assert_eq!((ended.completed, ended.failed), (0, 3));
        assert_eq!(codes(content(&store, ended.input).await), ["batch_expired"; 3]);
        // Rejected, and what comes behind it.
        let first = of_text(&store, &acme, "{\n").await;
        let second = create_after(&service, first, template()).await;
        let third = create_after(&service, second, template()).await;
        let ended = service.turns(third, BatchState::Failed, 0, &[]).await;
        assert_eq!(ended.errors[0].code, "previous_batch_failed");
        assert!(ended.errors[0].message.contains(&second.to_string()));
        // Cancelled while it waits: there are no lines.
        let first = service.batch(&acme, 3).await;
        let second = create_after(&service, first, template()).await;
        let third = create_after(&service, second, template()).await;
        service.change(second, BatchChange::Cancel).await;
        let ended = service.turns(second, BatchState::Cancelled, 0, &[]).await;
        assert_eq!((ended.output, ended.total_lines()), (None, 0));
        let ended = service.turns(third, BatchState::Failed, 0, &[]).await;
        assert_eq!(ended.errors[0].code, "previous_batch_failed");
        service.until(first, BatchState::Completed, &[]).await;
        // Resumed, it begins.
        service.change(second, BatchChange::Resume).await;
        let ended = service.until(second, BatchState::Completed, &[]).await;
        assert_eq!((ended.completed, ended.failed), (3, 0));
        // Its earlier batch was deleted while it was cancelled.
        let second = create_after(&service, first, template()).await;
        service.change(second, BatchChange::Pause { now: false }).await;
        service.change(second, BatchChange::Cancel).await;
        service.turns(second, BatchState::Cancelled, 0, &[]).await;
        assert_eq!(store.delete_batch(&acme, first).await.unwrap(), BatchDeletion::Deleted);
        service.change(second, BatchChange::Resume).await;
        let ended = service.turns(second, BatchState::Failed, 0, &[]).await;
        assert_eq!(ended.errors[0].code, "previous_batch_not_found");
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn template_decides_names_and_lines_that_it_cannot_make() {
    all(async |rig: Rig| {
        let (mut service, acme) = (Service::start(rig, 1000), tenant("acme"));
        let store = service.rig.store.clone();
        let line = |name: &str, body: Value| {
            let line = json!({
                "custom_id": name, "method": "POST", "url": "/v1/completions", "body": body,
            });
            format!("{line}\n\n")
        };
        let text = [
            line("a", json!({ "model": "tiny", "prompt": "a", "max_tokens": 5 })),
            line("b", json!({ "model": "tiny", "prompt": "b" })),
            line("c", json!({ "model": "tiny", "prompt": "c", "temperature": 9 })),
        ];
        let first = of_text(&store, &acme, &text.concat()).await;
        let lines = |name: &str| {
            of_lines(json!({
                "custom_id": name, "url": "/v1/completions",
                "body": { "model": "tiny", "prompt": "x", "max_tokens": "{{ previous.body.max_tokens }}" },
            }))
        };
        let second = create_after(&service, first, lines("{{ previous.custom_id }}-2")).await;
        let ended = service.until(second, BatchState::Completed, &[]).await;
        assert_eq!((ended.completed, ended.failed, ended.total_lines()), (1, 2, 3));
        assert_eq!(service.names(ended.output).await, ["a-2"]);
        let errors = content(&store, ended.error_file.unwrap()).await;
        let error = |line: usize, field: &str| errors[line]["response"]["body"]["error"][field].clone();
        assert_eq!((&errors[0]["custom_id"], &errors[1]["custom_id"]), (&json!("b"), &json!("c")));
        assert_eq!(error(0, "code"), "template_missing_field");
        assert_eq!(error(0, "param"), "previous.body.max_tokens");
        assert_eq!(error(1, "code"), "previous_line_failed");
        assert!(error(1, "message").as_str().unwrap().contains("invalid_value"));
        // Names that are the same are found as in any file.
        let same = create_after(&service, second, lines("{{ previous.body.model }}")).await;
        let ended = service.until(same, BatchState::Completed, &[]).await;
        assert_eq!(ended.total_lines(), 3, "one line has an answer");
        let both = of_text(&store, &acme, &(text[0].clone() + &line("d", json!({
            "model": "tiny", "prompt": "a", "max_tokens": 5 })))).await;
        let same = create_after(&service, both, lines("{{ previous.body.model }}")).await;
        let ended = service.until(same, BatchState::Failed, &[]).await;
        assert_eq!(ended.errors[0].code, "duplicate_custom_id");
        service.stop().await;
    })
    .await;
}

#[tokio::test]
async fn interrupted_lines_are_made_once_and_begin_again_when_they_were_swept() {
    const LINES: usize = 21_000;
    all(async |rig: Rig| {
        let acme = tenant("acme");
        let mut service = Service::start(rig, 1000);
        let store = service.rig.store.clone();
        let first = of_text(&store, &acme, &refused_lines(LINES)).await;
        service.turns(first, BatchState::Completed, 0, &[]).await;
        let second = create_after(&service, first, template()).await;
        // Waits for a state of the lines that was not there, and stops the process.
        let some = async |mut service: Service, before: MakingState| loop {
            let batch = service.get(second).await;
            assert!(!batch.has_input(), "it is not made in one step");
            let is_other = |state: &MakingState| {
                state.lines > before.lines
                    || (state.lines > 0
                        && state.file.map(|part| part.file) != before.file.map(|part| part.file))
            };
            match batch.steps.making.filter(is_other) {
                Some(state) => break (service.halt().await, state),
                None => service.turn(0, &[]).await,
            }
        };
        let file = |state: MakingState| state.file.unwrap().file;
        // The process ends in the middle, and the unfinished file is swept before another one goes on.
        let (rig, state) = some(service, MakingState::default()).await;
        assert!((state.lines as usize) < LINES && state.lines == state.read.line);
        store.abandon_file(file(state)).await.unwrap();
        let (rig, anew) = some(Service::start(rig, 1000), state).await;
        assert_ne!(file(anew), file(state));
        // The earlier batch is opened again: the rest is made when it has ended.
        let mut service = Service::start(rig, 1000);
        service.change(first, BatchChange::retry_all()).await;
        let ended = service.turns(second, BatchState::Completed, 0, &[]).await;
        assert_eq!((ended.completed, ended.failed), (0, LINES as u64));
        assert_eq!(ended.input, file(anew), "another process goes on with what one has made");
        let made = content(&store, ended.input).await;
        assert_eq!(made.len(), LINES);
        for (number, line) in (1..).zip(&made) {
            assert_eq!(line["custom_id"], format!("q{number}"));
        }
        service.stop().await;
    })
    .await;
}
