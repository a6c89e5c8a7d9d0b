//! The number of KV blocks that fit a device.

use super::error::CudaLoadError;

/// Memory that stays free for the driver.
pub const MARGIN_BYTES: u64 = 512 << 20;
/// Part of it that recorded launches may take.
pub const RECORDINGS_BYTES: u64 = MARGIN_BYTES / 2;
/// Blocks that a block table can number.
const BLOCKS_MAX: u64 = u32::MAX as u64;

/// Share of the free memory (beside weights, buffers and margin) that KV blocks take by default. The rest is for other
/// processes and for later allocations of the driver.
const SHARE: (u64, u64) = (9, 10);

/// The number of KV blocks of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBlocks {
    /// Exactly this many; the model does not start if they do not fit.
    Exactly(usize),
    /// As many as fit nine tenths of the free memory, between one and this many.
    UpTo(usize),
}

/// Returns the number of KV blocks that fit beside weights and buffers of `fixed_bytes`.
pub fn block_count(
    fixed_bytes: u64,
    block_bytes: usize,
    blocks: KvBlocks,
    free_bytes: u64,
) -> Result<usize, CudaLoadError> {
    let fixed_bytes = fixed_bytes + MARGIN_BYTES;
    let block_bytes = block_bytes as u64;
    let fitting = free_bytes.saturating_sub(fixed_bytes) / block_bytes;
    let (least, wanted) = match blocks {
        KvBlocks::Exactly(count) => (count as u64, count as u64),
        KvBlocks::UpTo(count) => {
            let (part, whole) = SHARE;
            let share = fitting / whole * part + fitting % whole * part / whole;
            (1, share.min(count as u64).max(1))
        }
    };
    if fitting < least {
        let needed_bytes = fixed_bytes.saturating_add(least.saturating_mul(block_bytes));
        return Err(CudaLoadError::OutOfMemory { needed_bytes, free_bytes });
    }
    Ok(wanted.min(BLOCKS_MAX) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const BLOCK: usize = 1 << 20;

    fn count(blocks: KvBlocks, fixed: u64, free: u64) -> Result<usize, (u64, u64)> {
        block_count(fixed, BLOCK, blocks, free).map_err(|error| match error {
            CudaLoadError::OutOfMemory { needed_bytes, free_bytes } => (needed_bytes, free_bytes),
            other => panic!("{other}"),
        })
    }

    #[test]
    fn default_pools_take_nine_tenths_of_the_free_memory() {
        let up_to = |most, free| count(KvBlocks::UpTo(most), 3 * GIB, free);
        // 4.5 GiB are left beside weights and margin: nine tenths of 4608 blocks.
        assert_eq!(up_to(1 << 20, 8 * GIB), Ok(4147));
        assert_eq!(up_to(1000, 8 * GIB), Ok(1000), "the limit");
        assert_eq!(up_to(0, 8 * GIB), Ok(1));
        assert_eq!(up_to(9, 3 * GIB + MARGIN_BYTES + BLOCK as u64), Ok(1));
        let missing = 3 * GIB + MARGIN_BYTES + BLOCK as u64;
        assert_eq!(up_to(9, 3 * GIB), Err((missing, 3 * GIB)));
        assert_eq!(count(KvBlocks::UpTo(usize::MAX), 0, u64::MAX), Ok(u32::MAX as usize));
    }

    #[test]
    fn exact_pools_fit_or_report_the_missing_memory() {
        let exactly = |count_of, free| count(KvBlocks::Exactly(count_of), 3 * GIB, free);
        assert_eq!(exactly(4608, 8 * GIB), Ok(4608), "all free memory");
        assert_eq!(exactly(4609, 8 * GIB), Err((8 * GIB + BLOCK as u64, 8 * GIB)));
        let needed = 8 * GIB + BLOCK as u64;
        let error = CudaLoadError::OutOfMemory { needed_bytes: needed, free_bytes: 8 * GIB };
        assert!(error.to_string().ends_with("8192 MiB are free: 1 MiB are missing"), "{error}");
    }
}
