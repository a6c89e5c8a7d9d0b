//! `cargo xtask gpu latency`: a hundred callers at once, through the HTTP API, a worker and its store.

use super::{Place, number, print_targets};

/// Bytes of the device that all of it may take.
const MEMORY_MAX: f64 = 8e9;

pub fn run(place: &Place) -> anyhow::Result<()> {
    let requests = "bench e2e --http --callers 100 --generate 100 --batch-lines 0 --batch 128 --kv-memory 2048";
    let words: Vec<&str> = requests.split(' ').collect();
    let said = place.measure(&words, &place.model()?)?;
    println!(
        "{} requests of 100 tokens, 100 at once, {} errors (`tritmill {requests}`)",
        said["requests"], said["errors"]
    );
    let seconds = |name: &str| Some(number(&said, name));
    print_targets(&[
        ("p50, s", "< 1.5".to_owned(), seconds("p50_s")),
        ("p90, s", "< 2".to_owned(), seconds("p90_s")),
        ("p99, s", "< 3".to_owned(), seconds("p99_s")),
        (
            "device memory, GB",
            format!("< {}", MEMORY_MAX / 1e9),
            Some(number(&said, "memory_bytes") / 1e9),
        ),
    ]);
    Ok(())
}
