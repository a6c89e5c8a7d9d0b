//! The calls of store and dispatcher that have no answer yet.

use std::{collections::BTreeMap, time::Instant};

use tritmill_queue::{ClaimRef, Delivery};

/// The calls without an answer, one of each kind at most.
#[derive(Debug, Default)]
pub(super) struct Calls {
    pub check: bool,
    pub pull: bool,
    pub claim: Option<ClaimCall>,
    pub prepare: bool,
    pub commit: bool,
    /// The tokens that are being saved.
    pub save: Option<BTreeMap<ClaimRef, Vec<u32>>>,
    pub acknowledge: Option<Vec<Delivery>>,
    pub release: Option<Vec<Delivery>>,
}

impl Calls {
    /// Returns whether a call may bring work: the free slots are reserved for it.
    pub fn may_bring_work(&self) -> bool {
        self.check || self.pull || self.claim.is_some() || self.prepare
    }

    /// Returns whether a call about claims or deliveries of this worker has no answer yet.
    pub fn involve_claims(&self) -> bool {
        self.claim.is_some()
            || self.prepare
            || self.commit
            || self.acknowledge.is_some()
            || self.release.is_some()
    }
}

/// A claim without an answer.
#[derive(Debug)]
pub(super) struct ClaimCall {
    /// The deliveries to claim.
    pub deliveries: Vec<Delivery>,
    /// Time just before the store was called: leases end no earlier than counted from this time.
    pub began: Instant,
    /// The claim id of the call.
    pub claim_id: i64,
}
