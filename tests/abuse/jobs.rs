//! Jobs that cannot be read, that nobody serves, and that kill their worker.

use crate::{
    fleet::{Fleet, eventually},
    rig::{self, LINE},
};
use tritmill_servers::Signal;

const STREAM: &str = "tm:{demo:i2_s}:normal:default";

#[test]
fn what_cannot_be_read_is_counted_and_its_neighbours_are_answered() {
    let fleet = Fleet::start();
    let (ids, _) = rig::submit(&fleet, &LINE.repeat(4), &[]);
    // Another program's entries, one of a later release, and a job of one.
    rig::redis(&fleet, &format!("XADD {STREAM} * junk 1"));
    rig::redis(&fleet, &format!("XADD {STREAM} * v 2 id {} cost 1", ids[1]));
    rig::redis(&fleet, &format!("XADD {STREAM} * v 1 id {} cost many", ids[1]));
    let later = "UPDATE jobs SET job = '\\x0900c0', attempts_max = 2 WHERE id =";
    rig::sql(&fleet, &format!("{later} '{}'", ids[0]));
    let worker = fleet.worker(&[]);
    let mut words = vec!["watch", "--timeout", "60"];
    words.extend(ids.iter().map(String::as_str));
    let (code, stdout, stderr) = fleet.run(&words);
    assert_eq!(code, Some(2), "{stderr}");
    let stories: Vec<_> = stdout.lines().map(rig::json).collect();
    assert_eq!(stories[0]["state"], "failed");
    for story in &stories[1..] {
        assert_eq!((&story["state"], &story["attempts"]), (&"completed".into(), &0.into()));
    }
    let page = worker.get("/metrics").1;
    assert_eq!(rig::metric(&page, "tritmill_worker_stream_entries_foreign_total"), 3);
    // Its attempts say why, and no list fails over it.
    let (code, stdout, stderr) = fleet.run(&["dlq", "list", "demo@i2_s"]);
    assert_eq!((code, stdout.lines().count()), (Some(0), 1), "{stderr}");
    let story = rig::story(&fleet, &ids[0]);
    assert_eq!((&story["queue"], &story["attempts"]), (&"demo@i2_s".into(), &2.into()));
    assert_eq!(story["errors"].as_array().unwrap().len(), 2, "{story}");
    assert_eq!(story["errors"][0]["code"], "unreadable");
    let why = story["error"]["message"].as_str().unwrap();
    assert!(why.contains("wire version 9 is not known here"), "{why}");
    let (code, _, stderr) = fleet.run(&["dlq", "replay", &ids[0]]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("not replayed"), "{stderr}");
    // An answer of a later release is not lost: it is left out until somebody can read it.
    let outcome = "UPDATE results SET outcome = '\\x0900c0' WHERE job_id =";
    rig::sql(&fleet, &format!("{outcome} '{}'", ids[1]));
    let (code, _, stderr) = fleet.run(&["watch", "--timeout", "1", &ids[1], &ids[2]]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("1/2 finished") && stderr.contains("wire version 9"), "{stderr}");
}

