//! House rules that a search over the repository's files can check. Each rule is one test that lists
//! every violation with file and line; docs/CONTRIBUTING.md gives the reasons.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Longest Rust file, in lines.
const LINES_MAX: usize = 600;
/// Largest file, in bytes: the weights of the demo model.
const FILE_BYTES_MAX: u64 = 3_000_000;
/// Largest number of visible entries at the root.
const ROOT_ENTRIES_MAX: usize = 19;
/// Places where `unsafe` is allowed.
const UNSAFE_ALLOWED: [&str; 11] = [
    "engine/src/kernels/",
    "engine/src/backend/cpu/",
    "engine/src/backend/cuda/driver.rs",
    "engine/src/backend/cuda/driver/",
    // The limits that the driver must enforce, tested by its own calls.
    "engine/src/backend/cuda/tests/limits.rs",
    "engine/src/backend/cuda/tests/overlap.rs",
    // Cells with concurrent use that loom checks.
    "xtask/loom/tests/cells/mod.rs",
    "engine/src/backend/cuda/emulated.rs",
    // An allocator that counts.
    "engine/tests/steady_allocations.rs",
    "engine/src/files/mmap.rs",
    "engine/src/formats/memory.rs",
];
/// Lines above an `unsafe` block in which its SAFETY comment must begin.
const SAFETY_LINES: usize = 8;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in a folder of the workspace")
}

/// Returns files that git does not ignore, relative to the root. Without git, all files outside of
/// build folders.
fn files() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root())
        .output();
    let mut files = match listed {
        Ok(output) if output.status.success() && !output.stdout.is_empty() => {
            let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
            names.split_terminator('\0').map(PathBuf::from).collect()
        }
        _ => walk(root()),
    };
    files.retain(|file| root().join(file).is_file());
    assert!(files.len() > 20, "the repository has more than {} files", files.len());
    files
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("the repository is readable") {
        let path = entry.expect("the repository is readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && name != ".git" {
            files.extend(walk(&path));
        } else if path.is_file() {
            let relative = path.strip_prefix(root()).expect("walked from the root");
            files.push(relative.to_owned());
        }
    }
    files
}

/// Returns the text of every file with one of these extensions, by path.
fn texts(extensions: &[&str]) -> Vec<(String, String)> {
    let has_extension = |file: &PathBuf| {
        let extension = file.extension().unwrap_or_default().to_string_lossy();
        extensions.contains(&&*extension)
    };
    let text = |file: PathBuf| {
        let text = fs::read_to_string(root().join(&file)).expect("text files are UTF-8");
        (file.to_string_lossy().into_owned(), text)
    };
    files().into_iter().filter(has_extension).map(text).collect()
}

/// Returns the text of every Rust file, by path.
fn rust_files() -> Vec<(String, String)> {
    texts(&["rs"])
}

/// Fails with one violation per line.
fn nothing(violations: Vec<String>) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

/// Fails if `is_broken(path, line)` holds for a line of the files.
fn no_line(files: &[(String, String)], rule: &str, is_broken: impl Fn(&str, &str) -> bool) {
    let mut violations = Vec::new();
    for (path, text) in files {
        for (index, line) in text.lines().enumerate() {
            if is_broken(path, line) {
                violations.push(format!("{path}:{}: {rule}: {}", index + 1, line.trim()));
            }
        }
    }
    nothing(violations);
}

/// Returns the code of a line without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or(line)
}

#[test]
fn rust_files_are_short() {
    let too_long = rust_files().into_iter().filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > LINES_MAX).then(|| format!("{path}: {lines} lines, at most {LINES_MAX}"))
    });
    nothing(too_long.collect());
}

#[test]
fn rust_files_begin_with_module_docs() {
    let undocumented = rust_files().into_iter().filter(|(_, text)| {
        // Attributes may precede the documentation.
        let first = text.lines().find(|line| !line.is_empty() && !line.starts_with("#!["));
        !first.is_some_and(|line| line.starts_with("//! "))
    });
    nothing(
        undocumented
            .map(|(path, _)| format!("{path}: does not begin with a //! comment"))
            .collect(),
    );
}

#[test]
fn code_has_no_unfinished_marks() {
    // Spelled in halves, so that this file does not break the rule.
    let marks = [["to", "do!("], ["unimple", "mented!("], ["TO", "DO"], ["FIX", "ME"], ["XX", "X"]]
        .map(|halves| halves.concat());
    no_line(&rust_files(), "unfinished", |_, line| {
        marks.iter().any(|mark| line.contains(mark.as_str()))
    });
}

