//! Processor time of this process and of the servers beside it, from `/proc`. On other systems than
//! Linux it is unknown.

use std::{fs, time::Duration};

/// Length of a tick in `/proc/PID/stat`: Linux reports these in hundredths of a second everywhere.
const TICK: Duration = Duration::from_millis(10);

/// Where to read the servers' time.
#[derive(Debug, Clone, Copy)]
pub struct Pids {
    /// Of redis-server.
    pub redis: Option<u32>,
    /// Of Postgres's main process, whose children are counted with it.
    pub postgres: Option<u32>,
}

/// Processor time used until a moment, or between two.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// By this process.
    pub own: Option<Duration>,
    /// By redis-server.
    pub redis: Option<Duration>,
    /// By Postgres.
    pub postgres: Option<Duration>,
}

impl Used {
    /// Until now.
    pub fn read(pids: Pids) -> Self {
        Self {
            own: of("self"),
            redis: pids.redis.and_then(|pid| of(&pid.to_string())),
            postgres: pids.postgres.and_then(of_family),
        }
    }

    /// From `earlier` on.
    pub fn since(self, earlier: Self) -> Self {
        let difference = |now: Option<Duration>, then: Option<Duration>| {
            now.zip(then).map(|(now, then)| now.saturating_sub(then))
        };
        Self {
            own: difference(self.own, earlier.own),
            redis: difference(self.redis, earlier.redis),
            postgres: difference(self.postgres, earlier.postgres),
        }
    }
}

/// What `/proc/PID/stat` says of a process.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// Its own time and that of children it has buried.
    ticks: u64,
}

/// The fields after the name, which is in parentheses and may contain anything.
fn parse(stat: &str) -> Option<Stat> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11..15)?.iter().map(|field| field.parse::<u64>().ok());
    Some(Stat { parent: fields.get(1)?.parse().ok()?, ticks: ticks.sum::<Option<u64>>()? })
}

fn stat(process: &str) -> Option<Stat> {
    parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

fn duration(ticks: u64) -> Duration {
    TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
}

fn of(process: &str) -> Option<Duration> {
    stat(process).map(|stat| duration(stat.ticks))
}

/// Of a process and its children that live; those that ended are in its own figure.
fn of_family(pid: u32) -> Option<Duration> {
    let mut ticks = stat(&pid.to_string())?.ticks;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let name = entry.file_name();
        let child = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        // A process may end while this looks.
        let child = child.and_then(stat).filter(|stat| stat.parent == pid);
        ticks += child.map_or(0, |stat| stat.ticks);
    }
    Some(duration(ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_hides_no_field() {
        let line = "17 (a) b (c) S 4 17 17 0 -1 0 1 2 3 4 50 7 20 1 20 0 9";
        assert_eq!(parse(line), Some(Stat { parent: 4, ticks: 78 }));
        assert_eq!(parse("17 (a) S 4 17"), None);
        assert_eq!(parse(""), None);
    }
}
