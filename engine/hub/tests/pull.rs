//! Pulls from a server on this machine, with its faults.

mod fake_hub;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use fake_hub::{COMMIT, FakeHub, Faults, REPOSITORY, hash_of};
use tempfile::TempDir;
use tritmill_hub::{Event, PullError, Pulled, Reference, Settings, cached, pull};

/// A cache in a folder of its own, and a hub.
struct Rig {
    hub: FakeHub,
    folder: TempDir,
    settings: Settings,
}

/// Bytes of the large file: more than one part of an answer.
const LARGE: usize = 300_000;

fn weights() -> Vec<u8> {
    (0..LARGE).map(|i| (i * 31 % 251) as u8).collect()
}

impl Rig {
    fn new(files: &[(&str, &[u8])], faults: Faults) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let hub = FakeHub::start(files, faults);
        let mut settings = Settings::at(&hub.endpoint, folder.path()).expect("good settings");
        settings.retry_delay = Duration::from_millis(1);
        settings.timeout = Duration::from_secs(20);
        Self { hub, folder, settings }
    }

    /// With one GGUF file.
    fn gguf(faults: Faults) -> Self {
        Self::new(&[("README.md", b"read me"), ("m-i2_s.gguf", &weights())], faults)
    }

    fn pull(&self, reference: &str) -> Result<Pulled, PullError> {
        pull(&self.settings, &parse(reference), &mut |_| {})
    }

    /// Pulls what fails, and returns the message.
    fn fails(&self, reference: &str) -> String {
        let message = self.pull(reference).expect_err("it fails").to_string();
        assert!(!message.contains('\n') && !message.contains("secret"), "{message}");
        message
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("models--tiny--model-1.58")
    }

    fn partial(&self) -> PathBuf {
        self.model().join("blobs").join(format!("{}.incomplete", hash_of(&weights())))
    }
}

fn parse(reference: &str) -> Reference {
    reference.parse().expect("a reference")
}

fn check_file(path: &Path) {
    assert!(fs::read(path).expect("it is there") == weights(), "the content differs");
}

#[test]
fn gguf_is_stored_in_the_layout_of_the_hub() {
    let rig = Rig::gguf(Faults::default());
    let pulled = rig.pull(REPOSITORY).expect("it arrives");
    assert_eq!(pulled.path, rig.model().join("snapshots").join(COMMIT).join("m-i2_s.gguf"));
    assert_eq!((pulled.commit.as_str(), pulled.downloaded_bytes), (COMMIT, LARGE as u64));
    check_file(&pulled.path);
    check_file(&rig.model().join("blobs").join(hash_of(&weights())));
    let commit = fs::read_to_string(rig.model().join("refs/main")).expect("a revision");
    assert_eq!(commit, COMMIT);
    assert!(!rig.partial().exists());
    let again = rig.pull(REPOSITORY).expect("it is there");
    assert_eq!((again.path, again.downloaded_bytes), (pulled.path, 0));
}

#[test]
fn folder_has_its_texts_and_weights_and_nothing_else() {
    let weights = weights();
    let files: [(&str, &[u8]); 5] = [
        ("README.md", b"read me"),
        ("config.json", b"{}"),
        ("model.safetensors", &weights),
        ("tokenizer.json", b"{\"a\": 1}"),
        ("pytorch_model.bin", b"pickle"),
    ];
    let rig = Rig::new(&files, Faults::default());
    let pulled = rig.pull(&format!("{REPOSITORY}@refs/pr/1")).expect("it arrives");
    let mut names: Vec<String> = fs::read_dir(&pulled.path)
        .expect("a folder")
        .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    let text = fs::read_to_string(pulled.path.join("tokenizer.json")).expect("a file");
    assert_eq!(text, "{\"a\": 1}");
    check_file(&pulled.path.join("model.safetensors"));
    assert!(rig.model().join("refs/refs/pr/1").is_file());
}

