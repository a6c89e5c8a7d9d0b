//! Steps of batches: claims, what a step leaves for the next one, and what it writes.
//!
//! A process claims a batch for one bounded step, saves the result and releases the batch with the time
//! of the next step. Work that waits holds no claim. A claim has a lease with an epoch, as a worker's claim
//! of a job has: a write under an older epoch writes nothing, so any number of processes may drive batches,
//! but only one at a time drives a given batch. Claims go round the tenants.
//!
//! A claim that ends without a release lost its lease, because its process died or froze. The batch is then
//! [suspect](Claimable::Suspect) until a step of it is saved: the one that drives it drives nothing else
//! meanwhile, so that a batch that kills its process twice is known, and its neighbours are not.

use std::time::Duration;

use async_trait::async_trait;
use tritmill_queue::{Claimant, Job, JobId, StoreError, Timestamp};

use super::{
    batch_ends::LineEnd,
    batches::{Batch, BatchId},
    files::{ChunkContent, FileId},
};

/// Due batches that a claim looks at, the longest due first. The cost of a claim depends on this number, not
/// on the number of batches.
pub const CLAIM_WINDOW: u32 = 4096;

/// A claimed batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchClaim {
    /// The batch as it was claimed.
    pub batch: Batch,
    /// The epoch of the claim.
    pub epoch: i64,
    /// Claims that ended without a release, and steps that were [charged](BatchSteps::charge_batch), since a
    /// step of the batch was saved.
    pub failures: u64,
}

/// Which batches to claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimable {
    /// Batches without a lost lease.
    Released,
    /// Batches with an expired lease, or with a lost one since a step was saved.
    Suspect,
}

/// Half of the SHA-256 of a line's `custom_id`.
pub type CustomIdHash = [u8; 16];

/// A valid line, by the name that no other line of its batch may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedLine {
    /// Hash of its `custom_id`.
    pub name: CustomIdHash,
    /// Its number.
    pub line: u32,
    /// Hash of its request, which is kept for lines of open batches.
    pub key: Option<[u8; 32]>,
}

/// A chunk of an output file.
#[derive(Debug, Clone, Copy)]
pub struct FileChunk<'a> {
    /// The incomplete file.
    pub file: FileId,
    /// Number of the chunk, from 0.
    pub number: u32,
    /// The whole content of the chunk.
    pub content: ChunkContent<'a>,
}

/// What is written in the same transaction as a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchWrites<'a> {
    /// Jobs to submit; jobs with known ids stay as they are.
    pub jobs: &'a [Job],
    /// Those of them that have ended before: their ends are deleted, so that they run again.
    pub again: &'a [JobId],
    /// Chunks of output files, in place of what they had.
    pub chunks: &'a [FileChunk<'a>],
    /// Files to complete, with their sizes and expiry times.
    pub files: &'a [(FileId, u64, Option<Timestamp>)],
    /// Output files that these files replace: they expire.
    pub replaced: &'a [FileId],
    /// Lines that were validated: hashes of their `custom_id`s, and their numbers.
    pub custom_ids: &'a [NamedLine],
    /// Lines that ended, in the order of their numbers. [`Batch::last_end`] counts them already.
    pub ends: &'a [LineEnd],
}

/// Result of [`BatchSteps::start_batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchStart {
    /// The batch is in progress.
    Started,
    /// Too many batches of the tenant are in progress; nothing was written.
    Full,
    /// The claim is no longer valid; nothing was written.
    Fenced,
}

/// Claims and steps of batches in a store.
#[async_trait]
pub trait BatchSteps: Send + Sync {
    /// Claims up to `max` unfinished batches with a due step. The tenant that was served least recently
    /// comes first; of a tenant's batches, the oldest.
    async fn claim_batches(
        &self,
        which: Claimable,
        by: Claimant<'_>,
        max: u32,
    ) -> Result<Vec<BatchClaim>, StoreError>;

    /// Returns whether a [suspect](Claimable::Suspect) batch has a due step.
    async fn has_suspect_batches(&self) -> Result<bool, StoreError>;

    /// Extends a claim's lease; returns false if the claim is no longer valid. On an error the old
    /// lease continues.
    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError>;

    /// Releases a claim; the next step is due `after` from now.
    async fn release_batch(
        &self,
        id: BatchId,
        epoch: i64,
        after: Duration,
    ) -> Result<(), StoreError>;

    /// Releases a claim, as [`release_batch`](Self::release_batch), and counts a failure: the step did not
    /// end within its time limit.
    async fn charge_batch(
        &self,
        id: BatchId,
        epoch: i64,
        after: Duration,
    ) -> Result<(), StoreError>;

    /// Writes a claimed batch that is in progress from now on, unless `active_max` batches of its tenant are
    /// in progress. Of calls at the same time no more than that succeed.
    async fn start_batch(
        &self,
        claim: &BatchClaim,
        active_max: u32,
    ) -> Result<BatchStart, StoreError>;

    /// Writes a claimed batch with what belongs to it, and the notices of its end, in one transaction; returns false and
    /// writes nothing if the claim is no longer valid. Resets the failures of the batch. May be repeated after an
    /// error. Fails, without a change, if a file of a chunk no longer exists.
    async fn save_batch(
        &self,
        claim: &BatchClaim,
        writes: BatchWrites<'_>,
    ) -> Result<bool, StoreError>;

    /// Returns those of the hashes that earlier steps of a validation have saved, with their lines.
    async fn known_custom_ids(
        &self,
        id: BatchId,
        hashes: &[CustomIdHash],
    ) -> Result<Vec<(CustomIdHash, u32)>, StoreError>;

    /// Deletes up to `max` saved hashes of a batch; returns how many.
    async fn forget_custom_ids(&self, id: BatchId, max: u32) -> Result<u64, StoreError>;

    /// Deletes hashes of batches that are neither validating nor paused nor open, and turns of tenants without batches for a week.
    async fn sweep_batches(&self) -> Result<(), StoreError>;
}
