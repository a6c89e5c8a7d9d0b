//! Unreadable jobs, jobs without a worker, and jobs that kill their worker.

use crate::{
    fleet::{Fleet, eventually, series},
    rig::{self, LINE},
};
use tritmill_servers::Signal;

const STREAM: &str = "tm:{demo:i2_s}:normal:default";

#[test]
fn unreadable_entries_are_counted_and_other_jobs_are_answered() {
    let fleet = Fleet::start();
    let (ids, _) = rig::submit(&fleet, &LINE.repeat(4), &[]);
    // An entry of another program, one of a later release, an invalid one, and a job of a later release.
    rig::redis(&fleet, &format!("XADD {STREAM} * junk 1"));
    rig::redis(&fleet, &format!("XADD {STREAM} * version 2 id {} cost 1", ids[1]));
    rig::redis(&fleet, &format!("XADD {STREAM} * version 1 id {} cost many", ids[1]));
    let later = "UPDATE open_jobs SET job = '\\x0900c0', attempts_max = 2 WHERE id =";
    rig::sql(&fleet, &format!("{later} '{}'", ids[0]));
    let worker = fleet.worker(&[]);
    let (code, stdout, stderr) = rig::watch(&fleet, &ids);
    assert_eq!(code, Some(2), "{stderr}");
    let jobs: Vec<_> = stdout.lines().map(rig::json).collect();
    assert_eq!(jobs[0]["state"], "failed");
    for job in &jobs[1..] {
        assert_eq!((&job["state"], &job["attempts"]), (&"completed".into(), &0.into()));
    }
    let page = worker.get("/metrics").1;
    assert_eq!(series(&page, "tritmill_worker_stream_entries_foreign_total"), Some(3.0));
    // The attempts hold the reason, and lists still work.
    let (code, stdout, stderr) = fleet.run(&["dlq", "list", "demo@i2_s"]);
    assert_eq!((code, stdout.lines().count()), (Some(0), 1), "{stderr}");
    let job = rig::history(&fleet, &ids[0]);
    assert_eq!((&job["queue"], &job["attempts"]), (&"demo@i2_s".into(), &2.into()));
    assert_eq!(job["errors"].as_array().unwrap().len(), 2, "{job}");
    assert_eq!(job["errors"][0]["code"], "unreadable");
    let why = job["error"]["message"].as_str().unwrap();
    assert!(why.contains("wire version 9 is not known here"), "{why}");
    let (code, _, stderr) = fleet.run(&["dlq", "replay", &ids[0]]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("not replayed"), "{stderr}");
    // A result of a later release is kept and left out of the output.
    let outcome = "UPDATE results SET outcome = '\\x0900c0' WHERE job_id =";
    rig::sql(&fleet, &format!("{outcome} '{}'", ids[1]));
    let (code, _, stderr) = fleet.run(&["watch", "--timeout", "1", &ids[1], &ids[2]]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("1/2 finished") && stderr.contains("wire version 9"), "{stderr}");
}

