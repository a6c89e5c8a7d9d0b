//! Machines with wrong clocks: leases, deadlines and backoffs use the store's clock.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tritmill_servers::Signal;

use crate::{
    fleet::{Fleet, WorkerProcess, eventually, series},
    rig::{self, LINE},
};

/// A preloaded library that shifts the wall clock of a process, but not its monotonic clocks.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, out);
    const char *shift = getenv("CLOCK_SHIFT_S");
    if (!failed && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        out->tv_sec += atoll(shift);
    return failed;
}
"#;

const HOUR_S: i64 = 3600;
const DAY_S: i64 = 24 * HOUR_S;
const YEAR_S: i64 = 365 * DAY_S;

struct Clocks {
    _folder: TempDir,
    shim: PathBuf,
}

impl Clocks {
    /// Builds the shim; `None` if this machine cannot build or preload it.
    fn new() -> Option<Self> {
        let folder = rig::folder();
        let source = rig::file(folder.path(), "shim.c", SHIM);
        let shim = folder.path().join("shim.so");
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(source).arg("-ldl");
        if !command.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            tritmill_servers::skip("cc, which builds the clock shim (apt install gcc)");
            return None;
        }
        let clocks = Self { _folder: folder, shim };
        let mut date = Command::new("date");
        clocks.shift(&mut date, YEAR_S);
        let year = |command: &mut Command| {
            let output = command.arg("+%Y").output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse::<u32>().unwrap()
        };
        if year(&mut date) == year(&mut Command::new("date")) {
            tritmill_servers::skip("a dynamic C library, for the preloaded clock shim");
            return None;
        }
        Some(clocks)
    }

    fn shift(&self, command: &mut Command, seconds: i64) {
        command.env("LD_PRELOAD", &self.shim).env("CLOCK_SHIFT_S", seconds.to_string());
    }

    fn worker(&self, fleet: &Fleet, arguments: &[&str], seconds: i64) -> WorkerProcess {
        let base = ["worker", "--json", "--threads", "1"];
        let mut command = fleet.command(&[&base, arguments].concat());
        command.stderr(Stdio::null());
        self.shift(&mut command, seconds);
        WorkerProcess::start(command)
    }

    fn submit(&self, fleet: &Fleet, seconds: i64) -> String {
        let mut command = fleet.command(&["submit", "-"]);
        self.shift(&mut command, seconds);
        rig::submit_with(command, LINE, &[]).0.remove(0)
    }
}

#[test]
fn leases_and_deadlines_do_not_depend_on_worker_clocks() {
    let Some(clocks) = Clocks::new() else { return };
    let fleet = Fleet::start();
    // Longer than the time between two renewals.
    let slow = "{\"prompt\": \"Paid\", \"max_tokens\": 200, \"ignore_eos\": true, \"n\": 8}\n";
    let (mut ids, _) = rig::submit(&fleet, slow, &[]);
    ids.extend(rig::submit(&fleet, &LINE.repeat(20), &[]).0);
    let (dated, _) = rig::submit(&fleet, &LINE.repeat(2), &[]);
    // By the slow clock the first deadline is far away; by the fast clock the second has passed.
    let deadline = |id: &str, minutes: i64| {
        let at = format!("store_now_ms(NULL) + {}", minutes * 60_000);
        rig::sql(&fleet, &format!("UPDATE open_jobs SET expires_at = {at} WHERE id = '{id}'"));
    };
    deadline(&dated[0], -1);
    deadline(&dated[1], 30);
    let isa = ["--isa", "scalar", "--lease", "4"];
    let workers = [-HOUR_S, HOUR_S].map(|shift| clocks.worker(&fleet, &isa, shift));
    let mut words = vec!["watch", "--timeout", "120"];
    words.extend(ids.iter().chain(&dated).map(String::as_str));
    let (_, _, stderr) = fleet.run(&words);
    assert!(stderr.contains("23/23 finished, 1 failed"), "{stderr}");
    assert_eq!(rig::states(&fleet, &dated), ["expired", "completed"]);
    let lasted = "SELECT max(finished_at) - (SELECT min(started_at) FROM workers) FROM results";
    let lasted: u64 = rig::sql(&fleet, lasted).parse().unwrap();
    assert!(lasted > 2000, "{lasted} ms: no lease had to be renewed");
    let lost = "SELECT count(*) FROM all_jobs WHERE attempts > 0 OR epoch > 1";
    assert_eq!(rig::sql(&fleet, lost), "0", "every job was claimed once");
    for worker in &workers {
        let page = worker.get("/metrics").1;
        for name in ["leases_lost", "results_fenced", "jobs_retried"] {
            let name = format!("tritmill_worker_{name}_total");
            assert_eq!(series(&page, &name), Some(0.0), "{name}");
        }
    }
    // Heartbeats carry the store's time: the list shows both as alive, seconds ago.
    let (_, listed, _) = fleet.run(&["workers", "list", "--json"]);
    for worker in listed.lines().map(rig::json) {
        assert!(worker["silent_s"].as_f64().unwrap() < 15.0, "{worker}");
        assert_eq!(worker["alive"], true);
    }
}

