//! A Redis out of memory, and a full disk.

use std::{
    fs::{self, File},
    io::Write as _,
    os::unix::fs::{MetadataExt as _, chown},
    path::Path,
    process::{Command, Stdio},
};

use tempfile::TempDir;
use tritmill_servers::{Postgres, Redis};

use crate::{
    fleet::{Fleet, eventually, series},
    rig::{self, LINE},
};

#[test]
fn producers_wait_for_a_full_redis() {
    let folder = rig::folder();
    let fleet = Fleet::start();
    let worker = fleet.worker(&[]);
    let (before, _) = rig::submit(&fleet, LINE, &[]);
    assert_eq!(fleet.run(&["watch", "--timeout", "60", &before[0]]).0, Some(0));
    rig::redis(&fleet, "CONFIG SET maxmemory 1mb");
    let input = rig::file(folder.path(), "in", &LINE.repeat(50));
    let log = folder.path().join("log");
    let (input, out) = (input.to_str().unwrap(), folder.path().join("ids"));
    let mut producer = fleet
        .command(&["submit", input])
        .stdout(File::create(&out).unwrap())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let answers = folder.path().join("answers");
    let mut batch = fleet
        .command(&["batch", "run", input, "-o", answers.to_str().unwrap()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the producer reports that it waits for memory", || {
        let said = rig::text(&log);
        said.contains("memory") && said.contains("waiting 1.0 s")
    });
    assert_eq!(fleet.rows(&["all_jobs"]), 1, "no job is stored while Redis is full");
    rig::redis(&fleet, "CONFIG SET maxmemory 0");
    assert_eq!(producer.wait().unwrap().code(), Some(0), "{}", rig::text(&log));
    let ids = rig::text(&out);
    let ids: Vec<String> = ids.lines().map(rig::id).collect();
    let (code, stdout, stderr) = rig::watch(&fleet, &ids);
    assert_eq!((code, stdout.lines().count()), (Some(0), 50), "{stderr}");
    assert_eq!(batch.wait().unwrap().code(), Some(0));
    assert_eq!(rig::text(&answers).matches("2024-03-03").count(), 50);
    assert_eq!(worker.get("/readyz").0, 200);
}

/// A small disk; unmounted when dropped.
struct Disk {
    folder: TempDir,
}

impl Disk {
    /// Mounts a tmpfs; `None` if this process may not.
    fn mount() -> Option<Self> {
        let folder = rig::folder();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=24m,mode=755", "tmpfs"]).arg(folder.path());
        if !command.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            tritmill_servers::skip("root and CAP_SYS_ADMIN, to mount a small disk");
            return None;
        }
        Some(Self { folder })
    }

    fn fill(&self) {
        let mut ballast = File::create(self.folder.path().join("ballast")).unwrap();
        while ballast.write_all(&[0; 4096]).is_ok() {}
    }

    fn empty(&self) {
        fs::remove_file(self.folder.path().join("ballast")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazy: a server that is being killed may still have open files.
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

/// Returns a fleet with its tables on this disk. The write-ahead log is elsewhere: without room for
/// it, Postgres stops.
fn fleet_on(disk: &Disk) -> Fleet {
    let postgres = Postgres::start().unwrap();
    let owner = fs::metadata(Path::new("/proc").join(postgres.pid().unwrap().to_string())).unwrap();
    let space = disk.folder.path().join("space");
    fs::create_dir(&space).unwrap();
    chown(&space, Some(owner.uid()), Some(owner.gid())).unwrap();
    let fleet = Fleet { redis: Redis::start().unwrap(), postgres };
    rig::sql(&fleet, &format!("CREATE TABLESPACE small LOCATION '{}'", space.display()));
    rig::sql(&fleet, "ALTER DATABASE postgres SET default_tablespace = small");
    let (code, _, stderr) = fleet.run(&["migrate"]);
    assert_eq!(code, Some(0), "{stderr}");
    fleet
}

#[test]
fn full_disk_refuses_submissions_and_delays_results() {
    let Some(disk) = Disk::mount() else { return };
    let folder = rig::folder();
    let fleet = fleet_on(&disk);
    let many = rig::file(folder.path(), "in", &LINE.repeat(20_000));
    // Paused until the disk is full.
    assert_eq!(fleet.run(&["queue", "pause", "demo@i2_s"]).0, Some(0));
    let worker = fleet.worker(&[]);
    let (ids, _) = rig::submit(&fleet, &LINE.repeat(3), &[]);
    disk.fill();
    let (code, _, stderr) = fleet.run(&["submit", many.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert!(last.starts_with("error: ") && last.contains("No space left on device"), "{stderr}");
    // The worker cannot record its answers, counts the failures, and retries.
    assert_eq!(fleet.run(&["queue", "resume", "demo@i2_s"]).0, Some(0));
    eventually("the worker counts a failure", || {
        let page = worker.get("/metrics").1;
        series(&page, "tritmill_worker_dependency_failures_total").unwrap() > 0.0
    });
    assert_eq!(fleet.rows(&["results"]), 0);
    disk.empty();
    let (code, stdout, stderr) = rig::watch(&fleet, &ids);
    assert_eq!((code, stdout.matches("2024-03-03").count()), (Some(0), 3), "{stderr}");
    eventually("the worker is ready again", || worker.get("/readyz").0 == 200);
    assert_eq!(rig::submit(&fleet, LINE, &[]).0.len(), 1);
}
