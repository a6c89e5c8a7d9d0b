//! Lists with conditions, the archive, and deletion.

use serde_json::json;
use tritmill_admin::store::batches::{BatchDeletion, BatchSearch};

use super::*;

/// The ids of batches that match, the first first.
async fn found(store: &Arc<dyn TestStore>, filter: BatchFilter) -> Vec<BatchId> {
    let page = Page { after: None, limit: 9, ascending: true };
    store.find_batches(&filter, page).await.unwrap().iter().map(|batch| batch.id).collect()
}

#[tokio::test]
async fn batches_are_found_by_metadata_model_text_and_time() {
    all(async |Rig { store, .. }| {
        let acme = tenant("acme");
        let mut ids = Vec::new();
        for (run, model, name) in
            [("1", "small", "Nightly Report.jsonl"), ("2", "large", "week.jsonl")]
        {
            let input = StoredFile { filename: name.to_owned(), ..file(&acme) };
            store.create_file(&input).await.unwrap();
            store.complete_file(input.id, 1, None).await.unwrap();
            let metadata = json!({ "run": run, "owner": "ü%_" });
            let queue = json!({ "model": model, "format": "i2_s" });
            let new = Batch {
                metadata: metadata.as_object().cloned(),
                queue: serde_json::from_value(queue).unwrap(),
                ..batch(&acme, input.id)
            };
            assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
            ids.push(new.id);
        }
        let plain = create(&store, &acme).await.id;
        create(&store, &tenant("other")).await;
        let search =
            async |search: BatchSearch| found(&store, BatchFilter { search, ..of(&acme) }).await;
        let pairs = |pairs: &[(&str, &str)]| BatchSearch {
            metadata: pairs
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_string()))
                .collect(),
            ..BatchSearch::default()
        };
        assert_eq!(search(pairs(&[("owner", "ü%_")])).await, ids);
        assert_eq!(search(pairs(&[("owner", "ü%_"), ("run", "2")])).await, ids[1..]);
        assert!(search(pairs(&[("owner", "ü%_"), ("run", "3")])).await.is_empty());
        let text =
            |text: &str| BatchSearch { text: Some(text.to_owned()), ..BatchSearch::default() };
        assert_eq!(search(text("nightly rep")).await, ids[..1]);
        assert_eq!(search(text(&plain.to_string())).await, [plain]);
        assert!(search(text("%")).await.is_empty(), "it stands for itself");
        let model =
            |model: &str| BatchSearch { model: Some(model.to_owned()), ..BatchSearch::default() };
        assert_eq!(search(model("large")).await, ids[1..]);
        assert_eq!(search(model("small@i2_s")).await, ids[..1]);
        assert!(search(model("small@tl1")).await.is_empty());
        // A batch of several models has none of its own.
        let several = json!({
            "small": { "model": "small", "format": "tl1" },
            "tiny": { "model": "tiny", "format": "tl2" },
        });
        let new = Batch {
            queues: serde_json::from_value(several).unwrap(),
            ..batch(&acme, create(&store, &acme).await.input)
        };
        assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
        assert_eq!(search(model("tiny")).await, [new.id]);
        assert_eq!(search(model("small@tl1")).await, [new.id]);
        assert_eq!(search(model("small")).await, [ids[0], new.id]);
        assert!(search(model("tiny@tl1")).await.is_empty());
        let now = store.now().await.unwrap();
        let since = |at| BatchFilter { created: (Some(at), None), ..of(&acme) };
        // The ids have the time of this machine, not that of the test.
        assert_eq!(found(&store, since(now)).await.len(), 5);
        assert!(found(&store, since(Timestamp(i64::MAX / 2))).await.is_empty());
        let until = BatchFilter { created: (None, Some(now)), ..of(&acme) };
        assert!(found(&store, until).await.is_empty());
    })
    .await;
}

/// Ends the batch that is claimed next, with these output files.
async fn end(store: &Arc<dyn TestStore>, output: Option<FileId>) -> Batch {
    let mut held = claim(store).await.unwrap();
    held.batch.output = output;
    held.batch.enter(BatchState::Completed, Timestamp(9));
    assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
    release(store, &held).await;
    held.batch
}

#[tokio::test]
async fn archived_batches_are_listed_apart() {
    all(async |Rig { store, .. }| {
        let acme = tenant("acme");
        let first = create(&store, &acme).await;
        let running = store.archive_batch(&acme, first.id, true).await.unwrap().unwrap();
        assert_eq!((running.state, running.archived_at), (BatchState::Validating, None));
        end(&store, None).await;
        let second = create(&store, &acme).await;
        assert_eq!(store.archive_batch(&tenant("other"), first.id, true).await.unwrap(), None);
        let archived = store.archive_batch(&acme, first.id, true).await.unwrap().unwrap();
        let since = archived.archived_at.unwrap();
        assert_eq!(since, store.now().await.unwrap());
        let listed = async |archived| found(&store, BatchFilter { archived, ..of(&acme) }).await;
        assert_eq!(listed(Some(false)).await, [second.id]);
        assert_eq!(listed(Some(true)).await, [first.id]);
        assert_eq!(listed(None).await, [first.id, second.id]);
        let back = store.archive_batch(&acme, first.id, false).await.unwrap().unwrap();
        assert_eq!(back.archived_at, None);
        assert_eq!(listed(Some(false)).await, [first.id, second.id]);
    })
    .await;
}

#[tokio::test]
async fn deleted_batch_takes_its_files_jobs_and_results() {
    all(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        let first = create(&store, &acme).await;
        let same = batch(&acme, first.input);
        let output = file(&acme);
        store.create_file(&output).await.unwrap();
        store.complete_file(output.id, 1, None).await.unwrap();
        let gone = BatchDeletion::Unfinished(BatchState::Validating);
        assert_eq!(store.delete_batch(&acme, first.id).await.unwrap(), gone);
        let jobs: Vec<Job> = (1..=3).map(|line| Job { id: first.id.job(line), ..job() }).collect();
        store.submit(&jobs).await.unwrap();
        store.cancel(&[first.id.job(1)]).await.unwrap();
        end(&store, Some(output.id)).await;
        assert_eq!(store.create_batch(&same, MANY).await.unwrap(), Creation::New);
        assert_eq!(store.delete_batch(&other, first.id).await.unwrap(), BatchDeletion::NotFound);
        assert_eq!(store.delete_batch(&acme, first.id).await.unwrap(), BatchDeletion::Deleted);
        assert_eq!(store.delete_batch(&acme, first.id).await.unwrap(), BatchDeletion::NotFound);
        assert_eq!(store.batch(&acme, first.id).await.unwrap(), None);
        assert!(store.file(&acme, output.id).await.unwrap().is_none());
        assert!(store.file(&acme, first.input).await.unwrap().is_some(), "another batch has it");
        while store.erase_deleted_batches().await.unwrap() {}
        assert!(store.ids_in_range(first.id.all_jobs(), 9).await.unwrap().is_empty());
        assert!(!store.erase_deleted_batches().await.unwrap());
        end(&store, None).await;
        assert_eq!(store.delete_batch(&acme, same.id).await.unwrap(), BatchDeletion::Deleted);
        assert!(store.file(&acme, first.input).await.unwrap().is_none());
    })
    .await;
}
