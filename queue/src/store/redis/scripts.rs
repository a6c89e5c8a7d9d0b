//! The store's Lua scripts: `store.lua` and then each one's own.

use std::sync::LazyLock;

use crate::dispatch::scripts::{FREEING, GROWING, Script};

const SHARED: &str = include_str!("store.lua");

macro_rules! scripts {
    ($($name:ident = $file:literal;)*) => {
        // What is in goes on, and makes room by ending, even when Redis's memory is full.
        $(pub(super) static $name: LazyLock<Script> =
            LazyLock::new(|| Script::of(&[FREEING, SHARED, include_str!($file)]));)*
    };
}

/// With what the dispatcher's scripts share: it adds entries too.
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
