//! The Lua scripts: everything that reads and then writes, each atomic within one queue.

use std::sync::LazyLock;

use redis::Cmd;

/// What Redis is told first. Scripts that only move or remove run even when its memory is full; the
/// others are refused whole, before their first command.
const FREEING: &str = "#!lua flags=allow-oom\n";
const GROWING: &str = "#!lua\n";

/// A script and the name by which a server knows it.
pub(super) struct Script {
    hash: String,
    text: String,
}

impl Script {
    fn new(flags: &str, body: &str) -> Self {
        let text = format!("{flags}{}{body}", include_str!("queue.lua"));
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { hash, text }
    }

    pub(super) fn by_hash(&self, prefix: &str, arguments: &[String]) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.hash).arg(1).arg(prefix).arg(arguments);
        command
    }

    /// The text itself, which the server keeps: one round trip, and to the right node of a cluster.
    pub(super) fn by_text(&self, prefix: &str, arguments: &[String]) -> Cmd {
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