#[test]
fn jobs_that_nobody_serves_are_shown_and_expire_by_their_deadline() {
    let fleet = Fleet::start();
    let (ids, said) = rig::submit(&fleet, &LINE.repeat(2), &["--format", "tl2"]);
    assert!(said.contains("workers: 0") && said.contains("no worker serves demo@tl2"), "{said}");
    let (code, _, stderr) = fleet.run(&["watch", "--timeout", "1", &ids[0]]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("no worker serves demo@tl2: 1 of these jobs wait"), "{stderr}");
    let late = "UPDATE jobs SET expires_at = store_now_ms(NULL) - 1 WHERE id =";
    rig::sql(&fleet, &format!("{late} '{}'", ids[0]));
    let overview = rig::queue(&fleet, "demo@tl2");
    let counts = ["queued", "workers", "overdue"].map(|name| overview[name].as_u64().unwrap());
    assert_eq!(counts, [2, 0, 1]);
    let (_, table, _) = fleet.run(&["queue", "list"]);
    assert!(table.contains("no worker serves it, 1 past their deadline"), "{table}");
    // A worker of another queue looks after all of them.
    let worker = fleet.worker(&[]);
    let (code, stdout, stderr) = fleet.run(&["watch", "--timeout", "60", &ids[0]]);
    assert_eq!(code, Some(2), "{stderr}");
    let story = rig::json(stdout.trim());
    assert_eq!((&story["state"], &story["error"]["code"]), (&"expired".into(), &"expired".into()));
    assert_eq!(rig::states(&fleet, &ids), ["expired", "queued"]);
    eventually("the worker is counted", || rig::queue(&fleet, "demo@i2_s")["workers"] == 1);
    // One that died without a word counts no more once it has been silent for a while.
    worker.signal(Signal::Kill);
    rig::sql(&fleet, "UPDATE workers SET seen_at = seen_at - 60000");
    let (_, said) = rig::submit(&fleet, LINE, &[]);
    assert!(said.contains("workers: 0"), "{said}");
    let (_, listed, _) = fleet.run(&["workers", "list", "--json"]);
    assert_eq!(rig::json(listed.trim())["alive"], false);
}

#[test]
fn a_job_that_kills_its_workers_ends_in_the_dead_letters_and_the_others_are_answered() {
    let fleet = Fleet::start();
    // Long enough to be caught in the act; the others are short.
    let poison = "{\"prompt\": \"Paid\", \"max_tokens\": 400, \"ignore_eos\": true, \"n\": 16}\n";
    let (ids, _) = rig::submit(&fleet, &format!("{poison}{}", LINE.repeat(8)), &[]);
    let done = |count: usize| {
        move |fleet: &Fleet| {
            let all = rig::sql(fleet, "SELECT count(*) FROM jobs WHERE state = 'completed'");
            all.parse::<usize>().unwrap() == count
        }
    };
    let running = format!("SELECT state || ' ' || owner FROM jobs WHERE id = '{}'", ids[0]);
    for attempt in 0..3 {
        let worker = fleet.worker(&["--isa", "scalar"]);
        eventually("it runs, alone", || {
            done(8)(&fleet) && rig::sql(&fleet, &running) == format!("running {}", worker.owner)
        });
        worker.signal(Signal::Kill);
        drop(worker);
        assert_eq!(rig::story(&fleet, &ids[0])["attempts"], attempt);
    }
    let _heir = fleet.worker(&[]);
    eventually("it is a dead letter", || rig::states(&fleet, &ids[..1]) == ["failed"]);
    let story = rig::story(&fleet, &ids[0]);
    assert_eq!((&story["attempts"], &story["error"]["code"]), (&3.into(), &"lease_lost".into()));
    assert_eq!(story["errors"].as_array().unwrap().len(), 3);
    assert_eq!(story["job"]["sampling"]["n"], 16, "what was asked");
    for id in &ids[1..] {
        let story = rig::story(&fleet, id);
        assert_eq!((&story["state"], &story["attempts"]), (&"completed".into(), &0.into()));
    }
    let (code, stdout, stderr) = fleet.run(&["dlq", "replay", &ids[0]]);
    assert_eq!(code, Some(0), "{stderr}");
    let replay = rig::json(stdout.trim());
    assert_eq!(replay["replay_of"], ids[0]);
    let again = replay["id"].as_str().unwrap();
    assert_eq!(fleet.run(&["watch", "--timeout", "60", again]).0, Some(0));
    let of = rig::sql(&fleet, &format!("SELECT replay_of FROM jobs WHERE id = '{again}'"));
    assert_eq!(of, ids[0]);
    assert_eq!(rig::states(&fleet, &ids[..1]), ["failed"], "the dead letter stays");
}
