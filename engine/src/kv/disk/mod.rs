//! KV blocks on disk: what one process computed is not computed again by another, or after a restart.
//!
//! A folder has one file per block, named by the block's hash, so that any number of processes may share it:
//!
//! ```text
//! DIR/ab/cdef….kv      ab and cdef… are the hexadecimal digits of the hash
//! DIR/tmp-PID-N        a file that is being written; renamed when it is complete
//! ```
//!
//! [`BlockFolder`] reads and writes files within a limit of bytes and a minimum of free space. [`BlockTiers`] does so
//! on a thread of its own, so that a step of the engine never waits for the disk. Before the disk it looks into the
//! memory of the host, after it at other workers, if there are any. States of recurrent layers, by names of their own, are files of
//! the same kind. A file that differs from what was
//! written, in any way, is a miss: its checksum covers the hash, the length and the content.

mod cache;
mod file;
mod folder;
mod host;
mod stats;

pub(crate) use cache::{Answer, Fetch, Fetched, Find, Found};
pub use cache::{BlockTiers, NAMES_MAX, RemoteBlocks, TierOptions};
pub use folder::{
    BlockFolder, Checked, FolderError, FolderLimits, FolderUse, find_files, read_file,
};
pub use stats::TierStats;
