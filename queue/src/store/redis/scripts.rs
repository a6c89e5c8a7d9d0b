//! The store's Lua scripts. Each begins with `store.lua`.

use std::sync::LazyLock;

use crate::dispatch::scripts::{FREEING, GROWING, Script};

const SHARED: &str = include_str!("store.lua");

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {
        // These scripts run even when Redis's memory is full, because finishing accepted jobs frees
        // memory.
        $(pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::of(&[FREEING, SHARED, include_str!($file)]));)*
    };
}

/// Includes `queue.lua` as well, since it adds entries.
pub(super) static SUBMIT: LazyLock<Script> =
    LazyLock::new(|| Script::new(GROWING, &[SHARED, include_str!("submit.lua")].concat()));

scripts! {
    CLAIM = "claim.lua";
    RENEW = "renew.lua";
    CHECKPOINT = "checkpoint.lua";
    FINISH = "finish.lua";
    HAND_BACK = "hand_back.lua";
    CANCEL = "cancel.lua";
    RECONCILE = "reconcile.lua";
    QUEUED = "queued.lua";
    ENDED = "ended.lua";
    PROGRESS = "progress.lua";
    DELETE = "delete.lua";
}
