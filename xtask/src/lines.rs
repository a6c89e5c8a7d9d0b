//! `cargo xtask lines`: lines of Rust by crate.
//!
//! A line is blank, a comment, test code or other code. Test code is everything under a `tests/` or
//! `benches/` folder and every item or module file marked `#[cfg(test)]`. The count relies on
//! rustfmt: an item ends at the first `}` or `;` that closes a line with the item's indentation.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};

use super::process::root;

/// Counts of one file or one crate.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Lines {
    files: usize,
    code: usize,
    tests: usize,
    comments: usize,
    blank: usize,
}

impl Lines {
    fn add(&mut self, other: Self) {
        self.files += other.files;
        self.code += other.code;
        self.tests += other.tests;
        self.comments += other.comments;
        self.blank += other.blank;
    }

    fn row(&self, name: &str) -> String {
        let Self { files, code, tests, comments, blank } = *self;
        let total = code + tests + comments + blank;
        format!("{name:<16}{files:>7}{code:>9}{tests:>9}{comments:>10}{blank:>8}{total:>9}")
    }
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    ensure!(arguments.is_empty(), "lines takes no arguments");
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs", "*/Cargo.toml"])
        .current_dir(root())
        .output()
        .context("cannot start git")?;
    let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
    // A deleted file is listed until the deletion is committed.
    let read = |name: &str| Some((name.to_owned(), fs::read_to_string(root().join(name)).ok()?));
    let files: Vec<_> =
        names.lines().filter(|name| name.ends_with(".rs")).filter_map(read).collect();
    let folders: Vec<&str> = names.lines().filter_map(|n| n.strip_suffix("/Cargo.toml")).collect();
    let modules_of_tests: Vec<String> =
        files.iter().flat_map(|(name, text)| modules_of_tests(name, text)).collect();
    let mut crates: BTreeMap<&str, Lines> = BTreeMap::new();
    for (name, text) in &files {
        let in_tests = name.split('/').any(|part| ["tests", "benches"].contains(&part))
            || modules_of_tests.iter().any(|module| is_in_module(name, module));
        crates.entry(crate_of(name, &folders)).or_default().add(count(text, in_tests));
    }
    println!("crate             files     code    tests  comments   blank    total");
    let mut total = Lines::default();
    for (name, lines) in crates {
        println!("{}", lines.row(name));
        total.add(lines);
    }
    println!("{}", total.row("total"));
    Ok(())
}

/// Returns the folder of the crate that a file belongs to; the root crate is `tritmill`.
fn crate_of<'a>(name: &str, folders: &[&'a str]) -> &'a str {
    let parents =
        folders.iter().filter(|folder| Path::new(name).starts_with(folder)).max_by_key(|f| f.len());
    parents.map_or("tritmill", |folder| folder)
}

/// Returns paths, without `.rs`, of the module files that `text` declares under `#[cfg(test)]`.
fn modules_of_tests(name: &str, text: &str) -> Vec<String> {
    let path = Path::new(name);
    let is_root = ["lib", "main", "mod"].iter().any(|stem| path.file_stem() == Some(stem.as_ref()));
    let folder = if is_root { path.with_file_name("") } else { path.with_extension("") };
    let pairs = text.lines().zip(text.lines().skip(1));
    pairs
        .filter(|(attribute, _)| attribute.trim() == "#[cfg(test)]")
        .filter_map(|(_, item)| item.trim_start_matches("pub ").strip_prefix("mod "))
        .filter_map(|item| item.strip_suffix(';'))
        .map(|module| folder.join(module).display().to_string())
        .collect()
}

fn is_in_module(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

fn count(text: &str, in_tests: bool) -> Lines {
    let mut lines = Lines { files: 1, ..Lines::default() };
    // Indentation of the `#[cfg(test)]` item that the line is part of.
    let mut test_item: Option<usize> = None;
    for line in text.lines() {
        let code = line.trim();
        let indentation = line.len() - line.trim_start().len();
        if code == "#[cfg(test)]" {
            test_item = test_item.or(Some(indentation));
        }
        match code {
            "" => lines.blank += 1,
            _ if code.starts_with("//") => lines.comments += 1,
            _ if in_tests || test_item.is_some() => lines.tests += 1,
            _ => lines.code += 1,
        }
        let ends = code.ends_with('}') || code.ends_with(';');
        if test_item == Some(indentation) && ends && !code.starts_with("//") {
            test_item = None;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_marked_for_tests_are_counted_as_tests() {
        let text = "//! Doc.\n\nfn f() {}\n\n#[cfg(test)]\nmod tests {\n    // Why.\n    fn g() {}\n}\nfn h() {}\n";
        let expected = Lines { files: 1, code: 2, tests: 4, comments: 2, blank: 2 };
        assert_eq!(count(text, false), expected);
        let text = "#[cfg(test)]\nmod cases;\n";
        assert_eq!(modules_of_tests("a/src/lib.rs", text), ["a/src/cases"]);
        assert_eq!(modules_of_tests("a/src/b.rs", text), ["a/src/b/cases"]);
        assert!(is_in_module("a/src/cases/one.rs", "a/src/cases"));
        assert_eq!(crate_of("a/b/src/c.rs", &["a", "a/b"]), "a/b");
        assert_eq!(crate_of("src/c.rs", &["a", "a/b"]), "tritmill");
    }
}
