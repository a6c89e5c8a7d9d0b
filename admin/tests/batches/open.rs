//! Open batches: lines that are added while they run, also twice and beside their end.

use tritmill_admin::store::{
    batches::MIXED,
    files::{FILE_CHUNK_BYTES, StoredChunk},
    open_batches::{AddedLine, AddedLines, Adding},
};

use super::{driven::Service, *};

/// A line with a name, of which the request has a number.
fn line(name: &str, request: u8) -> AddedLine {
    let body = format!(r#"{{"model":"tiny","prompt":"a","seed":{request}}}"#);
    let text = format!(
        r#"{{"custom_id":"{name}","method":"POST","url":"/v1/completions","body":{body}}}"#
    );
    let mut hash = [0; 16];
    hash[..name.len()].copy_from_slice(name.as_bytes());
    let model = ("tiny".to_owned(), queue());
    AddedLine { name: hash, key: [request; 32], model, text: text.into_bytes() }
}

fn lines(lines: impl IntoIterator<Item = AddedLine>) -> AddedLines {
    let lines = lines.into_iter().collect();
    AddedLines { lines, lines_max: 1000, bytes_max: 64 << 20, models_max: 2 }
}

async fn add(store: &Arc<dyn TestStore>, batch: &Batch, new: &AddedLines) -> Adding {
    store.add_lines(&batch.tenant, batch.id, new).await.unwrap().unwrap()
}

/// Returns how many lines were added, and how many the batch had.
fn counts(adding: &Adding) -> (u64, u64, u64) {
    match adding {
        Adding::Added { batch, added, known } => (*added, *known, batch.total_lines()),
        other => panic!("{other:?}"),
    }
}

/// Creates an open batch, with lines of a file or without.
async fn open(store: &Arc<dyn TestStore>, owner: &Tenant, endpoint: &str, text: &str) -> Batch {
    let own = file(owner);
    store.create_file(&own).await.unwrap();
    let ended = match text {
        "" => String::new(),
        text => format!("{}\n", text.trim_end_matches('\n')),
    };
    if !text.is_empty() {
        store.put_chunk(own.id, 0, ChunkContent::Bytes(ended.as_bytes())).await.unwrap();
    }
    store.complete_file(own.id, ended.len() as u64, None).await.unwrap();
    let created_at = store.now().await.unwrap();
    let expires_at = created_at.after(Duration::from_secs(86_400));
    let endpoint = endpoint.to_owned();
    let new = Batch { is_open: true, endpoint, created_at, expires_at, ..batch(owner, own.id) };
    assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
    new
}

/// Returns the bytes of a chunk of an open batch's file, which is in the database.
async fn chunk(store: &Arc<dyn TestStore>, file: FileId, number: u32) -> Vec<u8> {
    match store.chunk(file, number).await.unwrap() {
        Some(StoredChunk::Bytes(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

/// Lets an open batch be in progress, as its driver does.
async fn begin(store: &Arc<dyn TestStore>) -> BatchClaim {
    let mut held = claim(store).await.unwrap();
    held.batch.enter(BatchState::InProgress, store.now().await.unwrap());
    assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
    held
}

#[tokio::test]
async fn line_is_added_once_and_only_while_the_batch_is_open() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let new = open(store, &acme, "/v1/completions", "").await;
        let first = lines([line("a", 1), line("b", 2)]);
        assert_eq!(add(store, &new, &first).await, Adding::Validating);
        let other = store.add_lines(&tenant("other"), new.id, &first).await.unwrap();
        assert_eq!(other, None);
        let held = begin(store).await;
        assert_eq!(counts(&add(store, &new, &first).await), (2, 0, 2));
        // The first line of a model ends the claim of the driver, which must know it.
        assert!(!store.save_batch(&held, BatchWrites::default()).await.unwrap());
        let held = claim(store).await.unwrap();
        assert_eq!((held.batch.queue.clone(), held.batch.added), (Some(queue()), 2));
        // Further ones do not.
        assert_eq!(
            counts(&add(store, &new, &lines([line("b", 2), line("c", 3)])).await),
            (1, 1, 3)
        );
        assert_eq!(counts(&add(store, &new, &lines([line("c", 3)])).await), (0, 1, 3));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        assert_eq!(store.batch(&acme, new.id).await.unwrap().unwrap().total_lines(), 3);
        release(store, &held).await;
        // What is refused changes nothing.
        let taken = lines([line("d", 4), line("a", 9)]);
        assert_eq!(add(store, &new, &taken).await, Adding::OtherRequest(1));
        let mut few = lines([line("d", 4)]);
        few.lines_max = 3;
        assert_eq!(add(store, &new, &few).await, Adding::ManyLines);
        few = AddedLines { bytes_max: 300, ..lines([line("d", 4)]) };
        assert_eq!(add(store, &new, &few).await, Adding::TooLarge);
        let mut foreign = line("d", 4);
        foreign.model.1.model = "large".to_owned();
        assert_eq!(add(store, &new, &lines([foreign])).await, Adding::OtherModel(0));
        assert_eq!(store.batch(&acme, new.id).await.unwrap().unwrap().total_lines(), 3);
        let stored = chunk(store, new.input, 0).await;
        let expected = [("a", 1), ("b", 2), ("c", 3)].map(|(name, n)| line(name, n).text);
        assert_eq!(stored, [expected.join(&b'\n'), vec![b'\n']].concat());
        store.sweep_batches().await.unwrap();
        assert_eq!(
            counts(&add(store, &new, &lines([line("a", 1)])).await),
            (0, 1, 3),
            "names stay"
        );
        // Sealed, also twice.
        for _ in 0..2 {
            match change(store, &acme, new.id, BatchChange::Seal).await.unwrap() {
                Changed::Done(batch) => assert!(!batch.is_open && batch.at.sealed.is_some()),
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(add(store, &new, &lines([line("a", 1)])).await, Adding::Closed(_)));
        // A batch that was never open.
        let plain = create(store, &acme).await;
        assert!(matches!(add(store, &plain, &first).await, Adding::Closed(_)));
        let sealed = change(store, &acme, plain.id, BatchChange::Seal).await.unwrap();
        assert!(matches!(sealed, Changed::Refused(_)));
        cancel(store, &acme, plain.id).await;
    })
    .await;
}

#[tokio::test]
async fn models_of_a_mixed_batch_are_bounded_and_its_file_grows_by_chunks() {
    all(async |Rig { store, .. }| {
        let acme = tenant("acme");
        // The file that it begins with has no line end, and nearly fills a chunk.
        let begun = "x".repeat(FILE_CHUNK_BYTES - 1);
        let new = open(&store, &acme, MIXED, &begun).await;
        begin(&store).await;
        let of = |name: &str, model: &str| {
            let mut line = line(name, 1);
            line.model = (model.to_owned(), queue());
            line
        };
        assert_eq!(
            counts(&add(&store, &new, &lines([of("a", "m"), of("b", "n")])).await),
            (2, 0, 2)
        );
        assert_eq!(add(&store, &new, &lines([of("c", "o")])).await, Adding::ManyModels(0));
        let known = store.batch(&acme, new.id).await.unwrap().unwrap();
        assert_eq!(known.queues.keys().map(String::as_str).collect::<Vec<_>>(), ["m", "n"]);
        let first = chunk(&store, new.input, 0).await;
        assert_eq!((first.len(), first.last()), (FILE_CHUNK_BYTES, Some(&b'\n')));
        let second = chunk(&store, new.input, 1).await;
        let size = store.file(&acme, new.input).await.unwrap().unwrap().size_bytes;
        assert_eq!(size, (first.len() + second.len()) as u64);
        // After a whole chunk.
        let rest = FILE_CHUNK_BYTES - second.len() - 1;
        let fill = AddedLine { text: vec![b'y'; rest], ..of("d", "m") };
        assert_eq!(counts(&add(&store, &new, &lines([fill, of("e", "m")])).await), (2, 0, 4));
        assert_eq!(chunk(&store, new.input, 1).await.len(), FILE_CHUNK_BYTES);
        let third = chunk(&store, new.input, 2).await;
        assert_eq!(third, [of("e", "m").text, vec![b'\n']].concat());
        cancel(&store, &acme, new.id).await;
    })
    .await;
}

#[tokio::test]
async fn open_batch_runs_lines_as_they_come_and_ends_after_the_seal() {
    all(async |rig: Rig| {
        let mut service = Service::start(rig, 100);
        let (store, acme) = (service.rig.store.clone(), tenant("acme"));
        let text = |name: &str| String::from_utf8(line(name, 1).text).unwrap();
        let new = open(&store, &acme, "/v1/completions", &text("a")).await;
        service.until(new.id, BatchState::InProgress, &[]).await;
        let begun = |service: &Service, names: &[&str]| {
            names.iter().all(|name| service.answers.contains_key(*name))
        };
        for name in ["b", "c"] {
            add(&store, &new, &lines([line(name, 1)])).await;
            for _ in 0..1000 {
                if begun(&service, &["a", name]) {
                    break;
                }
                service.turn(4, &[]).await;
            }
            assert!(begun(&service, &["a", name]), "{name} is answered before the seal");
        }
        let known = service.get(new.id).await;
        assert_eq!((known.state, known.total_lines()), (BatchState::InProgress, 3));
        add(&store, &new, &lines([line("d", 1)])).await;
        service.change(new.id, BatchChange::Seal).await;
        let ended = service.until(new.id, BatchState::Completed, &[]).await;
        assert_eq!((ended.completed, ended.failed, ended.total_lines()), (4, 0, 4));
        assert!(matches!(add(&store, &new, &lines([line("d", 1)])).await, Adding::Closed(_)));
        assert!(service.answers.values().all(|count| *count == 1), "{:?}", service.answers);
        service.stop().await;
    })
    .await;
}
