//! This release on the schema of the next release and on an older one.

use crate::{
    fleet::{Fleet, eventually, series},
    rig::{self, LINE},
};

/// Changes that a next release may make to the schema while this one runs: additions.
const NEXT: &str = "
ALTER TABLE jobs ADD COLUMN shade text;
ALTER TABLE jobs ADD COLUMN weight bigint NOT NULL DEFAULT 1;
ALTER TABLE open_jobs ADD COLUMN shade text;
ALTER TABLE open_jobs ADD COLUMN weight bigint NOT NULL DEFAULT 1;
ALTER TABLE results ADD COLUMN of_a_later_release bigint NOT NULL DEFAULT 0;
ALTER TABLE workers ADD COLUMN device text;
ALTER TABLE queues ADD COLUMN note text;
ALTER TABLE attempt_errors ADD COLUMN device text;
CREATE INDEX jobs_by_shade ON jobs (shade) WHERE shade IS NOT NULL;
CREATE TABLE shades (name text PRIMARY KEY, since bigint NOT NULL);
INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
    VALUES (9001, 'shades', true, '\\x00', 0);";

#[test]
fn all_commands_work_on_an_expanded_schema() {
    let fleet = Fleet::start();
    // This worker runs during the change.
    let older = fleet.worker(&[]);
    rig::sql(&fleet, NEXT);
    let long = format!("{{\"prompt\": \"{}\"}}\n", "word ".repeat(2000));
    let (mut ids, _) = rig::submit(&fleet, &format!("{}{long}", LINE.repeat(20)), &[]);
    // This worker starts after the change; it also creates the partition of an old job.
    let old = "0190a3c2-0000-7000-8000-000000000001";
    let copied =
        "id, model, format, tenant, priority, state, cost, attempts_max, submitted_at, job";
    let rows = copied.replacen("id", &format!("'{old}'"), 1).replacen("state", "'queued'", 1);
    let of = format!("FROM all_jobs WHERE id = '{}'", ids[0]);
    rig::sql(&fleet, &format!("INSERT INTO open_jobs ({copied}) SELECT {rows} {of}"));
    let newer = fleet.worker(&[]);
    let dead = ids.pop().unwrap();
    let mut words = vec!["watch", "--timeout", "60", &dead];
    words.extend(ids.iter().map(String::as_str));
    let (code, stdout, stderr) = fleet.run(&words);
    assert_eq!(code, Some(2), "{stderr}");
    assert_eq!(stdout.matches("2024-03-03").count(), 20, "{stdout}");
    eventually("the partition is created and the row moved", || {
        rig::sql(&fleet, "SELECT count(*) FROM jobs_default") == "0"
    });
    // Every operator command.
    for words in [
        &["dlq", "list", "demo@i2_s"][..],
        &["dlq", "show", &dead],
        &["dlq", "replay", &dead],
        &["dlq", "purge", &dead],
        &["queue", "pause", "demo@i2_s"],
        &["queue", "resume", "demo@i2_s"],
        &["queue", "limit", "demo@i2_s", "1000000"],
        &["queue", "list"],
        &["workers", "list"],
        &["workers", "drain", &older.owner],
        &["migrate"],
    ] {
        let (code, _, stderr) = fleet.run(words);
        assert_eq!(code, Some(0), "{words:?}: {stderr}");
    }
    let (ids, _) = rig::submit(&fleet, &LINE.repeat(3), &[]);
    assert_eq!(fleet.run(&["cancel", &ids[2]]).0, Some(0));
    eventually("both jobs are finished", || {
        !rig::states(&fleet, &ids).iter().any(|state| state == "queued" || state == "running")
    });
    assert_eq!(newer.get("/readyz").0, 200);
    let page = newer.get("/metrics").1;
    assert_eq!(series(&page, "tritmill_worker_dependency_failures_total"), Some(0.0));
}

#[test]
fn older_schema_is_refused_with_the_command_to_run() {
    let fleet = Fleet::start();
    let latest = rig::sql(&fleet, "SELECT max(version) FROM _sqlx_migrations");
    // As a release before the first one would have it.
    rig::sql(&fleet, "UPDATE _sqlx_migrations SET version = version - 1");
    let refused = |expect: &str| {
        for words in [&["worker"][..], &["submit", "-"], &["queue", "list"], &["results", ID]] {
            let (code, stdout, stderr) = fleet.run(words);
            assert_eq!((code, stdout.as_str()), (Some(1), ""), "{words:?}: {stderr}");
            assert!(rig::is_one_error_line(&stderr), "{stderr}");
            assert!(stderr.contains(expect) && stderr.contains("run tritmill migrate"), "{stderr}");
        }
    };
    refused(&format!("lacks migration {latest}"));
    rig::sql(&fleet, "DROP TABLE _sqlx_migrations");
    refused("no tritmill schema");
}

const ID: &str = "0199f3c2-0000-7000-8000-000000000000";
