//! Packed files: what is read is what was packed; what is changed or damaged is not used.

use std::{collections::BTreeMap, os::unix::fs::PermissionsExt as _};

use tempfile::TempDir;

use super::*;
use crate::{backend::cpu::weights::Layer, formats::memory::AlignedBytes};

const MODELS: [&str; 4] = ["bitnet-tiny", "llama-norm-tiny", "qwen3-group-tiny", "qwen35-tiny"];

/// A copy of a golden model, for a test alone.
fn folder(name: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    for entry in fs::read_dir(golden).expect("a golden model").map(Result::unwrap) {
        if entry.metadata().is_ok_and(|metadata| metadata.is_file()) {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
        }
    }
    folder
}

fn open(folder: &TempDir) -> Arc<Model> {
    Arc::new(Model::open(folder.path()).expect("a good model"))
}

fn packing(format: Format, head: HeadMode) -> Packing {
    Packing { format, head, maps_experts: false }
}

fn load_all(folder: &TempDir, format: Format, head: HeadMode) -> Weights {
    load_at_least(0, open(folder), packing(format, head)).expect("a good model")
}

/// Returns the packed files by path, with their inodes, which change when they are written.
fn kept(folder: &TempDir) -> BTreeMap<PathBuf, u64> {
    let entries = fs::read_dir(folder.path().join(FOLDER)).into_iter().flatten();
    let entry = |entry: io::Result<fs::DirEntry>| {
        let entry = entry.expect("an entry");
        (entry.path(), FileState::from(&entry.metadata().expect("its state")).inode)
    };
    entries.map(entry).collect()
}

/// Returns all that is read from a packed file.
fn content(weights: &Weights) -> (Vec<Vec<u8>>, Scales, Vec<f32>) {
    let bytes = weights.sections().iter().map(<[u8]>::to_vec).collect();
    (bytes, weights.scales(), weights.final_norm.clone())
}

#[test]
fn second_load_reads_what_the_first_one_packed() {
    for name in MODELS {
        let folder = folder(name);
        for format in [Format::I2S, Format::Tl1, Format::Tl2] {
            for head in [HeadMode::Exact, HeadMode::Full, HeadMode::Q8] {
                let first = load_all(&folder, format, head);
                let file =
                    PackedFile::locate(&first.model, format, head).expect("a model in files");
                let model = open(&folder);
                let second = file.read(&model, packing(format, head)).expect("an intact file");
                let second = second.expect("a file of this model");
                assert!(content(&first) == content(&second), "{name} {format} {head:?}");
                assert_eq!(first.size_bytes(), second.size_bytes());

                recall_fingerprint(&model, format, head);
                let recalled = model.fingerprint().expect("recalled");
                assert_eq!(recalled, open(&folder).fingerprint().expect("computed"));
            }
        }
        assert_eq!(kept(&folder).len(), 9, "{name}");
    }
}

#[test]
fn changed_model_is_packed_again() {
    let folder = folder("bitnet-tiny");
    load_all(&folder, Format::I2S, HeadMode::Exact);
    let first = kept(&folder);
    load_all(&folder, Format::I2S, HeadMode::Exact);
    assert_eq!(kept(&folder), first, "read, not written");

    // The same bytes, written at another time.
    let weights = folder.path().join("model.safetensors");
    fs::write(&weights, fs::read(&weights).expect("weights")).expect("written");
    let model = open(&folder);
    let file = PackedFile::locate(&model, Format::I2S, HeadMode::Exact).expect("a model in files");
    assert!(file.read(&model, packing(Format::I2S, HeadMode::Exact)).expect("intact").is_none());
    load_all(&folder, Format::I2S, HeadMode::Exact);
    assert_ne!(kept(&folder), first);
    assert_eq!(kept(&folder).len(), 1, "the old file is replaced");

    // Another configuration, with the same weights.
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).expect("a configuration");
    let changed = text.replace("\"rope_theta\": ", "\"rope_theta\": 1");
    assert_ne!(changed, text);
    fs::write(&config, changed).expect("written");
    let model = open(&folder);
    recall_fingerprint(&model, Format::I2S, HeadMode::Exact);
    let file = PackedFile::locate(&model, Format::I2S, HeadMode::Exact).expect("a model in files");
    assert!(file.read(&model, packing(Format::I2S, HeadMode::Exact)).expect("intact").is_none());
}