#[test]
fn jobs_without_a_worker_are_shown_and_expire() {
    let fleet = Fleet::start();
    let (ids, said) = rig::submit(&fleet, &LINE.repeat(2), &["--format", "tl2"]);
    assert!(said.contains("workers: 0") && said.contains("no worker serves demo@tl2"), "{said}");
    let (code, _, stderr) = fleet.run(&["watch", "--timeout", "1", &ids[0]]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("no worker serves demo@tl2: 1 of these jobs wait"), "{stderr}");
    let late = "UPDATE open_jobs SET expires_at = store_now_ms(NULL) - 1 WHERE id =";
    rig::sql(&fleet, &format!("{late} '{}'", ids[0]));
    let overview = rig::queue(&fleet, "demo@tl2");
    let counts = ["queued", "workers", "overdue"].map(|name| overview[name].as_u64().unwrap());
    assert_eq!(counts, [2, 0, 1]);
    let (_, table, _) = fleet.run(&["queue", "list"]);
    assert!(table.contains("no worker serves it, 1 past their deadline"), "{table}");
    // A worker of another queue expires the jobs of all queues.
    let worker = fleet.worker(&[]);
    let (code, stdout, stderr) = fleet.run(&["watch", "--timeout", "60", &ids[0]]);
    assert_eq!(code, Some(2), "{stderr}");
    let job = rig::json(stdout.trim());
    assert_eq!((&job["state"], &job["error"]["code"]), (&"expired".into(), &"expired".into()));
    assert_eq!(rig::states(&fleet, &ids), ["expired", "queued"]);
    eventually("the worker is counted", || rig::queue(&fleet, "demo@i2_s")["workers"] == 1);
    // A killed worker is not counted once its heartbeats are a minute old.
    worker.signal(Signal::Kill);
    rig::sql(&fleet, "UPDATE workers SET seen_at = seen_at - 60000");
    let (_, said) = rig::submit(&fleet, LINE, &[]);
    assert!(said.contains("workers: 0"), "{said}");
    let (_, listed, _) = fleet.run(&["workers", "list", "--json"]);
    assert_eq!(rig::json(listed.trim())["alive"], false);
}

#[test]
fn job_that_kills_its_workers_becomes_a_dead_letter() {
    let fleet = Fleet::start();
    // Long enough to be running at the kill; the other jobs are short.
    let poison = "{\"prompt\": \"Paid\", \"max_tokens\": 400, \"ignore_eos\": true, \"n\": 16}\n";
    let (ids, _) = rig::submit(&fleet, &format!("{poison}{}", LINE.repeat(8)), &[]);
    let completed = |count: usize| {
        move |fleet: &Fleet| {
            let all = rig::sql(fleet, "SELECT count(*) FROM all_jobs WHERE state = 'completed'");
            all.parse::<usize>().unwrap() == count
        }
    };
    let running = format!("SELECT state || ' ' || owner FROM all_jobs WHERE id = '{}'", ids[0]);
    // It runs alone after two lost workers, and is charged for three more.
    for lost in 0..5_u32 {
        let worker = fleet.worker(&["--isa", "scalar"]);
        eventually("only the long job runs", || {
            completed(8)(&fleet)
                && rig::sql(&fleet, &running) == format!("running {}", worker.owner)
        });
        worker.signal(Signal::Kill);
        drop(worker);
        assert_eq!(rig::history(&fleet, &ids[0])["attempts"], lost.saturating_sub(2));
    }
    let _last = fleet.worker(&[]);
    eventually("the job is a dead letter", || rig::states(&fleet, &ids[..1]) == ["failed"]);
    let job = rig::history(&fleet, &ids[0]);
    assert_eq!((&job["attempts"], &job["error"]["code"]), (&3.into(), &"lease_lost".into()));
    assert_eq!(job["errors"].as_array().unwrap().len(), 5);
    assert_eq!(job["job"]["sampling"]["n"], 16, "the dead letter holds the job");
    for id in &ids[1..] {
        let job = rig::history(&fleet, id);
        assert_eq!((&job["state"], &job["attempts"]), (&"completed".into(), &0.into()));
    }
    let (code, stdout, stderr) = fleet.run(&["dlq", "replay", &ids[0]]);
    assert_eq!(code, Some(0), "{stderr}");
    let replay = rig::json(stdout.trim());
    assert_eq!(replay["replay_of"], ids[0]);
    let again = replay["id"].as_str().unwrap();
    assert_eq!(fleet.run(&["watch", "--timeout", "60", again]).0, Some(0));
    let of = rig::sql(&fleet, &format!("SELECT replay_of FROM all_jobs WHERE id = '{again}'"));
    assert_eq!(of, ids[0]);
    assert_eq!(rig::states(&fleet, &ids[..1]), ["failed"], "the dead letter stays");
}
