//! The Lua scripts: all operations that read and then write, each atomic within one queue.
//!
//! A script of a queue computes most of its keys and so cannot declare them. While the queue's slot moves to
//! another node of a cluster, keys are on both nodes, and a script that ran then would miss some, fail
//! halfway, or create keys that already exist on the other node. So each script declares two keys
//! ([`keys_of`]), of which one exists and one never does: with these, each node refuses the script
//! (`TRYAGAIN`) from the begin of the move to its end, before the first command, and the caller tries again.

use std::sync::LazyLock;

use redis::{Cmd, ToRedisArgs};

/// Flags of a script. Scripts that only move or remove data run even when Redis's memory is full; the
/// others are then refused before their first command.
pub(crate) const FREEING: &str = "#!lua flags=allow-oom\n";
pub(crate) const GROWING: &str = "#!lua\n";

/// A script and its hash.
pub(crate) struct Script {
    hash: String,
    text: String,
}

impl Script {
    /// Creates a script made of these parts, beginning with the flags.
    pub(crate) fn from_parts(parts: &[&str]) -> Self {
        let text = parts.concat();
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { hash, text }
    }

    pub(super) fn by_hash<A: ToRedisArgs>(&self, keys: &[String], arguments: &[A]) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.hash).arg(keys.len()).arg(keys).arg(arguments);
        command
    }

    /// Sends the text, which the server caches: one round trip, to the right node of a cluster.
    pub(super) fn by_text<A: ToRedisArgs>(&self, keys: &[String], arguments: &[A]) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(&self.text).arg(keys.len()).arg(keys).arg(arguments);
        command
    }
}

/// Returns the keys that scripts of a queue declare: the prefix, which is never a key itself, and the
/// counters, which exist once the queue was used.
pub(super) fn keys_of(prefix: &str) -> [String; 2] {
    [prefix.to_owned(), format!("{prefix}:meta")]
}

/// Scripts that can use the shared functions in `queue.lua`.
macro_rules! scripts {
    ($($name:ident = $flags:ident $file:literal;)*) => {
        $(pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::from_parts(&[$flags, include_str!("queue.lua"), include_str!($file)]));)*
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
    MISSING = FREEING "missing.lua";
    SET_MISSING = GROWING "set_missing.lua";
    WAKE = FREEING "wake.lua";
    TYPES = FREEING "types.lua";
}