#[test]
fn model_that_changes_while_it_is_packed_is_not_kept() {
    let folder = folder("bitnet-tiny");
    let model = open(&folder);
    let weights = Weights::load(Arc::clone(&model), Format::I2S, HeadMode::Full).expect("good");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, fs::read(&path).expect("weights")).expect("written");
    let file = PackedFile::locate(&model, Format::I2S, HeadMode::Full).expect("a model in files");
    file.keep(&weights);
    assert!(kept(&folder).is_empty());
}

#[test]
fn any_damage_is_noticed_and_mended() {
    let folder = folder("qwen3-group-tiny");
    let (format, head) = (Format::Tl2, HeadMode::Exact);
    let expected = content(&load_all(&folder, format, head));
    let (path, _) = kept(&folder).pop_first().expect("a file");
    let good = fs::read(&path).expect("its bytes");
    let model = open(&folder);
    let file = PackedFile::locate(&model, format, head).expect("a model in files");
    let is_used = |bytes: &[u8]| {
        fs::write(&path, bytes).expect("written");
        file.read(&model, packing(format, head)).is_ok()
    };
    assert!(is_used(&good));
    // Padding is not read, and the matrices of this model have none: every byte counts.
    for at in (0..good.len()).step_by(good.len() / 200) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        assert!(!is_used(&bytes), "byte {at}");
        assert!(!is_used(&good[..at]), "{at} bytes");
    }
    assert!(content(&load_all(&folder, format, head)) == expected, "packed again");
    assert_eq!(fs::read(&path).expect("its bytes"), good);
}

#[test]
fn sections_of_another_shape_are_refused() {
    let (folder, other) = (folder("qwen3-group-tiny"), folder("qwen3-yarn-tiny"));
    let (format, head) = (Format::I2S, HeadMode::Exact);
    load_all(&folder, format, head);
    let (path, _) = kept(&folder).pop_first().expect("a file");
    // As if the keys were equal.
    let model = open(&other);
    let opened = File::open(path).expect("a file");
    let file_head = Head::read(&opened).expect("an intact head");
    let mut reader = PackedReader::new(&opened, &file_head, false).expect("no mapping");
    let read = Weights::read(model, format, head, &mut reader).map(drop);
    assert!(matches!(read, Err(Damaged::OtherShape)), "{read:?}");
}

#[test]
fn small_models_and_folders_without_a_place_are_not_kept() {
    let folder = folder("bitnet-tiny");
    load(open(&folder), packing(Format::I2S, HeadMode::Exact)).expect("a good model");
    assert!(kept(&folder).is_empty(), "small");

    // A file in place of the folder: root may write everywhere.
    fs::write(folder.path().join(FOLDER), "").expect("written");
    load_all(&folder, Format::I2S, HeadMode::Exact);
    fs::remove_file(folder.path().join(FOLDER)).expect("removed");

    let read_only = fs::Permissions::from_mode(0o555);
    fs::set_permissions(folder.path(), read_only).expect("changed");
    load_all(&folder, Format::I2S, HeadMode::Exact);
}

#[test]
fn file_that_another_process_writes_is_left_alone() {
    let folder = folder("bitnet-tiny");
    let (format, head) = (Format::I2S, HeadMode::Full);
    let weights = Weights::load(open(&folder), format, head).expect("a good model");
    let file = PackedFile::locate(&weights.model, format, head).expect("a model in files");
    fs::create_dir(folder.path().join(FOLDER)).expect("a folder");
    let temporary = file.path.with_extension("tmp");
    let other = File::create(&temporary).expect("a file");
    other.lock().expect("it is free");
    file.keep(&weights);
    assert_eq!(kept(&folder).into_keys().collect::<Vec<_>>(), [temporary]);
    // What a process that ended has left is used again.
    drop(other);
    file.keep(&weights);
    assert_eq!(kept(&folder).into_keys().collect::<Vec<_>>(), std::slice::from_ref(&file.path));
}

