//! Redis and Postgres of a test's own: started on free ports in temporary folders, stopped when
//! dropped, and killed by the system if the test itself is killed. Never a server that was there.
//!
//! Start them on the thread that runs the test: the system ties their life to that thread's.

mod browser;
mod port;
mod postgres;
mod process;
mod redis;

pub use browser::Browser;
pub use port::Port;
pub use postgres::Postgres;
pub use process::Signal;
pub use redis::Redis;

/// Where Debian puts the programs of Postgres, beside `PATH`.
const POSTGRES_FOLDERS: &str = "/usr/lib/postgresql";

/// Debian packages of the programs that tests start but that are not here.
pub fn missing_packages() -> Vec<&'static str> {
    let mut missing = Vec::new();
    if process::find("redis-server").is_none() {
        missing.push("redis-server");
    }
    if process::find("initdb").is_none() {
        missing.push("postgresql");
    }
    missing
}
