//! `--kv-cache-dir`: prompts that begin alike are computed once, over restarts; damage costs time, never an answer.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[expect(dead_code, reason = "each test program uses its part of it")]
mod program;
#[expect(dead_code, reason = "each test program uses its part of it")]
mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use program::{fails, json, run};
use serde_json::{Value, json};
use support::{Scratch, without_created};

const LINES: usize = 120;
/// Tokens that all prompts begin with: ten blocks.
const SHARED: u64 = 160;

/// Lines with long prompts that differ in their last tokens only.
fn lines() -> Vec<Value> {
    let line = |index: u64| {
        let begin = (0..SHARED).map(|at| (at * 37 + 5) % 900);
        let prompt: Vec<u64> = begin.chain((0..8).map(|at| (index * 31 + at * 7) % 900)).collect();
        json!({
            "custom_id": format!("line-{index}"),
            "method": "POST",
            "url": "/v1/completions",
            "body": { "prompt": prompt, "max_tokens": 20, "ignore_eos": true },
        })
    };
    (0..LINES as u64).map(line).collect()
}

fn blocks(folder: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(folder).unwrap().flatten();
    let files = folders.flat_map(|folder| fs::read_dir(folder.path()).unwrap().flatten());
    files.map(|file| file.path()).collect()
}

fn damage(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
}

fn assert_same_answers(one: &Scratch, other: &Scratch) {
    let (ours, theirs) = (one.answers_by_id(), other.answers_by_id());
    assert_eq!((ours.len(), theirs.len()), (LINES, LINES));
    for (id, answer) in &theirs {
        assert_eq!(without_created(&ours[id]), without_created(answer), "{id}");
    }
}

#[test]
fn shared_prompt_is_computed_once_over_restarts_and_damage_changes_nothing() {
    let plain = Scratch::new();
    plain.write_input(&lines());
    assert_eq!(plain.run(&[]).code, Some(0));
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("kv");
    let name = folder.to_str().unwrap();

    let killed = Scratch::new();
    killed.write_input(&lines());
    let mut child = killed.spawn(&["--kv-cache-dir", name]);
    assert!(child.kill_when(|| killed.output_lines() >= 20), "the run ended before the kill");
    let rest = killed.run(&["--kv-cache-dir", name, "--json"]);
    assert_eq!(rest.code, Some(0), "{}", rest.stderr);
    let summary = rest.summary();
    let answered = LINES as u64 - summary["resumed"].as_u64().unwrap();
    assert_eq!(summary["prompt_tokens"], answered * (SHARED + 8));
    assert_eq!(summary["cached_tokens"], answered * SHARED, "also for the first line: {summary}");
    assert_same_answers(&killed, &plain);
    let found = json(&["kv", "inspect", name, "--json"]);
    assert!(found["blocks"].as_u64().unwrap() >= SHARED / 16, "{found}");

    blocks(&folder).iter().for_each(|file| damage(file));
    let damaged = Scratch::new();
    damaged.write_input(&lines());
    assert_eq!(damaged.run(&["--kv-cache-dir", name]).code, Some(0));
    assert_same_answers(&damaged, &plain);
    assert!(run(&["kv", "verify", name]).stdout.starts_with("good: "), "written again");
    damage(&blocks(&folder)[0]);
    let verified = run(&["kv", "verify", name]);
    assert_eq!(verified.code, 3);
    assert!(verified.stderr.contains("damaged, deleted: "), "{}", verified.stderr);
    assert_eq!(run(&["kv", "verify", name]).code, 0);

    let pruned = json(&["kv", "prune", name, "--bytes", "0", "--json"]);
    assert_eq!(pruned, json!({ "blocks": 0, "bytes": 0 }));
    assert!(blocks(&folder).is_empty());
}

#[test]
fn unusable_folders_are_refused_at_start() {
    let scratch = Scratch::new();
    scratch.write_input(&lines());
    let file = scratch.input();
    let refused = scratch.run(&["--kv-cache-dir", file.to_str().unwrap()]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("--kv-cache-dir"), "{}", refused.stderr);
    fails(&["kv", "inspect", "/nowhere/kv"], "there is no folder /nowhere/kv");
    fails(&["kv", "prune", "/tmp", "--bytes", "much"], "expected a number of bytes, such as 10G");
}
