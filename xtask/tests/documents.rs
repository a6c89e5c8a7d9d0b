//! The documents name files that exist.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

const DOCUMENTS: [&str; 11] = [
    "README.md",
    "ARCHITECTURE.md",
    "docs/SECURITY.md",
    "docs/OPERATIONS.md",
    "docs/BATCHES.md",
    "docs/NOTICES.md",
    "docs/CLIENTS.md",
    "docs/SCALING.md",
    "docs/CONTRIBUTING.md",
    "benches/RESULTS.md",
    "docker/README.md",
];
/// Longest ARCHITECTURE.md that is read in one sitting.
const ARCHITECTURE_LINES_MAX: usize = 160;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root").to_owned()
}

fn read(document: &str) -> String {
    std::fs::read_to_string(root().join(document)).unwrap_or_else(|e| panic!("{document}: {e}"))
}

/// Returns tracked files and their folders, each with a leading and folders with a trailing slash.
fn tracked() -> Vec<String> {
    let output = Command::new("git").arg("ls-files").current_dir(root()).output();
    let output = output.expect("git lists its files");
    let mut paths = Vec::new();
    for file in String::from_utf8(output.stdout).expect("paths are UTF-8").lines() {
        let path = format!("/{file}");
        paths.extend(path.match_indices('/').map(|(at, _)| path[..=at].to_owned()));
        paths.push(path);
    }
    paths.sort();
    paths.dedup();
    paths
}

/// Returns words between backticks that look like a path: a folder, or a source file.
fn named_paths(text: &str) -> impl Iterator<Item = &str> {
    let is_path = |word: &&str| {
        let of_path = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
        let ends = [".rs", ".lua", ".md", ".cu", ".py", "/"];
        word.len() > 1
            && !word.starts_with('/')
            && word.chars().all(of_path)
            && ends.iter().any(|end| word.ends_with(end))
    };
    text.split('`').skip(1).step_by(2).filter(is_path)
}

#[test]
fn paths_named_in_documents_exist() {
    let tracked = tracked();
    for document in DOCUMENTS {
        for path in named_paths(&read(document)) {
            let end = format!("/{path}");
            assert!(tracked.iter().any(|file| file.ends_with(&end)), "{document}: no file {path}");
        }
    }
}

#[test]
fn relative_links_lead_to_files() {
    for document in DOCUMENTS {
        let text = read(document);
        let folder = root().join(document).parent().expect("a document has a folder").to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if path.is_empty() || link.contains("://") {
                continue;
            }
            assert!(folder.join(path).exists(), "{document}: dead link {link}");
        }
    }
}

#[test]
fn the_architecture_is_read_in_one_sitting() {
    let lines = read("ARCHITECTURE.md").lines().count();
    assert!(lines <= ARCHITECTURE_LINES_MAX, "{lines} lines, at most {ARCHITECTURE_LINES_MAX}");
}
