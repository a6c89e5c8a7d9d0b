//! Largest sizes that a model may have, in all containers.

/// Largest width of a matrix. An int8 activation row of this width cannot overflow an i32 sum.
pub(crate) const WIDTH_MAX: u64 = 1 << 20;
/// Most layers accepted.
pub(crate) const LAYERS_MAX: u64 = 4096;
/// Largest vocabulary accepted.
pub(crate) const VOCAB_MAX: u64 = 1 << 24;
const _: () = assert!(WIDTH_MAX * 128 < i32::MAX as u64);
