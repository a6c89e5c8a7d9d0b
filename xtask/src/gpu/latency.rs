//! A hundred callers at once, through the HTTP API, a worker and its store.

use super::place::{Place, number, targets_table};

/// Device memory that everything together may take, in bytes.
const MEMORY_MAX: f64 = 8e9;

pub fn run(place: &Place) -> anyhow::Result<String> {
    let requests = place.sizes(
        "bench e2e --http --callers 100 --generate 100 --batch-lines 0 --batch 128 --kv-memory 2048",
        "bench e2e --http --callers 2 --generate 2 --batch-lines 0 --batch 2 --kv-memory 8",
    );
    let found = place.measure(requests)?;
    let text = format!(
        "{} requests, {} errors (`tritmill {requests}`)\n",
        found["requests"], found["errors"]
    );
    let seconds = |name: &str| Some(number(&found, name));
    let table = targets_table(&[
        ("p50, s", "< 1.5".to_owned(), seconds("p50_s")),
        ("p90, s", "< 2".to_owned(), seconds("p90_s")),
        ("p99, s", "< 3".to_owned(), seconds("p99_s")),
        (
            "device memory, GB",
            format!("< {}", MEMORY_MAX / 1e9),
            Some(number(&found, "memory_bytes") / 1e9),
        ),
    ]);
    Ok(text + &table)
}