#[test]
fn dropped_connection_continues_where_it_ended() {
    let rig = Rig::gguf(Faults { cuts: vec![70_000, 100_000], ..Faults::default() });
    let mut retries = 0;
    let pulled = pull(&rig.settings, &parse(REPOSITORY), &mut |event| {
        retries += u32::from(matches!(event, Event::Retrying { .. }));
    });
    check_file(&pulled.expect("it arrives").path);
    assert_eq!(retries, 2);
    let requests = rig.hub.seen("GET /content/");
    let ranges: Vec<_> = requests.iter().map(|seen| seen.range.as_deref()).collect();
    assert_eq!(ranges, [None, Some("bytes=100000-"), Some("bytes=170000-")]);
}

#[test]
fn next_process_continues_a_file_that_was_given_up() {
    let rig = Rig::gguf(Faults { cuts: vec![10; 50], ..Faults::default() });
    let error = rig.fails(REPOSITORY);
    let expect = "m-i2_s.gguf was interrupted at 60 of 300000 bytes, 6 times in a row: ";
    assert!(error.starts_with(expect) && error.ends_with("continues there"), "{error}");
    assert_eq!(fs::metadata(rig.partial()).expect("it stays").len(), 60);
    rig.hub.set(Faults::default());
    let pulled = rig.pull(REPOSITORY).expect("it arrives");
    assert_eq!(pulled.downloaded_bytes, LARGE as u64 - 60);
    check_file(&pulled.path);
}

#[test]
fn server_without_ranges_sends_all_of_it_again() {
    let cuts = vec![50_000];
    let rig = Rig::gguf(Faults { cuts, no_ranges: true, ..Faults::default() });
    check_file(&rig.pull(REPOSITORY).expect("it arrives").path);
}

#[test]
fn wrong_hash_is_refused_and_deleted() {
    let rig = Rig::gguf(Faults { damaged: true, ..Faults::default() });
    let error = rig.fails(REPOSITORY);
    let expect = format!("the hub says {}", hash_of(&weights()));
    assert!(
        error.starts_with("m-i2_s.gguf arrived damaged") && error.ends_with(&expect),
        "{error}"
    );
    assert!(!rig.partial().exists(), "it would be continued for ever");
    assert!(cached(&rig.settings, &parse(REPOSITORY)).is_none());
    rig.hub.set(Faults::default());
    check_file(&rig.pull(REPOSITORY).expect("it arrives").path);
}

#[test]
fn damaged_part_of_an_earlier_process_is_replaced() {
    for part in [vec![7; 1000], vec![7; LARGE], vec![7; LARGE + 1]] {
        let rig = Rig::gguf(Faults::default());
        fs::create_dir_all(rig.model().join("blobs")).expect("a folder");
        fs::write(rig.partial(), part).expect("a file");
        check_file(&rig.pull(REPOSITORY).expect("it arrives").path);
    }
}

#[test]
fn gated_repository_needs_the_token_which_only_the_hub_gets() {
    let mut rig = Rig::gguf(Faults { gate: Some("hf_right".to_owned()), ..Faults::default() });
    let error = rig.fails(REPOSITORY);
    let page = format!("{}/{REPOSITORY}", rig.hub.endpoint);
    let expect = format!("{REPOSITORY} is gated: accept its licence at {page}, then set HF_TOKEN");
    assert!(error.starts_with(&expect), "{error}");
    rig.settings.token = Some("hf_wrong".into());
    let error = rig.fails(REPOSITORY);
    assert!(
        error.starts_with("the hub refuses the token") && error.ends_with("bad token"),
        "{error}"
    );
    rig.settings.token = Some("hf_right".into());
    check_file(&rig.pull(REPOSITORY).expect("it arrives").path);
    assert!(rig.hub.seen("/content/").iter().all(|seen| seen.token.is_none()));
}

#[test]
fn what_does_not_exist_is_named() {
    let rig = Rig::gguf(Faults::default());
    let check = |reference: &str, expect: &str| {
        let error = rig.fails(reference);
        assert!(error.contains(expect), "{error}");
    };
    check("tiny/other", "no repository tiny/other");
    check("tiny/model-1.58@v2", "tiny/model-1.58 has no revision v2");
    check("tiny/model-1.58:x.gguf", "tiny/model-1.58 has no file x.gguf at revision main");
}

