//! The launches of the head: all logits of some rows, those of the first tokens in a question of others.

use super::{
    args::{
        DigitsArgs, DistributionArgs, DrawArgs, Estimates, FilteredDrawArgs, FinalNormArgs,
        HeadArgs, LogitBoundsArgs, RescoreArgs, ScreenArgs, SelectArgs, TakeChangedArgs,
        WeighRestArgs,
    },
    buffers::{Bucket, Outputs, REST_PARTS, capacity, changes_max, screen_blocks},
    device::{Address, Args, Launch},
    forward::{Pass, grid},
    layout::TILE_ROWS,
    linear::DeviceLinear,
    shape::stride,
    tables::{DenseHead, Dtype, Head, ScreenRows},
};

/// Threads of a block of `logit_bounds`, which has one for each group.
const BOUNDS_THREADS: u32 = 256;
/// Blocks that rescore one row's candidates.
const RESCORE_BLOCKS: usize = 16;
/// Blocks that rescore the tokens with changes of all rows, which may be thousands of a row.
const RESCORE_ALL: usize = 1024;

/// Blocks that take one row's tokens with changes, at most one for each thread.
const CHANGED_BLOCKS: usize = 4;

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
    Screening { kernel: "screen_n8", columns: 8, groups: 2, warps: 8, warp_bytes: 10_240 },
    Screening { kernel: "screen_n16", columns: 16, groups: 2, warps: 8, warp_bytes: 12_288 },
    Screening { kernel: "screen_n32", columns: 32, groups: 2, warps: 8, warp_bytes: 8192 },
    Screening { kernel: "screen_n64", columns: 64, groups: 2, warps: 4, warp_bytes: 8192 },
];
/// `screen_tile`, for more columns: columns, groups, threads and shared memory per block.
const SCREEN_TILE: (usize, usize, u32, usize) = (128, 8, 256, 98_304);

/// Where candidates go: those of questions, or those of filters, which have thresholds.
struct Candidates {
    filters: Address,
    counts: Address,
    found: Address,
    thresholds: Address,
}

impl Candidates {
    fn of_ranking(outputs: &Outputs) -> Self {
        let Outputs { found_counts: counts, found, .. } = *outputs;
        Self { filters: 0, counts, found, thresholds: 0 }
    }
}

