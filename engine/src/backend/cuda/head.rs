//! The launches of the head: all logits of some rows, those of the first tokens in a ranking of others.

use super::{
    args::{DigitsArgs, DrawArgs, FinalNormArgs, HeadArgs, RescoreArgs, ScreenArgs, SelectArgs},
    buffers::{Outputs, capacity, screen_blocks},
    device::{Args, Launch},
    forward::{Pass, grid},
    layout::TILE_ROWS,
    shape::stride,
    weights::{Dtype, ScreenRows},
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
/// Blocks that rescore one row's candidates.
const RESCORE_BLOCKS: usize = 16;

impl Pass<'_> {
    /// Returns the launches of the head; none if no row needs logits.
    pub fn head(&self, outputs: &Outputs) -> Vec<Launch> {
        let mut out = Vec::new();
        if self.bucket.whole > 0 {
            self.whole(outputs, &mut out);
        }
        if let Some(screen) = self.weights.head.screen.filter(|_| self.bucket.screened > 0) {
            self.screened(&screen, outputs, &mut out);
        }
        out
    }

    fn whole(&self, outputs: &Outputs, out: &mut Vec<Launch>) {
        let (shape, head, rows) = (self.shape, &self.weights.head, self.bucket.whole);
        let args = FinalNormArgs {
            step: self.inputs.step,
            wanted: self.inputs.whole,
            residual: self.buffers.residual,
            weight: self.weights.final_norm,
            out: self.buffers.whole_x,
            width: shape.hidden as u32,
            eps: shape.eps,
        };
        out.push(Launch {
            kernel: "final_norm",
            grid: grid(rows, 1, 1),
            threads: 256,
            shared_bytes: 4 * stride(shape.hidden) as u32,
            args: Args::of(&args),
        });
        let args = HeadArgs {
            step: self.inputs.step,
            rows: head.rows,
            scales: head.scales,
            x: self.buffers.whole_x,
            logits: outputs.logits,
            width: shape.hidden as u32,
            vocab: shape.vocab as u32,
        };
        out.push(Launch {
            kernel: of_dtype(head.dtype, ["head_f32", "head_f16", "head_bf16", "head_i8"]),
            grid: grid(shape.vocab.div_ceil(128), rows.div_ceil(4), 1),
            threads: 128,
            shared_bytes: 0,
            args: Args::of(&args),
        });
    }

    fn screened(&self, screen: &ScreenRows, outputs: &Outputs, out: &mut Vec<Launch>) {
        let (shape, buffers, inputs) = (self.shape, self.buffers, &self.inputs);
        let (head, rows, step) = (&self.weights.head, self.bucket.screened, self.inputs.step);
        let capacity = capacity(shape) as u32;
        let digits = DigitsArgs {
            step,
            wanted: inputs.screened,
            residual: buffers.residual,
            weight: self.weights.final_norm,
            x: buffers.screened_x,
            digits: buffers.digits,
            rows: buffers.digit_rows,
            width: shape.hidden as u32,
            stride: stride(shape.hidden) as u32,
            digit_count: self.bucket.digits as u32,
            eps: shape.eps,
        };
        let select = SelectArgs {
            step,
            rankings: inputs.rankings,
            errors: screen.errors,
            norms: screen.norms,
            rows: buffers.digit_rows,
            estimates: buffers.estimates,
            lowest: buffers.lowest,
            highest: buffers.highest,
            found_counts: outputs.found_counts,
            found: outputs.found,
            vocab: shape.vocab as u32,
            capacity,
        };
        let rescore = RescoreArgs {
            step,
            rows: head.rows,
            scales: head.scales,
            x: buffers.screened_x,
            found_counts: outputs.found_counts,
            found: outputs.found,
            width: shape.hidden as u32,
            capacity,
        };
        let draw = DrawArgs {
            step,
            rankings: inputs.rankings,
            found_counts: outputs.found_counts,
            found: outputs.found,
            drawn: outputs.drawn,
            carried: buffers.carried,
            capacity,
            unused: 0,
        };
        let per_row = |kernel, threads, shared_bytes, args| {
            let grid = grid(rows, 1, 1);
            Launch { kernel, grid, threads, shared_bytes, args }
        };
        let digits_bytes = 4 * stride(shape.hidden) as u32;
        out.push(per_row("digits", 256, digits_bytes, Args::of(&digits)));
        out.push(self.estimates(screen));
        out.push(per_row("screen_select", 1024, 0, Args::of(&select)));
        let rescores = ["rescore_f32", "rescore_f16", "rescore_bf16", "rescore_i8"];
        out.push(Launch {
            kernel: of_dtype(head.dtype, rescores),
            grid: grid(RESCORE_BLOCKS, rows, 1),
            threads: 128,
            shared_bytes: 0,
            args: Args::of(&rescore),
        });
        out.push(per_row("draw", 32, 0, Args::of(&draw)));
    }

    fn estimates(&self, screen: &ScreenRows) -> Launch {
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

/// Picks the kernel for the type of the head's elements: f32, f16, bf16 or int8.
fn of_dtype(dtype: Dtype, kernels: [&'static str; 4]) -> &'static str {
    kernels[dtype as usize]
}