#[test]
fn expired_lease_is_reclaimed_by_a_worker_with_another_clock() {
    let Some(clocks) = Clocks::new() else { return };
    let fleet = Fleet::start();
    let first = clocks.worker(&fleet, &["--isa", "scalar", "--lease", "2"], DAY_S);
    let slow = "{\"prompt\": \"Paid\", \"max_tokens\": 200, \"ignore_eos\": true, \"n\": 16}\n";
    let (ids, _) = rig::submit(&fleet, slow, &[]);
    eventually("the job runs", || rig::states(&fleet, &ids) == ["running"]);
    first.signal(Signal::Kill);
    let _second = clocks.worker(&fleet, &["--lease", "2"], -DAY_S);
    eventually("the second worker answers", || rig::states(&fleet, &ids) == ["completed"]);
    let claims = format!("SELECT attempts || ' ' || epoch FROM all_jobs WHERE id = '{}'", ids[0]);
    assert_eq!(rig::sql(&fleet, &claims), "0 2");
}

#[test]
fn job_ids_with_times_years_away_are_answered() {
    let Some(clocks) = Clocks::new() else { return };
    let fleet = Fleet::start();
    let shifts = [-20 * YEAR_S, -YEAR_S - DAY_S, -DAY_S, DAY_S, YEAR_S, 1000 * YEAR_S];
    let ids: Vec<String> = shifts.iter().map(|shift| clocks.submit(&fleet, *shift)).collect();
    assert!(ids.is_sorted(), "ids sort by their time: {ids:?}");
    // Two ids are older than this retention. The first worker creates the partitions.
    assert_eq!(fleet.run(&["migrate", "--retention", "30"]).0, Some(0));
    let worker = fleet.worker(&[]);
    let (code, _, stderr) = rig::watch(&fleet, &ids);
    assert_eq!(code, Some(0), "{stderr}");
    // The second worker drops old partitions, but none with jobs that finished now.
    drop(worker);
    let worker = fleet.worker(&[]);
    eventually("the worker maintains the partitions", || {
        let old = "SELECT count(*) FROM pg_class WHERE relname ~ '^results_p' AND relkind = 'r'";
        rig::sql(&fleet, old).parse::<u32>().unwrap() >= 6
    });
    std::thread::sleep(Duration::from_millis(500));
    let expected = vec!["completed"; ids.len()];
    assert_eq!(rig::states(&fleet, &ids), expected);
    assert_eq!(worker.get("/healthz").0, 200);
    let (code, stdout, _) = fleet.run(&["cancel", &ids[5]]);
    assert_eq!((code, &rig::json(stdout.trim())["state"]), (Some(0), &"completed".into()));
}