impl Pass<'_> {
    /// Returns the launches of the head; none if no row needs logits.
    pub fn head(&self, outputs: &Outputs) -> Vec<Launch> {
        let mut out = Vec::new();
        let Bucket { whole, reported, screened, .. } = self.bucket;
        match &self.weights.tables.head {
            Head::Dense(head) => {
                if whole > 0 {
                    self.whole(head, outputs, &mut out);
                }
                if let Some(screen) = head.screen.filter(|_| screened > 0) {
                    self.screened(head, &screen, outputs, &mut out);
                }
            }
            Head::Ternary(head) => {
                if whole > 0 {
                    let to = (outputs.logits, self.shape.vocab);
                    self.ternary_head(head, self.whole_rows(), to, &mut out);
                }
                if screened > 0 {
                    self.first_of_all(head, outputs, &mut out);
                }
            }
        }
        if reported > 0 {
            out.push(self.distributions(outputs));
        }
        out
    }

    /// Computes the distributions of rows with all logits.
    fn distributions(&self, outputs: &Outputs) -> Launch {
        let args = DistributionArgs {
            step: self.inputs.step,
            tops: self.inputs.tops,
            logits: outputs.logits,
            distributions: outputs.distributions,
            vocab: self.shape.vocab as u32,
            unused: 0,
        };
        Launch {
            kernel: "distribution",
            grid: grid(self.bucket.reported, 1, 1),
            threads: 1024,
            shared_bytes: 0,
            args: Args::from_struct(&args),
        }
    }

    fn whole(&self, head: &DenseHead, outputs: &Outputs, out: &mut Vec<Launch>) {
        let (shape, rows) = (self.shape, self.bucket.whole);
        let args = FinalNormArgs {
            step: self.inputs.step,
            wanted: self.inputs.whole,
            residual: self.buffers.residual,
            weight: self.weights.final_norm,
            out: self.buffers.whole_x,
            width: shape.hidden as u32,
            eps: shape.stream_eps,
        };
        out.push(Launch {
            kernel: "final_norm",
            grid: grid(rows, 1, 1),
            threads: 256,
            shared_bytes: 4 * stride(shape.hidden) as u32,
            args: Args::from_struct(&args),
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
            grid: grid(rows.div_ceil(4), shape.vocab.div_ceil(128), 1),
            threads: 128,
            shared_bytes: 0,
            args: Args::from_struct(&args),
        });
    }

    fn screened(
        &self,
        head: &DenseHead,
        screen: &ScreenRows,
        outputs: &Outputs,
        out: &mut Vec<Launch>,
    ) {
        let (shape, buffers, inputs) = (self.shape, self.buffers, &self.inputs);
        let step = inputs.step;
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
            eps: shape.stream_eps,
        };
        let bytes = 4 * stride(shape.hidden) as u32;
        out.push(self.per_screened("digits", (256, bytes), Args::from_struct(&digits)));
        out.push(self.estimates(screen));
        let estimates = Estimates {
            errors: screen.errors,
            norms: screen.norms,
            rows: buffers.digit_rows,
            values: buffers.estimates,
        };
        if self.bucket.changes {
            let changed = (buffers.changed_counts, buffers.changed, changes_max(shape));
            out.push(self.take_changed(estimates));
            let blocks = (RESCORE_ALL / self.bucket.screened).clamp(RESCORE_BLOCKS, 256);
            out.push(self.rescore(head, 0, changed, blocks));
        }
        let found = Candidates::of_ranking(outputs);
        out.push(self.select(estimates, &found));
        out.push(self.rescore(
            head,
            0,
            (found.counts, found.found, capacity(shape)),
            RESCORE_BLOCKS,
        ));
        out.push(self.draw(outputs));
        if self.bucket.filters {
            let some = self.candidates_of_filters();
            out.push(self.bounds(estimates, some.filters));
            out.push(self.select(estimates, &some));
            out.push(self.rescore(
                head,
                some.filters,
                (some.counts, some.found, capacity(shape)),
                RESCORE_BLOCKS,
            ));
            self.filtered_draw(estimates, &some, outputs, out);
        }
    }

    /// Computes the logits of tokens: given by the numbers of each row, the tokens, and the room of a row. With `filters`, only of
    /// rows with filters.
    fn rescore(
        &self,
        head: &DenseHead,
        filters: Address,
        (found_counts, found, room): (Address, Address, usize),
        blocks: usize,
    ) -> Launch {
        let args = RescoreArgs {
            step: self.inputs.step,
            rows: head.rows,
            scales: head.scales,
            x: self.buffers.screened_x,
            filters,
            found_counts,
            found,
            width: self.shape.hidden as u32,
            capacity: room as u32,
        };
        let kernels = ["rescore_f32", "rescore_f16", "rescore_bf16", "rescore_i8"];
        Launch {
            kernel: of_dtype(head.dtype, kernels),
            grid: grid(blocks, self.bucket.screened, 1),
            threads: 128,
            shared_bytes: 0,
            args: Args::from_struct(&args),
        }
    }

    /// Finds the first tokens of questions among all logits, which stay on the device.
    fn first_of_all(&self, head: &DeviceLinear, outputs: &Outputs, out: &mut Vec<Launch>) {
        let (shape, buffers) = (self.shape, self.buffers);
        let to = (buffers.estimates, shape.groups() * TILE_ROWS);
        self.ternary_head(head, self.screened_rows(), to, out);
        let exact = Estimates { errors: 0, norms: 0, rows: 0, values: buffers.estimates };
        if self.bucket.changes {
            out.push(self.take_changed(exact));
        }
        out.push(self.bounds(exact, 0));
        out.push(self.select(exact, &Candidates::of_ranking(outputs)));
        out.push(self.draw(outputs));
        if self.bucket.filters {
            let some = self.candidates_of_filters();
            out.push(self.bounds(exact, some.filters));
            out.push(self.select(exact, &some));
            self.filtered_draw(exact, &some, outputs, out);
        }
    }

    fn candidates_of_filters(&self) -> Candidates {
        let buffers = self.buffers;
        Candidates {
            filters: self.inputs.filters,
            counts: buffers.some_counts,
            found: buffers.some,
            thresholds: buffers.thresholds,
        }
    }

    /// Returns the bounds of groups; with `filters`, of their logits.
    fn bounds(&self, estimates: Estimates, filters: Address) -> Launch {
        let args = LogitBoundsArgs {
            step: self.inputs.step,
            questions: self.inputs.questions,
            filters,
            estimates,
            lowest: self.buffers.lowest,
            highest: self.buffers.highest,
            vocab: self.shape.vocab as u32,
            unused: 0,
        };
        let blocks = self.shape.groups().div_ceil(BOUNDS_THREADS as usize);
        Launch {
            kernel: "logit_bounds",
            grid: grid(blocks, self.bucket.screened, 1),
            threads: BOUNDS_THREADS,
            shared_bytes: 0,
            args: Args::from_struct(&args),
        }
    }

    /// Takes the tokens with changes out of the estimates.
    fn take_changed(&self, estimates: Estimates) -> Launch {
        let buffers = self.buffers;
        let args = TakeChangedArgs {
            step: self.inputs.step,
            questions: self.inputs.questions,
            estimates,
            values: estimates.values,
            lowest: buffers.lowest,
            highest: buffers.highest,
            changed_counts: buffers.changed_counts,
            changed: buffers.changed,
            vocab: self.shape.vocab as u32,
            changes_max: changes_max(self.shape) as u32,
        };
        Launch {
            kernel: "take_changed",
            grid: grid(CHANGED_BLOCKS, self.bucket.screened, 1),
            threads: 256,
            shared_bytes: 0,
            args: Args::from_struct(&args),
        }
    }

    /// Draws the tokens of rows with filters.
    fn filtered_draw(
        &self,
        estimates: Estimates,
        some: &Candidates,
        outputs: &Outputs,
        out: &mut Vec<Launch>,
    ) {
        let (step, questions, rests) =
            (self.inputs.step, self.inputs.questions, self.buffers.rests);
        let rest = WeighRestArgs {
            step,
            questions,
            filters: some.filters,
            estimates,
            thresholds: some.thresholds,
            firsts: self.buffers.firsts,
            rests,
            vocab: self.shape.vocab as u32,
            unused: 0,
        };
        out.push(Launch {
            kernel: "weigh_rest",
            grid: grid(REST_PARTS, self.bucket.screened, 1),
            threads: 256,
            shared_bytes: 0,
            args: Args::from_struct(&rest),
        });
        let draw = FilteredDrawArgs {
            step,
            questions,
            filters: some.filters,
            found_counts: outputs.found_counts,
            some_counts: some.counts,
            some: some.found,
            thresholds: some.thresholds,
            rests,
            changed: self.buffers.changed,
            firsts: self.buffers.firsts,
            drawn: outputs.drawn,
            carried: self.buffers.carried,
            capacity: capacity(self.shape) as u32,
            parts: REST_PARTS as u32,
            changes_max: changes_max(self.shape) as u32,
            unused: 0,
        };
        out.push(self.per_screened("filtered_draw", (256, 0), Args::from_struct(&draw)));
    }

    fn per_screened(
        &self,
        kernel: &'static str,
        (threads, shared_bytes): (u32, u32),
        args: Args,
    ) -> Launch {
        let grid = grid(self.bucket.screened, 1, 1);
        Launch { kernel, grid, threads, shared_bytes, args }
    }

    fn select(&self, estimates: Estimates, to: &Candidates) -> Launch {
        let (shape, buffers) = (self.shape, self.buffers);
        let args = SelectArgs {
            step: self.inputs.step,
            questions: self.inputs.questions,
            filters: to.filters,
            estimates,
            lowest: buffers.lowest,
            highest: buffers.highest,
            found_counts: to.counts,
            found: to.found,
            thresholds: to.thresholds,
            vocab: shape.vocab as u32,
            capacity: capacity(shape) as u32,
        };
        self.per_screened("screen_select", (1024, 0), Args::from_struct(&args))
    }

    fn draw(&self, outputs: &Outputs) -> Launch {
        let args = DrawArgs {
            step: self.inputs.step,
            questions: self.inputs.questions,
            found_counts: outputs.found_counts,
            found: outputs.found,
            changed: self.buffers.changed,
            firsts: self.buffers.firsts,
            drawn: outputs.drawn,
            carried: self.buffers.carried,
            capacity: capacity(self.shape) as u32,
            changes_max: changes_max(self.shape) as u32,
        };
        self.per_screened("draw", (32, 0), Args::from_struct(&args))
    }

    /// Returns the launch that estimates the logits of the screened rows.
    fn estimates(&self, screen: &ScreenRows) -> Launch {
        let (shape, buffers) = (self.shape, self.buffers);
        let columns = self.bucket.screened * self.bucket.digits;
        let args = Args::from_struct(&ScreenArgs {
            step: self.inputs.step,
            head: screen.rows,
            scales: screen.scales,
            errors: screen.errors,
            norms: screen.norms,
            digits: buffers.digits,
            rows: buffers.digit_rows,
            questions: self.inputs.questions,
            estimates: buffers.estimates,
            lowest: buffers.lowest,
            highest: buffers.highest,
            vocab: shape.vocab as u32,
            k_blocks: screen_blocks(shape),
            digit_count: self.bucket.digits as u32,
            unused: 0,
        });
        let groups = shape.vocab.div_ceil(TILE_ROWS);
        let (tile_columns, tile_groups, threads, bytes) = SCREEN_TILE;
        let last = &SCREENS[SCREENS.len() - 1];
        if columns > last.columns && bytes <= self.shared_bytes("screen_tile") {
            let grid = grid(columns.div_ceil(tile_columns), groups.div_ceil(tile_groups), 1);
            let shared_bytes = bytes as u32;
            return Launch { kernel: "screen_tile", grid, threads, shared_bytes, args };
        }
        let screening = SCREENS.iter().find(|s| columns <= s.columns).unwrap_or(last);
        let fitting = self.shared_bytes(screening.kernel) / screening.warp_bytes;
        // Warps with the same number of k blocks each, if at least half of the most are such.
        let most = screening.warps.min(fitting);
        let is_even = |warps: &usize| (screen_blocks(shape) as usize).is_multiple_of(*warps);
        let warps = (most.div_ceil(2).max(1)..=most).rev().find(is_even).unwrap_or(most);
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
