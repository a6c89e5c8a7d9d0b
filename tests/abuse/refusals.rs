//! What servers refuse until an operator has changed something: at the start, later, and for one row.

use std::{
    io::Read as _,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;

use crate::{
    fleet::{Fleet, KillOnDrop, eventually},
    rig::{self, LINE},
};

/// Commands that need Redis.
const COMMANDS: [&[&str]; 4] = [
    &["worker", "--threads", "1"],
    &["admin", "--listen", "127.0.0.1:0"],
    &["submit", "/dev/null"],
    &["watch", "0190b5e8-0000-7000-8000-000000000000"],
];

/// Runs a command that has to end by itself; returns its exit code and standard error.
fn ends(mut command: Command) -> (Option<i32>, String) {
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = KillOnDrop(command.spawn().unwrap());
    let code = child.wait(Duration::from_secs(60));
    let mut said = String::new();
    if code.is_some() {
        child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    }
    (code, said)
}

#[test]
fn process_that_redis_refuses_ends_with_cause_and_remedy() {
    let fleet = Fleet::start();
    let host = format!("127.0.0.1:{}", fleet.redis.port());
    let refused = |url: &str, words: &[&str], remedy: &str| {
        let mut command = fleet.command(words);
        command.env("REDIS_URL", url);
        let (code, said) = ends(command);
        assert_eq!(code, Some(1), "{words:?} {url}: {said}");
        assert!(said.contains(remedy) && !said.contains("hunter2"), "{words:?}: {said}");
    };
    for words in COMMANDS {
        refused(&format!("redis://{host}/99"), words, "correct the database number");
    }
    rig::redis(&fleet, "ACL SETUSER guest on >hunter2 ~tm:* +@read +ping");
    refused(&format!("redis://guest:hunter2@{host}"), COMMANDS[0], "allow the user");
    refused(&format!("redis://guest:hunter22@{host}"), COMMANDS[0], "check user and password");
    refused(&format!("redis+cluster://{host}"), COMMANDS[0], "this server is no cluster");
    rig::redis(&fleet, "SET tm:{demo:i2_s}:locations x");
    refused(&format!("redis://{host}"), COMMANDS[0], "tm:{demo:i2_s}:locations is a string");
}

#[test]
fn worker_ends_and_admin_is_not_ready_when_redis_refuses_them_later() {
    let fleet = Fleet::start();
    let mut command = fleet.command(&["worker", "--json", "--threads", "1", "--lease", "2"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut worker = KillOnDrop(command.spawn().unwrap());
    let admin = fleet.command(&["admin", "--json", "--listen", "127.0.0.1:0"]);
    let admin = crate::fleet::WorkerProcess::start(admin);
    assert_eq!(admin.get("/readyz").0, 200);
    let (ids, said) = rig::submit(&fleet, LINE, &[]);
    assert_eq!(ids.len(), 1, "{said}");
    assert_eq!(rig::watch(&fleet, &ids).0, Some(0));

    // One connection: the next one would have to log in.
    rig::redis(&fleet, "CONFIG SET requirepass hunter2\r\nCLIENT KILL TYPE normal SKIPME yes");
    let code = worker.wait(Duration::from_secs(60));
    assert!(code.is_some_and(|code| code != 0), "{code:?}");
    let mut said = String::new();
    worker.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("the Redis URL has no password"), "{said}");
    eventually("admin is not ready", || {
        let (status, why) = admin.get("/readyz");
        status == 503 && why.contains("the dispatcher refuses this service")
    });
}

#[test]
fn row_that_the_database_refuses_is_an_error_of_its_line() {
    let fleet = Fleet::start();
    rig::sql(&fleet, "ALTER TABLE open_jobs ADD CONSTRAINT short CHECK (octet_length(job) < 2000)");
    rig::sql(
        &fleet,
        "CREATE FUNCTION no_dates() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF position('2024-03-03'::bytea IN NEW.outcome) > 0 THEN RAISE 'no dates here'; END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER no_dates BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION no_dates()",
    );
    let _worker = fleet.worker(&[]);
    let folder = tempfile::tempdir().unwrap();
    let mut lines = String::new();
    for index in 0..20 {
        let prompt = match index {
            7 => (0..3000).map(|_| fastrand::alphanumeric()).collect::<String>(),
            11 => "Paid on the 3rd of March, 2024".to_owned(),
            _ => format!("Paid on the {}th of May, 2021", 4 + index),
        };
        let line = serde_json::json!({ "custom_id": format!("q{index}"), "prompt": prompt, "temperature": 0 });
        lines += &format!("{line}\n");
    }
    let input = rig::file(folder.path(), "in", &lines);
    let output = folder.path().join("out");
    let (code, _, said) =
        fleet.run(&["batch", "run", input.to_str().unwrap(), "-o", output.to_str().unwrap()]);
    assert_eq!(code, Some(2), "{said}");
    let answers: Vec<Value> = rig::text(&output).lines().map(rig::json).collect();
    assert_eq!(answers.len(), 20, "{said}");
    let is_failed = |answer: &&Value| answer["response"]["status_code"] != 200;
    let failed: Vec<&Value> = answers.iter().filter(is_failed).collect();
    let mut names: Vec<&str> =
        failed.iter().map(|answer| answer["custom_id"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["q11", "q7"], "{failed:?}");
    for (name, words) in [("q7", "violates check constraint"), ("q11", "no dates here")] {
        let answer = failed.iter().find(|answer| answer["custom_id"] == name).unwrap();
        let error = &answer["response"]["body"]["error"];
        assert_eq!(error["code"], "not_storable", "{answer}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
    }

    let (ids, said) = rig::submit(&fleet, &lines, &[]);
    assert_eq!(ids.len(), 19, "{said}");
    assert!(said.contains("refused: q7: ") && said.contains("\"short\""), "{said}");
}

#[test]
fn database_with_another_encoding_is_refused_by_name() {
    let fleet = Fleet::empty();
    let create =
        "CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0";
    rig::sql(&fleet, create);
    let url =
        fleet.postgres.url().replace("/postgres", "/latin").replace("//latin@", "//postgres@");
    for words in [&["migrate"][..], &["worker"], &["submit", "/dev/null"]] {
        let mut command = fleet.command(words);
        command.env("DATABASE_URL", &url);
        let (code, said) = ends(command);
        assert_eq!(code, Some(1), "{words:?}: {said}");
        assert!(said.contains("LATIN1") && said.contains("ENCODING 'UTF8'"), "{words:?}: {said}");
    }
}
