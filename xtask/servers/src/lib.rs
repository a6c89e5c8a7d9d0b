//! What tests share: Redis, Postgres, S3, web servers and browsers on free ports in temporary folders, seeded random
//! numbers, and the rule for tests that lack a program.
//!
//! A server stops when it is dropped, and the system kills it when the test itself is killed. Start
//! it on the thread that runs the test: the system ties its life to that thread.

mod browser;
mod cluster;
mod moto;
mod port;
mod postgres;
mod process;
mod random;
mod redis;
mod sentinel;
mod web;

pub use browser::Browser;
pub use cluster::{RedisCluster, SlotMove};
pub use moto::Moto;
pub use port::Port;
pub use postgres::Postgres;
pub use process::Signal;
pub use random::Random;
pub use redis::Redis;
pub use sentinel::Sentinel;
pub use web::{Web, WebFile};

/// Programs that tests start, with their Debian packages. `cargo xtask test` installs what is missing.
const PROGRAMS: [(&str, &str); 8] = [
    ("redis-server", "redis-server"),
    ("initdb", "postgresql"),
    ("chromium", "chromium"),
    ("chromedriver", "chromium-driver"),
    ("openssl", "openssl"),
    ("curl", "curl"),
    ("cc", "gcc"),
    ("g++", "g++"),
];

/// Debian packages of the programs that tests start and this machine lacks.
pub fn missing_packages() -> Vec<&'static str> {
    let missing = PROGRAMS.iter().filter(|(program, _)| process::find(program).is_none());
    missing.map(|(_, package)| *package).collect()
}

/// Returns whether a test that cannot run must fail: `TRITMILL_REQUIRE_ALL=1` is set, as in
/// `.ci/run`.
pub fn all_required() -> bool {
    std::env::var_os("TRITMILL_REQUIRE_ALL").is_some_and(|value| value == "1")
}

/// Reports that a test cannot run here and names what it needs. The test returns afterwards.
///
/// # Panics
/// If [`all_required`].
pub fn skip(needs: &str) {
    assert!(!all_required(), "TRITMILL_REQUIRE_ALL=1, and this test needs {needs}");
    eprintln!("SKIPPED: this test needs {needs}");
}
