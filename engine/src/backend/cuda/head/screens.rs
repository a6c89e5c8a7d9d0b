//! The kernels that estimate all logits.

use super::super::{
    args::ScreenArgs,
    buffers::screen_blocks,
    device::{Args, Launch},
    forward::{Pass, grid},
    layout::TILE_ROWS,
    tables::ScreenRows,
};

/// A kernel of the screen: columns (rows times digits) and groups per block, warps, shared memory per warp.
struct Screening {
    kernel: &'static str,
    columns: usize,
    groups: usize,
    warps: usize,
    warp_bytes: usize,
}

#[rustfmt::skip]
const SCREENS: [Screening; 4] = [
    Screening { kernel: "screen_n8", columns: 8, groups: 1, warps: 8, warp_bytes: 6144 },
    Screening { kernel: "screen_n16", columns: 16, groups: 1, warps: 8, warp_bytes: 8192 },
    Screening { kernel: "screen_n32", columns: 32, groups: 2, warps: 8, warp_bytes: 8192 },
    Screening { kernel: "screen_n64", columns: 64, groups: 2, warps: 4, warp_bytes: 8192 },
];
/// `screen_tile`, for more columns: columns, groups, threads and shared memory per block.
const TILE: (usize, usize, u32, usize) = (128, 8, 256, 98_304);
impl Pass<'_> {
    /// Returns the launch that estimates the logits of the screened rows.
    pub(super) fn estimates(&self, screen: &ScreenRows) -> Launch {
        let (shape, buffers) = (self.shape, self.buffers);
        let columns = self.bucket.screened * self.bucket.digits;
        let args = Args::of(&ScreenArgs {
            step: self.inputs.step,
            head: screen.rows,
            scales: screen.scales,
            errors: screen.errors,
            norms: screen.norms,
            digits: buffers.digits,
            rows: buffers.digit_rows,
            rankings: self.inputs.rankings,
            estimates: buffers.estimates,
            lowest: buffers.lowest,
            highest: buffers.highest,
            vocab: shape.vocab as u32,
            k_blocks: screen_blocks(shape),
            digit_count: self.bucket.digits as u32,
            unused: 0,
        });
        let groups = shape.vocab.div_ceil(TILE_ROWS);
        let (tile_columns, tile_groups, threads, bytes) = TILE;
        let last = &SCREENS[SCREENS.len() - 1];
        if columns > last.columns && bytes <= self.shared_bytes("screen_tile") {
            let grid = grid(columns.div_ceil(tile_columns), groups.div_ceil(tile_groups), 1);
            let shared_bytes = bytes as u32;
            return Launch { kernel: "screen_tile", grid, threads, shared_bytes, args };
        }
        let screening = SCREENS.iter().find(|s| columns <= s.columns).unwrap_or(last);
        let warps = screening.warps.min(self.shared_bytes(screening.kernel) / screening.warp_bytes);
        let blocks = columns.div_ceil(screening.columns);
        Launch {
            kernel: screening.kernel,
            grid: grid(groups.div_ceil(screening.groups), blocks, 1),
            threads: 32 * warps as u32,
            shared_bytes: (warps * screening.warp_bytes) as u32,
            args,
        }
    }
}
