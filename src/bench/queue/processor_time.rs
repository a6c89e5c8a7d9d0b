//! Processor time of this process and of the servers on this machine, from `/proc`; unknown on systems
//! other than Linux.

use std::{fs, time::Duration};

use anyhow::bail;
use clap::Args;

/// Length of a tick in `/proc/PID/stat`: Linux reports these in hundredths of a second everywhere.
const TICK: Duration = Duration::from_millis(10);

/// Process ids of the servers.
#[derive(Debug, Clone, Copy, Args)]
pub struct Pids {
    /// Process of redis-server on this machine, to report its CPU time
    #[arg(id = "redis_pid", long = "redis-pid", value_name = "PID")]
    pub redis: Option<u32>,
    /// Main process of Postgres on this machine, to report its CPU time and its children's
    #[arg(id = "postgres_pid", long = "postgres-pid", value_name = "PID")]
    pub postgres: Option<u32>,
}

impl Pids {
    /// Returns these ids; an error if one of the processes is not on this machine.
    pub fn existing(self) -> anyhow::Result<Self> {
        let used = Used::read(self);
        let is_missing = |pid: Option<u32>, used: Option<Duration>| pid.is_some() && used.is_none();
        if is_missing(self.redis, used.redis) || is_missing(self.postgres, used.postgres) {
            bail!("no such process on this machine: check --redis-pid and --postgres-pid");
        }
        Ok(self)
    }
}

/// Processor time until a moment, or between two moments.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// Of this process.
    pub own: Option<Duration>,
    /// Of redis-server.
    pub redis: Option<Duration>,
    /// Of Postgres.
    pub postgres: Option<Duration>,
}

impl Used {
    /// Reads the time until now.
    pub fn read(pids: Pids) -> Self {
        Self {
            own: time("self"),
            redis: pids.redis.and_then(|pid| time(&pid.to_string())),
            postgres: pids.postgres.and_then(time_with_children),
        }
    }

    /// Returns the time since `earlier`.
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

/// Fields of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    parent: u32,
    /// Time of the process and of its ended children.
    ticks: u64,
}

/// Returns the fields after the name, which is in parentheses and may contain any character.
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

fn time(process: &str) -> Option<Duration> {
    stat(process).map(|stat| duration(stat.ticks))
}

/// Returns the time of a process and its living children; ended children are in its own time.
fn time_with_children(pid: u32) -> Option<Duration> {
    let mut ticks = stat(&pid.to_string())?.ticks;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let name = entry.file_name();
        let child = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        // A process may end in the meantime.
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