/// Returns how many buffers of a model's experts are in the packed file, and how many there are.
fn mapped_experts(weights: &Weights) -> (usize, usize) {
    let (mut mapped, mut all) = (0, 0);
    for (of, linear) in weights.layers.iter().flat_map(Layer::all) {
        for buffer in linear.matrix.buffers() {
            let is_mapped = matches!(buffer, AlignedBytes::Mapped(..));
            assert!(of.is_of_experts() || !is_mapped, "only experts stay in the file");
            mapped += usize::from(is_mapped);
            all += usize::from(of.is_of_experts());
        }
    }
    (mapped, all)
}

#[test]
fn experts_may_stay_in_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/maple-tiny");
    let path = folder.path().join("maple.gguf");
    fs::copy(golden.join("maple-tiny-tq2_0.gguf"), &path).expect("a copy");
    let open = || Arc::new(Model::open(&path).expect("a good model"));
    let (format, head) = (Format::Tl2, HeadMode::Exact);
    let in_memory = Weights::load(open(), format, head).expect("a good model");
    assert_eq!(mapped_experts(&in_memory).0, 0);
    let in_file = Packing { format, head, maps_experts: true };
    // What is packed layer by layer is what is packed in memory.
    let on = load_at_least(0, open(), packing(format, head)).expect("a good model");
    let (kept_at, _) = kept(&folder).pop_first().expect("a file");
    let whole = fs::read(&kept_at).expect("its bytes");
    fs::remove_file(&kept_at).expect("removed");
    assert_eq!(mapped_experts(&on).0, 0);
    load_at_least(0, open(), in_file).expect("a good model");
    assert!(fs::read(&kept_at).expect("its bytes") == whole);
    fs::remove_file(&kept_at).expect("removed");
    // Without a packed file, and with one.
    for _ in 0..2 {
        let weights = load_at_least(0, open(), in_file).expect("a good model");
        assert!(content(&weights) == content(&in_memory));
        // Four layers of three matrices, with their scales.
        assert_eq!(mapped_experts(&weights), (24, 24));
    }
    let (kept_at, inode) = kept(&folder).pop_first().expect("a file");
    let on = load_at_least(0, open(), packing(format, head)).expect("a good model");
    assert_eq!((mapped_experts(&on).0, kept(&folder)[&kept_at]), (0, inode), "the same file");
    let held = experts_in_file(&open(), format, head).expect("it has a packed file");
    let expected = memory::expert_bytes(in_memory.config(), format) as u64;
    assert_eq!(held.bytes, expected);
    if cfg!(target_os = "linux") {
        assert_eq!(held.resident_bytes, Some(expected), "they were just written");
    }
    // Small models have no packed file, and stay in memory.
    fs::remove_file(&kept_at).expect("removed");
    assert_eq!(experts_in_file(&open(), format, head), None);
    let small = load(open(), in_file).expect("a good model");
    assert_eq!(mapped_experts(&small).0, 0);

    // Damage is noticed in what stays in the file, too.
    drop(load_at_least(0, open(), in_file));
    let good = fs::read(&kept_at).expect("its bytes");
    let model = open();
    let file = PackedFile::locate(&model, format, head).expect("a model in files");
    for at in (0..good.len()).step_by(good.len() / 40) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        fs::write(&kept_at, bytes).expect("written");
        assert!(file.read(&model, in_file).is_err(), "byte {at}");
    }
}

/// A changed packing under the same [`VERSION`] would be read as if it were the old one.
#[test]
fn layout_has_a_version() {
    assert_eq!(VERSION, 1, "to be raised when the hashes below change, and only then");
    let folder = folder("qwen3-group-tiny");
    let hash = |format| {
        let weights = Weights::load(open(&folder), format, HeadMode::Exact).expect("good");
        let mut hasher = blake3::Hasher::new();
        let (sections, ..) = content(&weights);
        for section in &sections {
            hasher.update(section);
        }
        hasher.finalize().to_hex()[..16].to_owned()
    };
    let hashes = [Format::I2S, Format::Tl1, Format::Tl2].map(hash);
    assert_eq!(hashes, ["a3db22449df4a7b0", "96c514f8c2810072", "f1ef41b96c7869e3"]);
}
