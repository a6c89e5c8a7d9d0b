//! House rules that a search can check, over every file that git knows. Each rule is one test that
//! lists every place where it is broken; docs/CONTRIBUTING.md says why the rules are what they are.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Longest Rust file.
const LINES_MAX: usize = 600;
/// Largest file: a model's weights are the largest thing the repository holds.
const FILE_BYTES_MAX: u64 = 2_000_000;
/// Most visible entries at the root.
const ROOT_ENTRIES_MAX: usize = 20;
/// Where `unsafe` may be written.
const UNSAFE_ALLOWED: [&str; 6] = [
    "engine/src/kernels/",
    "engine/src/backend/cpu/",
    "engine/src/backend/cuda/driver.rs",
    "engine/src/backend/cuda/emulated.rs",
    "engine/src/files/mmap.rs",
    "engine/src/formats/memory.rs",
];
/// Lines above an `unsafe` block in which its SAFETY comment may begin.
const SAFETY_LINES: usize = 8;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in a folder of the workspace")
}

/// Tracked and untracked files that git does not ignore, relative to the root; every file outside
/// build folders where there is no git.
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

/// Every Rust file with its text.
fn rust_files() -> Vec<(String, String)> {
    let rust = files().into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs"));
    rust.map(|file| {
        let text = fs::read_to_string(root().join(&file)).expect("source files are UTF-8");
        (file.to_string_lossy().into_owned(), text)
    })
    .collect()
}

/// Fails with every complaint on a line of its own.
fn nothing(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// Complaints about single lines of Rust files: where `broken(path, line)` holds.
fn no_line(rule: &str, broken: impl Fn(&str, &str) -> bool) {
    let mut complaints = Vec::new();
    for (path, text) in rust_files() {
        for (index, line) in text.lines().enumerate() {
            if broken(&path, line) {
                complaints.push(format!("{path}:{}: {rule}: {}", index + 1, line.trim()));
            }
        }
    }
    nothing(complaints);
}

/// Code of a line, without a trailing or whole-line comment.
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
fn rust_files_open_with_what_they_own() {
    let silent = rust_files().into_iter().filter(|(_, text)| {
        // Attributes may precede the module's documentation.
        let first = text.lines().find(|line| !line.is_empty() && !line.starts_with("#!["));
        !first.is_some_and(|line| line.starts_with("//! "))
    });
    nothing(silent.map(|(path, _)| format!("{path}: does not begin with a //! comment")).collect());
}

#[test]
fn nothing_is_left_to_do() {
    // Spelled in halves so that this file obeys its own rule.
    let marks = [["to", "do!("], ["unimple", "mented!("], ["TO", "DO"], ["FIX", "ME"], ["XX", "X"]]
        .map(|halves| halves.concat());
    no_line("unfinished", |_, line| marks.iter().any(|mark| line.contains(mark.as_str())));
}

#[test]
fn files_are_named_after_things() {
    let buckets = ["utils", "util", "common", "manager", "helpers", "misc"];
    let named = files().into_iter().filter(|file| {
        file.components().any(|part| {
            let part = part.as_os_str().to_string_lossy();
            buckets.contains(&part.split('.').next().unwrap_or(&part))
        })
    });
    nothing(named.map(|file| format!("{}: says nothing of its content", file.display())).collect());
}

#[test]
fn tests_are_named_after_facts() {
    no_line("name the fact that the test shows", |_, line| {
        line.trim_start().starts_with("fn test_")
    });
}

#[test]
fn skipped_tests_say_why() {
    no_line("an ignored test needs a reason", |_, line| line.trim() == "#[ignore]");
}

#[test]
fn unsafe_stays_where_it_belongs() {
    let block = ["unsafe", " {"].concat();
    let others = ["unsafe impl", "unsafe fn"];
    no_line("unsafe is not allowed here", |path, line| {
        let allowed = UNSAFE_ALLOWED.iter().any(|place| path.starts_with(place));
        let used = code(line).contains(&block) || others.iter().any(|o| code(line).contains(o));
        !allowed && used && !path.starts_with("xtask/tests/")
    });
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let mut complaints = Vec::new();
    for (path, text) in rust_files() {
        // Methods of one trait implementation may share a contract, stated once above it.
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
                complaints.push(format!("{path}:{}: unsafe without SAFETY", index + 1));
            }
        }
    }
    nothing(complaints);
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
    let text_files = files().into_iter().filter(|file| {
        let extension = file.extension().unwrap_or_default().to_string_lossy();
        ["rs", "md", "toml", "py", "sql", "sh", "yaml", "log"].contains(&&*extension)
    });
    let mut complaints = Vec::new();
    for file in text_files {
        let text = fs::read_to_string(root().join(&file)).expect("text files are UTF-8");
        for (index, line) in text.lines().enumerate() {
            // A folder of somebody's machine starts a path; the middle of an address is none.
            let starts = |folder: &String| {
                line.match_indices(folder.as_str()).any(|(at, _)| {
                    at == 0 || matches!(line.as_bytes()[at - 1], b' ' | b'"' | b'`' | b'(' | b'=')
                })
            };
            if folders.iter().any(starts) {
                complaints.push(format!("{}:{}: {}", file.display(), index + 1, line.trim()));
            }
        }
    }
    nothing(complaints);
}
