//! The Lua scripts: everything that reads and then writes, each atomic within one queue.

use std::sync::LazyLock;

use redis::{Cmd, ToRedisArgs};

/// What Redis is told first. Scripts that only move or remove run even when its memory is full; the
/// others are refused whole, before their first command.
pub(crate) const FREEING: &str = "#!lua flags=allow-oom\n";
pub(crate) const GROWING: &str = "#!lua\n";

/// A script and the name by which a server knows it.
pub(crate) struct Script {
    hash: String,
    text: String,
}

impl Script {
    /// A script that may use what the scripts of a queue share.
    pub(crate) fn new(flags: &str, body: &str) -> Self {
        Self::of(&[flags, include_str!("queue.lua"), body])
    }

    /// A script of these parts, the first of which are its flags.
    pub(crate) fn of(parts: &[&str]) -> Self {
        let text = parts.concat();
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { hash, text }
    }

    pub(super) fn by_hash<A: ToRedisArgs>(&self, prefix: &str, arguments: &[A]) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.hash).arg(1).arg(prefix).arg(arguments);
        command
    }

    /// The text itself, which the server keeps: one round trip, and to the right node of a cluster.
    pub(super) fn by_text<A: ToRedisArgs>(&self, prefix: &str, arguments: &[A]) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(&self.text).arg(1).arg(prefix).arg(arguments);
        command
    }
}

macro_rules! scripts {
    ($($name:ident = $flags:ident $file:literal;)*) => {
        $(pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::new($flags, include_str!($file)));)*
    };
}

scripts! {
    ADMIT = GROWING "admit.lua";
    ENQUEUE = GROWING "enqueue.lua";
    DELAY = GROWING "delay.lua";
    PROMOTE = FREEING "promote.lua";
    PULL = FREEING "pull.lua";
    ACKNOWLEDGE = FREEING "acknowledge.lua";
    HAND_BACK = FREEING "hand_back.lua";
    RENEW = FREEING "renew.lua";
    RECLAIM = FREEING "reclaim.lua";
    RECOVER = FREEING "recover.lua";
    SWEEP = FREEING "sweep.lua";
    BACKLOG = FREEING "backlog.lua";
    FORGET = FREEING "forget.lua";
}