#[test]
fn file_names_are_specific() {
    let buckets = ["utils", "util", "common", "manager", "helpers", "misc"];
    let named = files().into_iter().filter(|file| {
        file.components().any(|part| {
            let part = part.as_os_str().to_string_lossy();
            buckets.contains(&part.split('.').next().unwrap_or(&part))
        })
    });
    nothing(
        named
            .map(|file| format!("{}: the name does not describe the content", file.display()))
            .collect(),
    );
}

#[test]
fn names_of_tests_state_facts() {
    no_line(&rust_files(), "name the fact that the test shows", |_, line| {
        line.trim_start().starts_with("fn test_")
    });
}

#[test]
fn ignored_tests_have_a_reason() {
    no_line(&rust_files(), "an ignored test needs a reason", |_, line| line.trim() == "#[ignore]");
}

#[test]
fn unsafe_is_confined() {
    let block = ["unsafe", " {"].concat();
    let others = ["unsafe impl", "unsafe fn"];
    no_line(&rust_files(), "unsafe is not allowed here", |path, line| {
        let allowed = UNSAFE_ALLOWED.iter().any(|place| path.starts_with(place));
        let used = code(line).contains(&block) || others.iter().any(|o| code(line).contains(o));
        !allowed && used && !path.starts_with("xtask/tests/")
    });
}

#[test]
fn unsafe_blocks_have_safety_comments() {
    let mut violations = Vec::new();
    for (path, text) in rust_files() {
        // Methods of one trait implementation may share a contract that is stated once.
        if path.starts_with("xtask/tests/") || text.contains("// SAFETY of every block") {
            continue;
        }
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let code = code(line);
            if !(code.contains("unsafe {") || code.trim_start().starts_with("unsafe impl")) {
                continue;
            }
            let above = &lines[index.saturating_sub(SAFETY_LINES)..=index];
            if !above.iter().any(|line| line.contains("SAFETY")) {
                violations.push(format!("{path}:{}: unsafe without SAFETY", index + 1));
            }
        }
    }
    nothing(violations);
}

#[test]
fn files_are_small_enough_to_clone() {
    let large = files().into_iter().filter_map(|file| {
        let bytes = fs::metadata(root().join(&file)).map_or(0, |metadata| metadata.len());
        (bytes > FILE_BYTES_MAX).then(|| format!("{}: {bytes} bytes", file.display()))
    });
    nothing(large.collect());
}

#[test]
fn the_root_is_short() {
    let mut entries: Vec<String> = files()
        .iter()
        .filter_map(|file| Some(file.components().next()?.as_os_str().to_string_lossy().into()))
        .filter(|name: &String| !name.starts_with('.'))
        .collect();
    entries.sort();
    entries.dedup();
    assert!(entries.len() <= ROOT_ENTRIES_MAX, "{} entries: {entries:?}", entries.len());
}

#[test]
fn text_names_no_machine() {
    let folders = ["home", "root", "work"].map(|folder| format!("/{folder}/"));
    let files = texts(&["rs", "md", "toml", "py", "sql", "sh", "yaml", "yml", "log"]);
    no_line(&files, "a path of one machine", |_, line| {
        // A path starts a word; in the middle of a URL such a folder is allowed.
        let starts_a_word = |folder: &String| {
            line.match_indices(folder.as_str()).any(|(at, _)| {
                at == 0 || matches!(line.as_bytes()[at - 1], b' ' | b'"' | b'`' | b'(' | b'=')
            })
        };
        folders.iter().any(starts_a_word)
    });
}

#[test]
fn text_is_plain_english() {
    // Spelled in halves, so that this file does not break the rule.
    let words = [["who", "ever"], ["no", "body"], ["some", "body"]].map(|halves| halves.concat());
    no_line(&texts(&["rs", "md", "html"]), "use plainer words", |path, line| {
        let line = line.to_lowercase();
        let is_word = |word: &str| {
            let letter = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            line.match_indices(word).any(|(at, _)| {
                let (before, after) = (&line[..at], &line[at + word.len()..]);
                !letter(before.chars().next_back()) && !letter(after.chars().next())
            })
        };
        // The name of a user on Unix.
        let is_user = path == "xtask/servers/src/process.rs";
        !is_user && words.iter().any(|word| is_word(word))
    });
}

#[test]
fn published_crates_have_metadata() {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
    let output = cargo.current_dir(root()).output().expect("cargo starts");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let mut violations = Vec::new();
    for package in metadata["packages"].as_array().expect("a list of packages") {
        // An empty list of registries is `publish = false`.
        if package["publish"].as_array().is_some_and(Vec::is_empty) {
            continue;
        }
        for field in ["description", "keywords", "categories", "readme", "license", "repository"] {
            let value = &package[field];
            if value.is_null() || value.as_array().is_some_and(Vec::is_empty) {
                violations.push(format!("{}: no {field}", package["name"]));
            }
        }
    }
    nothing(violations);
}