#[test]
fn several_models_are_listed() {
    let weights = weights();
    let rig =
        Rig::new(&[("a.TQ1_0.gguf", &weights), ("b.TQ2_0.gguf", &weights)], Faults::default());
    let error = rig.fails(REPOSITORY);
    assert!(error.contains("--file: a.TQ1_0.gguf (0.00 GB), b.TQ2_0.gguf"), "{error}");
    let pulled = rig.pull(&format!("{REPOSITORY}:b.TQ2_0.gguf")).expect("one is chosen");
    assert!(pulled.path.ends_with("b.TQ2_0.gguf"));
}

#[test]
fn offline_uses_the_cache_or_fails() {
    let mut rig = Rig::gguf(Faults::default());
    rig.settings.offline = true;
    let error = rig.fails(REPOSITORY);
    assert!(error.starts_with("hf:tiny/model-1.58 is not completely in the cache"), "{error}");
    assert!(error.ends_with("HF_HUB_OFFLINE is set"), "{error}");
    rig.settings.offline = false;
    let online = rig.pull(REPOSITORY).expect("it arrives");
    let asked = rig.hub.seen("").len();
    rig.settings.offline = true;
    assert_eq!(rig.pull(REPOSITORY).expect("it is there").path, online.path);
    rig.settings.offline = false;
    let pinned = format!("{REPOSITORY}@{COMMIT}");
    assert_eq!(rig.pull(&pinned).expect("a commit never changes").path, online.path);
    assert_eq!(rig.hub.seen("").len(), asked, "nothing was asked");
}

#[test]
fn cache_is_used_while_the_hub_is_away() {
    let mut rig = Rig::gguf(Faults { busy: vec![503], ..Faults::default() });
    let online = rig.pull(REPOSITORY).expect("the second attempt succeeds");
    rig.hub.set(Faults { busy: vec![503; 3], ..Faults::default() });
    let mut causes = Vec::new();
    let away = pull(&rig.settings, &parse(REPOSITORY), &mut |event| {
        if let Event::FromCache { cause } = event {
            causes.push(cause.to_string());
        }
    });
    assert_eq!(away.expect("it is in the cache").path, online.path);
    assert!(causes.len() == 1 && causes[0].ends_with("answers 503"), "{causes:?}");
    // A port that was closed.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr();
    let empty = rig.folder.path().join("empty");
    let endpoint = format!("http://{}", closed.expect("it was bound"));
    rig.settings = Settings::at(&endpoint, &empty).expect("good settings");
    rig.settings.retry_delay = Duration::from_millis(1);
    assert!(rig.fails(REPOSITORY).starts_with("cannot reach 127.0.0.1:"));
}

#[test]
fn pulls_at_the_same_time_download_once() {
    let rig = Rig::gguf(Faults { together: 3, ..Faults::default() });
    let pulled: Vec<Pulled> = thread::scope(|scope| {
        let each = [(); 3].map(|()| scope.spawn(|| rig.pull(REPOSITORY).expect("it arrives")));
        each.map(|thread| thread.join().expect("no panic")).into()
    });
    let bytes: u64 = pulled.iter().map(|pulled| pulled.downloaded_bytes).sum();
    assert_eq!(bytes, LARGE as u64);
    assert_eq!(rig.hub.seen("GET /content/").len(), 1);
    check_file(&pulled[2].path);
}

#[test]
fn file_without_room_or_hash_is_refused_before_it_is_downloaded() {
    let rig = Rig::gguf(Faults { stated_size: Some(1 << 60), ..Faults::default() });
    let error = rig.fails(REPOSITORY);
    assert!(
        error.starts_with("no room for m-i2_s.gguf in ") && error.ends_with("more bytes"),
        "{error}"
    );
    rig.hub.set(Faults { stated_size: Some(100), ..Faults::default() });
    assert!(rig.fails(REPOSITORY).contains("longer than the 100 bytes"));
    rig.hub.set(Faults { no_hash: true, ..Faults::default() });
    assert!(rig.fails(REPOSITORY).contains("it states no hash"));
    assert!(!rig.partial().exists());
}
