//! Wrong passwords, read-only servers, and unknown job ids.

use std::{fs, process::Stdio};

use crate::{
    fleet::{Fleet, WorkerProcess, eventually},
    rig::{self, LINE},
};

const SECRET: &str = "s3cr3t-word";

#[test]
fn password_is_in_no_log_while_redis_refuses_it() {
    let folder = rig::folder();
    let fleet = Fleet::start();
    rig::redis(&fleet, "CONFIG SET requirepass right");
    let port = fleet.redis.port();
    let wrong = format!("redis://:{SECRET}@127.0.0.1:{port}/0");
    // The worker logs the error at every log level and ends.
    let log = folder.path().join("log");
    let start = || {
        let words = ["worker", "--json", "--threads", "1", "--lease", "2", "--redis", &wrong];
        let mut command = fleet.command(&words);
        command.env("RUST_LOG", "trace").stderr(fs::File::create(&log).unwrap());
        command
    };
    let code = start().stdout(Stdio::null()).status().unwrap().code();
    assert_eq!(code, Some(1));
    assert!(rig::text(&log).contains("WRONGPASS"), "the log names the error");
    assert!(!rig::text(&log).contains(SECRET), "the log holds a password");
    rig::redis(&fleet, &format!("AUTH right\r\nCONFIG SET requirepass {SECRET}"));
    let worker = WorkerProcess::start(start());
    eventually("it is ready", || worker.get("/readyz").0 == 200);
    let pages = worker.get("/metrics").1 + &worker.get("/readyz").1;
    assert!(!pages.contains(SECRET));
    assert!(!rig::text(&log).contains(SECRET), "the log holds a password");
}

#[test]
fn read_only_redis_is_named_and_jobs_wait() {
    let fleet = Fleet::start();
    rig::redis(&fleet, "REPLICAOF 127.0.0.1 1");
    let (ids, said) = rig::submit(&fleet, LINE, &[]);
    let warnings: Vec<&str> = said.lines().filter(|l| l.contains("not announced")).collect();
    assert_eq!(warnings.len(), 1, "{said}");
    assert!(warnings[0].to_lowercase().contains("read only replica"), "{said}");
    let worker = fleet.worker(&[]);
    eventually("it is not ready", || worker.get("/readyz").0 == 503);
    rig::redis(&fleet, "REPLICAOF NO ONE");
    let (code, _, stderr) = fleet.run(&["watch", &ids[0], "--timeout", "60"]);
    assert_eq!(code, Some(0), "{stderr}");
}

#[test]
fn database_errors_are_named_without_the_password() {
    let fleet = Fleet::start();
    rig::sql(&fleet, "CREATE ROLE clerk LOGIN PASSWORD 'right'");
    rig::beside_postgres(&fleet, "sed -i \"1i host all clerk all scram-sha-256\" pg_hba.conf");
    rig::sql(&fleet, "SELECT pg_reload_conf()");
    let port = fleet.postgres.port();
    let url = |who: &str, base: &str| format!("postgres://{who}@127.0.0.1:{port}/{base}");
    let clerk = url(&format!("clerk:{SECRET}"), "postgres");
    eventually("the password is required", || {
        fleet.run(&["queue", "list", "--database", &clerk]).2.contains("28P01")
    });
    for (url, expect) in [
        (clerk, "password authentication failed"),
        (url("clerk:right", "postgres"), "permission denied"),
        (url(&format!("stranger:{SECRET}"), "postgres"), "does not exist"),
        (url(&format!("postgres:{SECRET}"), "missing"), "does not exist"),
        (format!("postgres://u:{SECRET}@127.0.0.1:1/x"), "refused"),
    ] {
        let commands = [&["submit", "-"][..], &["worker"], &["queue", "list"], &["migrate"]];
        // A refused connection is retried for some seconds, so one command is enough.
        let count = if expect == "refused" { 1 } else { commands.len() };
        for command in &commands[..count] {
            let words = [*command, &["--database", &url]].concat();
            let output = fleet.command(&words).env("RUST_LOG", "trace").output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
            let last = said.lines().last().unwrap();
            assert!(last.starts_with("error: ") && last.contains(expect), "{words:?}: {last}");
            assert!(!last.contains(" at line "), "{last}");
            assert!(!said.contains(SECRET), "the output holds a password: {said}");
        }
    }
}

#[test]
fn unknown_and_purged_jobs_are_reported() {
    let fleet = Fleet::start();
    let unknown = "0199f3c2-0000-7000-8000-000000000000";
    // The id of a dead letter that was purged.
    let (ids, _) = rig::submit(&fleet, LINE, &[]);
    let purged = ids[0].as_str();
    let kept = "id, model, format, tenant, priority, cost, attempts_max, submitted_at, job";
    let end = format!(
        "WITH ended AS (DELETE FROM open_jobs RETURNING *)
         INSERT INTO jobs ({kept}, state) SELECT {kept}, 'failed' FROM ended"
    );
    rig::sql(&fleet, &end);
    assert_eq!(fleet.run(&["dlq", "purge", purged]).0, Some(0));
    for id in [unknown, purged] {
        for command in [&["cancel"][..], &["results"], &["watch"], &["watch", "--follow"]] {
            let words = [command, &[id]].concat();
            let (code, stdout, stderr) = fleet.run(&words);
            assert_eq!(code, Some(2), "{words:?}: {stderr}");
            assert!(stderr.contains(&format!("no job {id}")), "{words:?}: {stderr}");
            assert!(rig::json(stdout.trim())["state"].is_null(), "{stdout}");
        }
        for command in ["show", "replay", "purge"] {
            let (code, stdout, stderr) = fleet.run(&["dlq", command, id]);
            assert!(matches!(code, Some(1 | 2)), "{command}: {stderr}");
            assert_eq!((stdout.as_str(), stderr.is_empty()), ("", false), "{command}");
        }
    }
    // Known jobs in the same command are cancelled, and only once.
    let (ids, _) = rig::submit(&fleet, LINE, &[]);
    let (code, stdout, _) = fleet.run(&["cancel", unknown, &ids[0]]);
    assert_eq!((code, stdout.lines().count()), (Some(2), 2));
    let (code, stdout, stderr) = fleet.run(&["cancel", &ids[0]]);
    assert_eq!(code, Some(0));
    assert!(stderr.contains("already finished, cancelled"), "{stderr}");
    assert_eq!(rig::json(stdout.trim())["cancelled"], false);
    let (code, _, stderr) = fleet.run(&["workers", "drain", "unknown"]);
    assert_eq!(code, Some(1));
    assert!(rig::is_one_error_line(&stderr), "{stderr}");
}

#[test]
fn errors_about_a_redis_url_hide_its_password() {
    let fleet = Fleet::start();
    for url in [
        format!("redis:/:{SECRET}@h"),
        format!("redis://:{SECRET}@h:99999"),
        format!("redis://:{SECRET}%zz@h"),
        format!("redis://:{SECRET}@h/seventeen"),
        format!("redis+sentinel://:{SECRET}@h"),
        format!("redis://:{SECRET}@h?password={SECRET}"),
        format!("redis://:{SECRET}@a,b"),
    ] {
        let (code, _, stderr) = fleet.run(&["submit", "-", "--redis", &url]);
        assert_eq!(code, Some(1), "{url}");
        assert!(rig::is_one_error_line(&stderr) && !stderr.contains(SECRET), "{stderr}");
    }
}
