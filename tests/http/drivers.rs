//! Admins killed repeatedly: every batch completes, and no line runs twice.

use std::time::Duration;

use serde_json::json;
use tritmill_servers::Signal;

use crate::{
    batches::{by_name, embedded, lines},
    fleet::Fleet,
    rig::Admin,
};

#[test]
fn batches_survive_repeated_kills_of_admins() {
    const ROUNDS: usize = 10;
    const LINES: usize = 120;
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let mut admins = [0, 1].map(|_| Admin::start(&fleet, &[]));
    let key = admins.iter().find_map(|admin| admin.first_key.clone()).unwrap();
    let content = lines(LINES);
    let mut ids = Vec::new();
    for round in 0..ROUNDS {
        let (victim, other) = (round % 2, 1 - round % 2);
        ids.push(admins[other].with(&key).batch(content.as_bytes(), "24h"));
        // The kills fall between the validation of the batch and its end.
        std::thread::sleep(Duration::from_millis((round * round * 17) as u64));
        admins[victim].signal(Signal::Kill);
        admins[victim] = Admin::start(&fleet, &[]);
    }
    let expected = embedded(&content);
    for id in &ids {
        let caller = admins[0].with(&key);
        let batch = caller.finished(id);
        assert_eq!(batch["status"], "completed", "{batch}");
        let counts = json!({ "total": LINES, "completed": LINES, "failed": 0 });
        assert_eq!(batch["request_counts"], counts);
        assert_eq!(by_name(&caller.lines(&batch["output_file_id"])), expected);
    }
    assert_eq!(fleet.rows(&["all_jobs"]), (ROUNDS * LINES) as u64, "no line became two jobs");
    let again = fleet.sql("SELECT count(*) FROM all_jobs WHERE epoch <> 1");
    assert_eq!(again.trim(), "0", "every job was claimed once");
    let outputs = "SELECT count(*) FROM files WHERE purpose = 'batch_output' AND size_bytes > 0";
    assert_eq!(fleet.sql(outputs).trim(), ROUNDS.to_string());
}
